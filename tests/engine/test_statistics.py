"""Rates are events over seconds; totals add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.pipeline import PipelineResult
from lucevisor.engine.statistics import BoundaryTotals, RateWindow, StageTotals, StepTotals
from lucevisor.protocol.steps import Slice, Step, StepResult


def test_a_steady_stream_has_its_rate() -> None:
    window = RateWindow(10.0, now=100.0)
    for i in range(1000):
        window.add(2, 100.0 + i * 0.05)  # 40 a second for 50 s
    assert window.rate(150.0) == pytest.approx(40, rel=0.02)


def test_a_young_window_divides_by_its_age_and_an_old_one_forgets() -> None:
    window = RateWindow(10.0, now=0.0)
    window.add(30, 1.0)
    assert window.rate(2.0) == pytest.approx(15.0)
    assert window.rate(10.9) == pytest.approx(3.0)
    assert window.rate(11.1) == 0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50)), max_size=80), st.floats(0, 20))
def test_a_rate_is_never_more_than_what_happened(events: list[tuple[float, int]], idle_s: float) -> None:
    window = RateWindow(10.0, now=0.0)
    now = 0.0
    happened: list[tuple[float, int]] = []
    for pause_s, n in events:
        now += pause_s
        window.add(n, now)
        happened.append((now, n))
    now += idle_s
    seconds = max(min(10.0, now), 0.1)
    most = sum(n for t, n in happened if t >= now - 10.0 - 1e-9)
    least = sum(n for t, n in happened if t >= now - 10.0 + 0.1 + 1e-9)
    assert least - 1e-6 <= window.rate(now) * seconds <= most + 1e-6


def test_totals_add_up_by_stage_and_boundary() -> None:
    totals = StepTotals()
    for step_id in (1, 2):
        results = tuple(StepResult(step_id, stage, compute_s=0.5 + stage, wait_s=0.25) for stage in range(2))
        step = Step(step_id, 0, [], [Slice(0, 0, [1, 2, 3], True)])
        totals.add(PipelineResult(step, results, (memoryview(b""),) * 2, (0.125,), 4.0))
    assert (totals.n_steps, totals.n_tokens, totals.seconds) == (2, 6, 8.0)
    assert totals.stages == [StageTotals(2, 1.0, 0.5), StageTotals(2, 3.0, 0.5)]
    assert totals.boundaries == [BoundaryTotals(2, 6, 0.25)]
