"""The table of request states, and what refusals tell."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.request import (
    ContextOverflow,
    FinishedEvent,
    RequestHandle,
    RequestState,
    Timings,
    TokenEvent,
    Usage,
)
from lucevisor.engine.sequence import InvalidTransition, RequestRecord, WantedRows
from tests.engine.toy_engine import request


def test_a_prompt_too_long_for_the_context_is_told_what_to_do() -> None:
    error = ContextOverflow(prompt_tokens=1024, max_context=1024, page_tokens=2048)
    assert (error.prompt_tokens, error.max_context, error.limit_tokens) == (1024, 1024, 1024)
    for part in ("1024 tokens", "max_context is 1024", "at most 1023 tokens", "raise engine.max_context"):
        assert part in error.message


def test_a_prompt_too_long_for_the_pages_names_the_pages() -> None:
    error = ContextOverflow(prompt_tokens=700, max_context=1024, page_tokens=640)
    assert error.limit_tokens == 640
    for part in ("page pool holds 640 tokens", "at most 639 tokens", "engine.pages"):
        assert part in error.message


# ---- a reader's end


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


# ---- records


def record(n_prompt: int, wanted: WantedRows | None = None) -> RequestRecord:
    return RequestRecord(request("r", range(n_prompt)), 0, 4, 10.0, wanted)


@given(st.integers(1, 500), st.integers(1, 100), st.integers(0, 499))
def test_chunks_end_at_the_same_places_wherever_one_begins(n_prompt: int, chunk: int, start: int) -> None:
    one = record(n_prompt)
    whole = [0]
    while whole[-1] < n_prompt:
        whole.append(one.next_stop(whole[-1], chunk))
    assert whole[-1] == n_prompt
    assert all(stop % chunk == 0 for stop in whole[:-1])
    if start < n_prompt:
        assert one.next_stop(start, chunk) == next(stop for stop in whole if stop > start)


def test_a_change_that_is_not_in_the_table_is_refused() -> None:
    one = record(3)
    with pytest.raises(InvalidTransition, match="request r: queued -> decode"):
        one.move(RequestState.DECODE)
    one.move(RequestState.CANCELLED)
    assert one.ended
    with pytest.raises(InvalidTransition):
        one.move(RequestState.QUEUED)


def test_times_of_a_request_that_never_started() -> None:
    finished = record(3).finished_event("cancelled", 12.0, None, None)
    assert finished.timings == Timings(2.0, 0.0, 0.0)
    assert finished.usage == Usage(3, 0, 0)
