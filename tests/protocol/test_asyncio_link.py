"""The supervisor's end in a loop, under asyncio and uvloop."""

import asyncio
import os
import socket

import pytest

from lucevisor.model.values import Dtype
from lucevisor.protocol.errors import LinkClosed, LinkOverflow, LocalProtocolError
from lucevisor.protocol.frames import encode
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.messages import Check, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import Sampled, Slice, Step, StepResult
from lucevisor.protocol.transport import AwaitedConnection, BlockingLink, Link

RESULT = StepResult(7, 1, [Sampled(3, 5)], segments=[("logits", [4])])
RESULT_BYTES = encode(RESULT, 7, payload_bytes=16) + b"0123456789abcdef"
STEP = Step(1, 0, slices=[Slice(3, 100, [5], True)])


class Seen:
    """Collects what a link reports."""

    def __init__(self):
        self.frames = []
        self.reasons = []
        self._changed = asyncio.Event()

    def on_frame(self, frame):
        self.frames.append(frame)
        self._changed.set()

    def on_closed(self, reason):
        self.reasons.append(reason)
        self._changed.set()

    async def until(self, condition):
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def closed(self):
        await self.until(lambda: self.reasons)
        await asyncio.sleep(0.01)  # a second call would come now
        assert len(self.reasons) == 1
        return self.reasons[0]


def new_link(**options):
    """(link in READY, what it saw, the daemon's bare socket)."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # the machine's default may be any
    seen = Seen()
    link = Link(ours, seen.on_frame, seen.on_closed, name="link of left", **options)
    link._connection.state = LinkState.READY
    return link, seen, theirs


def open_fds():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("unread", [False, True], ids=["end of file", "ECONNRESET"])
def test_daemon_gone_at_every_byte(run, unread):
    async def main():
        for offset in range(len(RESULT_BYTES) + 1):
            link, seen, theirs = new_link()
            if unread:
                link.send(STEP)
            theirs.sendall(RESULT_BYTES + RESULT_BYTES[:offset])
            theirs.close()
            reason = await seen.until(lambda seen=seen: seen.reasons) or seen.reasons[0]
            assert len(seen.frames) == (2 if offset == len(RESULT_BYTES) else 1)
            assert isinstance(reason, LinkClosed)
            assert reason.what.startswith("the daemon is gone: [Errno 104]" if unread else "end of file")
            assert ("inside a STEP_RESULT frame" in reason.what) == (32 <= offset < len(RESULT_BYTES))
        await asyncio.sleep(0.01)
        assert len(seen.reasons) == 1

    run(main())


def test_a_raising_handler_closes_the_link_and_is_reported(run):
    async def main():
        link, seen, theirs = new_link()

        def on_frame(frame):
            seen.frames.append(frame)
            raise KeyError("sequence 3")

        link._on_frame = on_frame
        theirs.sendall(RESULT_BYTES * 2)
        reason = await seen.closed()
        assert len(seen.frames) == 1
        assert "KeyError('sequence 3')" in str(reason)
        theirs.close()

    run(main(), expect_unhandled=[KeyError])


# ---- slow readers


def test_frames_for_a_slow_reader_are_queued_in_order(run):
    async def main():
        link, seen, theirs = new_link()
        frames = [encode(Step(i, 0, slices=[Slice(i, 0, list(range(500)), False)])) for i in range(2000)]
        for frame in frames:
            link.send(frame)
        rows = os.urandom(3_000_000)
        link.send(STEP, payload=[rows, b"tail"])
        link.send(Shutdown("end"))
        assert link.queued_bytes > 4_000_000
        data = b""
        expected = (
            b"".join(frames) + encode(STEP, payload_bytes=len(rows) + 4) + rows + b"tail" + encode(Shutdown("end"))
        )
        theirs.setblocking(False)
        while len(data) < len(expected):
            await asyncio.sleep(0)
            try:
                data += theirs.recv(1 << 16)
            except BlockingIOError:
                continue
        assert data == expected
        await asyncio.sleep(0.01)
        assert link.queued_bytes == 0
        link.close()
        await seen.closed()
        theirs.close()

    run(main())


def test_a_stalled_reader_overflows_the_link(run):
    async def main():
        link, seen, theirs = new_link(max_queued_bytes=100_000)
        frame = encode(Step(1, 0, slices=[Slice(1, 0, list(range(500)), False)]))
        with pytest.raises(LinkOverflow, match="bytes are queued and the daemon does not read"):  # noqa: PT012
            for _ in range(1000):
                link.send(frame)
        assert isinstance(await seen.closed(), LinkOverflow)
        assert link.closed
        assert link.queued_bytes == 0
        theirs.close()

    run(main())


def test_a_link_queues_until_its_connection_is_there_and_no_descriptor_travels(run):
    async def main():
        forgotten = []
        awaited = AwaitedConnection(lambda: forgotten.append(True))
        seen = Seen()
        link = Link(awaited, seen.on_frame, seen.on_closed)
        link._connection.state = LinkState.READY
        link.send(STEP)
        assert link.queued_bytes > 0
        ours, theirs = socket.socketpair()
        awaited.take(ours)
        daemon = BlockingLink(theirs)
        daemon._connection.state = LinkState.READY
        frame = await asyncio.to_thread(daemon.receive)
        assert frame.message == STEP
        assert not link.passes_handles
        with pytest.raises(LocalProtocolError, match="nothing offers files"):
            link.send(Check([], 0, Dtype.FLOAT32, [ArenaPlan(0, 64, 1)]), fds=[0])
        daemon.send(RESULT, request_id=7, payload=[b"0123456789abcdef"])
        await seen.until(lambda: seen.frames)
        assert (seen.frames[0].message, bytes(seen.frames[0].payload)) == (RESULT, b"0123456789abcdef")
        daemon.close()
        assert isinstance(await seen.closed(), LinkClosed)
        assert not forgotten
        seen = Seen()
        never = Link(AwaitedConnection(lambda: forgotten.append(True)), seen.on_frame, seen.on_closed)
        never.close("the daemon ended before it connected")
        assert isinstance(await seen.closed(), LinkClosed)
        assert forgotten == [True]

    run(main())


def test_descriptors_are_sent_now_or_queued(run):
    """With a full socket they are duplicated: the caller may close its own at once."""

    async def main():
        link, seen, theirs = new_link()
        daemon = BlockingLink(theirs)
        daemon._connection.state = LinkState.READY
        before = open_fds()
        check = Check([], 0, Dtype.FLOAT32, [ArenaPlan(0, 64, 1)])
        expected = []
        for i in range(3):
            fd = os.memfd_create(f"test-{i}")
            os.write(fd, b"file %d" % i)
            link.send(check, fds=[fd], request_id=i)
            os.close(fd)
            expected.append((i, b"file %d" % i))
            if i == 0:
                link.send(STEP, payload=[bytes(1_000_000)])  # fills the socket
        assert link.queued_bytes > 0

        def read():
            found = []
            while len(found) < 3:
                frame = daemon.receive()
                if frame.fds:
                    found.append((frame.request_id, os.pread(frame.fds[0], 100, 0)))
                    os.close(frame.fds[0])
            return found

        assert await asyncio.to_thread(read) == expected
        await asyncio.sleep(0.01)
        assert open_fds() == before
        link.send(STEP, payload=[bytes(1_000_000)])
        link.send(check, fds=[0])
        assert open_fds() == before + 1
        link.close()  # with a descriptor in the queue
        await seen.closed()
        daemon.close()
        assert open_fds() == before - 3  # both ends and the epoll descriptor

    run(main())
