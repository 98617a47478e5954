"""The pipeline: relay from stage to stage, order, failures, times."""

from __future__ import annotations

import pytest

from lucevisor.engine.pipeline import Pipeline, PipelineFailure, PipelineResult, StepInFlight
from lucevisor.protocol.errors import LinkClosed
from lucevisor.protocol.steps import Sampled, Slice, Step, StepResult
from tests.engine.pipeline_wires import Bench


def step(step_id: int) -> Step:
    return Step(step_id, step_id % 3, [], [Slice(4, 0, [7, 8], True)])


def test_a_step_goes_from_stage_to_stage_and_all_answers_come_out() -> None:
    bench = Bench([0, 1])
    bench.pipeline.submit(step(9))
    assert bench.wires[0].sent == [(0, step(9))]
    assert bench.wires[1].sent == []
    payloads = [memoryview(b"head"), memoryview(b"tail")]
    results = [StepResult(9, 0, compute_s=0.5), StepResult(9, 1, [Sampled(4, 42)])]
    bench.now = 2.0
    bench.pipeline.receive(results[0], payloads[0])
    assert bench.wires[1].sent == [(1, step(9))]
    bench.now = 5.0
    bench.pipeline.receive(results[1], payloads[1])
    assert bench.results == [PipelineResult(step(9), tuple(results), tuple(payloads), (0.0,), 5.0)]
    assert len(bench.pipeline.in_flight) == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (StepResult(2, 0), "stage 0 answered step 2 while step 1 was due"),
        (StepResult(1, 1), "stage 1 answered step 1 while no step was due"),
        (StepResult(1, 3), "answered for stage 3; there are 2"),
        (StepResult(1, -1), "answered for stage -1"),
    ],
)
def test_an_answer_out_of_order_ends_the_pipeline(wrong: StepResult, words: str) -> None:
    bench = Bench([0, 1])
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(step(2))
    bench.pipeline.receive(wrong)
    assert [f.code for f in bench.failures] == ["protocol_error"]
    assert words in bench.failures[0].message
    bench.pipeline.receive(StepResult(1, 0))  # nothing comes after the failure
    bench.pipeline.submit(step(3))
    bench.pipeline.close()
    assert (len(bench.failures), bench.results, bench.wires[1].ids) == (1, [], [])
    assert len(bench.pipeline.in_flight) == 0


@pytest.mark.parametrize("error", [BrokenPipeError("gone"), LinkClosed("end of file", "link left", "wait")])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_dead_link_ends_the_pipeline_without_an_exception(error: Exception, stage: int) -> None:
    bench = Bench([0, 1])
    bench.wires[stage].error = error
    bench.pipeline.submit(step(1))
    bench.pipeline.receive(StepResult(1, 0))
    assert [(f.stage, f.code) for f in bench.failures] == [(stage, "shard_lost")]
    assert "step 1 could not be sent" in bench.failures[0].message


def test_a_failure_is_passed_on_once_with_the_stage_it_is_blamed_on() -> None:
    bench = Bench([0, 1])
    bench.pipeline.submit(step(1))
    for reason in ("it answered for a stage of another group", "again"):
        bench.pipeline.fail(1, "protocol_error", reason)
    assert bench.failures == [PipelineFailure(1, "protocol_error", "it answered for a stage of another group")]
    assert len(bench.pipeline.in_flight) == 0


def test_only_answers_of_the_first_stage_say_that_it_is_free() -> None:
    bench, free = Bench([0, 1, 2]), []
    bench.pipeline.on_first_stage_done = lambda: free.append(len(bench.pipeline.in_flight))
    bench.pipeline.submit(step(1), first_stage=1)
    bench.pipeline.receive(StepResult(1, 1))
    assert free == []
    bench.pipeline.submit(step(2))
    bench.pipeline.receive(StepResult(2, 0))
    assert free == [2]


def test_the_oldest_step_is_the_one_a_daemon_has_worked_on_for_longest() -> None:
    bench = Bench([0, 1])
    assert bench.pipeline.oldest_in_flight(0.0) is None
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(step(2))
    assert bench.pipeline.oldest_in_flight(3.0) == StepInFlight(1, 0, 3.0)
    bench.now = 10.0
    bench.pipeline.receive(StepResult(1, 0))
    # Step 2 was sent at 0 but its daemon was busy until 10.
    assert bench.pipeline.oldest_in_flight(12.0) == StepInFlight(2, 0, 2.0)
    bench.now = 11.0
    bench.pipeline.receive(StepResult(2, 0))
    assert bench.pipeline.oldest_in_flight(30.0) == StepInFlight(1, 1, 20.0)
    bench.now = 31.0
    bench.pipeline.receive(StepResult(1, 1))
    assert bench.pipeline.oldest_in_flight(32.0) == StepInFlight(2, 1, 1.0)


def test_a_daemon_of_two_stages_is_not_late_while_it_answers_for_the_other() -> None:
    bench = Bench([0, 0])
    bench.pipeline.submit(step(1))
    bench.pipeline.submit(step(2))
    bench.now = 5.0
    bench.pipeline.receive(StepResult(1, 0))
    bench.now = 9.0
    bench.pipeline.receive(StepResult(2, 0))
    assert bench.pipeline.oldest_in_flight(10.0) == StepInFlight(1, 1, 1.0)


def test_a_dead_link_does_not_hold_up_steps_that_are_past_it() -> None:
    bench = Bench([0, 1])
    bench.pipeline.submit(step(1))
    bench.pipeline.receive(StepResult(1, 0))
    bench.wires[0].error = BrokenPipeError("gone")
    bench.pipeline.receive(StepResult(1, 1))
    assert [r.step.step_id for r in bench.results] == [1]
    assert bench.failures == []


def test_after_close_neither_answers_nor_failures_are_told() -> None:
    bench = Bench([0, 1])
    bench.pipeline.submit(step(1))
    bench.pipeline.close()
    bench.pipeline.receive(StepResult(1, 0))
    bench.pipeline.receive(StepResult(9, 7))
    bench.pipeline.fail(0, "protocol_error", "too late")
    bench.pipeline.submit(step(2))
    assert (bench.results, bench.failures, bench.wires[0].ids, bench.wires[1].ids) == ([], [], [(0, 1)], [])


def test_who_takes_a_result_may_close_the_pipeline_or_send_the_next_step() -> None:
    """The engine does both from inside its callback."""
    bench = Bench([0])
    taken: list[int] = []

    def take(result: PipelineResult) -> None:
        taken.append(result.step.step_id)
        if len(taken) == 1:
            pipeline.submit(step(3))
        else:
            pipeline.close()

    pipeline = Pipeline(bench.wires, take, bench.failures.append)
    for i in (1, 2):
        pipeline.submit(step(i))
    for i in (1, 2, 3):
        pipeline.receive(StepResult(i, 0))
    assert (taken, bench.failures, bench.wires[0].ids) == ([1, 2], [], [(0, 1), (0, 2), (0, 3)])
