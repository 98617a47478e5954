"""Files over TCP: what arrives is what was sent, whatever is cut off, and nothing that is not due or allowed is done.

The model of a file is a bytearray.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from zlib import crc32

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lucevisor.model.values import Dtype, FileIdentity, identity_of
from lucevisor.protocol import files
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from lucevisor.protocol.files import (
    CHUNK_BYTES,
    MAX_OPEN,
    WINDOW_BYTES,
    Access,
    Extents,
    FileClient,
    FileError,
    FileServer,
    LocalFile,
    OpenFiles,
    PendingRequest,
    PendingRequests,
    RemoteFile,
    offered_files,
)
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import Load, OfferedFile, PoolSizes
from lucevisor.protocol.messages import (
    FileAnswer,
    FileOperation,
    FileRequest,
    Message,
    Restore,
    Role,
    Save,
    SlotPlace,
    StreamKind,
    TransferTensor,
)
from lucevisor.protocol.transport import BlockingLink
from tests.waiting import wait_until

N_BYTES = 40_000
LOAD = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], [], PoolSizes(0, 0, 0), 1, 1)


def tensor(offset: int, n_bytes: int) -> TransferTensor:
    return TransferTensor(f"at {offset}", 0, "k", "I8", (n_bytes,), offset, n_bytes)


def save_of(*ranges: tuple[int, int]) -> Save:
    return Save(1, "state", SlotPlace(0), [tensor(*one) for one in ranges])


def restore_of(*ranges: tuple[int, int]) -> Restore:
    return Restore(1, "state", SlotPlace(0), [tensor(*one) for one in ranges])


def memfd(content: bytes = b"") -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, content)
    return fd


def ends() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


class Pair:
    """A server and a client.  ``cut_up``, ``cut_down``: so many bytes of a direction arrive, then both ends are cut."""

    def __init__(self, cut_up: int | None = None, cut_down: int | None = None) -> None:
        self.broken: list[ProtocolError] = []
        self.gone = threading.Event()
        above, below = ends()
        if cut_up is not None or cut_down is not None:
            relay, other = below, ends()
            below = other[1]
            limits = {relay.fileno(): (other[0], cut_down), other[0].fileno(): (relay, cut_up)}
            threading.Thread(target=forward, args=(relay, other[0], limits), daemon=True).start()
        self.server = FileServer(above)
        self.server.start(self.broken.append)
        self.link = BlockingLink(below, stream=StreamKind.FILES)
        self.client = FileClient(self.link)
        self.client.on_broken = lambda problem: self.gone.set()
        self._n_files = 0

    def file(self, message: Message, fd: int) -> RemoteFile:
        self.server.offer(message, [fd])
        self._n_files += 1
        return self.client.file(self._n_files - 1)

    def close(self) -> None:
        self.link.close()
        self.server.close()


def forward(a: socket.socket, b: socket.socket, limits: dict[int, tuple[socket.socket, int | None]]) -> None:
    left = {sock.fileno(): limits[sock.fileno()][1] for sock in (a, b)}
    with a, b, suppress(OSError):
        while True:
            for sock in select.select([a, b], [], [])[0]:
                to, n = limits[sock.fileno()][0], left[sock.fileno()]
                data = sock.recv(65536 if n is None else max(1, min(n, 65536)))
                if not data or n == 0:
                    return
                to.sendall(data)
                if n is not None:
                    left[sock.fileno()] = n - len(data)


@contextmanager
def pair(cut_up: int | None = None, cut_down: int | None = None) -> Iterator[Pair]:
    found = Pair(cut_up, cut_down)
    yield found
    found.close()


# ---- what may be asked

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=6)


@given(ranges=RANGES, offset=st.integers(-3, 80), n_bytes=st.integers(-2, 30))
def test_extents_contain_what_their_bytes_are(ranges: list[tuple[int, int]], offset: int, n_bytes: int) -> None:
    members = {i for start, n in ranges for i in range(start, start + n)}
    found = Extents((start, start + n) for start, n in ranges)
    if n_bytes > 0:
        assert found.contain(offset, n_bytes) == (set(range(offset, offset + n_bytes)) <= members)
    elif n_bytes < 0:
        assert not found.contain(offset, n_bytes)


def test_a_daemon_may_do_what_it_was_asked_for() -> None:
    def access_of(message: Message) -> Access:
        [(_, access)] = offered_files(message, [-1])
        return access

    save, restore = access_of(save_of((10, 5), (15, 5))), access_of(restore_of((0, 8)))
    assert (save.reads.ranges, save.writes.ranges) == ([], [(10, 20)])
    assert (restore.reads.ranges, restore.writes.ranges) == ([(0, 8)], [])
    load = replace(LOAD, offered=[OfferedFile("model", 8, FileIdentity(0, 0, 10, 0, 0, ""))])
    [(_, rows), (_, model)] = offered_files(load, [-1, -1])
    assert rows.reads.contain(2**50, 1)
    assert model.reads.ranges == [(0, 10)]
    assert not rows.writes.ranges + model.writes.ranges


ALLOWED = Access(Extents([(0, 100), (200, 300)]), Extents([(0, 50)]))


def open_files() -> OpenFiles:
    found = OpenFiles()
    found.add(LocalFile(-1), ALLOWED)
    return found


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (FileRequest(1, FileOperation.STATUS, 0), "number 0 was due"),
        (FileRequest(0, FileOperation.STATUS, 1), "it is not open"),
        (FileRequest(0, FileOperation.READ, 0, 0, 0), "0 bytes at 0 are not 1 to"),
        (FileRequest(0, FileOperation.READ, 0, 0, CHUNK_BYTES + 1), "are not 1 to"),
        (FileRequest(0, FileOperation.READ, 0, -1, 10), "10 bytes at -1 are not 1 to"),
        (FileRequest(0, FileOperation.READ, 0, 90, 11), "outside of what it was asked for"),
        (FileRequest(0, FileOperation.READ, 0, 150, 10), "outside of what it was asked for"),
        (FileRequest(0, FileOperation.CHECKSUM, 0, 200, 101), "outside of what it was asked for"),
    ],
)
def test_what_a_daemon_must_not_ask_is_refused_and_counts_for_nothing(request_: FileRequest, why: str) -> None:
    opened = open_files()
    with pytest.raises(RemoteProtocolError, match=why):
        opened.take(request_, 0, 0)
    opened.take(FileRequest(0, FileOperation.READ, 0, 200, 100), 0, 0)


@pytest.mark.parametrize(
    ("request_", "n_bytes", "why"),
    [
        (FileRequest(0, FileOperation.WRITE, 0, 0, 50, 7), 49, "49 bytes came with it"),
        (FileRequest(0, FileOperation.WRITE, 0, 1, 50, 7), 50, "outside of what it was asked for"),
        (FileRequest(0, FileOperation.WRITE, 0, 0, 50, 8), 50, "the checksum of 50 bytes at 0 does not match"),
        (FileRequest(0, FileOperation.READ, 0, 0, 50), 50, "50 bytes came with it"),
    ],
)
def test_what_comes_with_a_request_is_checked(request_: FileRequest, n_bytes: int, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        open_files().take(request_, n_bytes, 7)


def test_a_file_that_was_closed_is_not_open_any_more() -> None:
    opened = open_files()
    opened.take(FileRequest(0, FileOperation.CLOSE, 0), 0, 0)
    with pytest.raises(RemoteProtocolError, match="it is not open"):
        opened.take(FileRequest(1, FileOperation.CLOSE, 0), 0, 0)


# ---- order of answers

SIZES = st.lists(st.sampled_from([1, 40, 5_000, 65_000, 70_000, 200_000]), min_size=1, max_size=6)


def receiver(sizes: list[int]) -> tuple[Connection, PendingRequests, list[PendingRequest]]:
    requests = PendingRequests()
    asked = [
        requests.add(FileOperation.READ, 0, 0, n, 0, memoryview(bytearray(n))) if n else requests.add(
            FileOperation.STATUS, 0, 0, 0, 0, None
        )
        for n in sizes
    ]  # fmt: skip
    connection = Connection(Role.DAEMON, StreamKind.FILES, "files")

    def memory(message: Message, n_bytes: int) -> memoryview:
        assert isinstance(message, FileAnswer)
        return requests.memory(message, n_bytes)

    connection.payload_memory = memory
    return connection, requests, asked


def answer(number: int, n_bytes: int) -> bytes:
    payload = bytes([number + 1]) * n_bytes
    return encode(FileAnswer(number, crc32(payload)), payload_bytes=n_bytes) + payload


def feed(connection: Connection, requests: PendingRequests, data: bytes, reads: list[int]) -> None:
    """Raises RemoteProtocolError at the first answer that is refused."""
    at = turn = 0
    while at < len(data):
        room = connection.buffer()
        n = min(len(room), reads[turn % len(reads)], len(data) - at)
        room[:n] = data[at : at + n]
        connection.received(n)
        at, turn = at + n, turn + 1
        for frame in connection.events():
            assert isinstance(frame.message, FileAnswer)
            requests.end(frame.message)
        if connection.error is not None:
            raise connection.error


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=SIZES, reads=st.lists(st.integers(1, 90_000), min_size=1, max_size=8), lost=st.integers(0, 300_000))
def test_answers_count_when_they_are_whole_wherever_the_stream_is_split_and_cut(
    sizes: list[int], reads: list[int], lost: int
) -> None:
    connection, requests, asked = receiver(sizes)
    frames = [answer(i, n) for i, n in enumerate(sizes)]
    data = b"".join(frames)
    kept = max(0, len(data) - lost)
    feed(connection, requests, data[:kept], reads)
    whole = sum(len(b"".join(frames[: i + 1])) <= kept for i in range(len(frames)))
    assert [one.answer is not None for one in asked] == [i < whole for i in range(len(sizes))]
    for i, one in enumerate(asked[:whole]):
        assert one.into == bytes([i + 1]) * sizes[i]
    requests.fail("it was cut")
    assert {one.answer.problem for one in asked if one.answer is not None} <= {"", "it was cut"}
    assert (len(requests), requests.n_bytes) == (0, 0)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.sampled_from([0, 1, 40, 70_000]), min_size=2, max_size=5),
    fault=st.sampled_from(["swapped", "twice", "left out", "damaged", "shortened"]),
    seed=st.integers(0, 1000),
    reads=st.lists(st.integers(1, 90_000), min_size=1, max_size=4),
)
def test_answers_that_are_not_due_or_damaged_are_refused(
    sizes: list[int], fault: str, seed: int, reads: list[int]
) -> None:
    connection, requests, asked = receiver(sizes)
    frames = [answer(i, n) for i, n in enumerate(sizes)]
    at = seed % (len(frames) - 1)
    with_bytes = [i for i, n in enumerate(sizes) if n]
    if fault in ("damaged", "shortened"):
        if not with_bytes:
            return
        at = with_bytes[seed % len(with_bytes)]
        payload = bytes(sizes[at])  # zeros, under the checksum of others
        n = sizes[at] - (fault == "shortened")
        head = encode(FileAnswer(at, crc32(bytes([at + 1]) * sizes[at])), payload_bytes=n)
        frames[at] = head + payload[:n]
    elif fault == "swapped":
        frames[at], frames[at + 1] = frames[at + 1], frames[at]
    elif fault == "twice":
        frames.insert(at + 1, frames[at])
    else:
        del frames[at]
    with pytest.raises(RemoteProtocolError):
        feed(connection, requests, b"".join(frames), reads)
    assert all(one.answer is not None for one in asked[:at])
    assert all(one.answer is None for one in asked[at + (fault == "twice") :])


def test_an_answer_without_a_request_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="number none was due"):
        PendingRequests().end(FileAnswer(0))
    with pytest.raises(RemoteProtocolError, match="that were not asked for"):
        PendingRequests().memory(FileAnswer(0), 10)


# ---- both ends

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "write"]),
        st.integers(0, N_BYTES - 1),
        st.lists(st.integers(0, 9_000), min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=8,
)


def run_steps(file: files.ByteFile, model: bytearray, steps: list[tuple[str, int, list[int]]]) -> int:
    """Compare each read with the model; return how many steps ended before the first error."""
    rng = random.Random(5)
    for i, (what, at, sizes) in enumerate(steps):
        sizes = sizes[: next((k for k in range(len(sizes)) if at + sum(sizes[: k + 1]) > N_BYTES), len(sizes))]
        try:
            if what == "read":
                views = [memoryview(bytearray(n)) for n in sizes]
                file.read(views, at)
                assert b"".join(views) == model[at : at + sum(sizes)]
            else:
                data = [rng.randbytes(n) for n in sizes]
                file.write([memoryview(part) for part in data], at)
                file.flush()
                model[at : at + sum(sizes)] = b"".join(data)
        except FileError:
            return i
    return len(steps)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=STEPS,
    cut_up=st.none() | st.integers(0, 60_000),
    cut_down=st.none() | st.integers(0, 60_000),
    chunk=st.sampled_from([700, 9_000, CHUNK_BYTES]),
)
def test_a_remote_file_is_as_a_local_one_up_to_where_it_is_cut(
    steps: list[tuple[str, int, list[int]]], cut_up: int | None, cut_down: int | None, chunk: int
) -> None:
    content = random.Random(1).randbytes(N_BYTES)
    fd = memfd(content)
    whole = Access(Extents([(0, N_BYTES)]), Extents([(0, N_BYTES)]))
    with pytest.MonkeyPatch.context() as patch, pair(cut_up, cut_down) as both:
        patch.setattr(files, "CHUNK_BYTES", chunk)
        patch.setattr(files, "offered_files", lambda message, fds: [(LocalFile(fd), whole) for fd in fds])
        model = bytearray(content)
        file = both.file(LOAD, fd)
        ended = run_steps(file, model, steps)
        if cut_up is None and cut_down is None:
            assert ended == len(steps)
            assert os.pread(fd, N_BYTES, 0) == model
        else:
            flushed = bytearray(content)
            run_steps(LocalFile(memfd(content)), flushed, steps[:ended])
            found = os.pread(fd, N_BYTES, 0)
            what, at, sizes = steps[ended] if ended < len(steps) else ("read", 0, [])
            stop = at + sum(sizes) if what == "write" else at
            assert found[:at] + found[stop:] == flushed[:at] + flushed[stop:]  # the rest of the step may be in the file
            if ended < len(steps):
                assert both.gone.wait(60)
                with pytest.raises(FileError, match="connection for files is gone"):
                    file.read([memoryview(bytearray(1))], 0)
        file.close()
    os.close(fd)


def test_what_is_on_the_way_is_bounded_and_long_transfers_are_whole() -> None:
    n = 3 * WINDOW_BYTES + 12_345
    data = memoryview(random.Random(2).randbytes(n))
    fd, on_the_way = memfd(), list[int]()
    with pair() as both:
        file = both.file(save_of((0, n)), fd)
        ask = both.client.ask

        def watched(*args: object, **kwargs: object) -> PendingRequest:
            found = ask(*args, **kwargs)  # type: ignore[arg-type]
            on_the_way.append(both.client._requests.n_bytes)
            return found

        both.client.ask = watched  # type: ignore[method-assign]
        half = n // 2
        threads = [
            threading.Thread(target=file.write, args=([data[at:stop]], at)) for at, stop in ((0, half), (half, n))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        file.flush()
        assert CHUNK_BYTES < max(on_the_way) <= WINDOW_BYTES
        back = both.file(restore_of((0, n)), fd)
        into = memoryview(bytearray(n))
        back.read([into[:half], into[half:]], 0)
        assert into == data
        assert back.checksum(5, 1_000_000) == crc32(data[5:1_000_005])
    os.close(fd)


def test_errors_of_the_file_come_to_the_daemon_and_the_connection_goes_on() -> None:
    fd = memfd(b"0123456789")
    with pair() as both:
        file = both.file(restore_of((0, 20)), fd)
        with pytest.raises(FileError, match="the file ends at byte 10"):
            file.read([memoryview(bytearray(20))], 0)
        full = os.open("/dev/full", os.O_WRONLY)
        other = both.file(save_of((0, 20)), full)

        def fill() -> None:
            other.write([memoryview(b"x" * 20)], 0)  # raises if the answer is there already
            other.flush()

        with pytest.raises(FileError, match="No space left"):
            fill()
        into = memoryview(bytearray(4))
        file.read([into], 3)
        assert into == b"3456"
        assert not both.broken
        os.close(full)
    os.close(fd)


def test_a_growing_file_says_when_it_is_complete() -> None:
    fd = memfd(b"01234")
    with pair() as both:
        file = both.file(LOAD, fd)
        assert file.status() == (5, False)
        os.write(fd, b"56")
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
        assert file.status() == (7, True)
    os.close(fd)


def test_a_daemon_that_asks_for_too_much_breaks_the_connection() -> None:
    fd = memfd(b"0123456789")
    with pair() as both:
        file = both.file(restore_of((0, 5)), fd)
        with pytest.raises(FileError, match="connection for files is gone"):
            file.read([memoryview(bytearray(6))], 0)
        wait_until(lambda: both.broken)
        assert "READ of file 0 is refused: 6 bytes at 0 are outside" in str(both.broken[0])
    os.close(fd)


def test_files_are_closed_by_the_daemon_or_with_the_connection_and_bounded() -> None:
    before = len(os.listdir("/proc/self/fd"))
    fd = memfd(b"0123456789")
    with pair() as both:
        opened = [both.file(restore_of((0, 5)), fd) for _ in range(MAX_OPEN)]
        with pytest.raises(LocalProtocolError, match=f"more than {MAX_OPEN}"):
            both.file(restore_of((0, 5)), fd)
        for one in opened[:10]:
            one.close()
            one.close()
        opened[10].status()  # behind those
        both.server.offer(restore_of((0, 5)), [fd] * 10)
    os.close(fd)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_chunk_that_is_damaged_on_the_way_breaks_the_connection() -> None:
    above, below = ends()
    broken: list[ProtocolError] = []
    server = FileServer(above)
    server.start(broken.append)
    fd = memfd(b"0" * 10)
    server.offer(save_of((0, 10)), [fd])
    right = FileRequest(0, FileOperation.WRITE, 0, 0, 10, crc32(b"1" * 10))
    below.sendall(encode(right, payload_bytes=10) + b"1" * 10)
    below.sendall(encode(replace(right, number=1), payload_bytes=10) + b"2" * 10)
    wait_until(lambda: broken)
    assert "the checksum of 10 bytes at 0 does not match" in str(broken[0])
    assert os.pread(fd, 10, 0) == b"1" * 10
    below.close()
    server.close()
    os.close(fd)


def test_a_source_that_is_written_to_meanwhile_is_not_sent_on() -> None:
    fd = memfd(b"0123456789")
    identity = identity_of(os.fstat(fd), "")
    load = replace(LOAD, offered=[OfferedFile("model", 8, identity)])
    with pair() as both:
        file = both.file(load, fd)
        assert file.checksum(2, 3) == crc32(b"234")
        wait_until(lambda: os.pwrite(fd, b"x", 0) and identity_of(os.fstat(fd), "") != identity)
        with pytest.raises(FileError, match="it was changed while it was sent"):
            file.read([memoryview(bytearray(4))], 3)
        with pytest.raises(FileError, match="it was changed while it was sent"):
            file.checksum(2, 3)
    os.close(fd)
