"""The pipeline's draft stage: which steps it gets, when and with what, and that its loss is not the pipeline's."""

from __future__ import annotations

import pytest

from lucevisor.engine.pipeline import Pipeline, PipelineResult, StepInFlight
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.frames import POSTED
from lucevisor.protocol.steps import (
    PENDING,
    CloseSequence,
    DraftStep,
    Sampled,
    Slice,
    Step,
    StepResult,
)
from tests.engine.pipeline_wires import Bench, Wire


class DraftBench(Bench):
    """Two stages on a wire each; the drafter beside the last one, or on wire 2."""

    def __init__(self, *, with_output: bool, has_doorbells: bool = False) -> None:
        super().__init__([0, 1], has_doorbells=has_doorbells)
        self.wires.append(Wire())
        self.log: list[str] = []
        self.pipeline.drafts.on_drafted = lambda result: self.log.append(f"drafts {result.step_id}")
        self.pipeline.drafts.on_lost = lambda failure: self.log.append(failure.message)
        self.drafter = self.wires[1 if with_output else 2]
        self.with_output = with_output

    def attach(self) -> None:
        self.pipeline.drafts.attach(self.drafter, with_output=self.with_output)

    def on_result(self, result: PipelineResult) -> None:
        super().on_result(result)
        self.log.append(f"result {result.step.step_id}")


def step(step_id: int) -> Step:
    return Step(step_id, 0, [], [Slice(4, 0, [7, 8], True), Slice(2, 0, [1], True), Slice(3, 0, [5], False)])


SAMPLED = [Sampled(4, 42), Sampled(2, 9), Sampled(2, 10)]


def test_in_the_output_stages_daemon_a_step_goes_to_the_drafter_right_behind_the_last_stage() -> None:
    bench = DraftBench(with_output=True)
    bench.attach()
    bench.pipeline.submit(step(1))
    assert bench.drafter.sent == []
    bench.pipeline.receive(StepResult(1, 0))
    assert bench.drafter.sent == [(1, step(1)), (2, DraftStep(step(1), None))]
    bench.pipeline.receive(StepResult(1, 1, SAMPLED))
    bench.pipeline.receive(StepResult(1, 2))
    assert bench.log == ["result 1", "drafts 1"]


def test_in_another_daemon_it_gets_a_step_with_the_tokens_once_they_are_known_and_before_anybody_else() -> None:
    bench = DraftBench(with_output=False)
    bench.attach()
    bench.pipeline.submit(step(1))
    bench.pipeline.receive(StepResult(1, 0))
    assert bench.drafter.sent == []
    sent_before: list[int] = []
    bench.pipeline._on_result = lambda _: sent_before.append(len(bench.drafter.sent))
    bench.pipeline.receive(StepResult(1, 1, SAMPLED))
    assert bench.drafter.sent == [(2, DraftStep(step(1), [[42], [9, 10], []]))]
    assert sent_before == [1]


def test_a_draft_stage_in_another_daemon_gets_the_tokens_of_a_step_that_ran_ahead() -> None:
    stage, drafter = Wire(), Wire()
    pipeline = Pipeline([stage], lambda _: None, lambda failure: pytest.fail(failure.message))
    ahead = Step(2, 1, [], [Slice(2, 1, [PENDING], True), Slice(4, 2, [PENDING], True)])
    pipeline.submit(Step(1, 0, [], [Slice(4, 0, [7, 8], True), Slice(2, 0, [1], True)]))
    pipeline.drafts.attach(drafter, with_output=False)
    pipeline.submit(ahead)
    pipeline.receive(StepResult(1, 0, [Sampled(4, 42), Sampled(2, 10)]))
    pipeline.receive(StepResult(2, 0, [Sampled(2, 11), Sampled(4, 43)]))
    known = Step(2, 1, [], [Slice(2, 1, [10], True), Slice(4, 2, [42], True)])
    assert drafter.sent == [(1, DraftStep(known, [[11], [43]]))]


def ahead(step_id: int, depends_on_step: int) -> Step:
    return Step(step_id, 0, [], [Slice(2, step_id, [PENDING], True)], depends_on_step=depends_on_step)


def test_a_draft_stage_gets_posted_steps_and_those_that_run_ahead_together_with_the_output_stage() -> None:
    bench = DraftBench(with_output=True, has_doorbells=True)
    bench.attach()
    steps = [Step(1, 0, [], [Slice(2, 1, [7], True)]), ahead(2, 1)]
    for one in steps:
        bench.pipeline.submit(one)
    assert bench.drafter.sent == [message for one in steps for message in ((1 | POSTED, one), (2, DraftStep(one)))]
    for step_id in (1, 2):
        bench.pipeline.receive(StepResult(step_id, 0, [Sampled(2, 41)] if step_id == 2 else []))
        bench.pipeline.receive(StepResult(step_id, 1, [Sampled(2, 40 + step_id)]))
    for step_id in (1, 2):
        bench.pipeline.receive(StepResult(step_id, 2))
    assert bench.log == ["result 1", "result 2", "drafts 1", "drafts 2"]


def test_the_watchdog_does_not_see_drafts_behind_a_step_that_waits_for_its_rows() -> None:
    bench = DraftBench(with_output=True, has_doorbells=True)
    bench.attach()
    bench.pipeline.submit(step(1))
    bench.now = 2.0
    bench.pipeline.receive(StepResult(1, 0))
    assert bench.pipeline.oldest_in_flight(5.0) == StepInFlight(1, 1, 3.0)


@pytest.mark.parametrize("with_output", [True, False])
def test_a_draft_stage_gets_only_steps_submitted_while_it_is_attached(*, with_output: bool) -> None:
    bench = DraftBench(with_output=with_output)
    bench.pipeline.submit(step(1))
    bench.attach()
    bench.pipeline.submit(step(2), opening=[CloseSequence(5)])
    bench.pipeline.submit(step(3), first_stage=1)  # a replay
    bench.pipeline.receive(StepResult(3, 1, SAMPLED))
    for stage in (0, 1):
        for step_id in (1, 2):
            bench.pipeline.receive(StepResult(step_id, stage, SAMPLED))
    sent = [message for _, message in bench.drafter.sent if isinstance(message, DraftStep)]
    assert [message.step for message in sent] == [Step(2, 0, [CloseSequence(5)], step(2).slices)]
    bench.pipeline.drafts.detach()
    bench.pipeline.receive(StepResult(2, 2))  # too late, and no harm
    assert bench.log == ["result 3", "result 1", "result 2"]
    assert not bench.failures


@pytest.mark.parametrize("with_output", [True, False])
def test_while_it_rests_a_draft_stage_gets_nothing_but_what_closes_or_opens_its_sequences(*, with_output: bool) -> None:
    bench = DraftBench(with_output=with_output)
    bench.attach()
    bench.pipeline.submit(step(1))
    bench.pipeline.drafts.suspended = True
    bench.pipeline.submit(step(2), opening=[CloseSequence(5)])
    bench.pipeline.submit(step(3))
    for stage in (0, 1):
        for step_id in (1, 2, 3):
            bench.pipeline.receive(StepResult(step_id, stage, SAMPLED))
    sent = [message.step for _, message in bench.drafter.sent if isinstance(message, DraftStep)]
    assert [(one.step_id, one.operations) for one in sent] == [(1, step(1).operations), (2, [CloseSequence(5)])]
    for step_id in (1, 2):
        bench.pipeline.receive(StepResult(step_id, 2))  # what it was sent before, it answers
    assert not bench.failures


@pytest.mark.parametrize("error", [LinkClosed("group draft", "link", "wait"), BrokenPipeError("gone")])
def test_a_dead_drafter_is_lost_and_the_pipeline_goes_on(error: Exception) -> None:
    bench = DraftBench(with_output=False)
    bench.attach()
    bench.drafter.error = error
    bench.pipeline.submit(step(1))
    bench.pipeline.receive(StepResult(1, 0))
    bench.pipeline.receive(StepResult(1, 1, SAMPLED))
    lost, result = bench.log
    assert lost.startswith("step 1 could not be sent to the draft stage: ")
    assert result == "result 1"
    bench.pipeline.submit(step(2))
    bench.pipeline.receive(StepResult(2, 0))
    bench.pipeline.receive(StepResult(2, 1, SAMPLED))
    assert bench.log[2:] == ["result 2"]
    assert not bench.failures


def test_a_drafter_that_answers_out_of_order_is_lost() -> None:
    bench = DraftBench(with_output=False)
    bench.attach()
    bench.pipeline.receive(StepResult(1, 2))
    assert bench.log == ["the draft stage answered step 1 while no step was due"]
    bench.attach()
    for step_id in (1, 2):
        bench.pipeline.submit(step(step_id))
        bench.pipeline.receive(StepResult(step_id, 0))
        bench.pipeline.receive(StepResult(step_id, 1, SAMPLED))
    bench.pipeline.receive(StepResult(2, 2))
    assert bench.log[-1] == "the draft stage answered step 2 while step 1 was due"
    assert not bench.failures


@pytest.mark.parametrize("with_output", [True, False])
def test_the_watchdog_sees_the_step_that_the_drafter_works_on(*, with_output: bool) -> None:
    bench = DraftBench(with_output=with_output)
    bench.attach()
    bench.pipeline.submit(step(1))
    bench.now = 1.0
    bench.pipeline.receive(StepResult(1, 0))
    bench.now = 3.0
    assert bench.pipeline.oldest_in_flight(4.0) == StepInFlight(1, 1, 3.0)
    bench.pipeline.receive(StepResult(1, 1, SAMPLED))
    assert bench.pipeline.oldest_in_flight(4.0) == StepInFlight(1, 2, 1.0)
    bench.pipeline.receive(StepResult(1, 2))
    assert bench.pipeline.oldest_in_flight(4.0) is None
    bench.pipeline.submit(step(2))
    bench.pipeline.close()
    assert bench.pipeline.oldest_in_flight(9.0) is None
