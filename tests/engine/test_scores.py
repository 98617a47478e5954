"""Log-probabilities of prompts: which tokens a slice asks for, and which results are refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lucevisor.engine.request import FinishedEvent, TokenScore
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import StepPlan, WrongResult
from lucevisor.protocol.steps import Scored, StepResult
from tests.engine.scheduler_steps import answer, plans
from tests.engine.toy_engine import limits, request


def scored_answer(plan: StepPlan) -> StepResult:
    """A token's log-probability is minus its id."""
    scored = [
        Scored(s.sequence, s.start + 1, [-float(t) for t in s.scored], [[(t, -float(t))] for t in s.scored])
        for s in plan.step.slices
        if s.scored
    ]
    return msgspec.structs.replace(answer(plan), scored=scored)


def test_every_token_but_the_first_is_scored_once_and_the_prefix_is_computed_again() -> None:
    scheduler = Scheduler(limits())
    prompt = range(10, 310)
    for name in "ab":
        scheduler.submit(replace(request(name, prompt, n=3), score_prompt=True), 0.0)
        asked: list[int] = []
        last = None
        while not scheduler.idle:
            for plan in plans(scheduler):
                asked += [t for s in plan.step.slices for t in s.scored]
                for _, event in scheduler.apply(scored_answer(plan), 0.0):
                    last = event
        assert asked == [*prompt][1:]
        assert isinstance(last, FinishedEvent)
        assert last.usage.cached_tokens == 0
        assert last.prompt_scores == tuple(TokenScore(-float(t), ((t, -float(t)),)) for t in prompt[1:])


def test_requests_without_scores_ask_for_none() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(request("a", range(100)), 0.0)
    assert not any(s.scored for plan in plans(scheduler) for s in plan.step.slices)


@pytest.mark.parametrize(
    "wrong",
    [[], [Scored(0, 1, [-1.0], [[]])], [Scored(0, 2, [-1.0, -2.0], [[], []])], [Scored(5, 1, [-1.0, -2.0], [[], []])]],
    ids=["none", "too few", "elsewhere", "another sequence"],
)
def test_a_result_with_other_scores_is_refused(wrong: list[Scored]) -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(replace(request("a"), score_prompt=True), 0.0)
    [plan] = plans(scheduler)
    with pytest.raises(WrongResult, match="other scores"):
        scheduler.apply(msgspec.structs.replace(answer(plan), scored=wrong), 0.0)
    assert scheduler.n_in_flight == 1
