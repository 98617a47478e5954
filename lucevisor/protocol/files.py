"""Files that daemons read and write: descriptors on one host, over TCP files of the supervisor's.

``ByteFile`` is what a daemon needs of a file. A ``RemoteFile`` asks the supervisor over a connection of its own, from a
``FileClient`` to a ``FileServer``. Every request is answered, in order, and chunks have checksums. Invariants: a
request or answer that is not due, damaged, or outside of what a frame came with, breaks the connection and does
nothing; bytes on the way are bounded (WINDOW_BYTES); what ``flush`` returned from is in the file."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition, Lock
from typing import Final, NamedTuple, Protocol
from zlib import crc32

from lucevisor.model.values import FileIdentity, identity_of
from lucevisor.protocol.errors import LinkClosed, LocalProtocolError, ProtocolError, RemoteProtocolError
from lucevisor.protocol.loading import Load
from lucevisor.protocol.messages import (
    MIB,
    FileAnswer,
    FileOperation,
    FileRequest,
    Message,
    Restore,
    Role,
    Save,
    StreamKind,
)
from lucevisor.protocol.threads import StartedThread
from lucevisor.protocol.transport import AwaitedConnection, BlockingLink, after

CHUNK_BYTES: Final = 1 * MIB
"""Bytes of one READ or WRITE."""
WINDOW_BYTES: Final = 16 * MIB
"""Bytes that a daemon has asked for, or sent, without an answer."""
MAX_CHECKSUM_BYTES: Final = 64 * MIB
"""Bytes of one CHECKSUM."""
MAX_OPEN: Final = 192
"""Files that a daemon may have open at once: the parts of a split model, and those of transfers."""
MAX_VIEWS: Final = 256
"""Of one system call; the kernel takes 1024."""

_RESTART = "restart the group; if it happens again, the network damages data"


class FileError(Exception):
    """A file cannot be read or written at ``offset``; ``errno`` 0: the system did not say so."""

    def __init__(self, offset: int, reason: str, errno_: int = 0) -> None:
        super().__init__(reason)
        self.offset, self.reason, self.errno = offset, reason, errno_


class FileStatus(NamedTuple):
    """Bytes of a file so far.  ``complete``: it will not grow."""

    n_bytes: int
    complete: bool


class ByteFile(Protocol):
    """A file that a daemon reads and writes.  All methods raise FileError, from any thread."""

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill the views consecutively.  Nothing is written to them any more when this returns or raises."""

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write the views consecutively, no later than the next ``flush``; they may change when this returns."""

    def flush(self) -> None:
        """Wait until all that was written is in the file."""

    def status(self) -> FileStatus: ...

    def checksum(self, offset: int, n_bytes: int) -> int:
        """Return the CRC-32 of a part of the file, of MAX_CHECKSUM_BYTES at most."""

    def close(self) -> None:
        """Release the file; idempotent, and never raises."""


# ---- on this host


_libc = ctypes.CDLL(None)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class LocalFile:
    """A file by its descriptor, which this object owns."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        self._move(os.preadv, views, offset)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        self._move(os.pwritev, views, offset)
        # Starts writeback, so that the supervisor's fsync has little left to do.  A hint: that fsync reports any error.
        _libc.sync_file_range(self._fd, offset, sum(map(len, views)), 2)  # SYNC_FILE_RANGE_WRITE

    def flush(self) -> None:
        """Nothing is on the way."""

    def status(self) -> FileStatus:
        try:
            seals = fcntl.fcntl(self._fd, fcntl.F_GET_SEALS)  # first: it is sealed when it is complete
        except OSError:  # no memfd, so nothing is being added
            seals = fcntl.F_SEAL_GROW
        complete = bool(seals & (fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL))
        try:
            return FileStatus(os.fstat(self._fd).st_size, complete)
        except OSError as error:
            raise FileError(0, error.strerror or str(error), error.errno or 0) from error

    def checksum(self, offset: int, n_bytes: int) -> int:
        buffer, found = memoryview(bytearray(min(CHUNK_BYTES, n_bytes))), 0
        for at in range(0, n_bytes, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, n_bytes - at)]
            self.read([part], offset + at)
            found = crc32(part, found)
        return found

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _move(self, call: Callable[..., int], views: Sequence[memoryview], offset: int) -> None:
        rest: Sequence[bytes | memoryview] = [view for view in views if len(view)]
        while rest:
            try:
                n = call(self._fd, rest[:MAX_VIEWS], offset)
            except OSError as error:
                raise FileError(offset, error.strerror or str(error), error.errno or 0) from error
            if n == 0:
                raise FileError(offset, "the file ends")
            offset += n
            rest = after(rest, n)


class SourceFile(LocalFile):
    """A file that is not to change while it is read."""

    def __init__(self, fd: int, identity: FileIdentity) -> None:
        super().__init__(fd)
        self._identity = identity

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        super().read(views, offset)
        if identity_of(os.fstat(self._fd), self._identity.header) != self._identity:
            raise FileError(offset, "it was changed while it was sent")


# ---- what may be asked


class Extents:
    """Half-open byte ranges, in order and apart."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self.ranges: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            if self.ranges and start <= self.ranges[-1][1]:
                self.ranges[-1] = (self.ranges[-1][0], max(stop, self.ranges[-1][1]))
            else:
                self.ranges.append((start, stop))

    def contain(self, offset: int, n_bytes: int) -> bool:
        """Return whether one of them has all of these bytes."""
        at = bisect_right(self.ranges, offset, key=lambda one: one[0]) - 1
        return at >= 0 and n_bytes >= 0 and offset + n_bytes <= self.ranges[at][1]


NOTHING: Final = Extents(())
EVERYTHING: Final = Extents([(0, 2**63)])


class Access(NamedTuple):
    """What a daemon may do with a file."""

    reads: Extents = NOTHING
    writes: Extents = NOTHING


def offered_files(message: Message, fds: Sequence[int]) -> list[tuple[ByteFile, Access]]:
    """Return the files that come with a message, which own the descriptors, and what its receiver may do with them."""
    match message:
        case Save(tensors=tensors):
            access = Access(writes=Extents((one.offset, one.offset + one.n_bytes) for one in tensors))
        case Restore(tensors=tensors):
            access = Access(reads=Extents((one.offset, one.offset + one.n_bytes) for one in tensors))
        case Load(offered=offered):
            n = len(fds) - len(offered)
            sources = [SourceFile(fd, one.identity) for fd, one in zip(fds[n:], offered, strict=True)]
            whole = [Access(reads=Extents([(0, one.identity.n_bytes)])) for one in offered]
            return [*((LocalFile(fd), Access(reads=EVERYTHING)) for fd in fds[:n]), *zip(sources, whole, strict=True)]
        case _:
            access = Access()
    return [(LocalFile(fd), access) for fd in fds]


class OpenFiles:
    """The files that a daemon was offered and has not closed, and which request of it is due.  Pure."""

    def __init__(self) -> None:
        self._n_files = self._n_requests = 0
        self._files: dict[int, tuple[ByteFile, Access]] = {}

    def __len__(self) -> int:
        return len(self._files)

    def add(self, file: ByteFile, access: Access) -> None:
        """Give a file the next number."""
        self._files[self._n_files] = file, access
        self._n_files += 1

    def take(self, request: FileRequest, n_bytes: int, checksum: int) -> ByteFile:
        """Return the file of the request that is due; ``n_bytes`` came with it, with this CRC-32. Raises
        RemoteProtocolError."""
        if fault := self._fault(request, n_bytes, checksum):
            what = f"{request.operation.name} of file {request.file} is refused: {fault}"
            raise RemoteProtocolError(what, f"request {request.number}", _RESTART)
        self._n_requests += 1
        file, _ = self._files[request.file]
        if request.operation is FileOperation.CLOSE:
            del self._files[request.file]
        return file

    def _fault(self, request: FileRequest, n_payload: int, checksum: int) -> str:
        operation, n_bytes = request.operation, request.n_bytes
        if request.number != self._n_requests:
            return f"number {self._n_requests} was due"
        if request.file not in self._files:
            return "it is not open"
        if n_payload != (n_bytes if operation is FileOperation.WRITE else 0):
            return f"{n_payload} bytes came with it"
        if operation in (FileOperation.STATUS, FileOperation.CLOSE):
            return ""
        writes = operation is FileOperation.WRITE
        most = MAX_CHECKSUM_BYTES if operation is FileOperation.CHECKSUM else CHUNK_BYTES
        if not 0 < n_bytes <= most or request.offset < 0:
            return f"{n_bytes} bytes at {request.offset} are not 1 to {most}"
        _, access = self._files[request.file]
        if not (access.writes if writes else access.reads).contain(request.offset, n_bytes):
            return f"{n_bytes} bytes at {request.offset} are outside of what it was asked for"
        if writes and checksum != request.checksum:
            return f"the checksum of {n_bytes} bytes at {request.offset} does not match"
        return ""

    def close(self) -> list[ByteFile]:
        """Return the files that are still open, and forget them."""
        left = [file for file, _ in self._files.values()]
        self._files.clear()
        return left


class FileServer:
    """Reads and writes files for a daemon, over its own connection or one that is awaited; a ``transport.Files``."""

    def __init__(self, connection: socket.socket | AwaitedConnection, name: str = "files") -> None:
        self._connection, self._name = connection, name
        self._lock = Lock()  # of the files
        self._files = OpenFiles()
        self._closed = False
        self._link: BlockingLink | None = None
        self._buffer = memoryview(bytearray(CHUNK_BYTES))
        self._on_broken: Callable[[ProtocolError], None] = lambda error: None

    def start(self, on_broken: Callable[[ProtocolError], None]) -> None:
        self._on_broken = on_broken
        if isinstance(self._connection, AwaitedConnection):
            self._connection.take = self._connected
        else:
            self._connected(self._connection)

    def offer(self, message: Message, fds: Sequence[int]) -> None:
        with self._lock:
            if len(self._files) + len(fds) > MAX_OPEN:
                what = f"it has {len(self._files)} files open, and would have more than {MAX_OPEN}"
                raise LocalProtocolError(what, self._name, "the daemon does not close its files: restart the group")
            copies = list[int]()
            try:
                copies += (os.dup(fd) for fd in fds)
            except OSError:
                for fd in copies:
                    os.close(fd)
                raise
            for file, access in offered_files(message, copies):
                self._files.add(file, access)
            if self._closed:  # by the daemon's end, which the link will say
                self._drop_files()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._link is not None:
            self._link.close()  # wakes the thread, which closes what is left
            return
        if isinstance(self._connection, AwaitedConnection):
            self._connection.forget()
        self._drop_files()

    def _connected(self, sock: socket.socket) -> None:
        self._link = BlockingLink(sock, role=Role.SUPERVISOR, stream=StreamKind.FILES, name=self._name)
        try:
            StartedThread(self._name, partial(self._run, self._link))
        except MemoryError as error:
            self._link.close()
            self._on_broken(LinkClosed(str(error), self._name, "free memory", local=True))

    # ---- on the thread

    def _run(self, link: BlockingLink) -> None:
        try:
            self._serve(link)
        finally:
            with self._lock:
                self._closed = True
                self._drop_files()
            link.close()

    def _drop_files(self) -> None:
        for file in self._files.close():
            file.close()

    def _serve(self, link: BlockingLink) -> None:
        """Answer requests until the daemon is gone, which its link says, or asks for what it must not."""
        try:
            while (frame := link.receive()) is not None:
                assert isinstance(frame.message, FileRequest)  # the daemon may send nothing else
                checksum = crc32(frame.payload)
                with self._lock:
                    file = self._files.take(frame.message, len(frame.payload), checksum)
                answer, payload = self._answer(file, frame.message, frame.payload)
                link.send(answer, payload=payload)
        except (LinkClosed, OSError):  # closed, maybe in another thread while this one sends
            pass
        except ProtocolError as error:
            self._on_broken(error)

    def _answer(
        self, file: ByteFile, request: FileRequest, payload: memoryview
    ) -> tuple[FileAnswer, Sequence[memoryview]]:
        number, offset, n_bytes = request.number, request.offset, request.n_bytes
        try:
            match request.operation:
                case FileOperation.READ:
                    part = self._buffer[:n_bytes]
                    file.read([part], offset)
                    return FileAnswer(number, crc32(part)), [part]
                case FileOperation.WRITE:
                    file.write([payload], offset)
                case FileOperation.CHECKSUM:
                    return FileAnswer(number, file.checksum(offset, n_bytes)), ()
                case FileOperation.STATUS:
                    size, complete = file.status()
                    return FileAnswer(number, n_bytes=size, complete=complete), ()
                case FileOperation.CLOSE:
                    file.close()
        except FileError as error:
            reason = f"{error.reason} at byte {error.offset}" if not error.errno else error.reason
            return FileAnswer(number, problem=reason, errno=error.errno), ()
        return FileAnswer(number), ()


# ---- the daemon's end


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request, and where its bytes go.  ``answer`` None: it has none yet."""

    request: FileRequest
    into: memoryview | None = None
    filled: bool = False
    answer: FileAnswer | None = None


class PendingRequests:
    """Requests without an answer, oldest first.  Pure."""

    def __init__(self) -> None:
        self._n = self.n_bytes = 0
        self._due: deque[PendingRequest] = deque()

    def __len__(self) -> int:
        return len(self._due)

    def add(
        self, operation: FileOperation, file: int, offset: int, n_bytes: int, checksum: int, into: memoryview | None
    ) -> PendingRequest:
        """Number a request."""
        asked = PendingRequest(FileRequest(self._n, operation, file, offset, n_bytes, checksum), into)
        self._n += 1
        self.n_bytes += n_bytes
        self._due.append(asked)
        return asked

    def memory(self, answer: FileAnswer, n_bytes: int) -> memoryview:
        """Return where the payload of an answer goes.  Raises RemoteProtocolError."""
        at = answer.number - self._due[0].request.number if self._due else -1
        asked = self._due[at] if 0 <= at < len(self._due) else None
        if asked is None or asked.into is None or asked.filled or len(asked.into) != n_bytes or answer.problem:
            raise _refused(answer, f"{n_bytes} bytes came that were not asked for")
        asked.filled = True
        return asked.into

    def end(self, answer: FileAnswer) -> PendingRequest:
        """Take the answer that is due.  Raises RemoteProtocolError."""
        if not self._due or answer.number != self._due[0].request.number:
            due = self._due[0].request.number if self._due else "none"
            raise _refused(answer, f"number {due} was due")
        asked = self._due[0]
        if asked.into is not None and not answer.problem:
            if not asked.filled:
                raise _refused(answer, "it has no bytes")
            if crc32(asked.into) != answer.checksum:
                raise _refused(answer, f"the checksum of {len(asked.into)} bytes does not match")
        self._due.popleft()
        self.n_bytes -= asked.request.n_bytes
        asked.answer = answer
        return asked

    def fail(self, problem: str) -> None:
        """End all requests: no answer comes any more."""
        for asked in self._due:
            asked.answer = FileAnswer(asked.request.number, problem=problem)
        self._due.clear()
        self.n_bytes = 0


def _refused(answer: FileAnswer, fault: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"an answer about a file is refused: {fault}", f"answer {answer.number}", _RESTART)


class FileClient:
    """The supervisor's files, over ``link``.  ``on_broken`` is called once when none can be used any more."""

    def __init__(self, link: BlockingLink) -> None:
        self.on_broken: Callable[[str], None] = lambda problem: None
        self._link = link
        self._sending = Lock()  # keeps requests on the connection in the order of their numbers
        self._changed = Condition()
        self._requests = PendingRequests()
        self._broken = ""
        link.payload_memory = self._memory
        StartedThread("files", self._receive)

    def file(self, number: int) -> RemoteFile:
        """Return the file with this number, which came with a frame of the link."""
        return RemoteFile(self, number)

    def ask(
        self,
        operation: FileOperation,
        file: int,
        offset: int = 0,
        n_bytes: int = 0,
        *,
        payload: Sequence[memoryview] = (),
        into: memoryview | None = None,
    ) -> PendingRequest:
        """Send a request as soon as the window has room; ``wait`` returns its answer."""
        checksum = 0
        for part in payload:
            checksum = crc32(part, checksum)
        with self._sending:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._broken or not self._requests or self._requests.n_bytes + n_bytes <= WINDOW_BYTES
                )
                asked = self._requests.add(operation, file, offset, n_bytes, checksum, into)
                if self._broken:
                    self._requests.fail(self._broken)
                    return asked
            with suppress(ProtocolError, OSError):  # the receiving thread sees the end, too
                self._link.send(asked.request, payload=payload)
        return asked

    def wait(self, asked: PendingRequest) -> FileAnswer:
        """Return the answer to a request.  Raises FileError."""
        with self._changed:
            self._changed.wait_for(lambda: asked.answer is not None)
        answer = asked.answer
        assert answer is not None
        if answer.problem:
            raise FileError(asked.request.offset, answer.problem, answer.errno)
        return answer

    def _memory(self, message: Message, n_bytes: int) -> memoryview:
        assert isinstance(message, FileAnswer)  # the supervisor may send nothing else
        with self._changed:
            return self._requests.memory(message, n_bytes)

    def _receive(self) -> None:
        problem = ""
        try:
            while (frame := self._link.receive()) is not None:
                assert isinstance(frame.message, FileAnswer)
                with self._changed:
                    self._requests.end(frame.message)
                    self._changed.notify_all()
        except (ProtocolError, OSError) as error:
            problem = str(error)
        problem = problem or str(self._link.closed_because or "it was closed")
        with self._changed:
            self._broken = f"the connection for files is gone: {problem}"
            self._requests.fail(self._broken)
            self._changed.notify_all()
        self._link.close()
        self.on_broken(problem)


class RemoteFile:
    """A file of the supervisor's."""

    def __init__(self, client: FileClient, number: int) -> None:
        self._client, self._number = client, number
        self._lock = Lock()
        self._written: deque[PendingRequest] = deque()  # without an answer so far
        self._closed = False

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        asked: list[tuple[PendingRequest, list[memoryview]]] = []
        for parts in _chunks(views):
            n_bytes = sum(map(len, parts))
            into = parts[0] if len(parts) == 1 else memoryview(bytearray(n_bytes))
            asked.append((self._client.ask(FileOperation.READ, self._number, offset, n_bytes, into=into), parts))
            offset += n_bytes
        self._check(one for one, _ in asked)
        for one, parts in asked:
            if len(parts) > 1:
                assert one.into is not None
                at = 0
                for part in parts:
                    part[:] = one.into[at : at + len(part)]
                    at += len(part)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        for parts in _chunks(views):
            n_bytes = sum(map(len, parts))
            asked = self._client.ask(FileOperation.WRITE, self._number, offset, n_bytes, payload=parts)
            offset += n_bytes
            with self._lock:
                self._written.append(asked)
                done = list[PendingRequest]()
                while self._written and self._written[0].answer is not None:
                    done.append(self._written.popleft())
            self._check(done)

    def flush(self) -> None:
        with self._lock:
            written, self._written = self._written, deque()
        self._check(written)

    def status(self) -> FileStatus:
        answer = self._client.wait(self._client.ask(FileOperation.STATUS, self._number))
        return FileStatus(answer.n_bytes, answer.complete)

    def checksum(self, offset: int, n_bytes: int) -> int:
        return self._client.wait(self._client.ask(FileOperation.CHECKSUM, self._number, offset, n_bytes)).checksum

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._client.ask(FileOperation.CLOSE, self._number)

    def _check(self, requests: Iterable[PendingRequest]) -> None:
        """Wait for all of these, as the receiving thread fills their views; raise the first error."""
        problem: FileError | None = None
        for asked in requests:
            try:
                self._client.wait(asked)
            except FileError as error:
                problem = problem or error
        if problem is not None:
            raise problem


def _chunks(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Split the views into lists of MAX_VIEWS with CHUNK_BYTES at most."""
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for view in views:
        rest = view
        while rest:
            parts.append(rest[:room])
            rest, room = rest[room:], room - len(parts[-1])
            if not room or len(parts) == MAX_VIEWS:
                yield parts
                parts, room = [], CHUNK_BYTES
    if parts:
        yield parts


def os_reason(error: FileError) -> str:
    """Return an error with its number and name, as the system has them."""
    if not error.errno:
        return error.reason
    return f"errno {error.errno} {errno.errorcode.get(error.errno, '')}: {error.reason}"
