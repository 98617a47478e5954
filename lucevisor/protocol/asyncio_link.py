"""The supervisor's end of a link or pulse, over a non-blocking socket in an asyncio or uvloop loop.

The protocol is in ``connection``.  Invariants: no task or future per frame; ``on_frame`` gets every valid frame that
arrived before the link died, in order; then ``on_closed`` is called exactly once, from its own loop callback.

A daemon may report a failure and die before the supervisor's next write fails, so after a failed write the link first
reads what has arrived.

The loop watches an epoll descriptor that contains the socket instead of the socket: uvloop (libuv) silently stops
watching a descriptor on POLLERR, which is what a daemon that dies with unread bytes causes.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections import deque
from typing import TYPE_CHECKING

from lucevisor.protocol.connection import Connection
from lucevisor.protocol.descriptors import MAX_BUFFERS, after, close_all, pack
from lucevisor.protocol.errors import LinkClosed, LinkOverflow, ProtocolError, RemoteProtocolError
from lucevisor.protocol.states import Channel, LinkState, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from lucevisor.protocol.frames import Frame
    from lucevisor.protocol.messages import Message

MAX_QUEUED_BYTES = 16 * 1024 * 1024
"""Send queue limit: thousands of step plans.  A daemon that is this far behind has stopped reading."""

_READ_BUDGET_BYTES = 4 * 1024 * 1024  # per callback: a long payload must not starve the other links
_RESTART = "the daemon has exited; see its log"


class Link:
    """Frames over ``sock``, which this object owns.  Create it inside the running loop.

    ``on_frame(frame)`` runs in the reader callback; if it raises, the link is closed and the exception goes to the
    loop's exception handler.  ``on_closed(reason)`` gets a LinkClosed, RemoteProtocolError or LinkOverflow.
    """

    def __init__(
        self,
        sock: socket.socket,
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[ProtocolError], None],
        *,
        role: Role = Role.SUPERVISOR,
        channel: Channel = Channel.LINK,
        name: str = "link",
        max_queued_bytes: int = MAX_QUEUED_BYTES,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        sock.setblocking(False)
        sock.set_inheritable(False)
        self._sock = sock
        self._poll = select.epoll()
        self._poll.register(sock.fileno(), select.EPOLLIN)
        self._connection = Connection(role, channel, name)
        self._name = name
        self._on_frame = on_frame
        self._on_closed = on_closed
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[tuple[list[bytes | memoryview], list[int]]] = deque()
        self._queued_bytes = 0
        self._write_error: LinkClosed | None = None
        self._closed: ProtocolError | None = None
        self._loop.add_reader(self._poll.fileno(), self._ready)

    @property
    def closed(self) -> bool:
        """Whether nothing more can be sent or received."""
        return self._closed is not None

    @property
    def queued_bytes(self) -> int:
        """Bytes waiting for the peer to read."""
        return self._queued_bytes

    @property
    def state(self) -> LinkState:
        return self._connection.state

    def send(
        self, message: Message | bytes, *, request_id: int = 0, payload: Sequence[Buffer] = (), fds: Sequence[int] = ()
    ) -> None:
        """Write one frame now if the socket has room, otherwise queue it.

        ``message``: a record, or bytes of ``codec.encode`` (then without payload and descriptors).  Queued ``fds`` are
        duplicated.  Payload buffers are not copied: do not change them until ``queued_bytes`` is 0.
        LocalProtocolError: not allowed now.  LinkClosed, LinkOverflow: the link is dead, ``on_closed`` follows.
        """
        dead = self._closed or self._write_error
        if dead is not None:
            raise LinkClosed(f"the link is closed: {dead.what}", self._name, dead.advice)
        if isinstance(message, bytes):
            self._connection.send_encoded(message)
            buffers: list[bytes | memoryview] = [message]
        else:
            buffers = self._connection.send(message, request_id, payload=payload, n_fds=len(fds))
        if self._queue:
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
        except ConnectionError as error:
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
        if self._queued_bytes > self._max_queued_bytes:
            overflow = LinkOverflow(
                f"{self._queued_bytes} bytes are queued and the daemon does not read",
                self._name,
                "the daemon hangs or is stopped: restart the group",
            )
            self._finish(overflow)
            raise overflow
        self._queue.append((buffers, [os.dup(fd) for fd in fds]))
        self._queued_bytes += sum(map(len, buffers))

    def _flush(self) -> None:
        while self._queue:
            buffers, fds = self._queue[0]
            try:
                n_sent = self._sock.sendmsg(buffers[:MAX_BUFFERS], pack(fds))
            except BlockingIOError:
                return
            except ConnectionError as error:
                self._write_failed(error)
                return
            close_all(fds)
            self._queued_bytes -= n_sent
            rest = after(buffers, n_sent)
            if rest:
                self._queue[0] = (rest, [])
            else:
                self._queue.popleft()
        self._poll.modify(self._sock.fileno(), select.EPOLLIN)

    def _write_failed(self, error: ConnectionError) -> LinkClosed:
        """Stop writing; the reader closes the link after the last bytes that arrived."""
        self._write_error = LinkClosed(f"the daemon is gone: {error}", self._name, _RESTART)
        self._drop_queue()
        self._loop.call_soon(self._read_rest)
        return self._write_error

    def _drop_queue(self) -> None:
        for _, fds in self._queue:
            close_all(fds)
        if self._queue:
            self._queue.clear()
            self._poll.modify(self._sock.fileno(), select.EPOLLIN)
        self._queued_bytes = 0

    # ---- in

    def _ready(self) -> None:
        """The socket is readable or writable: try both."""
        if self._queue:
            self._flush()
        budget = _READ_BUDGET_BYTES
        while budget > 0 and self._closed is None:
            room = self._connection.buffer()
            n = self._read(room)
            if n < len(room):  # drained, or nearly; otherwise the loop calls again
                return
            budget -= n

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
        except ConnectionError as error:
            self._finish(self._gone(f"the daemon is gone: {error}"))
            return 0
        if n == 0:
            self._finish(self._gone("end of file"))
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

    def _gone(self, what: str) -> LinkClosed:
        return LinkClosed(f"{what} {self._connection.unfinished}".strip(), self._name, _RESTART)

    def _finish(self, reason: ProtocolError) -> None:
        if self._closed is not None:
            return
        self._closed = reason
        self._loop.remove_reader(self._poll.fileno())
        self._drop_queue()
        self._poll.close()
        self._sock.close()
        self._loop.call_soon(self._on_closed, reason)
