"""Several sequences as one stream: all events, in order for each, and no task or sequence left behind."""

from __future__ import annotations

import asyncio

import pytest

from lucevisor.api.generation import merged
from lucevisor.engine.request import FinishedEvent, RequestHandle, Timings, TokenEvent, Usage

END = FinishedEvent("stop", Usage(1, 0, 3), Timings(0, 0, 0))
CANCELLED = FinishedEvent("cancelled", Usage(1, 0, 3), Timings(0, 0, 0))


def handles(n):
    made = []
    for i in range(n):
        made.append(RequestHandle(str(i), lambda request_id: made[int(request_id)].push(CANCELLED)))
    return made


def others():
    return [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and "pump" in repr(t)]


async def test_all_events_in_the_order_of_each():
    both = handles(2)
    for token in range(200):
        both[0].push(TokenEvent(token))
        both[1].push(TokenEvent(token + 1000))
    for handle in both:
        handle.push(END)
    seen = {0: [], 1: []}
    async with merged(both) as events:
        for _ in range(402):
            index, event = await events.get()
            seen[index].append(event)
    for index in (0, 1):
        assert [e.token for e in seen[index][:-1]] == list(range(index * 1000, index * 1000 + 200))
        assert seen[index][-1] is END
    assert not others()


async def test_a_wait_that_ends_without_an_event_loses_nothing():
    (one,) = handles(1)
    async with merged([one]) as events:
        for token in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(events.get(), 0.001)
            one.push(TokenEvent(token))
            assert await events.get() == (0, TokenEvent(token))


async def test_an_error_of_the_reader_is_raised_as_it_is_and_cancels_all():
    both = handles(2)

    async def read():
        async with merged(both):
            await asyncio.sleep(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()
    assert [h.finished for h in both] == [CANCELLED, CANCELLED]
    assert not others()


async def test_a_cancelled_reader_cancels_all():
    both = handles(2)

    async def read():
        async with merged(both) as events:
            await events.get()

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [h.finished for h in both] == [CANCELLED, CANCELLED]
    assert not others()


async def test_a_defect_of_a_sequence_reaches_the_reader():
    class Broken(RequestHandle):
        async def __anext__(self):
            raise ZeroDivisionError

    fine = handles(1)[0]

    async def read():
        async with merged([fine, Broken("x", lambda _: None)]) as events:
            await events.get()

    with pytest.raises(ZeroDivisionError):
        await read()
    assert fine.finished is CANCELLED
    assert not others()
