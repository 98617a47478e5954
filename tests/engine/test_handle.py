"""A reader's end of a request."""

from __future__ import annotations

import asyncio

import pytest

from lucevisor.engine.request import FinishedEvent, RequestHandle, Timings, TokenEvent, Usage

END = FinishedEvent("length", Usage(1, 0, 1), Timings(0, 0, 0))


async def test_events_come_in_order_and_the_iteration_ends_after_the_last() -> None:
    handle = RequestHandle("r", lambda _: None)
    reader = asyncio.create_task(asyncio.wait_for(collect(handle), 30))
    await asyncio.sleep(0)
    handle.push(TokenEvent(5))
    await asyncio.sleep(0)
    handle.push(END)
    assert await reader == [TokenEvent(5), END]
    with pytest.raises(StopAsyncIteration):
        await anext(handle)


async def collect(handle: RequestHandle) -> list[object]:
    return [event async for event in handle]


def test_leaving_the_block_cancels_what_still_runs() -> None:
    cancelled: list[str] = []
    with pytest.raises(ConnectionResetError), RequestHandle("r", cancelled.append):
        raise ConnectionResetError
    assert cancelled == ["r"]


def test_a_request_that_is_over_is_not_cancelled() -> None:
    cancelled: list[str] = []
    with RequestHandle("r", cancelled.append) as handle:
        handle.push(END)
        handle.cancel()
    assert cancelled == []
    assert handle.finished == END
