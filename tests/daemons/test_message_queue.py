"""Posted steps wait for the doorbell of their rows, and for nothing that never comes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from daemons.compute_lock import ComputeLock
from daemons.errors import StateError
from daemons.message_queue import MessageQueue, StepCancelled
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan
from lucevisor.protocol.messages import Message, Role, Shutdown
from lucevisor.protocol.states import LinkState
from lucevisor.protocol.steps import CancelPending, DraftStep, Masks, Reset, Slice, Step
from lucevisor.protocol.transport import BlockingLink
from tests.waiting import wait_until

MASKED = [Slice(0, 9, [1], True, masked=True), Slice(1, 4, [1, 2, 3], True, n_drafts=2, masked=True)]


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
        self.arena = Arena.attach(os.dup(self.before.fd), plan, os.dup(self.before.wake_fd))
        self.inbox = MessageQueue(self.daemon)
        self.inbox.spin_s = spin_s

    def send(self, message: Message, rows: bytes = b"") -> None:
        self.supervisor.send(message, payload=[rows])

    def await_rows(self, region: int, step_id: int) -> float:
        return self.inbox.await_rows(self.arena, region, step_id, posted=True)

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


def test_bells_of_other_steps_and_regions_do_not(ends: Ends) -> None:
    for region, step_id in ((1, 6), (0, 7), (1, 8)):
        ends.before.ring(region, step_id, 0)
    timer = ends.later(ends.before.ring, 1, 7, 0)
    ends.await_rows(1, 7)
    timer.join()


def test_rows_are_taken_while_another_model_computes(ends: Ends) -> None:
    lock, received = ComputeLock(), list[str]()

    class Rows(Arena):
        def drain(self) -> None:
            received.append("rows")
            super().drain()

        def awaited(self, here: bool) -> None:
            received.append("here" if here else "elsewhere")

    rows = Rows.attach(os.dup(ends.before.fd), ends.before.plan, os.dup(ends.before.wake_fd))
    queue = MessageQueue(ends.daemon, lock=lock)

    def wait() -> None:
        with lock:
            queue.await_rows(rows, 0, 7, posted=True)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: received == ["here"] and not lock.taken)
    with lock:
        ends.before.ring(0, 7, 0)
        wait_until(lambda: received == ["here", "rows", "elsewhere"])
    waiting.join()
    rows.close()


def test_frames_that_come_meanwhile_keep_their_order_and_masks_are_set_aside(ends: Ends) -> None:
    ends.supervisor.send(Step(8, 0))
    ends.supervisor.send(Masks(7, 1, 1), payload=[b"a"])
    ends.supervisor.send(Step(9, 1))
    timer = ends.later(ends.before.ring, 0, 7, 0)
    ends.await_rows(0, 7)
    timer.join()
    assert ends.inbox.wait_for_masks(7, [Slice(0, 0, [1], sample=True, masked=True)]).tolist() == [[ord("a")]]  # type: ignore[union-attr]
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


def test_the_end_of_the_link_ends_the_wait(ends: Ends) -> None:
    timer = ends.later(ends.supervisor.close)
    with pytest.raises(StepCancelled):
        ends.await_rows(1, 7)
    timer.join()
    assert ends.inbox.receive() is None


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


# ---- masks


def test_masks_come_before_or_after_their_step_and_other_frames_keep_their_order(ends: Ends) -> None:
    ends.send(Masks(2, 1, 2), b"ab")
    ends.send(Step(1, 0))
    ends.send(Step(2, 1))
    ends.send(Step(3, 0))
    ends.send(Masks(1, 4, 1), b"wxyz")
    first = ends.inbox.receive()
    assert first is not None
    assert first.message == Step(1, 0)
    found = ends.inbox.wait_for_masks(1, MASKED)
    assert found is not None
    assert found.tolist() == [[ord(c)] for c in "wxyz"]
    assert [frame.message.step_id for _ in range(2) if (frame := ends.inbox.receive())] == [2, 3]  # type: ignore[union-attr]
    assert ends.inbox.wait_for_masks(2, MASKED[:1]).tolist() == [[ord("a"), ord("b")]]  # type: ignore[union-attr]


def test_a_step_waits_for_masks_that_are_being_made(ends: Ends) -> None:
    timer = threading.Timer(0.05, lambda: ends.send(Masks(1, 1, 1), b"a"))
    timer.start()
    assert ends.inbox.wait_for_masks(1, MASKED[:1]) is not None
    timer.join()


@pytest.mark.parametrize("message", [Reset(4), Shutdown()], ids=lambda m: type(m).__name__)
def test_a_reset_or_shutdown_ends_the_wait_for_masks_and_is_read_next(ends: Ends, message: Message) -> None:
    ends.send(message)
    assert ends.inbox.wait_for_masks(1, MASKED) is None
    frame = ends.inbox.receive()
    assert frame is not None
    assert frame.message == message


@pytest.mark.parametrize(("message", "rows"), [(Masks(1, 3, 1), b"abc"), (Masks(1, 4, 2), b"abcd")], ids=str)
def test_masks_for_other_rows_are_a_broken_contract(ends: Ends, message: Masks, rows: bytes) -> None:
    ends.send(message, rows)
    with pytest.raises(StateError, match="for 4 rows"):
        ends.inbox.wait_for_masks(1, MASKED)
