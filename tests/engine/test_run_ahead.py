"""Steps sent while the one that samples their tokens is running."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lucevisor.engine.limits import SpeculationSettings
from lucevisor.engine.request import FinishedEvent, TokenEvent
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.step import StepPlan
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import PENDING, CloseSequence, Sampling
from tests.engine.prefix_scheduler import warm
from tests.engine.scheduler_steps import answer, decoding, plans
from tests.engine.toy_engine import limits, request
from tests.engine.toy_pipeline import ToyConstraint


def tokens(scheduler: Scheduler) -> list[list[list[int]]]:
    """The tokens of the slices of each step that can be sent now."""
    return [[piece.tokens for piece in plan.step.slices] for plan in plans(scheduler)]


def test_one_step_runs_ahead() -> None:
    scheduler = decoding(limits(pools=PoolSizes(16, 0, 4)), "ab")
    running, ahead = plans(scheduler)
    assert [s.tokens for s in running.step.slices] == [[7], [7]]
    assert [(s.start, s.tokens) for s in ahead.step.slices] == [(4, [PENDING]), (4, [PENDING])]
    assert scheduler.apply(answer(running, 5), 0.0) == [("a", TokenEvent(5)), ("b", TokenEvent(5))]
    assert tokens(scheduler) == [[[PENDING], [PENDING]]]
    assert scheduler.apply(answer(ahead, 6), 0.0) == [("a", TokenEvent(6)), ("b", TokenEvent(6))]


def test_a_request_ends_with_the_last_of_its_tokens_while_others_run_ahead() -> None:
    scheduler = Scheduler(limits(pools=PoolSizes(16, 0, 4)))
    for name, n in (("a", 3), ("b", 9)):
        scheduler.submit(request(name, n=n), 0.0)
    told = {"a": 0, "b": 0}
    carried = {"a": 0, "b": 0}
    while not scheduler.idle:
        for plan in plans(scheduler):
            for name in plan.request_ids:
                carried[name] += 1
            for name, event in scheduler.apply(answer(plan), 0.0):
                told[name] += isinstance(event, TokenEvent)
    assert told == carried == {"a": 3, "b": 9}  # no step for nothing


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": Sampling(repetition_penalty=1.1)},
        {"sampling": Sampling(n_top_logprobs=0)},
        {"constraint": ToyConstraint(1)},
    ],
    ids=["penalties", "log-probabilities", "constraint"],
)
def test_all_wait_where_one_needs_its_tokens(more: dict[str, object]) -> None:
    scheduler = Scheduler(limits(pools=PoolSizes(16, 0, 4)))
    scheduler.submit(request("a", n=50), 0.0)
    scheduler.submit(replace(request("b", n=50), **more), 0.0)
    for _ in range(6):
        for plan in plans(scheduler):
            assert not any(PENDING in piece.tokens for piece in plan.step.slices)
            scheduler.apply(answer(plan), 0.0)


def test_a_prompt_is_not_kept_waiting() -> None:
    scheduler = decoding(limits(pools=PoolSizes(16, 0, 4)), "a")
    scheduler.submit(request("b"), 0.0)
    assert tokens(scheduler) == [[[7], [1, 2, 3]]]


def test_several_stages_do_not_run_ahead() -> None:
    scheduler = decoding(limits(pools=PoolSizes(16, 0, 4)), "a", n_stages=2)
    assert tokens(scheduler) == [[[7]]]


def running_ahead(stop_ids: frozenset[int] = frozenset()) -> tuple[Scheduler, list[StepPlan]]:
    """A request with a cached prompt of 130 tokens and one of its own; two steps are in flight, for two more."""
    scheduler = Scheduler(warm(spaces=frozenset({Space.FULL, Space.RECURRENT})))
    scheduler.submit(request("a", range(130), n=50, stop_ids=stop_ids), 0.0)
    while len(found := plans(scheduler)) != 2 or found[1].step.slices[0].tokens != [PENDING]:
        for plan in found:
            scheduler.apply(answer(plan), 0.0)
    return scheduler, found


def test_a_request_that_stops_leaves_all_it_computed_in_the_cache() -> None:
    scheduler, [running, ahead] = running_ahead(frozenset({9}))
    [(_, event)] = scheduler.apply(answer(running, 9), 0.0)
    assert isinstance(event, FinishedEvent)
    assert event.reason == "stop"
    assert scheduler.apply(answer(ahead, 3), 0.0) == []
    assert scheduler.idle
    scheduler.submit(request("b", [*range(130), 7, 9, 50], n=1), 0.0)
    [plan] = plans(scheduler)
    assert [(s.start, s.tokens) for s in plan.step.slices] == [(132, [50])]


def test_of_a_request_cancelled_while_it_ran_ahead_the_prompt_stays_cached() -> None:
    """Its state is behind a token that nobody knows."""
    scheduler, [running, ahead] = running_ahead()
    [(_, event)] = scheduler.cancel("a", 0.0)
    assert isinstance(event, FinishedEvent)
    for plan in (running, ahead):
        assert scheduler.apply(answer(plan, 9), 0.0) == []
    assert isinstance(scheduler.cut(0.0).step.operations[-1], CloseSequence)
    scheduler.submit(request("b", [*range(130), 7, 9, 50], n=1), 0.0)
    [plan] = plans(scheduler)
    assert plan.step.slices[0].start == 128


def test_drafts_that_the_text_itself_offers_end_the_run() -> None:
    settings = SpeculationSettings(max_drafts=3, lookup=True, fixed=True, n_vocabulary=97)
    scheduler = Scheduler(limits(pools=PoolSizes(16, 0, 4), speculation=settings))
    scheduler.submit(request("a", [1, 2, 3, 4, 5, 6, 1, 2, 3], n=50), 0.0)
    [prompt] = plans(scheduler)
    scheduler.apply(answer(prompt, 4), 0.0)
    found = plans(scheduler)
    assert [piece.tokens for plan in found for piece in plan.step.slices] == [[4, 5, 6, 1]]
