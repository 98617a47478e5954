"""Estimated times of steps: shapes measured and not, warming up, outliers, a machine that slows down."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.drafting.decode_times import DecodeTimes

SHARE = 0.05


def times(*shapes: tuple[int, int, float], n: int = 5) -> DecodeTimes:
    """``shapes``: (rows, slices, seconds), each measured ``n`` times."""
    found = DecodeTimes(SHARE)
    for n_rows, n_slices, seconds in shapes:
        for _ in range(n):
            found.add(n_rows, n_slices, seconds)
    return found


def test_nothing_is_known_before_a_step() -> None:
    assert DecodeTimes(SHARE).seconds(1, 1) is None
    assert DecodeTimes(SHARE).age(1, 1) is None


def test_the_first_step_tells_about_all_shapes() -> None:
    assert times((1, 1, 0.01), n=1).seconds(5, 1) == pytest.approx(0.01 * (1 + 4 * SHARE))
    assert times((5, 1, 0.012), n=1).seconds(1, 1) == pytest.approx(0.012 / (1 + 4 * SHARE))


def test_between_known_rows_the_estimate_is_linear() -> None:
    found = times((1, 1, 0.010), (8, 1, 0.017))
    assert found.seconds(1, 1) == pytest.approx(0.010)
    assert found.seconds(4, 1) == pytest.approx(0.013)
    assert found.seconds(8, 1) == pytest.approx(0.017)


def test_slices_that_were_not_measured_follow_the_nearest() -> None:
    found = times((2, 2, 0.010), (10, 2, 0.018), (16, 16, 0.050))
    assert found.seconds(6, 3) == pytest.approx(0.014)


def test_beyond_the_known_rows_others_show_how_steps_grow() -> None:
    """Of three slices only plain steps were measured, at 12 ms; those of two show that eight rows take 1.5 x two."""
    found = times((2, 2, 0.010), (8, 2, 0.016), (3, 3, 0.012))
    assert found.seconds(6, 3) == pytest.approx(0.012 * 0.014 / 0.011)


def test_steps_that_compile_or_capture_do_not_count_once_others_came() -> None:
    found = times((1, 1, 0.010))
    found.add(4, 1, 0.7)
    assert found.seconds(4, 1) == pytest.approx(0.010 * (1 + 3 * SHARE))  # at most what is assumed
    found.add(4, 1, 0.05)
    found.add(4, 1, 0.012)
    assert found.seconds(4, 1) == pytest.approx(0.012)
    assert found.age(4, 1) == 0


def test_a_first_step_that_was_fast_is_believed() -> None:
    found = times((1, 1, 0.010))
    found.add(4, 1, 0.0101)
    assert found.seconds(4, 1) == pytest.approx(0.0101)


def test_the_age_of_a_shape_counts_steps_of_all() -> None:
    found = times((1, 1, 0.01), (2, 1, 0.011))
    assert (found.age(1, 1), found.age(2, 1), found.age(3, 1)) == (5, 0, None)


def test_outliers_do_not_count() -> None:
    found = times((1, 1, 0.010), n=20)
    for _ in range(4):
        found.add(1, 1, 1.0)
    assert found.seconds(1, 1) == pytest.approx(0.010)
    for _ in range(60):
        found.add(1, 1, 0.010)
    assert found.seconds(1, 1) == pytest.approx(0.010, rel=0.02)


def test_jitter_of_a_fifth_is_averaged_out() -> None:
    found, rng = DecodeTimes(SHARE), random.Random(0)
    for _ in range(200):
        found.add(1, 1, 0.010 * rng.uniform(0.8, 1.2))
    # 32 steps: the mean of the middle half has a standard deviation of about 2.5 %; three of them.
    assert found.seconds(1, 1) == pytest.approx(0.010, rel=0.075)


@pytest.mark.parametrize("in_turns", [1, 2, 4])
def test_shapes_that_are_not_used_follow_a_machine_that_slows_down(in_turns: int) -> None:
    used = [(8, 1, 0.014), (4, 1, 0.012), (2, 1, 0.011), (6, 1, 0.013)][:in_turns]
    found = times((1, 1, 0.010), *used, n=40)
    for _ in range(100):
        for n_rows, n_slices, seconds in used:
            found.add(n_rows, n_slices, 2 * seconds)
    assert found.seconds(1, 1) == pytest.approx(0.020)
    assert found.seconds(8, 1) == pytest.approx(0.028)


def test_a_machine_that_slows_down_and_recovers_again_and_again_moves_nothing_for_good() -> None:
    """It does so whenever other shapes begin to be used, which looks as if these cost more or less."""
    found, estimates = times((1, 1, 0.010), (8, 1, 0.017), (4, 1, 0.013), n=60), []
    for _ in range(50):
        for _ in range(40):
            found.add(1, 1, 0.013)
        for _ in range(40):
            found.add(1, 1, 0.010)
            found.add(8, 1, 0.017)
        estimates.append(found.seconds(4, 1))
    assert estimates[0] == pytest.approx(0.0115, abs=0.0015)
    assert estimates == pytest.approx([estimates[0]] * 50)


def test_a_cold_process_says_nothing_about_other_shapes() -> None:
    found = times((8, 1, 0.017), n=10)
    for seconds in [0.020] * 7 + [0.010] * 80:
        found.add(1, 1, seconds)
    assert found.seconds(8, 1) == pytest.approx(0.017)


def test_a_few_steps_count_beside_what_well_known_shapes_on_both_sides_say() -> None:
    found = times((1, 1, 0.010), (8, 1, 0.017), n=20)
    for n, wanted in [(1, (1 * 0.015 + 4 * 0.013) / 5), (4, 0.014), (8, 0.015)]:
        while found.n_known(4, 1) < n:
            found.add(4, 1, 0.015)
        assert found.seconds(4, 1) == pytest.approx(wanted)
    assert times((1, 1, 0.010), (8, 1, 0.017), (12, 1, 0.050), n=4).seconds(12, 1) == pytest.approx(0.050)


def test_a_shape_that_comes_back_is_measured_anew() -> None:
    """What it took before a pause is taken for what the reference says of it now, and gives way to new steps."""
    found = times((8, 1, 0.017), (1, 1, 0.010), n=40)
    for seconds in [0.020] * 40:
        found.add(1, 1, seconds)
    found.add(8, 1, 0.034)
    assert found.seconds(8, 1) == pytest.approx(0.034)
    for _ in range(40):
        found.add(8, 1, 0.030)
    assert found.seconds(8, 1) == pytest.approx(0.030)


@pytest.mark.parametrize("slow", [1.0, 1.5])
def test_unused_shapes_do_not_drift_with_the_jitter_of_used_ones(slow: float) -> None:
    """Steps that are sometimes disturbed lie beside their middle; over thousands that must not add up."""
    found, rng = times((8, 1, 0.017), (1, 1, 0.010), n=80), random.Random(1)
    for _ in range(5000):
        found.add(1, 1, 0.010 * slow * rng.uniform(0.95, 1.05) * (1.8 if rng.random() < 0.1 else 1))
    assert found.seconds(1, 1) == pytest.approx(0.010 * slow, rel=0.05)
    assert found.seconds(8, 1) == pytest.approx(0.017 * slow, rel=0.1)


def test_shapes_used_in_turns_find_their_own_ratio() -> None:
    """What was measured while the process was cold does not last."""
    found = times((1, 1, 0.010), (8, 1, 0.030), n=12)
    for _ in range(100):
        found.add(1, 1, 0.010)
        found.add(8, 1, 0.017)
    assert found.seconds(1, 1) == pytest.approx(0.010, rel=0.02)
    assert found.seconds(8, 1) == pytest.approx(0.017, rel=0.02)
    for seconds in [0.010] * 80 + [0.020] * 40:
        found.add(1, 1, seconds)
    assert found.seconds(8, 1) == pytest.approx(0.034, rel=0.1)


def test_a_time_that_is_not_one_is_left_out() -> None:
    found = times((1, 1, 0.010))
    found.add(1, 1, 0.0)
    assert found.seconds(1, 1) == pytest.approx(0.010)


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 8), st.floats(1e-4, 1.0)), min_size=1, max_size=40),
    st.integers(1, 200),
    st.integers(1, 16),
)
def test_an_estimate_is_always_a_time(steps: list[tuple[int, int, float]], n_rows: int, n_slices: int) -> None:
    found = DecodeTimes(SHARE)
    for rows, slices, seconds in steps:
        found.add(max(rows, slices), slices, seconds)
    seconds_found = found.seconds(n_rows, n_slices)
    assert seconds_found is not None
    assert 0 < seconds_found < 1e3
