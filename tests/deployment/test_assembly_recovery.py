"""Daemons that are lost while requests are held: who is reset and rebuilt, and that all requests get their tokens."""

from __future__ import annotations

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from lucevisor.engine.request import GenerationRequest, RequestHandle
from lucevisor.protocol.steps import StepResult
from tests.deployment.daemon_groups import GroupMachine, Groups, frame
from tests.engine.toy_engine import events_of, request, told


def serving(*homes: str, draft: str = "") -> Groups:
    groups = Groups(homes, draft, hold_s=60.0, journal_pages=100)
    for group in dict.fromkeys([*groups.homes, *([draft] if draft else [])]):
        groups.ready(group)
    groups.work()
    assert groups.engine.ready
    return groups


def compute(groups: Groups, n: int) -> None:
    for _ in range(n):
        for group in groups.processes:
            if groups.processes[group].busy:
                groups.answer(group)


@pytest.mark.parametrize("victim", ["left", "right"])
async def test_only_the_lost_daemon_is_reset(victim: str) -> None:
    groups = serving("left", "right")
    other = "right" if victim == "left" else "left"
    asked = [request(name, range(100), n=30) for name in "ab"]
    handles = [groups.engine.submit(one) for one in asked]
    compute(groups, 12)
    groups.die(victim)
    groups.lost(victim)
    assert not groups.assembly.complete
    assert groups.engine.holding
    groups.ready(victim)
    groups.work()
    assert groups.assembly.complete
    assert groups.processes[other].resets == 1, "that of the start"
    for one, handle in zip(asked, handles, strict=True):
        assert told(await events_of(handle))[0] == groups.model.alone(one.prompt, one.sampling, 30, frozenset())
    assert groups.failures == []
    assert groups.engine.statistics().recovery.n_rebuilt > 0


@pytest.mark.parametrize("homes", [("left", "right"), ("left", "right", "left")])
@pytest.mark.parametrize("victim", ["left", "right"])
def test_what_a_daemon_computed_while_it_loaded_is_not_computed_again(homes: tuple[str, ...], victim: str) -> None:
    groups = serving(*homes)
    asked = [request(name, range(100), n=30) for name in "ab"]
    handles = [groups.engine.submit(one) for one in asked]
    compute(groups, 13)
    groups.lost(victim)
    compute(groups, 5)
    assert groups.load(victim)
    handles[1].cancel()
    process = groups.ready(victim)
    assert groups.assembly.complete, "nothing is to be sent"
    assert process.resets == 0
    groups.work()
    groups.close()
    [tokens] = [[event.token for event in handles[0]._events if hasattr(event, "token")]]
    assert tokens == groups.model.alone(asked[0].prompt, asked[0].sampling, 30, frozenset())
    assert groups.engine.statistics().recovery.n_rebuilt > 0


def test_a_replay_with_which_daemons_do_not_load_is_left_out() -> None:
    """Else each that follows would fail in the same way, until the group is given up."""
    groups = serving("left", "right")
    one = request("a", range(100), n=30)
    handle = groups.engine.submit(one)
    compute(groups, 13)
    groups.lost("left")
    groups.work()
    assert [groups.load("left") for _ in range(4)] == [True, True, False, False]
    groups.ready("left")
    compute(groups, 20)
    groups.lost("left")
    groups.work()
    assert groups.load("left"), "another loss"
    groups.ready("left")
    groups.work()
    groups.close()
    tokens = [event.token for event in handle._events if hasattr(event, "token")]
    assert tokens == groups.model.alone(one.prompt, one.sampling, 30, frozenset())


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
        self.groups.assembly.frame(homes[draw % len(homes)], frame(StepResult(99_999, 0)))

    @rule(length=st.integers(1, 150), n=st.integers(1, 20))
    def submit(self, length: int, n: int) -> None:
        one = request(chr(0x100 + len(self.requests)), range(length), n)  # names whose seeds differ
        if self.groups.engine.ready or self.groups.engine.holding:
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
