"""Which model is loaded, which one leaves, and when: events in, instructions out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.deployment.model_swap import (
    IN_MEMORY,
    TURN_S,
    Instruction,
    LoadModel,
    ModelState,
    ModelUse,
    StopGroup,
    SwapPolicy,
    UnloadModel,
)

GROUP = "gpu"


def policy(shares: dict[str, dict[str, float]], loaded: Sequence[str] = (), **of_all: object) -> SwapPolicy:
    """Models with their shares of memories, some of which are loaded."""
    uses = {name: ModelUse(name, frozenset({GROUP}), **of_all) for name in shares}  # type: ignore[arg-type]
    made = SwapPolicy(uses)
    assert made.on_started([GROUP], 0.0) == []
    for at, name in enumerate(loaded):
        uses[name].state = ModelState.LOADING
        assert made.on_loaded(name, float(at)) == []
    for name, share in shares.items():
        assert made.on_placed(name, share, 0.0) == []
    return made


def alternatives(*names: str, loaded: Sequence[str] = (), **of_all: object) -> SwapPolicy:
    """Models each of which needs the whole of one memory."""
    return policy({name: {"m": 1.0} for name in names}, loaded, **of_all)


def test_models_whose_shares_fit_stay_side_by_side() -> None:
    made = policy({"a": {"m": 0.5}, "b": {"m": 0.25}, "c": {"m": 0.25}}, ["a"])
    assert made.want("b", 10.0) == [LoadModel("b")]
    assert made.want("c", 10.0) == [LoadModel("c")]


def test_the_least_recently_used_idle_models_leave_and_as_few_as_it_takes() -> None:
    made = policy({"a": {"m": 0.5}, "b": {"m": 0.25}, "c": {"m": 0.25}, "d": {"m": 0.5}}, ["a", "b", "c"])
    assert made.on_busy("a", True, 5.0) == []
    assert made.on_busy("a", False, 6.0) == []
    assert made.want("d", 10.0) == [UnloadModel("b", park=True), UnloadModel("c", park=True)]
    assert made.on_left("b", True, 11.0) == []
    assert made.on_left("c", False, 12.0) == [LoadModel("d")]
    assert [use.state.value for use in made.models.values()] == ["loaded", "parked", "unloaded", "loading"]


def test_a_model_that_is_not_needed_after_all_stays() -> None:
    """The oldest one alone does not make room; the next one does, and the oldest need not leave."""
    made = policy({"a": {"m": 0.25}, "b": {"m": 0.75}, "c": {"m": 0.75}}, ["a", "b"])
    assert made.want("c", 10.0) == [UnloadModel("b", park=True)]


def test_memories_that_a_model_does_not_use_stay_as_they_are() -> None:
    made = policy({"a": {"m": 1.0}, "b": {"n": 1.0}, "c": {"n": 1.0}}, ["a", "b"])
    assert made.want("c", 10.0) == [UnloadModel("b", park=True)]


def test_a_model_that_is_loaded_at_the_start_has_loaded_since_it_was_placed() -> None:
    """Not since the machine booted: its turn would last for days, and no other model would be loaded."""
    made = SwapPolicy({name: ModelUse(name, frozenset({GROUP})) for name in "ab"})
    made.models["a"].state, booted_s = ModelState.LOADING, 50_000.0
    made.on_started([GROUP], booted_s)
    for name in "ab":
        made.on_placed(name, {"m": 1.0}, booted_s + 1)
    made.on_loaded("a", booted_s + 4)
    assert (made.models["a"].n_loads, made.models["a"].load_s) == (1, 3.0)
    made.on_busy("a", True, booted_s + 5)
    made.on_busy("b", True, booted_s + 6)
    assert made.tick(booted_s + 4 + 12) == [UnloadModel("a", park=True)]


def test_a_busy_model_is_served_for_its_turn_then_leaves_when_its_requests_end() -> None:
    made = alternatives("a", "b", loaded=["a"])
    assert made.on_busy("a", True, 1.0) == []
    assert made.on_busy("b", True, 2.0) == []
    assert made.next_at() == TURN_S
    assert made.tick(TURN_S - 0.1) == []
    assert made.tick(TURN_S) == [UnloadModel("a", park=True)]
    assert made.on_left("a", False, 7.0) == [LoadModel("b")]  # its queued requests wait for the next turn
    assert made.models["a"].wanted_since == 7.0
    assert made.on_loaded("b", 10.0) == []
    assert made.tick(10.0 + TURN_S) == []  # four times its load
    assert made.tick(22.0) == [UnloadModel("b", park=True)]
    assert made.on_left("b", False, 23.0) == [LoadModel("a")]


def test_who_waits_longest_is_loaded_first_and_nothing_takes_what_is_freed_for_it() -> None:
    made = policy({"a": {"m": 0.5}, "b": {"m": 0.5}, "large": {"m": 1.0}, "small": {"m": 0.5}}, ["a", "b"])
    assert made.on_busy("a", True, 5.0) == []
    assert made.want("large", 6.0) == [UnloadModel("b", park=True), UnloadModel("a", park=True)]
    assert made.want("small", 7.0) == []
    assert made.on_left("b", False, 8.0) == []  # room for the small one, which came later
    assert made.on_busy("a", False, 9.0) == []
    assert made.on_left("a", False, 10.0) == [LoadModel("large")]


def test_a_pinned_model_never_leaves() -> None:
    made = policy({"a": {"m": 0.25}, "b": {"m": 0.75}, "c": {"m": 0.75}}, ["a", "b"])
    made.models["a"].pin, made.models["a"].ttl_s = True, 1.0
    assert made.want("c", 10.0) == [UnloadModel("b", park=True)]
    assert made.tick(1000.0) == []


def test_an_idle_model_leaves_after_its_ttl_and_a_request_before_that_begins_it_anew() -> None:
    made = policy({"a": {"m": 0.5}, "b": {"m": 0.5}}, ["a", "b"])
    made.models["b"].ttl_s = 60.0
    assert made.next_at() == 61.0
    assert made.on_busy("b", True, 30.0) == []
    assert made.tick(500.0) == []
    assert made.on_busy("b", False, 600.0) == []
    assert made.tick(659.0) == []
    assert made.tick(660.0) == [UnloadModel("b", park=True)]
    assert made.on_left("b", True, 661.0) == []  # the other one has no ttl, so the daemon stays


def test_a_group_ends_when_all_its_models_are_due_and_comes_back_for_a_request() -> None:
    made = policy({"a": {"m": 0.5}, "b": {"m": 0.5}, "c": {"m": 0.5}}, ["a", "b"], ttl_s=60.0)
    made.models["c"].ttl_s = 0.0  # it is not loaded, so it keeps nothing
    assert made.on_busy("b", True, 30.0) == []
    assert made.tick(70.0) == [UnloadModel("a", park=True)]
    assert made.on_left("a", True, 71.0) == []
    assert made.on_busy("b", False, 100.0) == []
    assert made.next_at() == 160.0
    assert made.tick(160.0) == [UnloadModel("b", park=False)]  # its daemon ends
    assert made.on_left("b", False, 161.0) == [StopGroup(GROUP)]
    assert made.on_daemon_lost(GROUP, 162.0) == []
    assert made.models["a"].state is ModelState.UNLOADED  # the daemon had its weights
    assert made.on_busy("a", True, 500.0) == [LoadModel("a")]
    assert made.on_started([GROUP], 501.0) == []


def test_an_operator_unloads_a_busy_model_when_its_requests_have_ended() -> None:
    made = alternatives("a", loaded=["a"])
    assert made.on_busy("a", True, 1.0) == []
    assert made.unload("a", 2.0) == []
    assert made.on_busy("a", False, 3.0) == [UnloadModel("a", park=False)]
    assert made.on_left("a", False, 4.0) == []
    assert made.want("a", 5.0) == [LoadModel("a")]


def test_an_order_to_load_outlives_a_request_that_is_cancelled() -> None:
    made = alternatives("a", "b", loaded=["a"])
    assert made.on_busy("a", True, 1.0) == []
    assert made.want("b", 2.0) == []
    assert made.on_busy("b", True, 2.0) == []
    assert made.on_busy("b", False, 2.5) == []  # its client left
    assert made.on_busy("a", False, 3.0) == [UnloadModel("a", park=True)]
    assert made.on_left("a", True, 4.0) == [LoadModel("b")]


def test_an_order_to_unload_a_model_that_is_being_parked_frees_what_was_parked() -> None:
    made = alternatives("a", "b", loaded=["a"])
    assert made.want("b", 10.0) == [UnloadModel("a", park=True)]
    assert made.unload("a", 11.0) == []
    assert made.on_left("a", True, 12.0) == [UnloadModel("a", park=False)]
    assert made.on_left("a", False, 13.0) == [LoadModel("b")]


@pytest.mark.parametrize("keep_alive_s", [None, 20.0])
def test_time_changes_nothing_for_a_pinned_model_with_a_ttl(keep_alive_s: float | None) -> None:
    made = alternatives("a", loaded=["a"], pin=True, ttl_s=20.0)
    if keep_alive_s is not None:
        assert made.keep_alive("a", keep_alive_s, 1.0) == []
    assert made.next_at() == inf
    assert made.tick(1000.0) == []


def test_a_keep_alive_holds_until_the_model_is_loaded_again() -> None:
    made = alternatives("a", loaded=["a"], ttl_s=300.0)
    assert made.keep_alive("a", 20.0, 1.0) == []
    assert made.next_at() == 20.0
    assert made.tick(20.0) == [UnloadModel("a", park=False)]
    assert made.on_left("a", False, 21.0) == [StopGroup(GROUP)]  # its daemon as well
    assert made.on_busy("a", True, 30.0) == [LoadModel("a")]
    assert made.keep_alive("a", 40.0, 30.0) == []  # of the request that loads it
    assert made.on_loaded("a", 31.0) == []
    assert made.on_busy("a", False, 32.0) == []
    assert made.models["a"].due_at() == 72.0
    assert made.unload("a", 40.0) == [UnloadModel("a", park=False)]
    assert made.on_left("a", False, 41.0) == []
    assert made.want("a", 50.0) == [LoadModel("a")]
    assert made.on_loaded("a", 51.0) == []
    assert made.models["a"].due_at() == 351.0


def test_a_load_that_fails_makes_room_for_others_and_is_tried_again_on_demand() -> None:
    made = alternatives("a", "b")
    assert made.on_busy("a", True, 1.0) == [LoadModel("a")]
    assert made.on_busy("b", True, 2.0) == []
    assert made.on_not_loaded("a", 3.0) == [LoadModel("b")]
    assert made.on_busy("a", False, 3.0) == []
    assert made.on_loaded("b", 4.0) == []
    assert made.on_busy("b", False, 5.0) == []
    assert made.on_busy("a", True, 6.0) == [UnloadModel("b", park=True)]


def test_a_group_stays_until_all_its_models_are_placed() -> None:
    made = SwapPolicy({name: ModelUse(name, frozenset({GROUP}), ttl_s=1.0) for name in "ab"})
    assert made.on_started([GROUP], 0.0) == []
    assert made.tick(50.0) == []
    assert made.on_placed("a", {"m": 1.0}, 50.0) == []
    assert made.on_not_loaded("b", 51.0) == [StopGroup(GROUP)]  # it does not fit


@dataclass
class World:
    """Carries instructions out, as late as the test likes."""

    policy: SwapPolicy
    now: float = 100.0
    loading: set[str] = field(default_factory=set)
    leaving: dict[str, bool] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)  # models with running requests
    queued: set[str] = field(default_factory=set)
    present: set[str] = field(default_factory=set)  # models that take memory; one that was parked takes none

    def take(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case LoadModel(name):
                    self.loading.add(name)
                    self.present.add(name)
                case UnloadModel(name, park):
                    assert not self.policy.models[name].pin
                    self.leaving[name] = park
                case StopGroup(group):
                    assert not any(use.state in IN_MEMORY for use in self.policy.models.values())
                    assert not self.queued | self.running
                    self.take(self.policy.on_daemon_lost(group, self.now))
        memories = {memory for use in self.policy.models.values() for memory in use.shares or {}}
        present = [self.policy.models[name] for name in self.present]
        for memory in memories:
            assert sum((use.shares or {}).get(memory, 0.0) for use in present) <= 1.000001

    def act(self, what: str, name: str) -> None:
        use = self.policy.models[name]
        if what == "request":
            was_busy = name in self.running | self.queued
            serves = use.state is ModelState.LOADED
            (self.running if serves else self.queued).add(name)
            if not was_busy:
                self.take(self.policy.on_busy(name, True, self.now))
        elif what == "end" and name in self.running:
            self.running.discard(name)
            if name not in self.queued:
                self.take(self.policy.on_busy(name, False, self.now))
        elif what == "cancel" and name in self.queued:
            self.queued.discard(name)
            if name not in self.running:
                self.take(self.policy.on_busy(name, False, self.now))
        elif what == "loaded" and name in self.loading:
            self.loading.discard(name)
            if name in self.queued:
                self.queued.discard(name)
                self.running.add(name)
            self.take(self.policy.on_loaded(name, self.now))
        elif what == "left" and name in self.leaving and name not in self.running:
            self.present.discard(name)
            self.take(self.policy.on_left(name, self.leaving.pop(name), self.now))
        elif what == "unload":
            self.take(self.policy.unload(name, self.now))
        elif what == "load":
            self.take(self.policy.want(name, self.now))
        elif what == "keep alive":
            self.take(self.policy.keep_alive(name, 0.0 if use.idle_s else 30.0, self.now))
        self.take(self.policy.tick(self.now))


NAMES = ("a", "b", "c", "d")
ACTIONS = ("request", "end", "cancel", "loaded", "left", "load", "unload", "keep alive")
SHARES = st.sampled_from([0.125, 0.25, 0.5, 1.0])


@settings(max_examples=100, deadline=None)
@given(
    shares=st.lists(st.dictionaries(st.sampled_from("mn"), SHARES, min_size=1), min_size=4, max_size=4),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(NAMES), st.floats(0, 9)), max_size=60),
)
def test_every_request_is_served_and_no_memory_is_overcommitted(shares, actions) -> None:
    world = World(policy(dict(zip(NAMES, shares, strict=True))))
    for what, name, seconds in actions:
        world.now += seconds
        world.act(what, name)
    for _ in range(200):  # everybody does what is asked, and requests end
        world.now += 5.0
        for name in NAMES:
            for what in ("loaded", "left", "end"):
                world.act(what, name)
    assert not world.queued | world.running | world.loading | {*world.leaving}
    assert not any(use.busy or use.ordered or use.wanted_since is not None for use in world.policy.models.values())


@pytest.mark.parametrize("state", ModelState)
def test_time_alone_changes_nothing_without_ttl(state: ModelState) -> None:
    made = alternatives("a", "b")
    made.models["a"].state = state
    assert made.tick(1e9) == []
