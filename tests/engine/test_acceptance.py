"""Estimates of acceptance: by position, by reported probability, over requests, and when a text changes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.engine.drafting.acceptance import (
    FADED_WEIGHT,
    AcceptanceModel,
    DraftLengths,
    PositionRates,
    Rate,
    expected_tokens,
)


def taught(
    model: AcceptanceModel, own: PositionRates, chances: list[float], n: int, seed: int = 0, probabilities: object = ()
) -> None:
    """Verify ``n`` slices whose drafts are accepted with those chances."""
    rng = random.Random(seed)
    for _ in range(n):
        n_accepted = [*(rng.random() < chance for chance in chances), False].index(False)
        model.verified(own, list(probabilities), len(chances), n_accepted)  # type: ignore[call-overload]


def test_before_anything_was_seen_chances_fall_slowly_from_the_first() -> None:
    chances = AcceptanceModel(0.8).chances(PositionRates(), 4)
    assert chances[0] == pytest.approx(0.8)
    assert all(after == pytest.approx(before * 0.97) for before, after in pairwise(chances))


def test_rates_are_learned_by_position() -> None:
    model, own = AcceptanceModel(0.8), PositionRates()
    taught(model, own, [0.9, 0.6, 0.3], 300)
    # 24 remembered observations with a prior of 4: a standard deviation of 0.1 at most.
    assert model.chances(own, 3) == pytest.approx([0.9, 0.6, 0.3], abs=0.25)
    assert model.chances(PositionRates(), 3) == pytest.approx([0.9, 0.6, 0.3], abs=0.15)  # 96 of all requests


def test_a_request_that_differs_from_others_is_told_apart_within_a_few_verdicts() -> None:
    model = AcceptanceModel(0.8)
    taught(model, PositionRates(), [0.8], 200)
    own = PositionRates()
    taught(model, own, [0.0], 6)
    assert model.chances(own, 1)[0] < 0.4
    assert model.chances(PositionRates(), 1)[0] > 0.6


def test_a_run_of_surprises_makes_what_was_learned_fade() -> None:
    model, own = AcceptanceModel(0.8), PositionRates()
    taught(model, own, [1.0], 100)
    n_rejected = 0
    while model.chances(own, 1)[0] > 0.5:
        model.verified(own, (), 1, 0)
        n_rejected += 1
    assert n_rejected <= 7  # without fading: 24 remembered successes take 16 rejections
    assert own.verdicts[0].tried < FADED_WEIGHT + 8


def test_probabilities_are_calibrated_and_used_where_they_predict_better() -> None:
    """A drafter that is sure of half its drafts, and wrong about how sure: 0.97 means 0.8, 0.6 means 0.1."""
    model, own, rng = AcceptanceModel(0.75), PositionRates(), random.Random(1)
    for _ in range(400):
        sure = rng.random() < 0.5
        probabilities = [0.97 if sure else 0.6]
        model.drafted(own, probabilities)
        model.verified(own, probabilities, 1, int(rng.random() < (0.8 if sure else 0.1)))
    assert model.by_probability
    assert model.offered(own, 1, [0.97])[0] == pytest.approx(0.8, abs=0.15)
    assert model.offered(own, 1, [0.6])[0] == pytest.approx(0.1, abs=0.15)
    assert model.chances(own, 1)[0] == pytest.approx(0.45, abs=0.2)  # of drafts that are yet to be made


def test_probabilities_that_tell_nothing_are_ignored() -> None:
    model, rng = AcceptanceModel(0.75), random.Random(2)
    good, bad = PositionRates(), PositionRates()
    for _ in range(300):
        for own, chance in ((good, 0.9), (bad, 0.1)):
            model.verified(own, [rng.random()], 1, int(rng.random() < chance))
    assert not model.by_probability
    assert model.offered(good, 1, [0.01])[0] > 0.7
    assert model.offered(bad, 1, [0.99])[0] < 0.3


def test_drafts_without_probabilities_are_judged_by_position() -> None:
    model, own = AcceptanceModel(0.75), PositionRates()
    taught(model, own, [1.0], 50, probabilities=[0.05])
    assert model.offered(own, 1, [])[0] > 0.9


@given(st.lists(st.floats(0, 1), max_size=8))
def test_expected_tokens_are_one_and_the_chances_of_all_drafts_up_to_each(chances: list[float]) -> None:
    tokens, likely = expected_tokens(chances), 1.0
    assert tokens[0] == 1.0
    for chance, before, after in zip(chances, tokens, tokens[1:], strict=False):
        likely *= chance
        assert after - before == pytest.approx(likely, abs=1e-9)


@given(st.lists(st.booleans(), max_size=100), st.integers(2, 50), st.floats(0, 1))
def test_a_rate_stays_within_bounds_and_memory(verdicts: list[bool], memory: int, prior: float) -> None:
    rate = Rate()
    for accepted in verdicts:
        rate.add(accepted, memory)
    assert 0.0 <= rate.mean(prior) <= 1.0
    assert rate.tried <= memory + 1e-9


def test_drafts_that_were_left_out_have_no_chance() -> None:
    """Two drafts are accepted, and a third was never sure: a slice yields three tokens, whatever is asked for."""
    model, own = AcceptanceModel(0.8), PositionRates()
    for _ in range(200):
        model.verified(own, [0.9, 0.8], 2, 2, n_left_out=2)
        model.drafted(own, [0.9, 0.8], 2)
    assert expected_tokens(model.chances(own, 4))[-1] == pytest.approx(3, abs=0.25)
    assert DraftLengths().shares == ()
    lengths = DraftLengths()
    for n_made in (4, 2) * 100:
        lengths.add(n_made, 4 - n_made)
    assert lengths.shares == pytest.approx([1, 1, 0.5, 0.5], abs=0.05)


def test_a_rejected_draft_says_nothing_of_those_left_out() -> None:
    model, own = AcceptanceModel(0.8), PositionRates()
    for _ in range(50):
        model.verified(own, [0.9, 0.8], 2, 1, n_left_out=2)
    assert len(own.verdicts) == 2
