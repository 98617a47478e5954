"""The pipeline: relay from stage to stage, order, failures, times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from lucevisor.engine.pipeline import Drafted as DraftsMade
from lucevisor.engine.pipeline import (
    DrafterDetached,
    Outcome,
    Pipeline,
    PipelineFailure,
    PipelineResult,
    SendCancelPending,
    SendFrame,
    StepInFlight,
    StepsReturned,
)
from lucevisor.protocol.connection import Connection
from lucevisor.protocol.frames import POSTED
from lucevisor.protocol.messages import Role
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import (
    PENDING,
    DraftStep,
    OpenSequence,
    PendingCancelled,
    Sampled,
    SamplingParams,
    Slice,
    Step,
    StepResult,
)


class Wire:
    """``sent``: (flags, message) of each frame; ``recalls``."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Step | DraftStep]] = []
        self.recalls: list[SendCancelPending] = []
        self._connection = Connection(Role.DAEMON)
        self._connection.state = LinkState.READY

    def send(self, message: bytes) -> None:
        self._connection.receive(message)
        for frame in self._connection.events():
            assert isinstance(frame.message, Step | DraftStep)
            step = frame.message.step if isinstance(frame.message, DraftStep) else frame.message
            assert frame.request_id == step.step_id
            self.sent.append((frame.flags, frame.message))

    @property
    def steps(self) -> list[tuple[int, Step]]:
        """(flags, step) of all but draft steps."""
        return [(flags, message) for flags, message in self.sent if isinstance(message, Step)]

    @property
    def ids(self) -> list[tuple[int, int]]:
        return [(flags, step.step_id) for flags, step in self.steps]


class Bench:
    """Carries out what the pipeline asks for after each call of ``pipeline``.  ``homes[s]``: the wire of stage s."""

    def __init__(self, homes: Sequence[int], *, has_doorbells: bool = False) -> None:
        self.now = 0.0
        self.wires = [Wire() for _ in range(max(homes) + 1)]
        self.stages = {stage: self.wires[home] for stage, home in enumerate(homes)}  # the draft stage is the last
        self.results: list[PipelineResult] = []
        self.plans: list[Step] = []  # submitted when a step ends, as the engine does
        self.failures: list[PipelineFailure] = []
        self.outcomes: list[Outcome] = []
        self.pipeline = DrivenPipeline(self, homes, has_doorbells=has_doorbells)

    def attach_drafter(self, wire: Wire, *, with_output: bool) -> None:
        if wire not in self.wires:
            self.wires.append(wire)
        self.stages[self.pipeline.n_stages] = wire
        self.pipeline.drafts.attach(self.wires.index(wire), with_output=with_output)

    def replace(self, stage: int, wire: Wire) -> None:
        """Restore a lost stage on another wire."""
        self.stages[stage] = wire
        self.pipeline.restore({stage: 100 + stage}, {})

    def carry_out(self) -> None:
        pipeline, out = self.pipeline, self.pipeline.out
        while out or pipeline.outcomes:
            while out:
                instruction = out.pop(0)
                if isinstance(instruction, SendFrame):
                    self.stages[instruction.stage].send(instruction.frame)
                elif isinstance(instruction, SendCancelPending):
                    self.stages[instruction.stage].recalls.append(instruction)
            if pipeline.outcomes:
                outcome = pipeline.outcomes.popleft()
                self.outcomes.append(outcome)
                if isinstance(outcome, PipelineResult):
                    self.on_result(outcome)
                    pipeline.drafts.deliver_drafts()
                elif isinstance(outcome, PipelineFailure):
                    self.failures.append(outcome)
                else:
                    self.on_outcome(outcome)

    def on_result(self, result: PipelineResult) -> None:
        self.results.append(result)
        if self.plans:
            self.pipeline.submit(self.plans.pop(0))

    def on_outcome(self, outcome: Outcome) -> None:
        """Also note the others."""

    def answer(self, step_id: int, *stages: int, hop_s: float = 0.0) -> None:
        for stage in stages:
            self.pipeline.receive(StepResult(step_id, stage, hop_s=hop_s))

    @property
    def done(self) -> list[int]:
        return [result.step.step_id for result in self.results]


class DrivenPipeline(Pipeline):
    """A pipeline whose owner acts right after each call."""

    def __init__(self, bench: Bench, homes: Sequence[int], *, has_doorbells: bool) -> None:
        super().__init__(homes, [], has_doorbells=has_doorbells)
        self._bench, self._depth = bench, 0

    def _drive(self, call: Callable[[], None]) -> None:
        self.now = self._bench.now
        self._depth += 1
        try:
            call()
        finally:
            self._depth -= 1
        if not self._depth:
            self._depth += 1
            self._bench.carry_out()
            self._depth -= 1

    def submit(self, step: Step, **more: Any) -> None:
        self._drive(lambda: super(DrivenPipeline, self).submit(step, **more))

    def receive(self, *answer: Any) -> None:
        self._drive(lambda: super(DrivenPipeline, self).receive(*answer))

    def lose(self, stages: Iterable[int]) -> None:
        self._drive(lambda: super(DrivenPipeline, self).lose(stages))

    def restore(self, *daemons: Any, **more: Any) -> None:
        self._drive(lambda: super(DrivenPipeline, self).restore(*daemons, **more))

    def fail(self, *failure: Any) -> None:
        self._drive(lambda: super(DrivenPipeline, self).fail(*failure))


def step(step_id: int) -> Step:
    return Step(step_id, step_id % 3, [], [Slice(4, 0, [7, 8], True)])


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
    bench.now = 25.0
    bench.pipeline.submit(step(3))
    assert bench.pipeline.oldest_in_flight(30.0) == StepInFlight(1, 1, 20.0)
    bench.now = 31.0
    bench.pipeline.receive(StepResult(1, 1))
    assert bench.pipeline.oldest_in_flight(32.0) == StepInFlight(3, 0, 7.0)
    bench.pipeline.receive(StepResult(3, 0))
    assert bench.pipeline.oldest_in_flight(32.0) == StepInFlight(2, 1, 1.0)


# ---- posted steps


def posting(n_stages: int = 3) -> Bench:
    return Bench(range(n_stages), has_doorbells=True)


def posted_step(step_id: int) -> Step:
    return Step(step_id, step_id % 4, [OpenSequence(step_id, 0, SamplingParams())], [Slice(4, 0, [7, 8], True)])


def test_a_loss_takes_back_what_has_not_begun_and_it_is_sent_again_from_stage_to_stage() -> None:
    bench = posting()
    bench.pipeline.submit(posted_step(1))
    bench.pipeline.submit(posted_step(2))
    bench.answer(1, 0)  # stage 1 is at step 1, stage 0 at step 2
    bench.pipeline.lose([0])
    assert [wire.recalls for wire in bench.wires] == [[], [SendCancelPending(1)], [SendCancelPending(2)]]
    bench.answer(1, 1)
    bench.pipeline.receive(PendingCancelled(1, [2], operated=True))
    bench.pipeline.receive(
        PendingCancelled(2, [1, 2], operated=False)
    )  # step 1 has come to stage 2: it goes there at once
    assert bench.wires[2].ids == [(2 | POSTED, 1), (2 | POSTED, 2), (2, 1)]
    assert bench.outcomes.count(StepsReturned()) == 2
    assert not bench.pipeline.settled
    bench.answer(1, 2)
    assert bench.done == [1]
    assert bench.pipeline.settled
    fresh = Wire()
    bench.replace(0, fresh)
    bench.answer(2, 0, 1, 2)
    assert bench.done == [1, 2]
    assert fresh.ids == [(0, 2)]
    assert bench.wires[1].ids[2:] == [(1, 2)]
    assert bench.wires[1].steps[-1][1].operations == []  # it has had them
    assert bench.wires[2].steps[-1][1].operations == posted_step(2).operations
    assert not bench.failures


def test_a_recall_of_what_a_stage_has_not_fails_the_pipeline() -> None:
    bench = posting()
    bench.pipeline.submit(posted_step(1))
    bench.pipeline.lose([0])
    bench.pipeline.receive(PendingCancelled(1, [5], operated=False))
    assert [(failure.stage, failure.code) for failure in bench.failures] == [(1, "protocol_error")]


# ---- steps that run ahead of their tokens


def ahead(step_id: int, depends_on_step: int) -> Step:
    return Step(step_id, step_id % 4, [], [Slice(4, 9 + step_id, [PENDING], True)], depends_on_step=depends_on_step)


def drawn(bench: Bench, step_id: int, token: int) -> None:
    bench.pipeline.receive(StepResult(step_id, 1, [Sampled(4, token)]))


def started(bench: Bench, step_id: int, token: int) -> None:
    """The first stage answers, with the token that it was told."""
    bench.pipeline.receive(StepResult(step_id, 0, [Sampled(4, token)]))


def test_a_stage_that_went_on_with_another_token_than_was_drawn_again_fails_the_pipeline() -> None:
    bench = posting(2)
    bench.pipeline.submit(posted_step(1))
    bench.pipeline.submit(ahead(2, 1))
    bench.answer(1, 0)
    started(bench, 2, 33)  # the output stage rang, and was lost before its result was heard
    bench.pipeline.lose([1])
    assert bench.pipeline.settled
    bench.replace(1, Wire())
    drawn(bench, 1, 35)
    assert [failure.code for failure in bench.failures] == ["protocol_error"]
    assert bench.done == []


# ---- steps that run ahead of their drafts


# ---- the draft stage


class DraftBench(Bench):
    """Two stages on a wire each; the drafter beside the last one, or on wire 2."""

    def __init__(self, *, with_output: bool, has_doorbells: bool = False) -> None:
        super().__init__([0, 1], has_doorbells=has_doorbells)
        self.wires.append(Wire())
        self.log: list[str] = []
        self.n_sent_before: list[int] = []  # to the drafter, by result
        self.drafter = self.wires[1 if with_output else 2]
        self.with_output = with_output

    def attach(self) -> None:
        self.attach_drafter(self.drafter, with_output=self.with_output)

    def on_outcome(self, outcome: Outcome) -> None:
        if isinstance(outcome, DraftsMade):
            self.log.append(f"drafts {outcome.result.step_id}")
        elif isinstance(outcome, DrafterDetached):
            self.log.append(outcome.failure.message)

    def on_result(self, result: PipelineResult) -> None:
        super().on_result(result)
        self.log.append(f"result {result.step.step_id}")
        self.n_sent_before.append(len(self.drafter.sent))


def drafted_step(step_id: int) -> Step:
    return Step(step_id, 0, [], [Slice(4, 0, [7, 8], True), Slice(2, 0, [1], True), Slice(3, 0, [5], False)])


SAMPLED = [Sampled(4, 42), Sampled(2, 9), Sampled(2, 10)]


def test_the_watchdog_does_not_see_drafts_behind_a_step_that_waits_for_its_rows() -> None:
    bench = DraftBench(with_output=True, has_doorbells=True)
    bench.attach()
    bench.pipeline.submit(drafted_step(1))
    bench.now = 2.0
    bench.pipeline.receive(StepResult(1, 0))
    assert bench.pipeline.oldest_in_flight(5.0) == StepInFlight(1, 1, 3.0)


def test_a_drafter_that_answers_out_of_order_is_lost() -> None:
    bench = DraftBench(with_output=False)
    bench.attach()
    bench.pipeline.receive(StepResult(1, 2))
    assert bench.log == ["the draft stage answered step 1 while no step was due"]
    bench.attach()
    for step_id in (1, 2):
        bench.pipeline.submit(drafted_step(step_id))
        bench.pipeline.receive(StepResult(step_id, 0))
        bench.pipeline.receive(StepResult(step_id, 1, SAMPLED))
    bench.pipeline.receive(StepResult(2, 2))
    assert bench.log[-1] == "the draft stage answered step 2 while step 1 was due"
    assert not bench.failures


@pytest.mark.parametrize("with_output", [True, False])
def test_the_watchdog_sees_the_step_that_the_drafter_works_on(*, with_output: bool) -> None:
    bench = DraftBench(with_output=with_output)
    bench.attach()
    bench.pipeline.submit(drafted_step(1))
    bench.now = 1.0
    bench.pipeline.receive(StepResult(1, 0))
    bench.now = 3.0
    assert bench.pipeline.oldest_in_flight(4.0) == StepInFlight(1, 1, 3.0)
    bench.pipeline.receive(StepResult(1, 1, SAMPLED))
    assert bench.pipeline.oldest_in_flight(4.0) == StepInFlight(1, 2, 1.0)
    bench.pipeline.receive(StepResult(1, 2))
    assert bench.pipeline.oldest_in_flight(4.0) is None
    bench.pipeline.submit(drafted_step(2))
    bench.pipeline.close()
    assert bench.pipeline.oldest_in_flight(9.0) is None
