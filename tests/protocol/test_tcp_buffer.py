"""Rows over TCP: any split of the stream fills the same regions, and nothing else than what is due reaches one."""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lucevisor.protocol import tcp_buffer
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.authentication import CHALLENGE_BYTES, NO_CHANNEL, AuthenticationError, Purpose
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import ArenaPlan, RowsConnection
from lucevisor.protocol.messages import Message, Role, StreamKind
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Attach, Attached, PlacedRows, Rows, RowsCopy, StepResult
from lucevisor.protocol.tcp import LOOPBACK, Credentials, connect
from lucevisor.protocol.tcp_buffer import RelayBuffer, RowsEndpoint, RowsLink, RowsOrder, TcpBuffer
from lucevisor.protocol.transport import BlockingLink, Channel
from tests.waiting import wait_until

CREDENTIALS = Credentials(bytes(range(32)))
N_REGIONS, REGION_BYTES, EPOCH = 3, 100_000, 7
PLAN = ArenaPlan(1, REGION_BYTES, N_REGIONS)
WAIT_S = 60.0

ROWS = st.lists(
    st.tuples(st.integers(0, N_REGIONS - 1), st.sampled_from([1, 40, 5_000, 65_000, 70_000, REGION_BYTES])),
    min_size=1,
    max_size=6,
)


def frame(rows: Rows, n_bytes: int) -> bytes:
    return encode(rows, payload_bytes=n_bytes) + bytes([rows.step_id]) * n_bytes


def receiver(arena: Arena) -> Connection:
    order = RowsOrder(arena, EPOCH)

    def memory(message: Message, n_bytes: int) -> memoryview:
        assert isinstance(message, Rows)
        return order.memory(message, n_bytes)

    connection = Connection(Role.DAEMON, StreamKind.ROWS, "rows")
    connection.payload_memory = memory
    return connection


@contextmanager
def arena_of(plan: ArenaPlan) -> Iterator[Arena]:
    arena = Arena.create(plan)
    yield arena
    arena.close()


def feed(connection: Connection, data: bytes, reads: list[int]) -> list[int]:
    """Write the stream straight into where it belongs; return the steps whose rows came whole."""
    steps, at, turn = [], 0, 0
    while at < len(data) and connection.error is None:
        room = connection.buffer()
        n = min(len(room), reads[turn % len(reads)], len(data) - at)
        room[:n] = data[at : at + n]
        connection.received(n)
        at, turn = at + n, turn + 1
        with suppress(RemoteProtocolError):
            steps += [found.message.step_id for found in connection.events()]  # type: ignore[union-attr]
    return steps


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sent=ROWS, reads=st.lists(st.integers(1, 90_000), min_size=1, max_size=8), lost=st.integers(0, 200_000))
def test_any_split_fills_the_same_regions_and_what_is_cut_off_does_not_count(
    sent: list[tuple[int, int]], reads: list[int], lost: int
) -> None:
    frames = [frame(Rows(False, 1, region, 1 + i, EPOCH, i), n) for i, (region, n) in enumerate(sent)]
    data = b"".join(frames)
    data = data[: max(1, len(data) - lost)]
    n_whole = max(n for n in range(len(frames) + 1) if sum(map(len, frames[:n])) <= len(data))
    with arena_of(PLAN) as arena:
        connection = receiver(arena)
        assert feed(connection, data, reads) == [*range(1, n_whole + 1)]
        assert connection.error is None
        assert bool(connection.unfinished) == (sum(map(len, frames[:n_whole])) < len(data))
        last = {region: (1 + i, n) for i, (region, n) in enumerate(sent[:n_whole])}
        broken = {region for region, _ in sent[n_whole : n_whole + 1]}
        for region, (step, n) in last.items():
            assert region in broken or bytes(arena.region(region)[:n]) == bytes([step]) * n


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sent=ROWS,
    at=st.integers(0, 5),
    reads=st.lists(st.integers(1, 90_000), min_size=1, max_size=4),
    change=st.sampled_from([
        {"epoch": EPOCH - 1}, {"epoch": EPOCH + 1}, {"sequence": 99}, {"region": N_REGIONS}, {"region": -1},
        {"boundary": 0}, {"capture": True}, {},
    ]),
)  # fmt: skip
def test_rows_out_of_order_or_without_room_end_the_connection_before_they_reach_a_region(
    sent: list[tuple[int, int]], at: int, reads: list[int], change: dict[str, int]
) -> None:
    at %= len(sent)
    messages = [(Rows(False, 1, region, 1 + i, EPOCH, i), n) for i, (region, n) in enumerate(sent)]
    wrong, n = replace(messages[at][0], step_id=200, **change), messages[at][1]
    messages[at] = wrong, n if change else REGION_BYTES + 1
    with arena_of(PLAN) as arena:
        connection = receiver(arena)
        assert feed(connection, b"".join(frame(*one) for one in messages), reads) == [*range(1, at + 1)]
        assert isinstance(connection.error, RemoteProtocolError)
        assert "step 200" in connection.error.what
        assert all(200 not in bytes(arena.region(i)) for i in range(N_REGIONS))


class Daemon:
    """A daemon's endpoint, and the supervisor's end of its link."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor, self.link = BlockingLink(ours, role=Role.SUPERVISOR), BlockingLink(theirs)
        for link in (self.supervisor, self.link):
            link._connection.state = LinkState.READY
        self.refused: list[str] = []
        self.endpoint = RowsEndpoint(self.link, LOOPBACK, CREDENTIALS, self.refused.append)
        self.broken: list[ProtocolError] = []
        self.is_broken = threading.Event()
        self.endpoint.on_broken = self.on_broken

    def on_broken(self, error: ProtocolError) -> None:
        self.broken.append(error)
        self.is_broken.set()

    def open(
        self, epoch: int, neighbour: Daemon | None = None, plan: ArenaPlan = PLAN, *, copies: bool = True
    ) -> TcpBuffer:
        address = "" if neighbour is None else neighbour.endpoint.address
        [self.buffer] = self.endpoint.open([replace(plan, connection=RowsConnection(epoch, address, copies))], [])
        assert isinstance(self.buffer, TcpBuffer)
        return self.buffer

    def close(self) -> None:
        self.endpoint.close()
        self.buffer.close()
        self.link.close()
        self.supervisor.close()


@contextmanager
def daemons(n: int) -> Iterator[list[Daemon]]:
    made = [Daemon() for _ in range(n)]
    yield made
    for daemon in made:
        daemon.close()


def await_rows(buffer: TcpBuffer, region: int, step_id: int) -> bytes:
    wait_until(lambda: buffer.rung(region, step_id))
    return bytes(buffer.region(region)[:4])


def write(buffer: TcpBuffer, region: int, step_id: int, rows: bytes) -> None:
    buffer.region(region)[: len(rows)] = rows
    buffer.ring(region, step_id, len(rows))


@pytest.mark.parametrize("writer_first", [True, False])
def test_rows_reach_the_reader_and_a_copy_the_supervisor(writer_first: bool) -> None:
    with daemons(2) as (writer, reader):
        first, second = (writer, reader) if writer_first else (reader, writer)
        first.open(1)
        second.open(2, first)
        for step in range(1, 8):
            rows, region = b"%04d" % step, step % N_REGIONS
            write(writer.buffer, region, step, rows)
            assert await_rows(reader.buffer, region, step) == rows
            writer.link.send(StepResult(step, 0))
            copied, answer = writer.supervisor.receive(), writer.supervisor.receive()
            assert copied is not None
            assert answer is not None
            assert copied.message == RowsCopy(False, 1, region, step, 1 if writer_first else 2, step - 1)
            assert bytes(copied.payload) == rows
            assert answer.message == StepResult(step, 0)


def test_a_supervisor_without_a_journal_gets_no_copy() -> None:
    with daemons(2) as (writer, reader):
        reader.open(1)
        writer.open(2, reader, copies=False)
        write(writer.buffer, 1, 1, b"rows")
        assert await_rows(reader.buffer, 1, 1) == b"rows"
        writer.link.send(StepResult(1, 0))
        answer = writer.supervisor.receive()
        assert answer is not None
        assert answer.message == StepResult(1, 0)


def test_who_waits_for_rows_needs_no_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowsLink, "run", lambda link: None)
    with daemons(2) as (writer, reader):
        reader.open(1)
        writer.open(2, reader)
        wait_until(lambda: len(reader.buffer.wake_fds) == 2)
        for step, n_bytes in enumerate((4, REGION_BYTES, 4, 65_000), start=1):
            write(writer.buffer, step % N_REGIONS, step, bytes([step]) * n_bytes)
            while not reader.buffer.rung(step % N_REGIONS, step):
                assert select.select(reader.buffer.wake_fds, [], [], WAIT_S)[0]
                reader.buffer.drain()
            assert bytes(reader.buffer.region(step % N_REGIONS)[:n_bytes]) == bytes([step]) * n_bytes
        writer.close()
        while len(reader.buffer.wake_fds) == 2:  # a descriptor that is always readable would keep the reader busy
            assert select.select(reader.buffer.wake_fds, [], [], WAIT_S)[0]
            reader.buffer.drain()
        assert not reader.broken


def test_no_other_thread_is_woken_for_rows_that_one_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    receivers, receive_arrived = [], RowsLink.receive_arrived

    def note(link: RowsLink) -> None:
        receivers.append(threading.current_thread())
        receive_arrived(link)

    monkeypatch.setattr(RowsLink, "receive_arrived", note)
    before = set(threading.enumerate())
    with daemons(2) as (writer, reader):
        reader.open(1)
        writer.open(2, reader)
        write(writer.buffer, 0, 1, b"rows")  # nobody waits: a thread takes them, which is asleep afterwards
        assert await_rows(reader.buffer, 0, 1) == b"rows"
        assert threading.current_thread() not in receivers
        reader.buffer.awaited(True)
        receivers.clear()
        for step in range(2, 30):
            write(writer.buffer, step % N_REGIONS, step, bytes([step]) * 5_000)
            while not reader.buffer.rung(step % N_REGIONS, step):
                assert select.select(reader.buffer.wake_fds, [], [], WAIT_S)[0]
                reader.buffer.drain()
        assert set(receivers) == {threading.current_thread()}
        reader.buffer.awaited(False)
        write(writer.buffer, 0, 30, b"rows")
        assert await_rows(reader.buffer, 0, 30) == b"rows"
        reader.buffer.awaited(True)
    wait_until(lambda: set(threading.enumerate()) <= before)  # also a thread that sleeps ends with its connection


def test_a_replaced_neighbour_connects_anew_and_bells_of_the_lost_one_count_no_more() -> None:
    with daemons(3) as (writer, reader, next_writer):
        reader.open(1)
        writer.open(2, reader)
        write(writer.buffer, 0, 3, b"lost")
        assert await_rows(reader.buffer, 0, 3) == b"lost"
        next_writer.open(3, reader)
        assert not reader.buffer.rung(0, 3)
        write(writer.buffer, 0, 6, b"late")
        write(next_writer.buffer, 0, 3, b"next")
        assert await_rows(reader.buffer, 0, 3) == b"next"
        assert not reader.broken


def test_a_connection_of_an_earlier_epoch_is_refused() -> None:
    with daemons(2) as (writer, reader):
        reader.open(1)
        writer.open(5, reader)
        link = connected(reader.endpoint.address)
        link.send(Attach(*PLAN.key, 4))
        answer = link.receive()
        assert answer is not None
        assert answer.message == Attached(accepted=False)
        assert link.receive() is None
        link.close()
        write(writer.buffer, 1, 1, b"rows")
        assert await_rows(reader.buffer, 1, 1) == b"rows"


def test_a_daemon_of_another_service_with_the_same_secret_is_no_neighbour() -> None:
    """It looks for one that had this port before."""
    with daemons(2) as (reader, other):
        for daemon in (reader, other):
            daemon.open(1)
        place, _, _ = reader.endpoint.address.partition("/")
        _, _, channel = other.endpoint.address.partition("/")
        for wrong in (f"{place}/{channel}", place):
            with pytest.raises(AuthenticationError, match="refused this end"):
                connected(wrong)
        wait_until(lambda: reader.refused)
        assert "nothing expects its connection for rows" in reader.refused[0]
        connected(reader.endpoint.address).close()


def connected(rows_address: str) -> BlockingLink:
    address, _, channel = rows_address.partition("/")
    sock = connect(address, CREDENTIALS, Purpose.ROWS, bytes.fromhex(channel) or NO_CHANNEL)
    return BlockingLink(sock, stream=StreamKind.ROWS)


def test_a_neighbour_that_is_gone_stops_nobody() -> None:
    with daemons(2) as (writer, reader):
        reader.open(1)
        reader.endpoint.close()
        writer.open(2, reader)  # nobody listens there any more
        write(writer.buffer, 0, 1, b"rows")
    plan = replace(PLAN, tokens=True)  # no copies, which nobody reads here
    with daemons(2) as (writer, reader):
        reader.open(1, plan=plan)
        writer.open(2, reader, plan)
        reader.buffer.close()
        for step in range(1, 40):
            write(writer.buffer, 0, step, b"x" * REGION_BYTES)


def test_foreign_bytes_reach_no_buffer_and_false_rows_break_the_daemon() -> None:
    with daemons(1) as (reader,):
        reader.open(1)
        host, _, port = reader.endpoint.address.partition("/")[0].partition(":")
        with socket.create_connection((host, int(port))) as noise:
            assert len(noise.recv(100)) == CHALLENGE_BYTES
            noise.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            with suppress(ConnectionResetError):
                assert noise.recv(100) == b""
        assert not reader.broken
        wait_until(lambda: reader.refused)
        assert "it speaks something else: b'GET / HTTP" in reader.refused[0]
        link = connected(reader.endpoint.address)
        link.send(Attach(*PLAN.key, 9))
        link.receive()
        link.send(Rows(*PLAN.key, 0, 1, 9, 1), payload=[b"rows"])
        assert reader.is_broken.wait(WAIT_S)
        assert "number 0 of epoch 9 was due" in reader.broken[0].what
        assert not reader.buffer.rung(0, 1)
        link.close()


class SentTo:
    """A channel that keeps what is sent."""

    def __init__(self) -> None:
        self.max_queued_bytes, self.closed, self.passes_handles = 0, False, False
        self.sent: list[tuple[PlacedRows, bytes]] = []

    def send(self, message, *, request_id=0, payload=(), fds=()) -> None:  # type: ignore[no-untyped-def]
        self.sent.append((message, bytes(payload[0])))

    def close(self, reason: str = "") -> None:
        pass


def test_the_supervisor_sends_a_reader_what_it_places_and_what_a_lost_writer_had_answered() -> None:
    relay, channel = RelayBuffer.create(PLAN), SentTo()
    reader: Channel = channel
    relay.attach_writer(4)
    relay.attach_reader(reader, 3)
    relay.rows_arrived(RowsCopy(False, 1, 2, 50, 4, 0), memoryview(b"from the writer"))
    assert relay.rung(2, 50)
    assert bytes(relay.region(2)[:15]) == b"from the writer"
    with pytest.raises(RemoteProtocolError, match="was due"):
        relay.rows_arrived(RowsCopy(False, 1, 2, 51, 4, 0), memoryview(b"out of order"))
    relay.region(1)[:6] = b"placed"
    relay.ring(1, 51, 6)
    assert channel.sent == [(PlacedRows(False, 1, 1, 51, 3, 0), b"placed")]
    relay.step_answered()
    relay.rows_arrived(RowsCopy(False, 1, 0, 52, 4, 1), memoryview(b"not answered: computed again"))
    relay.lose_writer()
    assert sorted(rows for _, rows in channel.sent[1:]) == [b"from the writer", b"placed"]
    assert [message.sequence for message, _ in channel.sent] == [0, 1, 2]
    relay.attach_reader(None)
    relay.ring(1, 52, 6)
    assert len(channel.sent) == 3
    relay.close()


def test_unknown_boundaries_are_refused() -> None:
    with daemons(1) as (reader,):
        reader.open(1)
        with pytest.raises(RemoteProtocolError, match="no boundary 5"):
            reader.endpoint.place(PlacedRows(False, 5, 0, 1, 1, 0), memoryview(b"rows"))
        with pytest.raises(LocalProtocolError):
            reader.link.send(PlacedRows(False, 1, 0, 1, 1, 0), payload=[b"rows"])


def test_who_asks_for_an_unknown_boundary_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_buffer, "BOUNDARY_S", 0.2)
    with daemons(1) as (reader,):
        reader.open(1)
        n_threads = len(sys._current_frames())
        link = connected(reader.endpoint.address)
        link.send(Attach(False, 5, 1))
        assert link.receive() is None
        link.close()
        [text] = reader.refused
        assert text == "a neighbour asked for boundary 5, which is not here after 0.2 s; restart both groups"
        wait_until(lambda: len(sys._current_frames()) == n_threads)
