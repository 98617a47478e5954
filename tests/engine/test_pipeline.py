"""The pipeline: relay from stage to stage, order, failures, times."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lucevisor.engine.pipeline import (
    DrafterDetached,
    OldestStep,
    Pipeline,
    PipelineResult,
    SendCancelPending,
    SendFrame,
    StageFailure,
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

    def send(self, message: bytes, *, payload: object = ()) -> None:
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
    """A pipeline of stages on a wire each, whose owner acts right after each call.

    ``drafter``: the wire of the draft stage, if there is one: that of the last stage or one of its own.
    """

    def __init__(self, n_stages: int = 2, *, has_doorbells: bool = False, drafter: int | None = None) -> None:
        self.now = 0.0
        self.wires = [Wire() for _ in range(n_stages + 1)]
        self.stages = dict(enumerate(self.wires))
        self.results: list[PipelineResult] = []
        self.failures: list[StageFailure] = []
        self.returned: list[StepsReturned] = []
        self.detached: list[str] = []  # what is said of drafters that were lost
        self.pipeline = Pipeline(range(n_stages), [], has_doorbells=has_doorbells)
        self.drafter = drafter
        if drafter is not None:
            self.attach()

    def attach(self) -> None:
        n = self.pipeline.n_stages
        assert self.drafter is not None
        self.stages[n] = self.wires[self.drafter]
        self.pipeline.drafts.attach(self.drafter, with_output=self.drafter < n)

    def submit(self, step: Step) -> None:
        self._do(self.pipeline.submit, step)

    def receive(self, answer: StepResult | PendingCancelled) -> None:
        self._do(self.pipeline.receive, answer)

    def lose(self, stage: int) -> None:
        self._do(self.pipeline.lose, [stage])

    def replace(self, stage: int, wire: Wire) -> None:
        """Restore a lost stage on another wire."""
        self.stages[stage] = wire
        self._do(self.pipeline.restore, {stage: 100 + stage}, {})

    def answer(self, step_id: int, *stages: int) -> None:
        for stage in stages:
            self.receive(StepResult(step_id, stage))

    def _do(self, call: Callable[..., None], *arguments: object) -> None:
        pipeline, out = self.pipeline, self.pipeline.out
        pipeline.now = self.now
        call(*arguments)
        while out or pipeline.outcomes:
            while out:
                instruction = out.pop(0)
                if isinstance(instruction, SendFrame):
                    self.stages[instruction.stage].send(instruction.frame)
                elif isinstance(instruction, SendCancelPending):
                    self.stages[instruction.stage].recalls.append(instruction)
            if pipeline.outcomes:
                match pipeline.outcomes.popleft():
                    case PipelineResult() as result:
                        self.results.append(result)
                        pipeline.drafts.deliver_drafts()
                    case StageFailure() as failure:
                        self.failures.append(failure)
                    case DrafterDetached(failure):
                        self.detached.append(failure.message)
                    case StepsReturned() as returned:
                        self.returned.append(returned)

    @property
    def done(self) -> list[int]:
        return [result.step.step_id for result in self.results]


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
    bench = Bench()
    bench.submit(step(1))
    bench.submit(step(2))
    bench.receive(wrong)
    assert [f.code for f in bench.failures] == ["protocol_error"]
    assert words in bench.failures[0].message
    bench.receive(StepResult(1, 0))  # nothing comes after the failure
    bench.submit(step(3))
    bench.pipeline.close()
    assert (len(bench.failures), bench.results, bench.wires[1].ids) == (1, [], [])
    assert len(bench.pipeline.in_flight) == 0


def test_the_oldest_step_is_the_one_a_daemon_has_worked_on_for_longest() -> None:
    bench = Bench()
    assert bench.pipeline.oldest_in_flight(0.0) is None
    bench.submit(step(1))
    bench.submit(step(2))
    assert bench.pipeline.oldest_in_flight(3.0) == OldestStep(1, 0, 3.0)
    bench.now = 10.0
    bench.receive(StepResult(1, 0))
    # Step 2 was sent at 0 but its daemon was busy until 10.
    assert bench.pipeline.oldest_in_flight(12.0) == OldestStep(2, 0, 2.0)
    bench.now = 11.0
    bench.receive(StepResult(2, 0))
    bench.now = 25.0
    bench.submit(step(3))
    assert bench.pipeline.oldest_in_flight(30.0) == OldestStep(1, 1, 20.0)
    bench.now = 31.0
    bench.receive(StepResult(1, 1))
    assert bench.pipeline.oldest_in_flight(32.0) == OldestStep(3, 0, 7.0)
    bench.receive(StepResult(3, 0))
    assert bench.pipeline.oldest_in_flight(32.0) == OldestStep(2, 1, 1.0)


# ---- posted steps


def posted_step(step_id: int) -> Step:
    return Step(step_id, step_id % 4, [OpenSequence(step_id, 0, SamplingParams())], [Slice(4, 0, [7, 8], True)])


def test_a_loss_takes_back_what_has_not_begun_and_it_is_sent_again_from_stage_to_stage() -> None:
    bench = Bench(3, has_doorbells=True)
    bench.submit(posted_step(1))
    bench.submit(posted_step(2))
    bench.answer(1, 0)  # stage 1 is at step 1, stage 0 at step 2
    bench.lose(0)
    assert [wire.recalls for wire in bench.wires] == [[], [SendCancelPending(1)], [SendCancelPending(2)], []]
    bench.answer(1, 1)
    bench.receive(PendingCancelled(1, [2], operations_applied=True))
    bench.receive(PendingCancelled(2, [1, 2], operations_applied=False))  # step 1 has come to stage 2: it goes at once
    assert bench.wires[2].ids == [(2 | POSTED, 1), (2 | POSTED, 2), (2, 1)]
    assert len(bench.returned) == 2
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
    bench = Bench(3, has_doorbells=True)
    bench.submit(posted_step(1))
    bench.lose(0)
    bench.receive(PendingCancelled(1, [5], operations_applied=False))
    assert [(failure.stage, failure.code) for failure in bench.failures] == [(1, "protocol_error")]


# ---- steps that run ahead of their tokens


def ahead(step_id: int, depends_on_step: int) -> Step:
    return Step(step_id, step_id % 4, [], [Slice(4, 9 + step_id, [PENDING], True)], depends_on_step=depends_on_step)


def drawn(bench: Bench, step_id: int, token: int) -> None:
    bench.receive(StepResult(step_id, 1, [Sampled(4, token)]))


def started(bench: Bench, step_id: int, token: int) -> None:
    """The first stage answers, with the token that it was told."""
    bench.receive(StepResult(step_id, 0, [Sampled(4, token)]))


def test_a_stage_that_went_on_with_another_token_than_was_drawn_again_fails_the_pipeline() -> None:
    bench = Bench(has_doorbells=True)
    bench.submit(posted_step(1))
    bench.submit(ahead(2, 1))
    bench.answer(1, 0)
    started(bench, 2, 33)  # the output stage rang, and was lost before its result was heard
    bench.lose(1)
    assert bench.pipeline.settled
    bench.replace(1, Wire())
    drawn(bench, 1, 35)
    assert [failure.code for failure in bench.failures] == ["protocol_error"]
    assert bench.done == []


# ---- the draft stage


def drafted_step(step_id: int) -> Step:
    return Step(step_id, 0, [], [Slice(4, 0, [7, 8], True), Slice(2, 0, [1], True), Slice(3, 0, [5], False)])


SAMPLED = [Sampled(4, 42), Sampled(2, 9), Sampled(2, 10)]


def test_the_watchdog_does_not_see_drafts_behind_a_step_that_waits_for_its_rows() -> None:
    bench = Bench(has_doorbells=True, drafter=1)
    bench.submit(drafted_step(1))
    bench.now = 2.0
    bench.receive(StepResult(1, 0))
    assert bench.pipeline.oldest_in_flight(5.0) == OldestStep(1, 1, 3.0)


def test_a_drafter_that_answers_out_of_order_is_lost() -> None:
    bench = Bench(drafter=2)
    bench.receive(StepResult(1, 2))
    assert bench.detached == ["the draft stage answered step 1 while no step was due"]
    bench.attach()
    for step_id in (1, 2):
        bench.submit(drafted_step(step_id))
        bench.receive(StepResult(step_id, 0))
        bench.receive(StepResult(step_id, 1, SAMPLED))
    bench.receive(StepResult(2, 2))
    assert bench.detached[-1] == "the draft stage answered step 2 while step 1 was due"
    assert not bench.failures


@pytest.mark.parametrize("drafter", [1, 2])
def test_the_watchdog_sees_the_step_that_the_drafter_works_on(drafter: int) -> None:
    bench = Bench(drafter=drafter)
    bench.submit(drafted_step(1))
    bench.now = 1.0
    bench.receive(StepResult(1, 0))
    bench.now = 3.0
    assert bench.pipeline.oldest_in_flight(4.0) == OldestStep(1, 1, 3.0)
    bench.receive(StepResult(1, 1, SAMPLED))
    assert bench.pipeline.oldest_in_flight(4.0) == OldestStep(1, 2, 1.0)
    bench.receive(StepResult(1, 2))
    assert bench.pipeline.oldest_in_flight(4.0) is None
    bench.submit(drafted_step(2))
    bench.pipeline.close()
    assert bench.pipeline.oldest_in_flight(9.0) is None
