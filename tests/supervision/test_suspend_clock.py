"""The clock that stands still while the process is stopped, and what waits by it."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor import suspend_clock


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def clock_over(gaps: list[float]) -> float:
    time_ = Time()
    clock = suspend_clock.SuspendAwareClock(time_)
    began = before = clock()
    for gap in gaps:
        time_.now += gap
        now = clock()
        assert 0.0 <= now - before <= suspend_clock.LONGEST_GAP_S + 1e-6
        before = now
    return before - began


@given(st.lists(st.floats(0.0, 300.0), max_size=20))
def test_a_gap_counts_for_as_long_as_it_lasted_but_no_longer_than_the_longest(gaps):
    passed = asyncio.run(clock_over(gaps))
    assert passed == pytest.approx(sum(min(gap, suspend_clock.LONGEST_GAP_S) for gap in gaps), abs=1e-6)


async def test_the_loop_keeps_the_clock_going_and_lets_it_go():
    clock = suspend_clock.SuspendAwareClock()
    began, wall = clock(), time.monotonic()
    await asyncio.sleep(2.5 * suspend_clock.TICK_S)
    assert clock() - began <= time.monotonic() - wall
    assert clock() - began > suspend_clock.TICK_S
    held = suspend_clock.weakref.ref(clock)
    del clock
    await asyncio.sleep(2 * suspend_clock.TICK_S)
    assert held() is None
