"""Daemons that come, go and answer in every order: when a pipeline stands, who is reset, what requests are told."""

from __future__ import annotations

import os
from io import FileIO

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from lucevisor.engine.request import GenerationRequest, NotReady, RequestHandle
from lucevisor.kv_transfer.transfers import CREDITS, TransferFile
from lucevisor.protocol.messages import SlotPlace, TransferTensor
from lucevisor.protocol.steps import StepResult
from tests.deployment.daemon_groups import GroupMachine, Groups, frame
from tests.engine.toy_engine import events_of, request, told


class Link:
    """A link that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object, **_: object) -> None:
        self.sent.append(message)


def serving(*homes: str) -> Groups:
    groups = Groups(homes or ("left", "right"))
    for group in dict.fromkeys(groups.homes):
        groups.ready(group)
    groups.work()
    assert groups.engine.ready
    return groups


async def test_a_loss_ends_running_requests_and_names_the_group_and_the_queue_goes_on() -> None:
    groups = serving()
    one, two, waiting = (request(name, n=30) for name in "abc")  # two at once
    handles = [groups.engine.submit(r) for r in (one, two, waiting)]
    for _ in range(6):
        groups.answer("left")
        groups.answer("right")
    groups.die("right")
    groups.lost("right")
    for handle in handles[:2]:
        error = (await events_of(handle))[-1].error  # type: ignore[union-attr]
        assert error.code == "shard_lost"
        assert "group right was lost while the request ran: killed by signal 9" in error.message
    assert handles[2].finished is None
    with pytest.raises(NotReady, match="group right was lost"):
        groups.engine.submit(request("d"))
    groups.ready("right")
    groups.work()
    assert [p.resets for p in groups.processes.values()] == [2, 1]  # the daemon that lives on was reset again
    assert told(await events_of(handles[2]))[0] == groups.model.alone(waiting.prompt, waiting.sampling, 30, frozenset())


async def test_what_waits_to_be_loaded_is_not_written_behind_a_reset() -> None:
    """The daemon cancels what it was sent; its pages are others' by then."""
    groups, link = serving(), Link()
    groups.transfers.on_ready("left", link)  # type: ignore[arg-type]
    tensors = [TransferTensor("layers.0.k", 0, "k", "I8", (10,), 0, 10)]
    with FileIO(os.memfd_create("slot")) as file:
        units = [(TransferFile("slot", file.fileno(), tensors), SlotPlace(1)) for _ in range(CREDITS + 3)]
        ends = [groups.transfers.load([unit]) for unit in units]
    assert (len(link.sent), groups.processes["left"].resets) == (CREDITS, 1)
    groups.die("right")
    groups.lost("right")
    groups.ready("right")
    assert [end.result().problem for end in ends if end.done()] == [
        "it was cancelled: the daemon drops its sequences"
    ] * 3
    groups.work()
    assert groups.processes["left"].resets == 2
    groups.transfers.on_lost("left", "it ends")


def test_a_step_that_cannot_be_sent_ends_its_request_before_supervision_hears_of_the_death() -> None:
    groups = serving()
    groups.die("left")
    handle = groups.engine.submit(request("a"))
    assert handle.finished is not None
    assert handle.finished.error is not None
    assert handle.finished.error.code == "shard_lost"
    assert "group left was lost while the request ran: step" in handle.finished.error.message
    assert not groups.assembly.complete
    groups.lost("left")
    groups.ready("left")
    groups.work()
    assert groups.assembly.complete
    assert groups.engine.ready


# ---- lost daemons


class Losses(GroupMachine):
    """Whatever comes, goes, answers or breaks in whatever order: requests that are not cancelled get their tokens."""

    @initialize(
        homes=st.sampled_from([("a", "b"), ("a", "b", "a"), ("a", "b", "c")]),
        draft=st.sampled_from(["", "last", "aside"]),
        pages=st.sampled_from([100, 100, 3]),
    )
    def begin(self, homes: tuple[str, ...], draft: str, pages: int) -> None:
        self.groups = Groups(homes, homes[-1] if draft == "last" else draft, hold_s=60.0, journal_pages=pages)
        self.names = list(dict.fromkeys([*homes, *([draft] if draft == "aside" else [])]))
        self.requests: list[tuple[GenerationRequest, RequestHandle]] = []
        for name in self.names:
            self.groups.ready(name)
        self.groups.work()
        self.n_mended = 0

    @precondition(lambda self: self.away)
    @rule(draw=st.integers(0, 5), alive=st.sampled_from([True, True, True, False]))
    def ready(self, draw: int, alive: bool) -> None:
        self.groups.ready(self.some(draw, self.away), alive=alive)

    @precondition(lambda self: self.away)
    @rule(draw=st.integers(0, 5))
    def load(self, draw: int) -> None:
        carries = self.groups.load(self.some(draw, self.away))
        event(f"load with a replay: {carries}")

    @precondition(lambda self: self.here)
    @rule(draw=st.integers(0, 5))
    def die(self, draw: int) -> None:
        self.groups.die(self.some(draw, self.here))

    @precondition(lambda self: self.here)
    @rule(draw=st.integers(0, 5))
    def lost(self, draw: int) -> None:
        self.groups.lost(self.some(draw, self.here))
        self.n_mended = len(self.groups.failures)

    @precondition(lambda self: self.groups.engine.ready)
    @rule(draw=st.integers(0, 5))
    def break_the_order(self, draw: int) -> None:
        homes = [n for n in self.here if n in self.groups.homes]
        self.groups.assembly.on_frame(homes[draw % len(homes)], frame(StepResult(99_999, 0)))

    @rule(length=st.integers(1, 150), n=st.integers(1, 20))
    def submit(self, length: int, n: int) -> None:
        one = request(chr(0x100 + len(self.requests)), range(length), n)  # names whose seeds differ
        if self.groups.engine.ready or self.groups.engine.core.recovery.holding:
            self.requests.append((one, self.groups.submit(one)))

    @precondition(lambda self: self.requests)
    @rule(draw=st.integers(0, 50))
    def cancel(self, draw: int) -> None:
        self.requests[draw % len(self.requests)][1].cancel()

    @invariant()
    def nobody_fails(self) -> None:
        for _, handle in self.requests if hasattr(self, "requests") else ():
            assert handle.finished is None or handle.finished.error is None

    def teardown(self) -> None:
        if not hasattr(self, "groups"):
            return
        self.groups.close()
        for group in self.here:  # what broke the order is replaced; so is all else
            self.groups.lost(group)
        for group in self.names:
            self.groups.ready(group)
        self.groups.work()
        assert self.groups.engine.ready
        assert self.groups.assembly.complete
        for one, handle in self.requests:
            assert handle.finished is not None
            tokens = [event.token for event in _unread(handle) if hasattr(event, "token")]
            wanted = self.groups.model.alone(one.prompt, one.sampling, one.max_tokens, frozenset())
            assert tokens == wanted[: len(tokens)]
            assert handle.finished.reason == "cancelled" or tokens == wanted


def _unread(handle: RequestHandle) -> list[object]:
    found: list[object] = [*handle._events]
    handle._events.clear()
    return found


TestLosses = Losses.TestCase
TestLosses.settings = settings(max_examples=12, stateful_step_count=40)


# ---- a drafter that comes and goes


def test_requests_are_served_before_the_drafter_is_there() -> None:
    groups = Groups(["left", "right"], "draft")
    groups.ready("left")
    groups.ready("right")
    groups.work()
    assert groups.assembly.complete
    assert not groups.assembly.drafting
    changes = groups.changes
    groups.ready("draft")
    assert not groups.assembly.drafting
    assert groups.assembly.resetting == {"draft"}
    groups.answer("draft")
    assert groups.assembly.drafting
    assert groups.changes == changes + 1
