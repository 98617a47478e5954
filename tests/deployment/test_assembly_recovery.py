"""Daemons that are lost while requests are held: who is reset and rebuilt, and that all requests get their tokens."""

from __future__ import annotations

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from lucevisor.engine.request import GenerationRequest, RequestHandle
from lucevisor.protocol.steps import StepResult
from tests.deployment.daemon_groups import GroupMachine, Groups, frame
from tests.engine.toy_engine import request


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
