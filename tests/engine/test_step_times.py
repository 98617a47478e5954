"""The cost of a step, fitted to measured ones."""

from __future__ import annotations

import pytest

from lucevisor.engine.step_times import StepCost, StepTimes
from lucevisor.protocol.steps import Slice


def slices(*sizes: int, start: int = 0) -> list[Slice]:
    return [Slice(i, start, [7] * n, False) for i, n in enumerate(sizes)]


def seen(cost: StepCost, sizes: tuple[int, ...] = (40, 256), starts: tuple[int, ...] = (0,)) -> StepTimes:
    times = StepTimes()
    for _ in range(3):
        for n in sizes:
            for start in starts:
                times.add(slices(n, start=start), cost.step_s(n, start))
    return times


@pytest.mark.parametrize(
    "cost",
    [
        StepCost(0.008, 0.000385),  # the demo on a core of an EPYC
        StepCost(0.014, 0.0000205),  # a quarter of a 27B model on an H200: launches and weights, tokens cost little
        StepCost(0.0, 0.001),
        StepCost(0.010, 0.0),
        StepCost(0.008, 0.000385, 3.4e-8),
        StepCost(0.0, 0.0001, 2e-7),
    ],
)
def test_a_cost_is_found_again(cost: StepCost) -> None:
    found = seen(cost, starts=(0, 1500, 5000)).fit()
    assert found is not None
    for n, start in ((64, 0), (512, 0), (128, 3000), (512, 8000)):
        assert found.step_s(n, start) == pytest.approx(cost.step_s(n, start), rel=1e-3)


def test_depth_is_no_overhead_of_small_steps() -> None:
    """The last piece of a prompt is smaller, and has the most before it."""
    cost = StepCost(0.004, 0.00014, 2e-8)
    times = StepTimes()
    for _ in range(3):
        for start in range(0, 3584, 512):
            times.add(slices(512, start=start), cost.step_s(512, start))
        times.add(slices(416, start=3584), cost.step_s(416, 3584))
        times.add(slices(64), cost.step_s(64))
    found = times.fit()
    assert found is not None
    assert found.overhead_s == pytest.approx(cost.overhead_s, rel=0.01)
    assert found.depth_s == pytest.approx(cost.depth_s, rel=0.01)


def test_nothing_is_known_before_two_sizes_were_seen() -> None:
    assert StepTimes().fit() is None
    assert seen(StepCost(0.008, 0.000385), sizes=(128,)).fit() is None


def test_steps_that_compiled_or_were_disturbed_do_not_count() -> None:
    cost = StepCost(0.008, 0.000385)
    times = seen(cost)
    times.add(slices(256), 5.0)
    times.add(slices(40), 3.0)
    found = times.fit()
    assert found is not None
    assert found.step_s(512) == pytest.approx(cost.step_s(512))


def test_decodes_and_short_slices_say_nothing() -> None:
    times = seen(StepCost(0.008, 0.000385))
    before = times.fit()
    for _ in range(40):
        times.add(slices(*[1] * 60), 1.0)
    assert times.fit() == before


def test_times_that_fall_with_size_are_noise() -> None:
    times = StepTimes()
    for n, seconds in ((40, 0.2), (256, 0.1)) * 3:
        times.add(slices(n), seconds)
    found = times.fit()
    assert found is not None
    assert min(found.overhead_s, found.token_s, found.depth_s) >= 0.0
    assert 0.1 <= found.step_s(128) <= 0.2


def test_a_step_costs_its_overhead_once() -> None:
    cost = StepCost(0.01, 0.001, 1e-6)
    assert cost.seconds(slices(10, 20, start=100)) == pytest.approx(0.01 + 0.03 + 1e-6 * (10 * 105 + 20 * 110))
