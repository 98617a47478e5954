"""What a round takes beside its step and its drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lucevisor.engine.drafting.costs import PRIORS, BatchCosts, DraftTimes, Round
from lucevisor.engine.scheduling.round_gaps import RoundGaps
from lucevisor.engine.step import ScheduledSequence, ScheduledStep
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import PENDING, Slice


def step(number: int, *slices: Slice) -> ScheduledStep:
    return ScheduledStep(number, {s.sequence: ScheduledSequence(None, None, s) for s in slices}, True)  # type: ignore[arg-type]


def decode(sequence: int, n_ahead: int = 0) -> Slice:
    return Slice(sequence, 70, [5], True, n_ahead=n_ahead)


def test_rounds_without_and_with_drafts() -> None:
    gaps = RoundGaps()
    steps = [step(i, decode(0), decode(1, n_ahead=3 * (i == 8))) for i in (7, 8, 9)]
    assert gaps.applied(steps[0], 0.010, 1.000) is None
    assert gaps.applied(steps[1], 0.010, 1.011) == (Round.PLAIN, pytest.approx(0.001))
    gaps.drafted(steps[1], 0.002)
    assert gaps.applied(steps[2], 0.012, 1.028) == (Round.SEEN, pytest.approx(0.003))


def test_a_step_sent_before_its_drafts_were_known_is_told_from_others() -> None:
    gaps = RoundGaps()
    asking, pending, filled = (
        Slice(0, 70, [5, *drafts], True, len(drafts), n_ahead=2) for drafts in ([], [PENDING] * 2, [6, 7])
    )
    gaps.applied(step(7, asking), 0.010, 1.000)
    gaps.planned(step(8, pending))
    gaps.planned(step(9, filled))
    assert gaps.applied(step(8, filled), 0.010, 1.012) == (Round.UNSEEN, pytest.approx(0.002))
    assert gaps.applied(step(9, filled), 0.010, 1.025) == (Round.SEEN, pytest.approx(0.003))


def test_the_wait_for_a_verdict_is_no_gap_of_plain_decoding() -> None:
    gaps = RoundGaps()
    verify = Slice(0, 70, [5, 6, 7], True, 2)
    gaps.applied(step(7, verify), 0.010, 1.000)
    assert gaps.applied(step(8, decode(0)), 0.010, 1.020) is None
    assert gaps.applied(step(9, decode(0)), 0.010, 1.031) == (Round.PLAIN, pytest.approx(0.001))


def test_a_plain_step_that_waited_is_none_of_plain_decoding_that_runs_ahead() -> None:
    gaps = RoundGaps(lambda: True)
    gaps.applied(step(7, decode(0)), 0.010, 1.000)
    assert gaps.applied(step(8, decode(0)), 0.010, 1.012) is None
    assert gaps.applied(replace(step(9, decode(0)), follows=8), 0.010, 1.022) == (Round.PLAIN, pytest.approx(0.0))


def test_a_step_that_was_prepared_while_another_was_computed_has_a_negative_gap() -> None:
    gaps = RoundGaps()
    gaps.applied(step(7, decode(0)), 0.010, 1.0)
    assert gaps.applied(step(8, decode(0)), 0.010, 1.008) == (Round.PLAIN, pytest.approx(-0.002))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (step(7, decode(0)), step(9, decode(0))),  # another was in between
        (step(7, decode(0)), step(8, decode(0), decode(1))),  # another micro-batch
        (step(7, Slice(0, 0, [1, 2], True)), step(8, decode(0))),
        (step(7), step(8)),
    ],
    ids=["in between", "others", "prompt", "empty"],
)
def test_other_rounds_tell_nothing(first: ScheduledStep, second: ScheduledStep) -> None:
    gaps = RoundGaps()
    gaps.applied(first, 0.01, 1.0)
    assert gaps.applied(second, 0.01, 1.5) is None


def test_drafting_must_pay_for_the_gaps_of_its_rounds() -> None:
    times = DraftTimes(PRIORS[DraftKind.MTP])
    costs = BatchCosts(times, 1, 0.010)
    for _ in range(5):
        times.steps.add(1, 1, 0.010)
        times.steps.add(4, 1, 0.012)
        times.drafts.add(3, 1, 0.002)
    before = costs.round_s(3)
    times.add_gap(Round.SEEN, 0.001)
    assert (costs.round_s(0), costs.round_s(3)) == (pytest.approx(0.011), pytest.approx(before + 0.001))
    times.add_gap(Round.PLAIN, 0.0)
    assert (costs.round_s(0), costs.bare_round_s) == (pytest.approx(0.010), pytest.approx(0.010))
    assert costs.charged(0.012, drafted=True) == pytest.approx(1.3)


def test_drafts_are_looked_at_where_that_was_measured_to_spare_more_than_it_takes() -> None:
    times = DraftTimes(PRIORS[DraftKind.DFLASH])
    costs = BatchCosts(times, 1, 0.010)
    for _ in range(5):
        times.steps.add(1, 1, 0.010)
        times.steps.add(8, 1, 0.017)  # 1 ms a row
    assert times.look_s is None
    assert costs.pays_to_look(7, 4.0), "half of four rows are spared, 2 ms, for 1.5 by assumption"
    assert not costs.pays_to_look(7, 5.5)
    times.add_gap(Round.UNSEEN, -0.001)
    times.add_gap(Round.SEEN, 0.002)
    assert times.look_s == pytest.approx(0.003)
    assert not costs.pays_to_look(7, 4.0)
    assert costs.pays_to_look(7, 1.5)
    assert not costs.pays_to_look(0, 1.0)
    for _ in range(2000):  # it was long ago
        times.add_gap(Round.UNSEEN, -0.001)
    assert times.look_s is None


def test_rounds_with_drafts_count_as_the_last_one() -> None:
    times = DraftTimes(PRIORS[DraftKind.DFLASH])
    assert times.gap_s(drafted=True) == times.gap_s(drafted=False) == 0.0
    times.add_gap(Round.PLAIN, 0.001)
    assert times.gap_s(drafted=True) == 0.001
    times.add_gap(Round.UNSEEN, -0.002)
    times.add_gap(Round.SEEN, 0.003)
    assert (times.gap_s(drafted=True), times.gap_s(drafted=False)) == (0.003, 0.001)
    times.add_gap(Round.UNSEEN, -0.002)
    assert times.gap_s(drafted=True) == -0.002
