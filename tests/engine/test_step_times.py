"""The chunk of a long prompt that leaves room, found from measured step times."""

from __future__ import annotations

import pytest

from lucevisor.engine.step_times import MOST_LOSS, StepTimes, chunk_sizes
from lucevisor.protocol.steps import Slice, Step


def step(*sizes: int) -> Step:
    return Step(1, 0, slices=[Slice(i, 0, [7] * n, False) for i, n in enumerate(sizes)])


def seen(full: int, overhead_s: float, token_s: float, sizes: tuple[int, ...] = (40, 256)) -> StepTimes:
    times = StepTimes(full)
    for n in sizes:
        for _ in range(3):
            times.add(step(n), overhead_s + n * token_s)
    return times


def test_sizes_are_halves_down_to_a_page() -> None:
    assert chunk_sizes(512) == [64, 128, 256, 512]
    assert chunk_sizes(384) == [96, 192, 384]
    assert chunk_sizes(100) == [100]
    assert chunk_sizes(7) == [7]


@pytest.mark.parametrize(
    ("overhead_s", "token_s", "chunk"),
    [
        (0.008, 0.000385, 128),  # the demo on a core of an EPYC
        (0.014, 0.0000205, 512),  # a quarter of a 27B model on an H200: launches and weights, tokens cost little
        (0.0, 0.001, 64),
        (0.010, 0.0, 512),
    ],
)
def test_the_smallest_chunk_that_costs_little(overhead_s: float, token_s: float, chunk: int) -> None:
    times = seen(512, overhead_s, token_s)
    assert times.shared_chunk == chunk
    assert overhead_s / chunk + token_s <= MOST_LOSS * (overhead_s / 512 + token_s)


def test_half_a_chunk_before_anything_is_known() -> None:
    assert StepTimes(512).shared_chunk == 256
    assert StepTimes(100).shared_chunk == 100
    times = seen(512, 0.008, 0.000385, sizes=(128,))
    assert times.fit() is None
    assert times.shared_chunk == 256


def test_steps_that_compiled_or_were_disturbed_do_not_count() -> None:
    times = seen(512, 0.008, 0.000385)
    times.add(step(256), 5.0)
    times.add(step(40), 3.0)
    assert times.shared_chunk == 128


def test_decodes_and_short_slices_say_nothing() -> None:
    times = seen(512, 0.008, 0.000385)
    for _ in range(20):
        times.add(step(*[1] * 60), 1.0)
    assert times.shared_chunk == 128


def test_times_that_fall_with_size_are_noise() -> None:
    times = StepTimes(512)
    for n, seconds in ((40, 0.2), (256, 0.1)) * 3:
        times.add(step(n), seconds)
    fitted = times.fit()
    assert fitted is not None
    assert min(fitted) >= 0.0
    assert times.shared_chunk in chunk_sizes(512)
