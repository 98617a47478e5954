"""The daemon's end over real sockets: deaths at every byte, full buffers, descriptors."""

import os
import resource
import select
import signal
import socket
import threading
import time

import pytest

from lucevisor.model.values import Dtype
from lucevisor.protocol.errors import LinkClosed, RemoteProtocolError
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.messages import Check, Role
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Reset, Slice, Step, StepResult
from lucevisor.protocol.transport import BlockingLink

STEP = Step(7, 1, slices=[Slice(3, 100, [5], True)])
STEP_BYTES = encode(STEP, 7, payload_bytes=16) + b"0123456789abcdef"


@pytest.fixture
def pair():
    """(supervisor's link, daemon's link), both in READY."""
    a, b = socket.socketpair()
    for sock in (a, b):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # the machine's default may be any
    links = BlockingLink(a, role=Role.SUPERVISOR), BlockingLink(b)
    for link in links:
        link._connection.state = LinkState.READY
    yield links
    for link in links:
        link.close()


@pytest.fixture
def raw():
    """(bare socket of the supervisor, daemon's link in READY)."""
    a, b = socket.socketpair()
    link = BlockingLink(b, name="link of left")
    link._connection.state = LinkState.READY
    yield a, link
    a.close()
    link.close()


@pytest.mark.parametrize("unread", [False, True], ids=["end of file", "ECONNRESET"])
def test_peer_gone_at_every_byte_of_header_metadata_and_payload(unread):
    for offset in range(len(STEP_BYTES) + 1):
        a, b = socket.socketpair()
        link = BlockingLink(b)
        link._connection.state = LinkState.READY
        if unread:
            link.send(StepResult(1, 0))  # the peer dies without reading it
        a.sendall(STEP_BYTES + STEP_BYTES[:offset])
        a.close()
        n_frames = 2 if offset == len(STEP_BYTES) else 1
        for _ in range(n_frames):
            frame = link.receive()
            assert frame is not None
            assert (frame.message, bytes(frame.payload)) == (STEP, b"0123456789abcdef")
        assert link.receive() is None
        assert link.receive() is None
        assert link.closed_because is not None
        what = link.closed_because.what
        assert what.startswith("the peer is gone: [Errno 104]" if unread else "end of file")
        assert ("STEP frame" in what) == (32 <= offset < len(STEP_BYTES))
        assert ("bytes of a header" in what) == (0 < offset < 32)
        with pytest.raises(LinkClosed):
            link.send(StepResult(2, 0))
        link.close()


def test_full_socket_buffers_block_and_lose_nothing(pair):
    supervisor, daemon = pair
    n, rows = 300, os.urandom(40_000)
    thread = threading.Thread(
        target=lambda: [supervisor.send(Step(i, 0), payload=[rows, rows[:100]]) for i in range(n)]
    )
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()  # 12 MB do not fit
    for i in range(n):
        frame = daemon.receive()
        assert frame.message.step_id == i
        assert frame.payload == rows + rows[:100]
    thread.join(60)
    assert not thread.is_alive()


def test_descriptors_arrive_close_on_exec_in_order(pair, tmp_path):
    supervisor, daemon = pair
    files = []
    for i in range(3):
        path = tmp_path / str(i)
        path.write_bytes(b"file %d" % i)
        files.append(os.open(path, os.O_RDONLY))
    plans = [ArenaPlan(i, 64, 1) for i in range(3)]
    supervisor.send(Reset(1))
    supervisor.send(Check([], 0, Dtype.FLOAT32, plans[:2]), fds=files[:2])
    supervisor.send(Check([], 0, Dtype.FLOAT32, plans[2:]), fds=files[2:])
    supervisor.send(Reset(2))
    frames = [daemon.receive() for _ in range(4)]
    assert [len(frame.fds) for frame in frames] == [0, 2, 1, 0]
    received = [fd for frame in frames for fd in frame.fds]
    assert [os.read(fd, 10) for fd in received] == [b"file 0", b"file 1", b"file 2"]
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in files + received:
        os.close(fd)


def test_descriptors_lost_at_the_limit_of_open_files_are_an_error(raw):
    peer, link = raw
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    check = encode(Check([], 0, Dtype.FLOAT32, [ArenaPlan(i, 64, 1) for i in range(3)]))
    socket.send_fds(peer, [check], [0, 1, 2])
    used = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
    while True:
        try:
            used.append(os.dup(0))
        except OSError:
            break
    try:
        os.close(used.pop())  # room for one of three
        with pytest.raises(RemoteProtocolError, match="descriptors were lost in transit"):
            link.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in used:
            os.close(fd)


def test_close_wakes_a_thread_that_receives(raw):
    _, link = raw
    found = []
    thread = threading.Thread(target=lambda: found.append(link.receive()))
    thread.start()
    time.sleep(0.05)
    link.close()
    link.close()
    thread.join(60)
    assert found == [None]
    assert link.closed_because is not None
    assert link.closed_because.local
    with pytest.raises(LinkClosed, match="closed by this side"):
        link.send(StepResult(1, 0))


def test_a_frame_cut_by_a_signal_handler_is_the_last(pair):
    """A frame may be half written when a handler raises: another after it would be read as its rest."""
    supervisor, daemon = pair

    def interrupt(number, frame):
        raise InterruptedError("stop was asked")

    def interrupt_inside_the_frame():
        assert select.select([daemon.fileno()], [], [], 60)[0]
        os.kill(os.getpid(), signal.SIGALRM)

    before, thread = signal.signal(signal.SIGALRM, interrupt), threading.Thread(target=interrupt_inside_the_frame)
    try:
        thread.start()
        with pytest.raises(InterruptedError):
            supervisor.send(STEP, payload=[bytes(1_000_000)])  # nobody reads
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(LinkClosed, match="sending was interrupted by InterruptedError"):
        supervisor.send(Reset(1))
    daemon.send(StepResult(1, 0))
    assert supervisor.receive().message == StepResult(1, 0)  # the other direction is whole
    supervisor.close()
    assert daemon.receive() is None
    assert daemon.closed_because.what == "end of file inside a STEP frame"
