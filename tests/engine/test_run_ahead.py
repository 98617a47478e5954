"""Steps sent while the one that samples their tokens is running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lucevisor.engine.request import FinishedEvent
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.spec_decode.controller import RequestDrafts, SpecDecodeController
from lucevisor.engine.step import StepPlan
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings
from lucevisor.protocol.steps import PENDING, Drafted, SamplingParams, StepResult
from tests.engine.scheduler_steps import answer, decoding, plans, warm
from tests.engine.toy_engine import limits, request
from tests.engine.toy_pipeline import ToyConstraint


def tokens(scheduler: Scheduler) -> list[list[list[int]]]:
    """The tokens of the slices of each step that can be sent now."""
    return [[piece.tokens for piece in plan.step.slices] for plan in plans(scheduler)]


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": SamplingParams(repetition_penalty=1.1)},
        {"sampling": SamplingParams(n_top_logprobs=0)},
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


def test_several_stages_run_ahead_where_the_last_one_tells_the_first_the_tokens() -> None:
    scheduler = decoding(limits(pools=PoolSizes(16, 0, 4)), "a", n_stages=2)
    assert tokens(scheduler) == [[[7]]]
    scheduler = decoding(limits(pools=PoolSizes(16, 0, 4)), "a", n_stages=2)
    scheduler.attach(2, has_doorbells=True)
    running, ahead = plans(scheduler)
    assert (running.step.depends_on_step, ahead.step.depends_on_step) == (0, running.step.step_id)
    assert ahead.step.slices[0].tokens == [PENDING]


@pytest.mark.parametrize("n_stages", [2, 3])
def test_each_micro_batch_has_a_step_under_way_and_one_behind_it(n_stages: int) -> None:
    scheduler = decoding(limits(pools=PoolSizes(32, 0, 16), max_sequences=8), "abcdef", n_stages=n_stages)
    scheduler.attach(n_stages, has_doorbells=True)
    found = plans(scheduler)
    of = [{s.sequence for s in plan.step.slices} for plan in found]
    assert of[:n_stages] == of[n_stages:]
    assert {len(sequences) for sequences in of} == {6 // n_stages}
    assert [plan.step.depends_on_step for plan in found[n_stages:]] == [plan.step.step_id for plan in found[:n_stages]]
    for _ in range(20):
        scheduler.apply(answer(found.pop(0)), 0.0)
        [behind] = plans(scheduler)
        assert behind.step.depends_on_step == found[n_stages - 1].step.step_id
        found.append(behind)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
def test_a_request_starts_while_all_micro_batches_run_ahead(n_stages: int) -> None:
    scheduler = decoding(limits(pools=PoolSizes(32, 0, 16), max_sequences=8), "abcdef", n_stages=n_stages)
    scheduler.attach(n_stages, has_doorbells=True)
    found = plans(scheduler)
    assert len(found) == 2 * n_stages
    scheduler.submit(request("g"), 0.0)
    for n_answered in range(2 * n_stages):
        if any("g" in plan.request_ids for plan in found):
            assert n_answered <= n_stages  # those that ran ahead
            return
        scheduler.apply(answer(found.pop(0)), 0.0)
        found += plans(scheduler)
    raise AssertionError("it waits until another one ends")


def test_micro_batches_that_became_unequal_are_dealt_again() -> None:
    scheduler = decoding(limits(pools=PoolSizes(32, 0, 16), max_sequences=8), "abcd", n_stages=2)
    scheduler.attach(2, has_doorbells=True)
    found = plans(scheduler)
    for name in found[0].request_ids:
        scheduler.cancel(name, 0.0)
    while found:
        scheduler.apply(answer(found.pop(0)), 0.0)
        found += plans(scheduler)
        if len(found) == 4 and all(len(plan.step.slices) == 1 for plan in found):
            return
    raise AssertionError("one of two sequences waits for the other")


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


DRAFTER = SpeculationSettings(max_drafts=3, drafter=True)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
@pytest.mark.parametrize("with_output", [True, False])
def test_a_drafter_that_is_not_asked_does_not_end_the_run(*, with_output: bool, n_stages: int) -> None:
    scheduler = decoding(
        limits(pools=PoolSizes(16, 0, 4, draft_states=8), speculation=DRAFTER), "ab", n_stages=n_stages
    )
    scheduler.attach(n_stages, has_doorbells=True)
    scheduler.attach_drafter(with_output=with_output)
    scheduler.drafting.speculation = Asked(3)
    in_flight, drafting = plans(scheduler), list[StepPlan]()
    assert in_flight[0].opening is not None
    for i in range(20):
        done = in_flight.pop(0)
        scheduler.apply(answer(done, 5), 0.0)
        drafting.append(done)
        if len(drafting) > 1 and not drafting[0].step.upkeep:  # the drafter is a step behind
            scheduler.drafting.on_drafts(StepResult(drafting[0].step.step_id, n_stages))
        del drafting[: len(drafting) - 1]
        assert done.opening is not None or done.step.upkeep == (with_output and n_stages > 1)
        found = plans(scheduler)
        in_flight += found
        if i > n_stages:
            assert len(in_flight) == 2 * min(2, n_stages)  # of each micro-batch one is under way and one behind it
            assert [s.tokens for plan in found for s in plan.step.slices] == [[PENDING]] * len(found[0].step.slices)


class Asked(SpecDecodeController):
    """Asks for as many drafts as ``turns`` say, then for none, and verifies all."""

    def __init__(self, max_drafts: int) -> None:
        super().__init__(max_drafts)
        self.turns: list[int] = []

    def num_draft_tokens(self, own: RequestDrafts, n_decoding: int) -> int:
        return self.turns.pop(0) if self.turns else 0

    def num_verify_tokens(self, drafts: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        return max(len(drafted.tokens) for _, drafted in drafts)
