"""Sans-I/O protocol state of one end of a link or heartbeat: bytes in, frames out; messages in, bytes out.

Invariants: frames come out in order, each exactly once; none comes out after the first byte that violates the protocol;
memory is bounded by the read buffer plus what one header within its limits announces. ``buffer()`` and ``received(n)``
let a socket write straight to its destination; ``receive(data)`` copies."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from lucevisor.protocol.errors import LocalProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import (
    HEADER_BYTES,
    KIND_OFFSET,
    MAGIC,
    WITH_DESCRIPTORS,
    Frame,
    Header,
    byte_views,
    decode,
    encode,
    foreign_bytes,
    n_descriptors,
    parse_header,
)
from lucevisor.protocol.messages import KIND_OF, Message, MessageKind, Role, StreamKind
from lucevisor.protocol.states import INITIAL, LinkState, legal, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

READ_BUFFER_BYTES = 64 * 1024  # holds any frame of a decode step: one read per frame
_NOTHING = memoryview(b"")


class Connection:
    """Protocol state of one end of a stream."""

    def __init__(self, role: Role, stream: StreamKind = StreamKind.LINK, name: str = "link") -> None:
        self.name = name
        self.error: RemoteProtocolError | None = None
        self._stream = stream
        self._role = role
        self._peer = Role.DAEMON if role is Role.SUPERVISOR else Role.SUPERVISOR
        self._incoming = legal(stream, self._peer)
        self._outgoing = legal(stream, role)
        self.state = INITIAL[stream]
        self._small = memoryview(bytearray(READ_BUFFER_BYTES))
        self._start = 0  # unread bytes are _small[_start:_end]
        self._end = 0
        self._n_received = 0  # stream position, for error messages
        self._large: memoryview | None = None  # metadata or payload too long for _small, being filled
        self._n_large = 0
        self._header: Header | None = None  # of the frame being received
        self._message: Message | None = None  # its metadata, while the payload is incomplete
        self._frames: list[Frame] = []
        self._fds: deque[int] = deque()
        self._n_files = 0
        self.numbers_files = False
        """Descriptors stay with the sender, and count as files that it has offered."""
        self.payload_memory: Callable[[Message, int], memoryview] = _new_memory
        """Returns where so many bytes of payload go; may raise RemoteProtocolError."""

    @property
    def state(self) -> LinkState:
        """Current state of the link."""
        return self._state

    @state.setter
    def state(self, state: LinkState) -> None:
        self._state = state
        self._may_receive = self._incoming[state]
        self._may_send = self._outgoing[state]

    # ---- in

    def receive(self, data: Buffer, fds: Sequence[int] = ()) -> None:
        """Feed bytes of the stream, and the descriptors that arrived with the last of them."""
        view = memoryview(data).cast("B")
        while len(view) > 0 and self.error is None:
            room = self.buffer()
            n = min(len(room), len(view))
            room[:n] = view[:n]
            view = view[n:]
            self.received(n, () if len(view) else fds)

    def buffer(self) -> memoryview:
        """Memory for the next bytes of the stream; never empty.  Fill it from the start, then call ``received``."""
        if self._large is not None:
            return self._large[self._n_large :]
        return self._small[self._end :] if self._end else self._small

    @property
    def is_filling(self) -> bool:
        """True if ``buffer()`` ends where the frame does, or its metadata."""
        return self._large is not None

    def received(self, n_bytes: int, fds: Sequence[int] = ()) -> None:
        """Account for ``n_bytes`` written to ``buffer()``.  Never raises on bad bytes: see ``events`` and ``error``."""
        if fds:
            self._fds.extend(fds)
        if self.error is not None:
            return
        self._n_received += n_bytes
        try:
            if self._large is None:
                self._end += n_bytes
                self._parse()
            else:
                self._n_large += n_bytes
                if self._n_large == len(self._large):
                    self._finish_large(self._large)
        except RemoteProtocolError as error:
            n_unread = self._end - self._start
            place = f"{error.where}, {self.name}, byte {self._n_received - n_unread} from the {self._peer}"
            self.error = RemoteProtocolError(error.what, place, error.advice)
            self.error.__cause__ = error.__cause__

    def events(self) -> list[Frame]:
        """Frames completed since the last call.  Raises ``error`` when there are none and the stream is broken."""
        frames, self._frames = self._frames, []
        if self.error is not None and not frames:
            raise self.error
        return frames

    def take_descriptors(self) -> list[int]:
        """Descriptors not claimed by any frame; whoever ends the connection closes them."""
        fds = list(self._fds)
        self._fds.clear()
        return fds

    @property
    def unfinished(self) -> str:
        """Description of the frame that an end of file would truncate; empty between frames."""
        if self._header is not None:
            return f"inside a {self._header.kind.name} frame"
        return f"after {self._end - self._start} bytes of a header" if self._end > self._start else ""

    # ---- out

    def send(
        self, message: Message | bytes, request_id: int = 0, flags: int = 0, payload: Sequence[Buffer] = ()
    ) -> list[bytes | memoryview]:
        """Advance the state and return the buffers to write, in order, of a record or of bytes of ``frames.encode``
        without payload; descriptors go with the first byte. A LocalProtocolError changes nothing."""
        if isinstance(message, bytes):
            self._advance(MessageKind(message[KIND_OFFSET]))
            return [message]
        views = byte_views(payload) if len(payload) else []
        data = encode(message, request_id, flags, sum(map(len, views)))
        self._advance(KIND_OF[type(message)])
        return [data, *views]

    def _advance(self, kind: MessageKind) -> None:
        following = self._may_send.get(kind)
        if following is None:
            text = refusal(self._stream, self._role, self._state, kind)
            raise LocalProtocolError(text, self.name, "wait for the answer that allows it")
        if following is not self._state:
            self.state = following

    # ---- parsing

    def _parse(self) -> None:
        """Complete every whole frame in the read buffer and make room for the rest."""
        while self._header is not None or self._start < self._end:
            if self._header is None and not self._read_header():
                return
            if self._message is None and not self._read_metadata():
                return
            if not self._read_payload():
                return
        self._start = self._end = 0
        if self._fds:
            raise RemoteProtocolError(
                f"{len(self._fds)} descriptors arrived with a frame that takes none", "descriptors", "restart the group"
            )

    def _read_header(self) -> bool:
        start = self._start
        if self._end - start < HEADER_BYTES:
            found = bytes(self._small[start : min(self._end, start + len(MAGIC))])
            if not MAGIC.startswith(found):
                raise foreign_bytes(found)
            if start + HEADER_BYTES > READ_BUFFER_BYTES:
                self._move_to_front()
            return False
        header = parse_header(self._small[start : start + HEADER_BYTES])
        if header.kind not in self._may_receive:
            text = refusal(self._stream, self._peer, self._state, header.kind)
            raise RemoteProtocolError(text, "frame header", "supervisor and daemon differ: restart the group")
        self._header = header
        self._start = start + HEADER_BYTES
        return True

    def _read_metadata(self) -> bool:
        assert self._header is not None
        n = self._header.metadata_bytes
        stop = self._start + n
        if stop <= self._end:
            self._message = decode(self._header, self._small[self._start : stop])
            self._start = stop
            return True
        if n > READ_BUFFER_BYTES:
            self._start_large(_new_memory(None, n))
        elif stop > READ_BUFFER_BYTES:
            self._move_to_front()
        return False

    def _read_payload(self) -> bool:
        assert self._header is not None
        n = self._header.payload_bytes
        if n == 0:
            self._complete(_NOTHING)
        else:
            assert self._message is not None
            payload = self.payload_memory(self._message, n)
            if self._end - self._start < n:
                self._start_large(payload)
                return False
            payload[:] = self._small[self._start : self._start + n]
            self._start += n
            self._complete(payload)
        return True

    def _start_large(self, memory: memoryview) -> None:
        """Fill ``memory`` with the next bytes, and move in what has arrived of them."""
        self._large = memory
        self._n_large = self._end - self._start
        self._large[: self._n_large] = self._small[self._start : self._end]
        self._start = self._end = 0

    def _finish_large(self, large: memoryview) -> None:
        self._large = None
        assert self._header is not None
        if self._message is None:
            self._message = decode(self._header, large)
        else:
            self._complete(large)
        self._parse()

    def _complete(self, payload: memoryview) -> None:
        header, message = self._header, self._message
        assert header is not None
        assert message is not None
        fds: tuple[int, ...] = ()
        files: tuple[int, ...] = ()
        if header.kind in WITH_DESCRIPTORS and self.numbers_files:
            first, self._n_files = self._n_files, self._n_files + n_descriptors(message)
            files = tuple(range(first, self._n_files))
        elif header.kind in WITH_DESCRIPTORS:
            n = n_descriptors(message)
            if len(self._fds) < n:
                raise RemoteProtocolError(
                    f"{header.kind.name} names {_named(header.kind, n)}, {len(self._fds)} descriptors arrived",
                    "descriptors",
                    "restart the group; check the limit of open files (ulimit -n) if it happens again",
                )
            fds = tuple(self._fds.popleft() for _ in range(n))
        self._header = self._message = None
        # Look it up again: this end may have sent something since the header arrived; states.py keeps the kind legal.
        following = self._may_receive[header.kind]
        if following is not self._state:
            self.state = following
        self._frames.append(Frame(header.kind, header.request_id, header.flags, message, payload, fds, files))

    def _move_to_front(self) -> None:
        n = self._end - self._start
        self._small[:n] = self._small[self._start : self._end]
        self._start, self._end = 0, n


def _new_memory(_message: Message | None, n_bytes: int) -> memoryview:
    return memoryview(bytearray(n_bytes))


def _named(kind: MessageKind, n: int) -> str:
    """Return a description of a frame's descriptors, for messages."""
    return "a snapshot file" if kind in (MessageKind.SAVE, MessageKind.RESTORE) else f"{n} arenas"
