"""The daemon's end of a link or pulse, over a blocking socket.

Knows sockets and descriptors; the protocol is in ``connection``.  Invariants: a frame is written whole or the link is
dead; end of file, EPIPE and ECONNRESET all become ``LinkClosed``.

A peer that dies with unread bytes causes ECONNRESET instead of end of file.  The kernel delivers earlier bytes first,
so frames sent before a death are received.  End of file arrives when the *last* copy of the other end is closed: a
third process that inherited it would hide the peer's death.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from contextlib import suppress
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

from lucevisor.protocol.connection import Connection
from lucevisor.protocol.descriptors import (
    ANCILLARY_BYTES,
    LOST_FLAG,
    MAX_BUFFERS,
    RECEIVE_FLAGS,
    RECEIVE_NOW_FLAGS,
    after,
    close_all,
    pack,
    unpack,
)
from lucevisor.protocol.errors import LinkClosed, RemoteProtocolError
from lucevisor.protocol.states import Channel, LinkState, Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from lucevisor.protocol.frames import Frame
    from lucevisor.protocol.messages import Message

_RESTART = "the peer has exited or closed the link; a daemon exits now, a supervisor restarts the group"


class BlockingLink:
    """Frames over ``sock``, which this object owns.

    One thread receives; any thread may send, a lock keeps frames whole.  ``spin_s``: how long ``receive`` polls before
    it blocks in the kernel.  Polling saves the wake-up and burns the core, so use it only with a dedicated core.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        role: Role = Role.DAEMON,
        channel: Channel = Channel.LINK,
        name: str = "link",
        spin_s: float = 0.0,
    ) -> None:
        sock.setblocking(True)
        sock.set_inheritable(False)
        self.closed_because: LinkClosed | None = None
        self._sock = sock
        self._connection = Connection(role, channel, name)
        self._name = name
        self._spin_s = spin_s
        self._frames: deque[Frame] = deque()
        self._send_lock = Lock()
        self._held: list[bytes | memoryview] = []  # frames that wait for the next one
        self._send_broken: LinkClosed | None = None

    @property
    def state(self) -> LinkState:
        return self._connection.state

    def fileno(self) -> int:
        """The socket's descriptor, -1 after ``close``."""
        return self._sock.fileno()

    @property
    def buffered(self) -> bool:
        """Whether ``receive`` returns a frame that has come already, of which the socket tells nothing any more."""
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
        """Block until the next frame; None when the link is dead (``closed_because`` has the reason).

        RemoteProtocolError when the peer violated the protocol, on this and every later call.  ``send`` still works, so
        a daemon can report it in a Failed before it exits.
        """
        while not self._frames:
            if self.closed_because is not None:
                return None
            self._frames.extend(self._connection.events())
            if not self._frames:
                self._fill()
        return self._frames.popleft()

    def send(
        self, message: Message | bytes, *, request_id: int = 0, payload: Sequence[Buffer] = (), fds: Sequence[int] = ()
    ) -> None:
        """Write one frame; blocks while the peer's buffer is full.

        ``message``: a record, or bytes of ``codec.encode`` (then without payload and descriptors).  LinkClosed when
        the link is dead, LocalProtocolError when this message is not allowed.
        """
        with self._send_lock:
            self._check_sending()
            if isinstance(message, bytes):
                self._connection.send_encoded(message)
                buffers: list[bytes | memoryview] = [message]
            else:
                buffers = self._connection.send(message, request_id, payload=payload, n_fds=len(fds))
            if fds:
                self._write_held()
            self._write_all(buffers, fds)

    def hold(self, message: Message, *, request_id: int = 0) -> None:
        """Let a frame wait for the next one, ``flush``, or until ``receive`` waits for the peer.  Raises as ``send``.

        Each write wakes the peer; where cores are few it takes the place of who has more urgent work.
        """
        with self._send_lock:
            self._check_sending()
            self._held += self._connection.send(message, request_id)

    @property
    def holds(self) -> bool:
        """Whether a frame waits for the next one."""
        return bool(self._held)

    def flush(self) -> None:
        """Write the frames that wait for the next one.  LinkClosed when the link is dead."""
        with self._send_lock:
            self._write_held()

    def _check_sending(self) -> None:
        if self._send_broken is not None:
            raise LinkClosed(self._send_broken.what, self._name, _RESTART, local=self._send_broken.local)

    def _write_held(self) -> None:
        if self._held:
            self._check_sending()
            self._write_all([], ())

    def _write_all(self, buffers: list[bytes | memoryview], fds: Sequence[int]) -> None:
        """Write frames behind those that wait for them."""
        held, self._held = self._held, []
        try:
            self._write(held + buffers, fds)
        except ConnectionError as error:
            self._send_broken = LinkClosed(f"the peer is gone: {error}", self._name, _RESTART)
            raise self._send_broken from error
        except BaseException as error:  # a signal handler raised: the frame may be truncated, so none may follow
            self._send_broken = LinkClosed(f"sending was interrupted by {error!r}", self._name, _RESTART, local=True)
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

    def _fill(self) -> None:
        """Feed the connection the next bytes, or mark the link dead."""
        buffer = self._connection.buffer()
        if self._held and not self.wait(0.0):
            with suppress(LinkClosed):  # reading says so, too
                self.flush()
        try:
            n, ancillary, flags, _ = self._receive_message(buffer)
        except ConnectionError as error:
            self._dead(f"the peer is gone: {error}")
            return
        except OSError:
            if self.closed_because is None:
                raise
            return  # close() in another thread
        if n == 0:
            self._dead("end of file")
            return
        if flags & LOST_FLAG:
            self._connection.error = RemoteProtocolError(
                "descriptors were lost in transit",
                self._name,
                "raise the limit of open files (ulimit -n), then restart the group",
            )
        self._connection.received(n, unpack(ancillary) if ancillary else ())

    def _receive_message(self, buffer: memoryview) -> tuple[int, list[tuple[int, int, bytes]], int, object]:
        if self._spin_s > 0:
            deadline = perf_counter() + self._spin_s
            while True:
                try:
                    return self._sock.recvmsg_into([buffer], ANCILLARY_BYTES, RECEIVE_NOW_FLAGS)
                except BlockingIOError:
                    if perf_counter() >= deadline:
                        break
        return self._sock.recvmsg_into([buffer], ANCILLARY_BYTES, RECEIVE_FLAGS)

    def _dead(self, what: str) -> None:
        place = self._connection.unfinished
        self.closed_because = self.closed_because or LinkClosed(f"{what} {place}".strip(), self._name, _RESTART)
        close_all(self._connection.take_descriptors())
