"""Posted steps wait for the doorbell of their rows, and for nothing that never comes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from daemons.errors import StateError
from daemons.inbox import Inbox, StepCancelled
from daemons.options import Options
from daemons.step_output import StepOutput
from daemons.worker import _MessageLoop
from lucevisor.model.values import Backend
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.frames import POSTED, Frame
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.messages import Message, MessageKind, Role, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import (
    CancelPending,
    Drafted,
    DraftStep,
    Masks,
    PendingCancelled,
    Reset,
    ResetDone,
    Slice,
    Step,
    StepResult,
)
from lucevisor.protocol.transport import BlockingLink


class Ends:
    """Both ends of a link, and an arena mapped twice: the stage before rings, the daemon waits."""

    def __init__(self, spin_s: float) -> None:
        ours, theirs = socket.socketpair()
        self.supervisor = BlockingLink(ours, role=Role.SUPERVISOR)
        self.daemon = BlockingLink(theirs)
        for link in (self.supervisor, self.daemon):
            link._connection.state = LinkState.READY
        plan = ArenaPlan(0, 64, 3)
        self.before = Arena.create(plan)
        self.arena = Arena.attach(os.dup(self.before.fd), plan, os.dup(self.before.bells.wake_fd))
        self.inbox = Inbox(self.daemon)
        self.inbox.spin_s = spin_s

    def await_rows(self, region: int, step_id: int) -> float:
        return self.inbox.await_rows(self.arena.bells, region, step_id)

    def loop(self, **runtime: object) -> _MessageLoop:
        """A daemon's loop on the link, with a double of what it runs."""
        reporter = SimpleNamespace(phase=lambda *_: None, step_done=lambda _: None)
        loop = _MessageLoop(self.daemon, reporter, Options("left", Backend.CPU, 0, 0, 0, 1, ()))  # type: ignore[arg-type]
        loop._runtime = SimpleNamespace(
            **{"tell": lambda _: None, "keep_up": lambda *_: None, "awaits_drafts": lambda _: False}
            | {"shares_cores": False}
            | runtime
        )  # type: ignore[assignment]
        return loop

    def later(self, work: object, *arguments: object) -> threading.Timer:
        timer = threading.Timer(0.05, work, arguments)  # type: ignore[arg-type]
        timer.start()
        return timer


@pytest.fixture(params=[0.0, 10.0], ids=["sleeps", "polls"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    one = Ends(request.param)
    yield one
    one.supervisor.close()
    one.daemon.close()
    one.arena.close()
    one.before.close()


def test_rows_that_are_there_are_not_waited_for(ends: Ends) -> None:
    ends.before.bells.ring(2, 7)
    time.sleep(0.05)
    began = time.monotonic()
    assert ends.await_rows(2, 7) <= time.monotonic() - began, "of the hop only what was waited for counts"


def test_the_bell_ends_the_wait(ends: Ends) -> None:
    timer = ends.later(ends.before.bells.ring, 1, 7)
    assert 0 <= ends.await_rows(1, 7) < 5
    timer.join()


def test_bells_of_other_steps_and_regions_do_not(ends: Ends) -> None:
    for region, step_id in ((1, 6), (0, 7), (1, 8)):
        ends.before.bells.ring(region, step_id)
    timer = ends.later(ends.before.bells.ring, 1, 7)
    ends.await_rows(1, 7)
    timer.join()


def test_frames_that_come_meanwhile_keep_their_order_and_masks_are_set_aside(ends: Ends) -> None:
    ends.supervisor.send(Step(8, 0))
    ends.supervisor.send(Masks(7, 1, 1), payload=[b"a"])
    ends.supervisor.send(Step(9, 1))
    timer = ends.later(ends.before.bells.ring, 0, 7)
    ends.await_rows(0, 7)
    timer.join()
    assert ends.inbox.take(7, [Slice(0, 0, [1], sample=True, masked=True)]).tolist() == [[ord("a")]]  # type: ignore[union-attr]
    assert [ends.inbox.receive().message for _ in range(2)] == [Step(8, 0), Step(9, 1)]  # type: ignore[union-attr]


@pytest.mark.parametrize("message", [CancelPending(1), Reset(4), Shutdown()], ids=lambda m: type(m).__name__)
def test_a_step_that_is_dropped_does_not_wait_and_those_behind_it_are_dropped_too(ends: Ends, message: Message) -> None:
    ends.supervisor.send(Step(8, 0))
    timer = ends.later(ends.supervisor.send, message)
    with pytest.raises(StepCancelled):
        ends.await_rows(1, 7)
    timer.join()
    assert ends.inbox.is_cancelling
    assert ends.inbox.receive().message == Step(8, 0)  # type: ignore[union-attr]
    assert ends.inbox.is_cancelling  # so step 8 is not begun
    assert ends.inbox.receive().message == message  # type: ignore[union-attr]
    assert not ends.inbox.is_cancelling


def test_an_answer_that_waits_for_the_next_one_does_not_wait_as_long_as_rows_do(ends: Ends) -> None:
    ends.inbox.spin_s = 0.0
    ends.daemon.hold(StepResult(6, 2))
    thread = threading.Thread(target=ends.await_rows, args=(1, 7))
    thread.start()
    assert ends.supervisor.wait(5.0)
    assert ends.supervisor.receive().message == StepResult(6, 2)  # type: ignore[union-attr]
    ends.before.bells.ring(1, 7)
    thread.join()


@pytest.mark.parametrize("shares_cores", [True, False])
def test_drafts_that_the_first_stage_was_told_are_answered_with_the_next_step_where_cores_are_shared(
    shares_cores: bool,
) -> None:
    ends = Ends(0.0)
    told = list[int]()
    loop = ends.loop(tell=lambda output: told.append(output.result.step_id), shares_cores=shares_cores)
    drafted = StepResult(6, 2, drafts=[Drafted(0, [3], [0.5])])
    loop._answer(StepOutput(drafted, []), 1)
    assert told == [6]
    assert ends.supervisor.wait(0.05) != shares_cores
    loop._answer(StepOutput(StepResult(7, 1), []), 1)
    assert [ends.supervisor.receive().message for _ in range(2)] == [drafted, StepResult(7, 1)]  # type: ignore[union-attr]
    for part in (ends.supervisor, ends.daemon, ends.arena, ends.before):
        part.close()


def test_the_end_of_the_link_ends_the_wait(ends: Ends) -> None:
    timer = ends.later(ends.supervisor.close)
    with pytest.raises(StepCancelled):
        ends.await_rows(1, 7)
    timer.join()
    assert ends.inbox.receive() is None


def test_a_step_that_a_reset_has_dropped_is_not_given_back_by_a_later_recall(ends: Ends) -> None:
    def run_step(*_: object) -> None:
        raise StepCancelled

    loop = ends.loop(run_step=run_step, reset=lambda: None)
    for frame in (
        Frame(MessageKind.STEP, 0, POSTED, Step(8, 0), memoryview(b"")),
        Frame(MessageKind.CANCEL_PENDING, 0, 0, CancelPending(0), memoryview(b"")),
        Frame(MessageKind.STEP, 0, POSTED, Step(9, 0), memoryview(b"")),
        Frame(MessageKind.RESET, 0, 0, Reset(4), memoryview(b"")),
        Frame(MessageKind.CANCEL_PENDING, 0, 0, CancelPending(0), memoryview(b"")),
    ):
        assert loop._handle(frame) is None
    answers = [ends.supervisor.receive().message for _ in range(3)]  # type: ignore[union-attr]
    assert answers == [PendingCancelled(0, [8], True), ResetDone(4), PendingCancelled(0, [], False)]


def test_a_step_that_is_not_posted_does_not_go_before_one_that_is_dropped(ends: Ends) -> None:
    """A prompt that came while a decode waited for its token."""

    def run_step(*_: object) -> None:
        raise StepCancelled

    loop = ends.loop(run_step=run_step)
    for frame in (
        Frame(MessageKind.STEP, 0, POSTED, Step(8, 0), memoryview(b"")),
        Frame(MessageKind.STEP, 0, 0, Step(9, 0), memoryview(b"")),
        Frame(MessageKind.CANCEL_PENDING, 0, 0, CancelPending(0), memoryview(b"")),
    ):
        assert loop._handle(frame) is None
    assert ends.supervisor.receive().message == PendingCancelled(0, [8, 9], True)  # type: ignore[union-attr]


def test_drafts_behind_a_step_that_is_dropped_are_not_made(ends: Ends) -> None:
    """They come again with their step; those behind one that was done are made."""
    drafted: list[int] = []

    def run_step(step: Step, *_: object) -> StepOutput:
        if step.step_id > 7:
            raise StepCancelled
        return StepOutput(StepResult(step.step_id, 1), [])

    def run_draft(message: DraftStep, _: float) -> StepOutput:
        drafted.append(message.step.step_id)
        return StepOutput(StepResult(message.step.step_id, 2), [])

    loop = ends.loop(run_step=run_step, run_draft=run_draft)
    for step_id in (7, 8):
        for kind, flags, message in (
            (MessageKind.STEP, 1 | POSTED, Step(step_id, 0)),
            (MessageKind.DRAFT_STEP, 2, DraftStep(Step(step_id, 0))),
        ):
            assert loop._handle(Frame(kind, 0, flags, message, memoryview(b""))) is None
    assert loop._handle(Frame(MessageKind.CANCEL_PENDING, 0, 0, CancelPending(1), memoryview(b""))) is None
    answers = [ends.supervisor.receive().message for _ in range(3)]  # type: ignore[union-attr]
    assert answers == [StepResult(7, 1), StepResult(7, 2), PendingCancelled(1, [8], True)]
    assert loop._handle(Frame(MessageKind.DRAFT_STEP, 0, 2, DraftStep(Step(8, 0)), memoryview(b""))) is None
    assert drafted == [7, 8]


def test_drafts_behind_steps_wait_in_order_for_the_step_on_the_device(ends: Ends) -> None:
    """Those of several steps: the drafter may be here and the output stage not."""
    done: list[str] = []

    def run_draft(message: DraftStep, _: float) -> StepOutput:
        done.append(f"draft {message.step.step_id}")
        return StepOutput(StepResult(message.step.step_id, 2), [])

    def settle(output: StepOutput) -> StepOutput:
        done.append(f"settle {output.result.step_id}")
        return output

    loop = ends.loop(run_draft=run_draft, settle=settle)
    loop._deferred = StepOutput(StepResult(9, 0), [])
    for step_id in (7, 8):
        message = DraftStep(Step(step_id, 0), [])
        assert loop._handle(Frame(MessageKind.DRAFT_STEP, 0, 2, message, memoryview(b""))) is None
    assert not done
    loop._answer_deferred()
    assert done == ["settle 9", "draft 7", "draft 8"]


def test_the_draft_stage_takes_a_step_along_before_the_next_one_begins(ends: Ends) -> None:
    """Whose operations come later; and when the step was answered, if no other follows."""
    done: list[str] = []

    def run_step(step: Step, *_: object) -> StepOutput:
        done.append(f"run {step.step_id}")
        deferred = SimpleNamespace(ready=False)
        return StepOutput(StepResult(step.step_id, 1), [], deferred, step)  # type: ignore[arg-type]

    def settle(output: StepOutput) -> StepOutput:
        done.append(f"settle {output.result.step_id}")
        return output

    loop = ends.loop(
        run_step=run_step, settle=settle,
        keep_up=lambda step, stage: done.append(f"keep up {step.step_id} {stage}"),
    )  # fmt: skip
    for step_id in (7, 8):
        step = Step(step_id, 0, upkeep=True)
        assert loop._handle(Frame(MessageKind.STEP, 0, 1 | POSTED, step, memoryview(b""))) is None
        if step_id == 7:
            first, loop._deferred = loop._deferred, None  # as a step does that settles the one before
            assert first is not None
    assert done == ["run 7", "keep up 7 1", "run 8"]
    loop._answer_deferred()
    assert done[3:] == ["settle 8", "keep up 8 1"]
    loop._answer_deferred()
    assert len(done) == 5


def test_a_recall_that_was_read_together_with_the_step_ends_the_wait(ends: Ends) -> None:
    """The socket tells nothing of it any more."""
    ends.supervisor.send(Step(7, 1))
    ends.supervisor.send(Step(8, 0))
    ends.supervisor.send(CancelPending(1))
    frame = ends.inbox.receive()
    assert frame is not None
    with pytest.raises(StepCancelled):
        ends.await_rows(1, 7)


def test_what_the_draft_stage_shall_do_is_seen_before_its_turn(ends: Ends) -> None:
    assert ends.inbox.draft_step(7) is None
    behind = DraftStep(Step(7, 0))
    for message in (behind, Step(8, 0), DraftStep(Step(8, 0))):
        ends.supervisor.send(message)
        if message is behind:
            ends.supervisor.send(Masks(8, 1, 1), payload=[b"a"])
    assert ends.inbox.draft_step(8) is None, "it is not the next one"
    assert ends.inbox.draft_step(7) == behind
    assert [ends.inbox.receive().message for _ in range(3)] == [behind, Step(8, 0), DraftStep(Step(8, 0))]  # type: ignore[union-attr]
    ends.supervisor.close()
    assert ends.inbox.draft_step(9) is None


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_device_begins_with_drafts_before_their_step_is_answered(ends: Ends, deferred: bool, fails: bool) -> None:
    done: list[str] = []

    def run_step(step: Step, *_: object) -> StepOutput:
        return StepOutput(StepResult(step.step_id, 1), [])

    def run_draft(message: DraftStep, _: float) -> StepOutput:
        done.append("answered" if ends.supervisor.wait(0.0) else "not answered")
        if fails:
            raise StateError("draft step 7", "it failed", "mend it")
        waiting = SimpleNamespace(ready=False) if deferred else None
        return StepOutput(StepResult(7, 2), [], waiting)  # type: ignore[arg-type]

    loop = ends.loop(run_step=run_step, run_draft=run_draft, settle=lambda output: output, awaits_drafts=lambda _: True)
    ends.supervisor.send(DraftStep(Step(7, 0)))
    code = loop._handle(Frame(MessageKind.STEP, 0, 1, Step(7, 0), memoryview(b"")))
    assert done == ["not answered"]
    assert ends.supervisor.receive().message == StepResult(7, 1)  # type: ignore[union-attr]
    if fails:
        assert code
        assert ends.supervisor.receive().message.reason == "it failed"  # type: ignore[union-attr]
        return
    assert (loop._deferred is not None) == deferred
    loop._answer_deferred()
    assert ends.supervisor.receive().message == StepResult(7, 2)  # type: ignore[union-attr]


def test_the_draft_stage_has_earlier_steps_before_the_operations_of_one_that_it_takes_along(ends: Ends) -> None:
    """They may close a sequence that a DraftStep opens, which waits for a step on the device."""
    done: list[str] = []

    def run_step(step: Step, *_: object) -> StepOutput:
        done.append(f"run {step.step_id}")
        return StepOutput(StepResult(step.step_id, 1), [])

    def run_draft(message: DraftStep, _: float) -> StepOutput:
        done.append(f"draft {message.step.step_id}")
        return StepOutput(StepResult(message.step.step_id, 2), [])

    loop = ends.loop(run_step=run_step, run_draft=run_draft, settle=lambda output: output)
    loop._deferred = StepOutput(StepResult(8, 1), [])
    assert loop._handle(Frame(MessageKind.DRAFT_STEP, 0, 2, DraftStep(Step(8, 0)), memoryview(b""))) is None
    assert loop._handle(Frame(MessageKind.STEP, 0, 1, Step(9, 0, upkeep=True), memoryview(b""))) is None
    assert done == ["draft 8", "run 9"]
