"""The two ends of a link or heartbeat, over a Unix socket or TCP: in the supervisor's event loop, blocking in a daemon.

A peer that dies with unread bytes causes ECONNRESET instead of end of file; the kernel delivers earlier bytes first.
End of file arrives when the *last* copy of the other end is closed.

Invariants of :class:`Link`: no task or future per frame; ``on_frame`` gets every valid frame that arrived before the
link died, in order; then ``on_closed`` is called exactly once, from its own loop callback. A daemon may report a
failure and die before the supervisor's next write fails, so after a failed write the link first reads what has arrived.
The loop watches an epoll descriptor that contains the socket: uvloop (libuv) silently stops watching a socket on
POLLERR, which is what a daemon that dies with unread bytes causes.

Invariant of :class:`BlockingLink`: a frame is written whole or the link is dead. Descriptors travel as SCM_RIGHTS."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import LinkClosed, LinkOverflow, LocalProtocolError, ProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import MAX_DESCRIPTORS, Frame
from lucevisor.protocol.messages import Message, Role, StreamKind
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.tcp import TcpPath, measured_path

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Plain ints: operations on the enums of socket run Python code, here once per frame.
RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
LOST_FLAG = int(socket.MSG_CTRUNC)
WAIT_FOR_ALL = int(socket.MSG_WAITALL)
DO_NOT_WAIT = int(socket.MSG_DONTWAIT)
ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)

MAX_BUFFERS = 512  # of one sendmsg; the kernel takes at most 1024 (UIO_MAXIOV)
_CUT_OFF = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
"""The peer answers no more."""
_DAEMON_GONE = "the daemon has exited; see its log"
_HOST_GONE = "check that host, and the network"
_PEER_GONE = "the peer has exited or closed the link; a daemon exits now, a supervisor restarts the group"


class Channel(Protocol):
    """A connection to a daemon, as all that only sends sees it."""

    max_queued_bytes: int
    """More in the queue mean that the daemon does not read."""

    @property
    def passes_handles(self) -> bool:
        """True if files may come with a frame."""

    @property
    def closed(self) -> bool:
        """True if nothing more can be sent or received."""

    def send(
        self, message: Message | bytes, *, request_id: int = 0, payload: Sequence[Buffer] = (), fds: Sequence[int] = ()
    ) -> None:
        """Send one frame without waiting: a record, or bytes of ``frames.encode`` (without payload and descriptors).
        Payload buffers are not copied: they must not change until the daemon has answered. Raises ProtocolError,
        LocalProtocolError if this message is not allowed."""

    @property
    def path(self) -> TcpPath | None:
        """What is known of the way to the daemon; None where it is on this host, or not connected."""

    def close(self, reason: str = ...) -> None:
        """Close the connection and drop what is queued; idempotent."""


class AwaitedConnection:
    """A connection over TCP that a daemon is going to open: ``take`` gets its socket, once; ``forget``: it is not
    wanted."""

    def __init__(self, forget: Callable[[], object]) -> None:
        self.forget = forget
        self.tcp: socket.socket | None = None  # what is below the socket, when it is there
        self.error: Callable[[], OSError | None] = lambda: None  # what ended it, where the socket shows an end only
        self.take: Callable[[socket.socket], None] = lambda sock: sock.close()


class Files(Protocol):
    """Offers files over TCP, where no descriptor travels with a frame; a :class:`FileServer`."""

    def start(self, on_broken: Callable[[ProtocolError], None]) -> None:
        """Begin to serve.  ``on_broken`` is called from another thread when the connection cannot be used."""

    def offer(self, message: Message, fds: Sequence[int]) -> None:
        """Serve what a message comes with; the caller keeps the descriptors.  Raises LocalProtocolError, OSError."""

    def close(self) -> None:
        """Serve nothing more; idempotent."""


class Link:
    """Frames over ``sock``, which this object owns, or over the connection that is awaited. Create it inside the
    running loop.

    ``files`` offers the files of frames, for a socket that passes no descriptors. If ``on_frame`` raises, the link is
    closed and the exception goes to the loop's handler. ``on_closed`` gets a LinkClosed, RemoteProtocolError or
    LinkOverflow."""

    def __init__(
        self,
        sock: socket.socket | AwaitedConnection,
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[ProtocolError], None],
        *,
        role: Role = Role.SUPERVISOR,
        stream: StreamKind = StreamKind.LINK,
        name: str = "link",
        max_queued_bytes: int = 16 << 20,  # thousands of step plans: a daemon so far behind has stopped reading
        files: Files | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._awaited = sock if isinstance(sock, AwaitedConnection) else None
        self._tcp: socket.socket | None = None
        self._error: Callable[[], OSError | None] = lambda: None
        self._poll = select.epoll()
        self._connection = Connection(role, stream, name)
        self._name = name
        self._on_frame = on_frame
        self._on_closed = on_closed
        self.max_queued_bytes = max_queued_bytes
        self._queue: deque[tuple[list[bytes | memoryview], list[int]]] = deque()
        self.queued_bytes = 0
        self._write_error: LinkClosed | None = None
        self._closed: ProtocolError | None = None
        self._files = files
        if files is not None:
            files.start(self._files_broken)
        self.passes_handles = files is not None or not isinstance(sock, AwaitedConnection)
        if isinstance(sock, AwaitedConnection):
            sock.take = self._connected
        else:
            self._connected(sock)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    @property
    def state(self) -> LinkState:
        return self._connection.state

    @property
    def path(self) -> TcpPath | None:
        if self._tcp is None or self._closed is not None:
            return None
        with suppress(OSError):  # it has ended
            return measured_path(self._tcp)
        return None

    def send(
        self, message: Message | bytes, *, request_id: int = 0, payload: Sequence[Buffer] = (), fds: Sequence[int] = ()
    ) -> None:
        """Write one frame now if the socket has room, otherwise queue it, with copies of ``fds``. After LinkClosed and
        LinkOverflow ``on_closed`` follows."""
        dead = self._closed or self._write_error
        if dead is not None:
            raise LinkClosed(f"the link is closed: {dead.what}", self._name, dead.advice)
        if fds and not self.passes_handles:
            what = f"{type(message).__name__} comes with a file, and nothing offers files on this connection"
            raise LocalProtocolError(what, self._name, "report it")
        buffers = self._connection.send(message, request_id, payload=payload)
        if fds and self._files is not None and not isinstance(message, bytes):
            self._files.offer(message, fds)
            fds = ()
        if self._queue or self._awaited is not None:
            self._enqueue(buffers, fds)
            return
        try:
            if len(buffers) == 1 and not fds:
                n_sent = self._sock.send(buffers[0])
                if n_sent == len(buffers[0]):
                    return
            else:
                n_sent = self._sock.sendmsg(buffers[:MAX_BUFFERS], pack(fds))
                fds = ()
        except BlockingIOError:
            n_sent = 0
        except OSError as error:
            if not _is_lost(error):
                raise
            raise self._write_failed(error) from error
        rest = after(buffers, n_sent)
        if rest:
            self._enqueue(rest, fds)
            self._poll.modify(self._sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def close(self, reason: str = "closed by the supervisor") -> None:
        """Close the link and drop its queue; idempotent."""
        self._finish(LinkClosed(reason, self._name, "nothing to do", local=True))

    # ---- out

    def _enqueue(self, buffers: list[bytes | memoryview], fds: Sequence[int]) -> None:
        if self.queued_bytes > self.max_queued_bytes:
            overflow = LinkOverflow(
                f"{self.queued_bytes} bytes are queued and the daemon does not read",
                self._name,
                "the daemon hangs or is stopped: restart the group",
            )
            self._finish(overflow)
            raise overflow
        self._queue.append((buffers, [os.dup(fd) for fd in fds]))
        self.queued_bytes += sum(map(len, buffers))

    def _flush(self) -> None:
        while self._queue:
            buffers, fds = self._queue[0]
            try:
                n_sent = self._sock.sendmsg(buffers[:MAX_BUFFERS], pack(fds))
            except BlockingIOError:
                return
            except OSError as error:
                if not _is_lost(error):
                    raise
                self._write_failed(error)
                return
            close_all(fds)
            self.queued_bytes -= n_sent
            rest = after(buffers, n_sent)
            if rest:
                self._queue[0] = (rest, [])
            else:
                self._queue.popleft()
        self._poll.modify(self._sock.fileno(), select.EPOLLIN)

    def _write_failed(self, error: OSError) -> LinkClosed:
        """Stop writing; the reader closes the link after the last bytes that arrived."""
        self._write_error = self._lost(error)
        self._drop_queue()
        self._loop.call_soon(self._read_rest)
        return self._write_error

    def _drop_queue(self) -> None:
        for _, fds in self._queue:
            close_all(fds)
        if self._queue:
            self._queue.clear()
            if self._awaited is None:
                self._poll.modify(self._sock.fileno(), select.EPOLLIN)
        self.queued_bytes = 0

    # ---- in

    def _ready(self) -> None:
        """The socket is readable or writable: try both."""
        if self._queue:
            self._flush()
        budget = 4 << 20  # bytes per callback: a long payload must not starve the other links
        while budget > 0 and self._closed is None:
            room = self._connection.buffer()
            n = self._read(room)
            if n < len(room):  # drained, or nearly; otherwise the loop calls again
                return
            budget -= n

    def _connected(self, sock: socket.socket) -> None:
        if self._awaited is not None:
            self._tcp, self._error = self._awaited.tcp, self._awaited.error
        self._awaited = None
        _prepare(sock, blocking=False)
        self._sock = sock
        self._poll.register(sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._queue else 0))
        self._loop.add_reader(self._poll.fileno(), self._ready)

    def _read_rest(self) -> None:
        while self._closed is None:
            if self._read(self._connection.buffer()) == 0 and self._closed is None:
                assert self._write_error is not None
                self._finish(self._write_error)

    def _read(self, room: memoryview) -> int:
        """Receive once and deliver the frames; 0 when there was nothing to read."""
        try:
            n = self._sock.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError as error:
            if not _is_lost(error):
                raise
            self._finish(self._lost(error))
            return 0
        if n == 0:
            below = self._error()
            self._finish(self._gone("end of file") if below is None else self._lost(below))
            return 0
        self._connection.received(n)
        try:
            frames = self._connection.events()
        except RemoteProtocolError as error:
            self._finish(error)
            return 0
        self._deliver(frames)
        if self._connection.error is not None:  # the stream broke after those frames
            self._finish(self._connection.error)
        return n

    def _deliver(self, frames: list[Frame]) -> None:
        try:
            for frame in frames:
                self._on_frame(frame)
                if self._closed is not None:  # the callback closed the link
                    return
        except BaseException as error:
            self._finish(LinkClosed(f"on_frame raised {error!r}", self._name, "report it", local=True))
            raise

    def _files_broken(self, error: ProtocolError) -> None:
        """Called from the thread that serves files."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._finish, error)

    def _lost(self, error: OSError) -> LinkClosed:
        if error.errno in _CUT_OFF:
            return LinkClosed(f"its host answers no more: {error.strerror}", self._name, _HOST_GONE, cut=True)
        return self._gone(f"the daemon is gone: {error}")

    def _gone(self, what: str) -> LinkClosed:
        return LinkClosed(f"{what} {self._connection.unfinished}".strip(), self._name, _DAEMON_GONE)

    def _finish(self, reason: ProtocolError) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._drop_queue()
        if self._awaited is None:
            self._loop.remove_reader(self._poll.fileno())
            self._sock.close()
        else:
            self._awaited.forget()
        self._poll.close()
        if self._files is not None:
            self._files.close()
        self._loop.call_soon(self._on_closed, reason)


class BlockingLink:
    """Frames over ``sock``, which this object owns. One thread at a time receives; any may send. ``numbers_files``: no
    descriptor travels; the other end offers those of a frame as files."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        role: Role = Role.DAEMON,
        stream: StreamKind = StreamKind.LINK,
        name: str = "link",
        numbers_files: bool = False,
    ) -> None:
        _prepare(sock, blocking=True)
        self.closed_because: LinkClosed | None = None
        self._sock = sock
        self._connection = Connection(role, stream, name)
        self._connection.numbers_files = numbers_files
        self._name = name
        self._frames: deque[Frame] = deque()
        self._send_lock = Lock()
        self._send_broken: LinkClosed | None = None

    @property
    def state(self) -> LinkState:
        return self._connection.state

    @property
    def payload_memory(self) -> Callable[[Message, int], memoryview]:
        """Returns where so many bytes of payload go; see Connection."""
        return self._connection.payload_memory

    @payload_memory.setter
    def payload_memory(self, memory: Callable[[Message, int], memoryview]) -> None:
        self._connection.payload_memory = memory

    def fileno(self) -> int:
        """The socket's descriptor, -1 after ``close``."""
        return self._sock.fileno()

    @property
    def buffered(self) -> bool:
        """True if ``receive`` returns a frame that has come already, of which the socket tells nothing any more."""
        return bool(self._frames)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a frame has begun to arrive, or the link is dead; False after ``timeout_s``."""
        if self._frames or self.closed_because is not None or self._sock.fileno() < 0:
            return True
        try:
            return bool(select.select([self._sock], [], [], timeout_s)[0])
        except (OSError, ValueError):  # close() in another thread
            return True

    def receive(self) -> Frame | None:
        """Block until the next frame; None when the link is dead (``closed_because``). Raises RemoteProtocolError when
        the peer violated the protocol, on every later call, too; ``send`` still works, to report it."""
        while not self._frames:
            if self.closed_because is not None:
                return None
            self._frames.extend(self._connection.events())
            if not self._frames:
                self._fill()
        return self._frames.popleft()

    def receive_arrived(self) -> Frame | None:
        """Return the next frame if all of it has arrived, else None; as ``receive``, but without waiting."""
        while not self._frames:
            self._frames.extend(self._connection.events())
            if not self._frames and (self.closed_because is not None or not self._fill(DO_NOT_WAIT)):
                return None
        return self._frames.popleft()

    def send(
        self, message: Message | bytes, *, request_id: int = 0, payload: Sequence[Buffer] = (), fds: Sequence[int] = ()
    ) -> None:
        """Write one frame; blocks while the peer's buffer is full. Raises LinkClosed, LocalProtocolError."""
        with self._send_lock:
            if self._send_broken is not None:
                raise LinkClosed(self._send_broken.what, self._name, _PEER_GONE, local=self._send_broken.local)
            buffers = self._connection.send(message, request_id, payload=payload)
            try:
                self._write(buffers, fds)
            except BaseException as error:
                if isinstance(error, OSError) and _is_lost(error):
                    self._send_broken = LinkClosed(f"the peer is gone: {error}", self._name, _PEER_GONE)
                    raise self._send_broken from error
                # A signal handler raised: the frame may be truncated, so none may follow.
                what = f"sending was interrupted by {error!r}"
                self._send_broken = LinkClosed(what, self._name, _PEER_GONE, local=True)
                raise

    def close(self) -> None:
        """Close the link; idempotent.  A ``receive`` in another thread returns None."""
        if self._sock.fileno() < 0:
            return
        closed = LinkClosed("the link was closed by this side", self._name, "nothing to do", local=True)
        self.closed_because = self.closed_because or closed
        self._send_broken = self._send_broken or closed
        with suppress(OSError):  # ENOTCONN: the peer closed first
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread blocked in recv; close alone would not
        self._sock.close()
        close_all(self._connection.take_descriptors())
        for frame in self._frames:
            close_all(frame.fds)
        self._frames.clear()

    def _write(self, buffers: list[bytes | memoryview], fds: Sequence[int]) -> None:
        if len(buffers) == 1 and not fds:
            self._sock.sendall(buffers[0])
            return
        ancillary = pack(fds)
        while buffers:
            n_sent = self._sock.sendmsg(buffers[:MAX_BUFFERS], ancillary)
            ancillary = []  # the descriptors went with the first byte
            buffers = after(buffers, n_sent)

    def _fill(self, wait: int = WAIT_FOR_ALL) -> bool:
        """Feed the connection the next bytes, or mark the link dead; False if there are none and it may not wait."""
        buffer = self._connection.buffer()
        try:
            wanted = RECEIVE_FLAGS | (wait if self._connection.is_filling else wait & DO_NOT_WAIT)
            n, ancillary, flags, _ = self._sock.recvmsg_into([buffer], ANCILLARY_BYTES, wanted)
        except BlockingIOError:
            return False
        except OSError as error:
            if _is_lost(error):
                self._dead(f"the peer is gone: {error}", cut=error.errno in _CUT_OFF)
            elif self.closed_because is None:
                raise
            return True  # else: close() in another thread
        if n == 0:
            self._dead("end of file")
            return True
        if flags & LOST_FLAG:
            self._connection.error = RemoteProtocolError(
                "descriptors were lost in transit",
                self._name,
                "raise the limit of open files (ulimit -n), then restart the group",
            )
        self._connection.received(n, unpack(ancillary) if ancillary else ())
        return True

    def _dead(self, what: str, *, cut: bool = False) -> None:
        closed = LinkClosed(f"{what} {self._connection.unfinished}".strip(), self._name, _PEER_GONE, cut=cut)
        self.closed_because = self.closed_because or closed
        close_all(self._connection.take_descriptors())


# ---- sockets, descriptors and buffers


def _is_lost(error: OSError) -> bool:
    """Return whether the peer has gone, or the way to it."""
    return isinstance(error, ConnectionError) or error.errno in _CUT_OFF


def inherited_socket(number: int) -> socket.socket:
    """Return a socket that this process inherited."""
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)


def _prepare(sock: socket.socket, *, blocking: bool) -> None:
    sock.setblocking(blocking)
    sock.set_inheritable(False)


def pack(fds: Sequence[int]) -> list[tuple[int, int, Buffer]]:
    """Ancillary data for a sendmsg; ``fds`` travel with its first byte."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


def unpack(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors in the ancillary data of a recvmsg, now owned by the caller."""
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def after(buffers: Sequence[bytes | memoryview], n_sent: int) -> list[bytes | memoryview]:
    """Return the rest of ``buffers`` after a sendmsg wrote the first ``n_sent`` bytes."""
    rest: list[bytes | memoryview] = []
    for buffer in buffers:
        if n_sent >= len(buffer):
            n_sent -= len(buffer)
        else:
            rest.append(memoryview(buffer)[n_sent:] if n_sent else buffer)
            n_sent = 0
    return rest
