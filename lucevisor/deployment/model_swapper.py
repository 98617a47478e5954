"""Loads and unloads the models of a service, as the policy of model_swap.py decides.

A model leaves in this order: its requests end, its prefix slots go to host memory or disk, the engine leaves the
pipeline, the daemons free its memory.  Requests that come meanwhile wait in its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any, Final, Protocol

import structlog

from lucevisor.config import Config
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.model_swap import (
    IN_MEMORY,
    Instruction,
    LoadModel,
    ModelState,
    ModelUse,
    StopGroup,
    SwapPolicy,
    UnloadModel,
)
from lucevisor.engine.request import RequestError
from lucevisor.engine.shell import Changes, Engine
from lucevisor.errors import AdminError, LucevisorError
from lucevisor.kv_transfer.host_memory import HostLease, HostMemory
from lucevisor.placement.result import HostOwner
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor

NOT_LOADED: Final = "the model is not loaded; a request loads it"

log = structlog.get_logger("lucevisor.deployment")


class SwappedModel(Protocol):
    """A model of the service."""

    config: Config
    deployment: Deployment
    engine: Engine | None

    @property
    def host_memory(self) -> HostMemory: ...

    @property
    def changes(self) -> Changes: ...

    async def keep_prefixes(self) -> None:
        """Copy or save prefix slots before the shards lose them."""


class ModelSwapper:
    """``models`` and their ``groups``; ``on_change`` is called when a model's state changed.  Create it in a running
    loop."""

    def __init__(
        self,
        models: Mapping[str, SwappedModel],
        groups: Callable[[], Mapping[str, GroupSupervisor]],
        on_change: Callable[[], None],
    ) -> None:
        self._models, self._groups, self._on_change = models, groups, on_change
        self._loop = asyncio.get_running_loop()
        uses = {}
        for name, service in models.items():
            own = service.config.model
            uses[name] = use = ModelUse(name, frozenset(service.config.groups), own.pin, own.ttl)
            if own.preload:
                use.state = ModelState.LOADING
            else:
                service.deployment.wanted = False
        self.policy = SwapPolicy(uses)
        self.problems: dict[str, str] = {}  # why models could not be loaded the last time
        self._timer: asyncio.TimerHandle | None = None
        self._failing: set[str] = set()  # models whose load has failed and is being undone
        self._parked: dict[str, HostLease] = {}  # weights in the host memory of daemons
        self._ending: dict[str, asyncio.Task[None]] = {}  # groups that are being stopped
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False

    def state(self, name: str) -> ModelState:
        return self.policy.models[name].state

    async def wait_for(self, name: str, done: Callable[[], bool]) -> None:
        """Wait until something holds of a model that was ordered, or the service stops."""
        changes = self._models[name].changes
        changes.notify()  # who ordered something else gives way
        await changes.wait_for(lambda: done() or self.closed)

    def close(self) -> None:
        """Decide nothing more: the service stops."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    # ---- events of models and groups

    def on_placed(self, name: str) -> None:
        service = self._models[name]
        assert service.deployment.placement is not None
        shares = service.deployment.placement.memory_shares
        self.decide(self.policy.on_placed(name, shares, self._loop.time()))

    def on_busy(self, name: str) -> None:
        """A model's first request came, or its last one ended; engines call it while they handle an event."""
        self._loop.call_soon(self._note_busy, name)

    def _note_busy(self, name: str) -> None:
        engine = self._models[name].engine
        busy = engine is not None and engine.busy
        if busy or self.policy.models[name].busy:  # between two calls requests may have ended, and others come
            self.decide(self.policy.on_busy(name, busy, self._loop.time()))

    def on_complete(self, name: str) -> None:
        if self.state(name) is ModelState.LOADING:
            self.problems.pop(name, None)
            self.decide(self.policy.on_loaded(name, self._loop.time()))

    def on_not_loaded(self, name: str, reason: str) -> None:
        """A model could not be loaded, or placed."""
        self._loop.call_soon(self._fail, name, reason)

    def _fail(self, name: str, reason: str) -> None:
        service, text = self._models[name], f"model {name} could not be loaded: {reason}"
        self.problems[name] = reason
        if self.state(name) in (ModelState.LOADING, ModelState.LOADED):  # loaded: the next daemon could not
            if name not in self._failing:
                self._failing.add(name)
                self._spawn(self._end_load(name), f"end the load of {name}")
        elif self.state(name) is not ModelState.LEAVING:
            if service.engine is not None:
                service.engine.unload(NOT_LOADED, RequestError("shard_lost", text))
            self.decide(self.policy.on_not_loaded(name, self._loop.time()))
            self._note_busy(name)
        self._on_change()

    async def _end_load(self, name: str) -> None:
        """Free what other daemons have loaded of a model, then end the requests that wait."""
        service = self._models[name]
        text = f"model {name} could not be loaded: {self.problems.get(name, '')}"
        if service.engine is not None:
            service.engine.unload(NOT_LOADED, RequestError("shard_lost", text))
        await service.deployment.unload(park=False)
        self._failing.discard(name)
        self.decide(self.policy.on_not_loaded(name, self._loop.time()))
        self._note_busy(name)  # requests that came meanwhile try again

    def on_moved(self, name: str) -> None:
        self.policy.models[name].groups = frozenset(self._models[name].config.groups)
        used = {group for use in self.policy.models.values() for group in use.groups}
        self.policy.running_groups &= used

    def on_group_state(self, group: str, state: State, reason: str) -> None:
        now = self._loop.time()
        if state is State.STARTING:
            self.decide([*self.policy.on_daemon_lost(group, now), *self.policy.on_started([group], now)])
        elif state is State.READY:
            self.decide(self.policy.on_started([group], now))
        elif state is State.FAILED:
            self.policy.on_daemon_lost(group, now)
            for name, use in self.policy.models.items():
                preloads = self._models[name].config.model.preload
                if group in use.groups and use.state is ModelState.LOADING and not preloads:
                    self.on_not_loaded(name, f"group {group} is FAILED: {reason}")

    # ---- instructions

    def decide(self, instructions: Sequence[Instruction]) -> None:
        if self.closed:
            return
        for instruction in instructions:
            match instruction:
                case LoadModel(name):
                    self._spawn(self._load(name), f"load {name}")
                case UnloadModel(name, park):
                    self._spawn(self._unload(name, park=park), f"unload {name}")
                case StopGroup(group):
                    self._ending[group] = self._spawn(self._stop(group), f"stop {group}")
        for name in [name for name in self._parked if self.state(name) is not ModelState.PARKED]:
            if self.state(name) is not ModelState.LEAVING:
                self._parked.pop(name).close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (at := self.policy.next_at()) < inf:
            self._timer = self._loop.call_at(max(at, self._loop.time() + 0.01), self._tick)
        if instructions:
            self._on_change()

    def _tick(self) -> None:
        self._timer = None
        self.decide(self.policy.tick(self._loop.time()))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("model task failed", task=task.get_name(), reason=repr(error), exc_info=error)

    async def _load(self, name: str) -> None:
        service, groups = self._models[name], self._groups()
        log.info("loading model", model=name)
        for group in self.policy.models[name].groups:
            if group in self._ending:
                await asyncio.wait({self._ending[group]})
        for group in self.policy.models[name].groups:
            if groups[group].state is State.STOPPED:
                with contextlib.suppress(LucevisorError):  # its state says why
                    await groups[group].start()
            if groups[group].state is State.FAILED:
                self.on_not_loaded(name, f"group {group} is FAILED: {groups[group].reason}")
                return
        service.deployment.load()

    async def _unload(self, name: str, *, park: bool) -> None:
        service = self._models[name]
        if service.engine is not None and service.engine.core.pipeline is not None:
            await service.engine.quiesce(inf)
            await service.keep_prefixes()
        if service.engine is not None:
            service.engine.unload(NOT_LOADED)
        parked_bytes = await service.deployment.unload(park=park)
        if parked_bytes:
            self._parked[name] = service.host_memory.lease(HostOwner.WEIGHTS, parked_bytes)
        self.decide(self.policy.on_left(name, parked_bytes > 0, self._loop.time()))
        self._on_change()

    async def _stop(self, group: str) -> None:
        log.info("stopping group: its models are idle", group=group)
        try:
            await self._groups()[group].stop()
        finally:
            del self._ending[group]
            self.policy.on_daemon_lost(group, self._loop.time())
            self._on_change()


class LoadControl:
    """Loads and unloads one model, for its API and operators (api.contexts.ModelControl)."""

    def __init__(self, swapper: ModelSwapper, name: str) -> None:
        self._swapper, self._name, self._use = swapper, name, swapper.policy.models[name]

    @property
    def state(self) -> str:
        return self._use.state.value

    @property
    def problem(self) -> str:
        """Return why the model could not be loaded the last time, or empty."""
        return self._swapper.problems.get(self._name, "")

    @property
    def unloads_in_s(self) -> float | None:
        """Return the seconds until the idle model leaves; None: it stays, or has requests."""
        due_at = self._use.due_at() if self._use.state is ModelState.LOADED else inf
        return None if due_at == inf else max(0.0, due_at - self._now())

    @property
    def loads(self) -> tuple[int, float]:
        return self._use.n_loads, self._use.load_s

    async def load(self) -> None:
        """Load it; returns when it was loaded.  Raises LucevisorError."""
        swapper, use, n_loads = self._swapper, self._use, self._use.n_loads
        swapper.problems.pop(self._name, None)
        swapper.decide(swapper.policy.want(self._name, self._now()))
        await swapper.wait_for(self._name, lambda: not use.ordered or bool(self.problem))
        if use.state is not ModelState.LOADED and use.n_loads == n_loads:
            gone = "the supervisor is stopping" if swapper.closed else "it was unloaded meanwhile; load it again"
            raise LucevisorError(f"model {self._name} is not loaded: {self.problem or gone}")

    async def unload(self) -> None:
        """Unload it once it has no requests; returns when its memory is free.  Raises AdminError."""
        swapper, use, n_unloads = self._swapper, self._use, self._use.n_unloads
        if use.pin:
            raise AdminError(f"model {self._name} is pinned ([models.{self._name}] pin = true): it is never unloaded")
        self.keep_alive(0.0)
        await swapper.wait_for(self._name, lambda: not use.leave and use.state is not ModelState.LEAVING)
        if use.state in IN_MEMORY and use.n_unloads == n_unloads:
            why = "the supervisor is stopping" if swapper.closed else "it was loaded again meanwhile"
            raise AdminError(f"model {self._name} is not unloaded: {why}")

    def keep_alive(self, seconds: float) -> None:
        """Set its idle time until it is loaded again; negative: it stays, 0: it leaves when it is idle."""
        policy = self._swapper.policy
        if seconds != 0:
            self._swapper.decide(policy.keep_alive(self._name, max(0.0, seconds), self._now()))
        elif not self._use.pin:
            self._swapper.decide(policy.unload(self._name, self._now()))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
