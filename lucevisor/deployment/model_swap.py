"""The swap policy: which models are loaded, which one makes room for another, and when idle ones leave.

Pure: events in, instructions out; ``now`` is seconds of a monotonic clock.  A model takes a share of each memory that
it was placed in.  To make room, the least recently used idle models leave (LRU eviction), then busy ones whose turn is
over, when their running requests have ended.  The model that has waited longest is loaded first.

Invariants: the shares in a memory add up to at most 1; a model with running requests and a pinned one never leave; a
group is stopped only when nothing is loaded in it and all of its models are due.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from math import inf
from typing import Final

TURN_S: Final = 5.0
"""Time for which a model is served before it makes room while it is busy; four times its load if that is longer."""


class ModelState(StrEnum):
    """State of a model, as /v1/models and the status show it."""

    UNLOADED = auto()
    PARKED = auto()  # its weights are in host memory
    LOADING = auto()
    LOADED = auto()
    LEAVING = auto()  # it frees its memory when its running requests have ended


IN_MEMORY: Final = frozenset({ModelState.LOADING, ModelState.LOADED, ModelState.LEAVING})


# ---- instructions


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Load it; answered by ``on_loaded`` or ``on_not_loaded``."""

    model: str


@dataclass(frozen=True, slots=True)
class UnloadModel:
    """Free its memory when its running requests have ended.  ``park``: keep its weights in host memory if there is
    room.

    Answered by ``on_left``.
    """

    model: str
    park: bool


@dataclass(frozen=True, slots=True)
class StopGroup:
    """End the daemon of a group, in which no model is loaded, until a model needs it."""

    group: str


Instruction = LoadModel | UnloadModel | StopGroup


@dataclass(slots=True, eq=False)
class ModelUse:
    """A model.  ``shares``: of memories, by name.  ``ttl_s``: idle time after which it leaves; 0: never.

    ``keep_alive_s``: a request's, in place of ``ttl_s`` for load number ``keep_alive_load``, as in Ollama.  ``load_s``:
    of the last of ``n_loads``.  ``wanted_since``: requests wait for it, or an operator does (``ordered``).  ``leave``:
    it is to leave when it is idle.  ``known``: it was placed, or cannot be.
    """

    name: str
    groups: frozenset[str]
    pin: bool = False
    ttl_s: float = 0.0
    keep_alive_s: float | None = None
    keep_alive_load: int = 0
    state: ModelState = ModelState.UNLOADED
    shares: Mapping[str, float] | None = None  # None: not placed yet
    busy: bool = False
    used_at: float = 0.0
    wanted_since: float | None = None
    ordered: bool = False
    loading_since: float = 0.0
    loaded_at: float = 0.0
    load_s: float = 0.0
    n_loads: int = 0
    n_unloads: int = 0
    leave: bool = False
    known: bool = False

    @property
    def idle_s(self) -> float:
        """Idle time after which it leaves; 0: never."""
        if self.pin:
            return 0.0
        return self.ttl_s if self.keep_alive_s is None else self.keep_alive_s

    def due_at(self) -> float:
        """Return when an idle model leaves by its ``idle_s``."""
        return inf if self.busy or not self.idle_s or self.wanted_since is not None else self.used_at + self.idle_s

    @property
    def turn_ends_at(self) -> float:
        return self.loaded_at + max(TURN_S, 4 * self.load_s)


@dataclass(slots=True, eq=False)
class SwapPolicy:
    models: Mapping[str, ModelUse]
    running_groups: set[str] = field(default_factory=set)
    _out: list[Instruction] = field(default_factory=list)

    # ---- events

    def on_placed(self, name: str, shares: Mapping[str, float], now: float) -> Sequence[Instruction]:
        model = self.models[name]
        if model.state is ModelState.LOADING and not model.known:  # at the start: its daemons load it when it is placed
            model.loading_since = now
        model.shares, model.known = shares, True
        return self._decide(now)

    def on_started(self, groups: Collection[str], now: float) -> Sequence[Instruction]:
        """Daemons of groups were started, so idle models are due later."""
        self.running_groups |= {*groups}
        for model in self.models.values():
            if not model.groups.isdisjoint(groups):
                model.used_at = max(model.used_at, now)
        return self._decide(now)

    def want(self, name: str, now: float) -> Sequence[Instruction]:
        """An operator waits for a model: until it is no longer ``ordered``."""
        model = self.models[name]
        if model.state is not ModelState.LOADED:
            model.ordered = True
            if model.wanted_since is None:
                model.wanted_since = now
        model.used_at, model.leave = now, False
        return self._decide(now)

    def on_busy(self, name: str, busy: bool, now: float) -> Sequence[Instruction]:
        model = self.models[name]
        model.busy, model.used_at = busy, now
        if busy and model.state is not ModelState.LOADED and model.wanted_since is None:
            model.wanted_since = now
        if not busy and not model.ordered and model.state in (ModelState.UNLOADED, ModelState.PARKED):
            model.wanted_since = None  # they were cancelled
        return self._decide(now)

    def on_loaded(self, name: str, now: float) -> Sequence[Instruction]:
        model = self.models[name]
        model.state, model.wanted_since, model.ordered = ModelState.LOADED, None, False
        model.loaded_at, model.load_s, model.used_at = now, now - model.loading_since, now
        model.n_loads += 1
        if model.keep_alive_load != model.n_loads:
            model.keep_alive_s = None
        return self._decide(now)

    def on_not_loaded(self, name: str, now: float) -> Sequence[Instruction]:
        """A load failed; those who waited for it know."""
        model = self.models[name]
        model.state, model.wanted_since, model.ordered = ModelState.UNLOADED, None, False
        model.leave, model.known = False, True
        return self._decide(now)

    def on_left(self, name: str, parked: bool, now: float) -> Sequence[Instruction]:
        """A model has freed its memory; requests may have come meanwhile."""
        model = self.models[name]
        model.state, model.n_unloads = ModelState.PARKED if parked else ModelState.UNLOADED, model.n_unloads + 1
        model.leave = model.leave and parked and not model.busy  # ordered while it was being parked
        if model.busy and model.wanted_since is None:
            model.wanted_since = now
        return self._decide(now)

    def on_daemon_lost(self, group: str, now: float) -> Sequence[Instruction]:
        """A daemon has ended, and with it what it had parked."""
        for model in self.models.values():
            if group in model.groups and model.state is ModelState.PARKED:
                model.state = ModelState.UNLOADED
        return self._decide(now)

    def unload(self, name: str, now: float) -> Sequence[Instruction]:
        """Unload a model as soon as it is idle, parked or not, in place of any order to load it."""
        model = self.models[name]
        model.leave, model.ordered = model.state in (*IN_MEMORY, ModelState.PARKED), False
        if not model.busy:
            model.wanted_since = None
        return self._decide(now)

    def keep_alive(self, name: str, seconds: float, now: float) -> Sequence[Instruction]:
        """Set the idle time after which a model leaves, until it is loaded again; 0: never."""
        model = self.models[name]
        model.keep_alive_s, model.keep_alive_load = seconds, model.n_loads + (model.state is not ModelState.LOADED)
        return self._decide(now)

    def tick(self, now: float) -> Sequence[Instruction]:
        return self._decide(now)

    def next_at(self) -> float:
        """Return when the next ``tick`` is due."""
        times = [model.due_at() for model in self._present() if not model.pin and model.state is ModelState.LOADED]
        if any(model.wanted_since is not None and model.state not in IN_MEMORY for model in self.models.values()):
            times += [model.turn_ends_at for model in self._present() if model.busy and not model.pin]
        times += [self._group_due_at(group) for group in self.running_groups]
        return min(times, default=inf)

    # ---- decisions

    def _present(self) -> Iterator[ModelUse]:
        return (model for model in self.models.values() if model.state in IN_MEMORY)

    def _of_group(self, group: str) -> list[ModelUse]:
        return [model for model in self.models.values() if group in model.groups]

    def _decide(self, now: float) -> Sequence[Instruction]:
        for model in self.models.values():
            if model.leave and not model.busy and model.state in (ModelState.LOADED, ModelState.PARKED):
                self._leave(model, park=False)
        self._load_wanted(now)
        for model in self.models.values():
            if model.state is ModelState.LOADED and not model.pin and now >= model.due_at():
                ends = any(now >= self._group_due_at(group) for group in model.groups)  # with all they keep
                self._leave(model, park=not ends)
        for group in sorted(self.running_groups):
            is_due = now >= self._group_due_at(group)
            if is_due and not any(model.state in IN_MEMORY for model in self._of_group(group)):
                self.running_groups.discard(group)
                self._out.append(StopGroup(group))
        instructions, self._out = self._out, []
        return instructions

    def _load_wanted(self, now: float) -> None:
        """Load what is waited for, the longest wait first; its memories are reserved."""
        waiting = [model for model in self.models.values() if model.wanted_since is not None]
        reserved: set[str] = set()
        for model in sorted(waiting, key=lambda model: model.wanted_since or 0.0):
            if model.state in IN_MEMORY or model.shares is None or not reserved.isdisjoint(model.shares):
                continue
            if self._fits(model):
                model.state, model.loading_since = ModelState.LOADING, now
                self._out.append(LoadModel(model.name))
                continue
            reserved |= {*model.shares}
            self._make_room(model, now)

    def _fits(self, model: ModelUse, without: Collection[ModelUse] = ()) -> bool:
        assert model.shares is not None
        others = [other.shares or {} for other in self._present() if other not in without]
        used = {memory: sum(shares.get(memory, 0.0) for shares in others) for memory in model.shares}
        return all(used[memory] + share <= 1.0 + 1e-6 for memory, share in model.shares.items())

    def _make_room(self, model: ModelUse, now: float) -> None:
        """Evict as few models as it takes, idle ones first, the least recently used of these."""
        assert model.shares is not None
        leaving = [other for other in self._present() if other.state is ModelState.LEAVING]
        if self._fits(model, leaving):
            return
        candidates = [
            other
            for other in self._present()
            if other.state is ModelState.LOADED
            and not other.pin
            and not model.shares.keys().isdisjoint(other.shares or ())
            and (not other.busy or now >= other.turn_ends_at)
        ]
        chosen = list[ModelUse]()
        for other in sorted(candidates, key=lambda other: (other.busy, other.used_at)):
            if self._fits(model, [*leaving, *chosen]):
                break
            chosen.append(other)
        if not self._fits(model, [*leaving, *chosen]):
            return  # wait until a turn ends
        for other in [*chosen]:  # one that was chosen first may not be needed with those after it
            if self._fits(model, [*leaving, *(kept for kept in chosen if kept is not other)]):
                chosen.remove(other)
        for other in chosen:
            self._leave(other, park=True)

    def _leave(self, model: ModelUse, *, park: bool) -> None:
        model.state = ModelState.LEAVING
        self._out.append(UnloadModel(model.name, park))

    def _group_due_at(self, group: str) -> float:
        """Return when all models of a group are due; infinity unless one has an ``idle_s``.  One without it is due when
        it is not loaded and no request waits for it."""
        models = self._of_group(group)
        if not all(model.known for model in models):
            return inf  # it has to be there for their placement
        bound = [
            model for model in models if model.idle_s or model.wanted_since is not None
            or model.state is not ModelState.UNLOADED
        ]  # fmt: skip
        return max((model.due_at() for model in bound), default=inf) if any(m.idle_s for m in models) else inf
