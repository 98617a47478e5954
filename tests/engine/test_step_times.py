"""The cost of a step by measured ones: a line where it tells them all, else medians by size."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lucevisor.engine.scheduling.step_times import MAX_AGE, MAX_ERROR, MeasuredCost, StepCost, StepTimes
from lucevisor.protocol.steps import Slice
from tests.engine.timed_pipeline import gpu_rows_s


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
    found = seen(cost, starts=(0, 1500, 5000)).cost()
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
    found = times.cost()
    assert found is not None
    assert found.fit.overhead_s == pytest.approx(cost.overhead_s, rel=0.01)
    assert found.fit.depth_s == pytest.approx(cost.depth_s, rel=0.01)


def test_nothing_is_known_before_two_sizes_were_seen() -> None:
    assert StepTimes().cost() is None
    assert seen(StepCost(0.008, 0.000385), sizes=(128,)).cost() is None


def test_steps_that_compiled_or_were_disturbed_do_not_count() -> None:
    cost = StepCost(0.008, 0.000385)
    times = seen(cost)
    times.add(slices(256), 5.0)
    times.add(slices(40), 3.0)
    found = times.cost()
    assert found is not None
    assert found.step_s(512) == pytest.approx(cost.step_s(512))


def test_cold_steps_do_not_count_unless_all_are() -> None:
    cost = StepCost(0.008, 0.000385)
    times = StepTimes()
    for n in (40, 256):
        for _ in range(8):
            times.add(slices(n), 0.5, cold=True)
    assert times.cost() is None
    for n in (40, 256):
        for _ in range(2):
            times.add(slices(n), cost.step_s(n))
    found = times.cost()
    assert found is not None
    assert found.step_s(128) == pytest.approx(cost.step_s(128))
    for n in (40, 256):
        for _ in range(8 + 9):
            times.add(slices(n), 0.5, cold=True)
    found = times.cost()
    assert found is not None
    assert found.step_s(128) == pytest.approx(0.5)


def test_decodes_and_short_slices_say_nothing() -> None:
    times = seen(StepCost(0.008, 0.000385))
    before = times.cost()
    for _ in range(40):
        times.add(slices(*[1] * 60), 1.0)
    assert times.cost() == before


def test_times_that_fall_with_size_are_noise() -> None:
    times = StepTimes()
    for n, seconds in ((40, 0.2), (256, 0.1)) * 3:
        times.add(slices(n), seconds)
    found = times.cost()
    assert found is not None
    assert min(found.fit.overhead_s, found.fit.token_s, found.fit.depth_s) >= 0.0
    assert 0.1 <= found.step_s(128) <= 0.2


def test_a_step_costs_its_overhead_once() -> None:
    cost = MeasuredCost(StepCost(0.01, 0.001, 1e-6), ((10, 0.02), (40, 0.05)))
    assert cost.seconds([(10, 100), (20, 100)]) == pytest.approx(0.01 + 0.03 + 1e-6 * (10 * 105 + 20 * 110))


def test_where_decodes_are_is_no_depth_of_a_step() -> None:
    cost = MeasuredCost(StepCost(0.01, 0.001), ((10, 0.02), (60, 0.07)), {(False, 24): [(0, 0.0), (4, 1.0)]})
    assert cost.seconds([(60, 0), (1, 10_000)]) == pytest.approx(0.071)
    assert cost.seconds([(60, 10_000), (1, 0)]) == pytest.approx(1.071)


# ---- costs that are no line


def by_size(rows_s: Callable[[int], float], *sizes: int) -> MeasuredCost:
    times = StepTimes()
    for n in sizes * 3:
        times.add(slices(n), rows_s(n))
    found = times.cost()
    assert found is not None
    return found


def test_measured_sizes_cost_what_was_measured() -> None:
    rows_s = gpu_rows_s()
    found = by_size(rows_s, 16, 64, 128, 512, 2048)
    for n in (16, 64, 128, 512, 2048):
        assert found.measured(n)
        assert found.step_s(n) == found.most_s(n) == rows_s(n)
    for n in (65, 256, 1024):
        at = [m for m in (64, 128, 512, 2048) if m < n][-1]
        assert rows_s(at) < found.step_s(n) < rows_s(4 * at)


def test_sizes_between_measured_ones_cost_at_most_what_the_larger_one_does() -> None:
    found = by_size(gpu_rows_s(), 16, 64, 512)
    for n in (100, 256, 440):
        assert not found.measured(n)
        assert found.step_s(n) < found.most_s(n) == gpu_rows_s()(512)
    assert found.measured(520)  # decodes ride with a chunk
    assert found.most_s(4096) == found.step_s(4096) > found.step_s(512)


def test_a_line_is_taken_only_where_it_tells_every_size() -> None:
    """It is made of all steps: what a size has of noise is averaged out."""
    line = StepCost(0.008, 0.000385)
    for error in (0.5 * MAX_ERROR, 3 * MAX_ERROR):

        def rows_s(n: int, error: float = error) -> float:
            return line.step_s(n) * (1 + error * (n == 128))

        found = by_size(rows_s, 32, 64, 128, 256, 512)
        off = found.step_s(128) / line.step_s(128) - 1
        assert off < 0.5 * error if error < MAX_ERROR else off == pytest.approx(error)


def test_a_size_that_was_disturbed_costs_no_more_than_a_larger_one() -> None:
    """The first steps of a size load kernels and take memory."""
    rows_s = gpu_rows_s()
    times = StepTimes()
    for n in (16, 64, 512, 704, 1024) * 3:
        times.add(slices(n), rows_s(n) + 0.4 * (n == 704))
    found = times.cost()
    assert found is not None
    assert found.step_s(704) == found.step_s(1024) == rows_s(1024)
    assert found.step_s(512) == rows_s(512)


def test_what_short_steps_take_longer_at_a_depth_is_no_cost_of_their_tokens() -> None:
    """A GPU replays graphs up to a position; beyond, a short step takes as long as its launches."""
    cost = StepCost(0.003, 0.00007, 2e-9)

    def seconds(n: int, start: int) -> float:
        return max(cost.step_s(n, start), 0.08 if start + n > 8192 else 0.0)

    times = StepTimes()
    for _ in range(4):
        for n in (40, 64, 256, 1024):
            for start in (0, 1024, 5120, 9216, 12288):
                times.add(slices(n, start=start), seconds(n, start))
    found = times.cost()
    assert found is not None
    for n in (64, 256, 1024):
        for start in (0, 2048, 6144, 10240, 14336):
            assert found.step_s(n, start) == pytest.approx(seconds(n, start), rel=0.05)
            assert found.seconds([(n, start)]) == found.step_s(n, start)
    assert found.surplus_s(64, 0) == found.surplus_s(64, 6144) == found.surplus_s(1024, 10240) == 0.0
    assert found.surplus_s(128, 10240) == 0.0  # of this size nothing is known
    assert found.seconds([]) == found.flat_s(0)


def test_a_whole_chunk_alone_costs_no_positions() -> None:
    """Larger steps have more positions before their tokens: only steps of one size tell what those cost."""
    times = StepTimes()
    for n in (16, 64, 2048) * 3:
        times.add(slices(n), gpu_rows_s()(n))
    found = times.cost()
    assert found is not None
    assert found.fit.depth_s == 0.0
    assert found.step_s(2048, 30_000) == gpu_rows_s()(2048)


def test_sizes_nobody_had_for_long_are_forgotten_but_short_ones() -> None:
    rows_s = gpu_rows_s()
    times = StepTimes()
    for n in (40, 256) * 3:
        times.add(slices(n), rows_s(n))
    for _ in range(MAX_AGE + 16):
        times.add(slices(512), rows_s(512))
    found = times.cost()
    assert found is not None
    assert found.measured(40)
    assert not found.measured(256)
