"""The supervisor's end in a loop, under asyncio and uvloop."""

import asyncio

import pytest

from lucevisor.protocol.errors import LinkClosed
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


def test_close_from_inside_the_handler_stops_delivery(run):
    async def main():
        link, seen, theirs = new_link()
        link._on_frame = lambda frame: (seen.on_frame(frame), link.close("enough"))
        theirs.sendall(RESULT_BYTES * 3)
        await seen.closed()
        assert len(seen.frames) == 1
        theirs.close()

    run(main())
