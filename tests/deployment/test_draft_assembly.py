"""A drafter that comes and goes beside a pipeline: when it drafts, who is reset, and that requests never notice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from lucevisor.engine.request import GenerationRequest, RequestHandle
from lucevisor.protocol.steps import StepResult
from tests.deployment.daemon_groups import Groups, ServingMachine, frame
from tests.engine.toy_engine import request


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


class World(ServingMachine):
    """Whatever comes, goes or answers in whatever order: with the drafter alone in its group no request ends by its
    loss, and every answer is what it would be without drafts."""

    @initialize(
        homes=st.sampled_from([("a",), ("a", "b"), ("a", "b", "a")]), alone=st.booleans(), last=st.sampled_from([0, -1])
    )
    def begin(self, homes: tuple[str, ...], alone: bool, last: int) -> None:
        self.groups = Groups(homes, "d" if alone else homes[last])
        self.alone = alone
        self.names = list(dict.fromkeys([*homes, self.groups.draft]))
        self.requests: dict[str, tuple[GenerationRequest, RequestHandle]] = {}

    @precondition(lambda self: self.away)
    @rule(draw=st.integers(0, 5), with_draft=st.sampled_from([True, True, True, False]))
    def ready(self, draw: int, with_draft: bool) -> None:
        group = self.some(draw, self.away)
        self.groups.ready(group, with_draft=with_draft or self.alone)

    @precondition(lambda self: self.here)
    @rule(draw=st.integers(0, 5), heard=st.booleans())
    def lost(self, draw: int, heard: bool) -> None:
        """``heard``: the link's end is noticed before a step is sent to it."""
        group = self.some(draw, self.here)
        n_running = self.groups.engine.statistics().running
        self.groups.die(group)
        if not heard and self.busy:
            self.groups.answer(self.some(draw, self.busy))
            n_running = self.groups.engine.statistics().running
        self.groups.lost(group)
        kept = self.alone and group == self.groups.draft
        assert self.groups.engine.statistics().running == (n_running if kept else 0)

    @precondition(lambda self: self.groups.assembly.drafting)
    @rule()
    def wrong_answer(self) -> None:
        n_running = self.groups.engine.statistics().running
        stage = len(self.groups.homes)
        self.groups.assembly.on_frame(self.groups.draft, frame(StepResult(99_999, stage)))
        assert not self.groups.assembly.drafting
        assert self.groups.engine.statistics().running == n_running
        if self.alone:
            self.groups.lost(self.groups.draft)  # what supervision does about it

    @precondition(lambda self: self.groups.engine.ready)
    @rule(length=st.integers(1, 150), n=st.integers(1, 40))
    def submit(self, length: int, n: int) -> None:
        one = request("r" * (1 + len(self.requests)), range(length), n)  # a seed of its own, for the drafter
        self.requests[one.request_id] = one, self.groups.submit(one)

    @invariant()
    def the_drafter_needs_a_pipeline(self) -> None:
        if self.groups.assembly.drafting:
            assert self.groups.assembly.complete
            assert self.groups.draft in self.groups.processes

    def teardown(self) -> None:
        if not hasattr(self, "groups"):
            return
        for group in self.here:
            if not self.groups.processes[group].alive:
                self.groups.lost(group)
        for group in self.away:
            self.groups.ready(group)
        self.groups.work()
        assert self.groups.engine.ready
        assert self.groups.assembly.drafting or not self.alone
        for _, handle in self.requests.values():
            assert handle.finished is not None
        self.what_ended_well_is_right()


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=40, stateful_step_count=40)
