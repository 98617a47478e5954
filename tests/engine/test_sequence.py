"""Records of requests: where chunks end, and which changes of state are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.request import RequestState, Timings, Usage
from lucevisor.engine.sequence import InvalidTransition, RequestRecord, WantedRows
from tests.engine.toy_engine import request


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
