"""When choices of widths are made again."""

from __future__ import annotations

import pytest

from lucevisor.engine.drafting.choices import CHOICE_STEPS, EAGER_STEPS, WidthChoice, WidthChoices
from lucevisor.engine.drafting.request import RequestDrafts
from lucevisor.engine.drafting.speculation import Speculation

LATE = 2 * EAGER_STEPS


def made(n_slices: int, at: int = LATE) -> WidthChoices:
    choices = WidthChoices()
    assert choices.asked(n_slices, at) is None
    choices.keep(n_slices, WidthChoice(3, 1.0, at))
    return choices


def test_a_choice_holds_for_some_steps() -> None:
    choices = made(2)
    assert choices.asked(2, LATE + CHOICE_STEPS - 1) == choices.get(2) == choices.latest
    assert choices.asked(2, LATE + CHOICE_STEPS) is None
    assert choices.asked(3, LATE) is None
    early = made(2, at=5)
    assert early.asked(2, 6) is None


def test_that_of_a_lone_slice_is_made_again_behind_its_step() -> None:
    choices = made(1)
    assert choices.asked(1, LATE + CHOICE_STEPS) == choices.get(1)
    assert choices.lone_is_due(LATE + CHOICE_STEPS, oldest=LATE)
    assert not choices.lone_is_due(LATE + CHOICE_STEPS - 1, oldest=LATE)
    assert not choices.lone_is_due(
        LATE + CHOICE_STEPS, oldest=LATE + CHOICE_STEPS + 1
    )  # nothing decodes alone any more
    choices.keep(1, WidthChoice(2, 1.0, LATE + CHOICE_STEPS))
    assert not choices.lone_is_due(LATE + CHOICE_STEPS, oldest=LATE)


@pytest.mark.parametrize("n_slices", [1, 2])
def test_choices_from_before_an_event_are_made_again(n_slices: int) -> None:
    choices = made(n_slices)
    choices.renew_at = LATE + 1
    assert (choices.asked(n_slices, LATE + 1) is None) is (n_slices > 1)
    assert choices.lone_is_due(LATE + 1, oldest=LATE) is (n_slices == 1)
    choices = made(n_slices)
    choices.renew = True
    assert choices.asked(n_slices, LATE) is None
    choices.keep(n_slices, WidthChoice(1, 1.0, LATE))
    assert choices.asked(n_slices, LATE) is not None


def test_a_lone_request_is_not_asked_to_wait_for_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made by the time of its step, and asking finds it."""
    policy, own, chosen = Speculation(4), RequestDrafts("a"), list[int]()
    policy.n_ahead(own, 1)
    for _ in range(EAGER_STEPS + 1):
        policy.measured(1, 1, 0.01)
        policy.n_ahead(own, 1)
    choose = policy._choose
    monkeypatch.setattr(policy, "_choose", lambda n: (chosen.append(policy._n_measured), choose(n))[1])
    for _ in range(2 * CHOICE_STEPS):
        n_before = len(chosen)
        policy.n_ahead(own, 1)
        assert len(chosen) == n_before
        policy.measured(1, 1, 0.01)
    assert chosen
