"""Boundary memory of daemons that share none: rows travel over TCP from the writer's region to the reader's.

Each daemon has regions and doorbells of its own (``TcpBuffer``), and so has the supervisor (``RelayBuffer``), which
gets a copy of the rows for its journal. The daemon that is loaded later connects to the other one (``RowsEndpoint``).
Invariants: a frame is written straight to its region, and rung when it is whole; a connection brings the rows of one
epoch, in order; after a newer one has begun, the older one writes nothing more; what the supervisor sends stays outside
the regions."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Condition, Lock
from typing import Any

from lucevisor.protocol.arena import Arena, SharedBuffer, arena_bytes, open_arenas
from lucevisor.protocol.authentication import CHANNEL_BYTES, AuthenticationError, Purpose
from lucevisor.protocol.errors import ArenaError, LinkClosed, ProtocolError, RemoteProtocolError
from lucevisor.protocol.loading import ArenaPlan, RowsConnection
from lucevisor.protocol.messages import MAX_PAYLOAD_BYTES, Message, StreamKind
from lucevisor.protocol.steps import Attach, Attached, PlacedRows, Rows, RowsCopy
from lucevisor.protocol.tcp import Accepted, Acceptor, Credentials, connect
from lucevisor.protocol.threads import StartedThread
from lucevisor.protocol.transport import BlockingLink, Channel

NEVER = 2**64 - 1
"""No step has this id."""
BOUNDARY_S = 150.0
"""Time that a neighbour waits for a boundary to be opened: the supervisor ends its load, which makes no progress,
sooner."""


class RowsOrder:
    """Checks that rows come in order, belong to ``buffer`` and fit into its regions."""

    def __init__(self, buffer: Arena, epoch: int) -> None:
        self.epoch = epoch
        self._buffer, self._sequence = buffer, 0

    def memory(self, rows: Rows, n_bytes: int) -> memoryview:
        """Return where ``n_bytes`` of rows belong.  Raises RemoteProtocolError."""
        plan, problem = self._buffer.plan, ""
        if (rows.capture, rows.boundary) != plan.key:
            problem = f"they belong to another boundary, {rows.boundary}"
        elif (rows.epoch, rows.sequence) != (self.epoch, self._sequence):
            found, due = f"{rows.sequence} of epoch {rows.epoch}", f"{self._sequence} of epoch {self.epoch}"
            problem = f"they are number {found}, and number {due} was due"
        elif not 0 <= rows.region < plan.n_regions or not 0 < n_bytes <= plan.region_bytes:
            problem = f"{n_bytes} bytes for region {rows.region}: there are {plan.n_regions} of {plan.region_bytes}"
        if problem:
            what = f"rows of step {rows.step_id} are refused: {problem}"
            raise RemoteProtocolError(what, f"rows of boundary {plan.boundary}", "restart the group")
        self._sequence += 1
        return self._buffer.region(rows.region)[:n_bytes]


class RowsLink:
    """A connection between the two ends of a buffer. ``run`` receives on a thread of its own, and so does who waits for
    rows in ``receive_arrived``, as no other thread needs to be woken by then."""

    def __init__(self, buffer: TcpBuffer, link: BlockingLink, epoch: int) -> None:
        self.link, self.epoch = link, epoch
        self._buffer, self._order, self._n_sent = buffer, RowsOrder(buffer, epoch), 0
        self._receiving = Lock()
        self._poll: tuple[select.epoll, int] | None = None  # what ``run`` sleeps on
        link.payload_memory = self._memory

    def send(self, region: int, step_id: int, rows: memoryview) -> None:
        """Send the rows of a step.  Nothing happens where the other end is gone: the supervisor reports its loss."""
        message = Rows(*self._buffer.plan.key, region, step_id, self.epoch, self._n_sent)
        self._n_sent += 1
        with suppress(LinkClosed, OSError):
            self.link.send(message, payload=[rows])

    def run(self) -> None:
        """Receive rows until the other end is gone or ``close`` is called."""
        try:
            fd = os.dup(self.link.fileno())  # in the set until this ends: ``close`` wakes it
        except OSError:
            return  # closed
        with select.epoll() as poll:
            poll.register(fd, select.EPOLLIN)
            self._poll = poll, fd
            while self.link.fileno() >= 0:
                poll.poll()
                self.receive_arrived()
            self._poll = None
        os.close(fd)

    def awaited(self, here: bool) -> None:
        """Let ``run`` sleep while another thread waits for rows: two would contend for the interpreter's lock."""
        if (polled := self._poll) is not None:
            poll, fd = polled
            with suppress(ValueError, OSError):  # it has ended
                poll.modify(fd, 0 if here else select.EPOLLIN)

    def receive_arrived(self) -> None:
        """Receive the rows that have arrived.  Closes the connection when the other end is gone."""
        with self._receiving:
            try:
                while (frame := self.link.receive_arrived()) is not None:
                    if not isinstance(frame.message, Rows):
                        raise RemoteProtocolError(f"{frame.kind.name} came twice", "rows", "restart the group")
                    self._buffer.rows_arrived(frame.message)
            except ProtocolError as error:
                self._buffer.on_broken(error)
                self.link.close()
            if (closed := self.link.closed_because) is not None:
                if closed.cut:
                    self._buffer.on_cut(closed)
                self.link.close()

    def close(self) -> None:
        """End ``run``: nothing is written to a region after this."""
        with self._receiving:
            self.link.close()

    def _memory(self, message: Message, n_bytes: int) -> memoryview:
        if not isinstance(message, Rows):
            raise RemoteProtocolError(f"{type(message).__name__} with {n_bytes} bytes", "rows", "restart the group")
        return self._order.memory(message, n_bytes)


class TcpBuffer(Arena):
    """A daemon's end of boundary memory that it does not share."""

    shared_memory = False

    def __init__(self, *memory: Any) -> None:
        super().__init__(*memory)
        self.send_copy: Callable[[RowsCopy, memoryview], None] = lambda rows, memory: None
        self.on_broken: Callable[[ProtocolError], None] = lambda error: None
        self.on_cut: Callable[[ProtocolError], None] = lambda error: None
        self._lock = Lock()
        self._epoch = -1  # of the last connection
        self._peer: RowsLink | None = None
        self._n_copies = 0
        self._placed: dict[int, tuple[int, memoryview]] = {}  # by region: the step, and its rows

    def attach_peer(self, peer: RowsLink, answer: Callable[[], object] = lambda: None) -> bool:
        """Use a connection in place of the one before; False if a later one is there.  ``answer`` goes out first."""
        with self._lock:
            if peer.epoch <= self._epoch:
                return False
            self._epoch = peer.epoch
            if self._peer is not None:
                self._peer.close()
            for region in range(self.plan.n_regions):  # a lost writer's steps are announced again
                super().ring(region, NEVER, 0)
            with suppress(LinkClosed):
                answer()
            self._peer = peer
        return True

    def ring(self, region: int, step_id: int, n_bytes: int) -> None:
        """Send a copy of rows to a supervisor with a journal, then the rows to the reader: what is read is filed."""
        rows = self.region(region)[:n_bytes]
        assert self.plan.connection is not None
        if self.plan.connection.copies and not self.plan.tokens:  # tokens come with the answer itself
            self.send_copy(RowsCopy(*self.plan.key, region, step_id, self.plan.connection.epoch, self._n_copies), rows)
            self._n_copies += 1
        with self._lock:  # a reader that has its answer is the peer
            peer = self._peer
        if peer is not None:
            peer.send(region, step_id, rows)

    def rows_arrived(self, rows: Rows) -> None:
        """Ring for rows that are in their region now."""
        super().ring(rows.region, rows.step_id, 0)

    def place(self, rows: PlacedRows, payload: memoryview) -> None:
        """Keep rows from the supervisor beside the region."""
        self._placed[rows.region] = rows.step_id, payload

    @property
    def wake_fds(self) -> Sequence[int]:
        fd = -1 if self._peer is None else self._peer.link.fileno()
        return (self.wake_fd,) if fd < 0 else (self.wake_fd, fd)

    def drain(self) -> None:
        if (peer := self._peer) is not None:
            peer.receive_arrived()
        super().drain()  # after what that rings

    def awaited(self, here: bool) -> None:
        if (peer := self._peer) is not None:
            peer.awaited(here)

    def placed(self, region: int, step_id: int) -> memoryview | None:
        placed_step, payload = self._placed.get(region, (NEVER, None))
        return payload if placed_step == step_id else None

    def close(self) -> None:
        with self._lock:
            self._epoch = NEVER
            if self._peer is not None:
                self._peer.close()
            self._peer = None
        super().close()


class RelayBuffer(Arena):
    """The supervisor's copy of boundary memory that daemons do not share."""

    shared_memory = False

    def __init__(self, *memory: Any) -> None:
        super().__init__(*memory)
        self._order = RowsOrder(self, NEVER)
        self._reader: Channel | None = None
        self._reader_epoch = self._n_placed = 0
        # By region: the step whose rows are there, and their bytes; apart from those that its writer has answered.
        self._arrived: dict[int, tuple[int, int]] = {}
        self._answered: dict[int, tuple[int, int]] = {}

    def attach_writer(self, epoch: int) -> None:
        """Take rows of the writing daemon from now on."""
        self._order = RowsOrder(self, epoch)
        self._arrived.clear()

    def attach_reader(self, channel: Channel | None, epoch: int = 0) -> None:
        """Send what is placed to this daemon."""
        self._reader, self._reader_epoch, self._n_placed = channel, epoch, 0
        if channel is not None:
            channel.max_queued_bytes += arena_bytes(self.plan)

    def lose_writer(self) -> None:
        """Send the reader what the writer has answered, as its own connection may have lost it; the next writer
        computes the rest again."""
        for region, (step_id, n_bytes) in self._answered.items():
            if self.rung(region, step_id):
                self._place(region, step_id, n_bytes)

    def step_answered(self) -> None:
        """Take note that the writer has answered the step whose rows arrived last."""
        self._answered |= self._arrived
        self._arrived.clear()

    def rows_arrived(self, rows: RowsCopy, payload: memoryview) -> None:
        """Take the writer's copy of a step's rows.  Raises RemoteProtocolError."""
        self._order.memory(rows, len(payload))[:] = payload
        self._arrived[rows.region] = rows.step_id, len(payload)
        super().ring(rows.region, rows.step_id, len(payload))

    def ring(self, region: int, step_id: int, n_bytes: int) -> None:
        """Send the reader rows that were placed."""
        self._answered[region] = step_id, n_bytes
        super().ring(region, step_id, n_bytes)
        self._place(region, step_id, n_bytes)

    def _place(self, region: int, step_id: int, n_bytes: int) -> None:
        if self._reader is not None:
            rows = PlacedRows(*self.plan.key, region, step_id, self._reader_epoch, self._n_placed)
            self._n_placed += 1
            with suppress(ProtocolError):  # it is lost, too: its owner is notified
                self._reader.send(rows, payload=[bytes(self.region(region)[:n_bytes])])


class RowsEndpoint:
    """Opens a daemon's boundary memory. With a ``host``, listens there for neighbours that are loaded later and have
    the ``credentials``; ``report`` gets what to log, in another thread.

    A channel in its address keeps out daemons of other supervisors with the same secret that look for an
    earlier port."""

    def __init__(
        self,
        link: BlockingLink,
        host: str = "",
        credentials: Credentials | None = None,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.address = ""
        self.on_broken: Callable[[ProtocolError], None] = lambda error: None
        self._link, self._report = link, report
        self._credentials = credentials or Credentials(b"")
        self._buffers: dict[tuple[bool, int], TcpBuffer] = {}
        self._orders: dict[tuple[bool, int], RowsOrder] = {}
        self._opened = Condition()
        if host:
            expected = Purpose.ROWS, os.urandom(CHANNEL_BYTES)
            self._acceptor = Acceptor(host, 0, self._credentials, lambda *found: found == expected, report)
            self.address = f"{self._acceptor.address}/{expected[1].hex()}"
            StartedThread("rows", partial(self._acceptor.serve, self._accepted))

    def open(self, plans: Sequence[ArenaPlan], fds: Sequence[int]) -> list[SharedBuffer]:
        """Attach the arenas whose descriptors came, and connect the others.  Raises ArenaError."""
        arenas = iter(open_arenas([plan for plan in plans if plan.connection is None], fds))
        buffers = [next(arenas) if plan.connection is None else self._open(plan) for plan in plans]
        with self._opened:
            self._opened.notify_all()  # the neighbours that have connected already
        for buffer in self._buffers.values():
            assert buffer.plan.connection is not None
            if buffer.plan.connection.address:
                self._connect(buffer, buffer.plan.connection)
        return [*buffers]

    def close(self) -> None:
        """Listen no more; idempotent."""
        if self.address:
            self._acceptor.stop()

    def place(self, rows: PlacedRows, payload: memoryview) -> None:
        """Take rows from the supervisor.  Raises RemoteProtocolError."""
        key = rows.capture, rows.boundary
        if key not in self._buffers:
            raise RemoteProtocolError(f"no boundary {rows.boundary} here", "placed rows", "restart the group")
        self._orders[key].memory(rows, len(payload))
        self._buffers[key].place(rows, payload)

    def _open(self, plan: ArenaPlan) -> TcpBuffer:
        if plan.region_bytes > MAX_PAYLOAD_BYTES:
            what = f"a step has {plan.region_bytes} bytes of rows, a frame at most {MAX_PAYLOAD_BYTES}"
            raise ArenaError(what, f"boundary {plan.boundary}", "lower engine.prefill_chunk")
        assert plan.connection is not None
        buffer = self._buffers[plan.key] = TcpBuffer.create(plan)
        buffer.send_copy = lambda rows, memory: self._link.send(rows, payload=[memory])
        buffer.on_broken = lambda error: self.on_broken(error)
        buffer.on_cut = lambda error: self._report(f"neighbour at boundary {plan.boundary}: {error.what}")
        self._orders[plan.key] = RowsOrder(buffer, plan.connection.epoch)
        return buffer

    def _accepted(self, accepted: Accepted) -> None:
        link = BlockingLink(accepted.sock, stream=StreamKind.ROWS, name="rows")
        StartedThread("rows", partial(self._serve, link))

    def _serve(self, link: BlockingLink) -> None:
        """Serve one connection; what does not begin as one of a neighbour is closed."""
        with suppress(ProtocolError):
            frame = link.receive()
            if frame is not None and isinstance(frame.message, Attach):
                key = frame.message.capture, frame.message.boundary
                with self._opened:
                    is_open = self._opened.wait_for(lambda: key in self._buffers, BOUNDARY_S)
                if not is_open:
                    what = f"a neighbour asked for boundary {key[1]}{' of captures' if key[0] else ''}"
                    self._report(f"{what}, which is not here after {BOUNDARY_S:g} s; restart both groups")
                    link.close()
                    return
                buffer = self._buffers[key]
                peer = RowsLink(buffer, link, frame.message.epoch)
                if buffer.attach_peer(peer, lambda: link.send(Attached(accepted=True))):
                    peer.run()
                    return
                link.send(Attached(accepted=False))
        link.close()

    def _connect(self, buffer: TcpBuffer, plan: RowsConnection) -> None:
        """Connect to the neighbour that was loaded before; one that is gone by now connects here when it is replaced.
        Raises ArenaError if it cannot be reached."""
        address, _, channel = plan.address.partition("/")
        try:
            sock = connect(address, self._credentials, Purpose.ROWS, bytes.fromhex(channel))
        except ConnectionError:
            return
        except (OSError, AuthenticationError) as error:
            what = f"the daemon of the next or previous layers cannot be reached at {address}: {error}"
            advice = "let the hosts of all groups connect to each other, at any port"
            raise ArenaError(what, f"boundary {buffer.plan.boundary}", advice) from error
        peer = RowsLink(buffer, BlockingLink(sock, stream=StreamKind.ROWS, name="rows"), plan.epoch)
        with suppress(ProtocolError):
            peer.link.send(Attach(*buffer.plan.key, plan.epoch))
            frame = peer.link.receive()
            accepted = frame is not None and isinstance(frame.message, Attached) and frame.message.accepted
            if accepted and buffer.attach_peer(peer):
                StartedThread("rows", peer.run)
                return
        peer.link.close()
