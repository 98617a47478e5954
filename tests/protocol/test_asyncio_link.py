"""The supervisor's end in a loop, under asyncio and uvloop."""

import asyncio

import pytest

from lucevisor.protocol.codec import encode
from lucevisor.protocol.errors import LinkClosed, RemoteProtocolError
from lucevisor.protocol.messages import Failed
from tests.protocol.asyncio_links import RESULT, RESULT_BYTES, STEP, new_link


def test_frames_in_order_and_end_of_file(run):
    async def main():
        link, seen, theirs = new_link()
        theirs.sendall(RESULT_BYTES * 3)
        theirs.close()
        reason = await seen.closed()
        assert [(f.request_id, f.message, bytes(f.payload)) for f in seen.frames] == [
            (7, RESULT, b"0123456789abcdef")
        ] * 3
        assert isinstance(reason, LinkClosed)
        assert not reason.local
        assert str(reason) == "end of file (link of left): the daemon has exited; see its log"
        assert link.closed
        with pytest.raises(LinkClosed, match="the link is closed: end of file"):
            link.send(STEP)

    run(main())


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


def test_frames_sent_before_a_death_are_received(run):
    """It wrote Failed and died; the supervisor's write fails before its loop read anything."""

    async def main():
        link, seen, theirs = new_link()
        failed = Failed("step 3", "cuda:0", "device error", "see dmesg")
        theirs.sendall(encode(failed))
        theirs.close()
        with pytest.raises(LinkClosed, match="Broken pipe"):
            link.send(STEP)
        assert seen.reasons == []  # never from inside send
        with pytest.raises(LinkClosed, match="Broken pipe"):
            link.send(STEP)
        reason = await seen.closed()
        assert [f.message for f in seen.frames] == [failed]
        assert isinstance(reason, LinkClosed)

    run(main())


def test_damage_closes_the_link_after_the_frames_before_it(run):
    async def main():
        link, seen, theirs = new_link()
        theirs.sendall(RESULT_BYTES + b"Traceback (most recent call last):\n")
        reason = await seen.closed()
        assert [f.message for f in seen.frames] == [RESULT]
        assert isinstance(reason, RemoteProtocolError)
        assert "found b'Trac'" in str(reason)
        assert "link of left" in reason.where
        assert link.closed
        with pytest.raises(BrokenPipeError):
            theirs.send(b"x")
        theirs.close()

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


def test_close_is_idempotent_and_reported_once(run):
    async def main():
        link, seen, theirs = new_link()
        link.close("stop was asked")
        link.close("again")
        assert seen.reasons == []
        reason = await seen.closed()
        assert (reason.what, reason.local) == ("stop was asked", True)
        with pytest.raises(LinkClosed):
            link.send(STEP)
        assert theirs.recv(10) == b""
        theirs.close()

    run(main())


def test_close_from_inside_the_handler_stops_delivery(run):
    async def main():
        link, seen, theirs = new_link()
        link._on_frame = lambda frame: (seen.on_frame(frame), link.close("enough"))
        theirs.sendall(RESULT_BYTES * 3)
        await seen.closed()
        assert len(seen.frames) == 1
        theirs.close()

    run(main())
