"""What an operator may ask of a running service: another process for a group, another configuration.

A base of the service (service.py), which implements its abstract methods.  Invariant: one order is carried out at a
time, and none once the stop has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final

import structlog

from lucevisor import awake
from lucevisor.config import Config
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.group_settings import target_groups
from lucevisor.deployment.journal_rows import journal_rows
from lucevisor.deployment.reload import READ_LATER, give_state, go_on, take_state, values_of
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.state_memory import Kept
from lucevisor.engine.core import Engine
from lucevisor.engine.request import RequestError
from lucevisor.errors import LucevisorError, NotReadyError, OrderError, show
from lucevisor.snapshots.manager import SnapshotManager
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.states import State

STOP_S: Final = 2.0
"""How long daemons have to exit before SIGKILL."""
RESTART_S: Final = 30.0
PREPARE_S: Final = 15.0
"""An orderly restart waits PREPARE_S for a warm successor, while requests run, then RESTART_S / 2 for them, and kills
after RESTART_S."""

_MOVING: Final = RequestError("shard_lost", "the layers move to other daemons; send the request again later")

log = structlog.get_logger("service")


class Orders(ABC):
    """The service's side of restart and reload."""

    config: Config
    model: ServedModel
    engine: Engine | None
    snapshots: SnapshotManager | None
    deployment: Deployment
    restart_reasons: dict[str, Counter[str]]
    _deployments: list[Deployment]
    _target_groups: list[str]
    _restarting: asyncio.Lock
    _stopping: asyncio.Task[None] | None

    def check_group(self, group: str) -> None:
        """Raise OrderError if there is no group of that name."""
        if group not in self.groups:
            near = difflib.get_close_matches(group, self.groups, 1, 0.0)[0]
            names = ", ".join(self.groups)
            raise OrderError(f"there is no group {show(group)}: the groups are {names}; nearest: {near}")

    async def restart(self, group: str, *, now: bool) -> None:
        """Restart one group's daemon; returns when requests are served again or another group has FAILED.

        Raises LucevisorError naming group and reason.
        """
        self.check_group(group)
        one = self.groups[group]
        async with self._restarting:
            if self._stopping is not None:  # perhaps since this call waited for its turn
                raise LucevisorError("the supervisor is stopping")
            if not now:
                with contextlib.suppress(TimeoutError):  # it takes longer without
                    async with awake.timeout(PREPARE_S):
                        await one.prepare()
            await one.restart(now=now, deadline_s=RESTART_S)
            self.restart_reasons[group]["operator"] += 1
            tried = (State.LOADING, State.READY, State.FAILED)  # of a new process: the old one has left these
            await one.wait(State.STARTING, *tried, timeout_s=2 * RESTART_S)
            if group in self._target_groups:
                await self._until(
                    lambda: self.state in ("ready", "draining") or (self.state == "failed" and one.state in tried)
                )
            else:  # it runs the drafter alone
                await self._until(lambda: self.state == "draining" or one.state in (State.READY, State.FAILED))
            if self.state == "draining" or one.state is State.FAILED:
                raise NotReadyError(f"group {group} did not come back: {self.reason() or one.reason}")

    async def reload(self, config: Config, at_once: Collection[str] = ()) -> dict[str, object]:
        """Switch to another configuration; when requests are served with it, return the keys that changed and their
        values.  ``at_once``: keys that the caller applies.

        Raises LucevisorError, after which all is as it was.
        """
        async with self._restarting:
            no_daemons = READ_LATER.union(at_once)
            changed = values_of(self.config, config, no_daemons)
            if self.state != "ready" or self.engine is None or not self.config.recovery.hold_s:
                reason = self.reason() or "recovery.hold_s is 0, so requests cannot wait for their state"
                raise NotReadyError(f"nothing is reloaded: {reason}")
            if no_daemons.issuperset(changed):
                self.config = config
                return changed
            earlier, later = self.deployment, self._deploy(config, self.deployment)
            try:
                await self._load(later)
                memory = await take_state(self.engine, earlier, self.model.spec)
                try:
                    kept = await give_state(memory, later)
                except BaseException:
                    go_on(self.engine, earlier)
                    raise
            except BaseException:
                await self._end(later)
                if not later.unfit or self._stopping is not None:
                    raise
                log.warning("both do not fit at once: requests wait while the weights are loaded", reason=later.unfit)
                await self._replace(self.engine, config, earlier)
            else:
                self._switch(self.engine, config, later, kept)
                await self._end(earlier)
            await self._until(lambda: self.state in ("ready", "failed", "draining"))
            return changed

    async def _load(self, later: Deployment) -> None:
        """Start a deployment and wait until its daemons are READY.  Raises LucevisorError."""
        await later.start()
        await self._until(lambda: later.loaded or self._stopping is not None or _failed(later) is not None)
        if not later.loaded:
            raise LucevisorError(f"nothing is reloaded: {_failed(later) or 'the supervisor is stopping'}")

    async def _replace(self, engine: Engine, config: Config, earlier: Deployment) -> None:
        """End the deployment and start another one with its state, or itself again where that fails.

        Raises LucevisorError in that case.
        """
        memory = await take_state(engine, earlier, self.model.spec)
        earlier.retire()
        engine.part(_MOVING, None, 0)
        await self._end(earlier)
        problem: LucevisorError | None = None
        for wanted in (config, self.config):
            later = self._deploy(wanted, earlier)
            kept = Kept()
            try:
                await self._load(later)
                kept = await give_state(memory, later)
            except LucevisorError as error:
                log.error("reload", reason=str(error))
                problem = problem or error
                if wanted is config and not later.loaded and self._stopping is None:
                    await self._end(later)
                    continue
            memory.close()
            self._switch(engine, wanted, later, kept)
            break
        if problem is not None and self.config is not config:
            raise problem

    def _switch(self, engine: Engine, config: Config, later: Deployment, kept: Kept) -> None:
        """Serve with another deployment, whose daemons have the state that was ``kept``."""
        self.deployment.retire()
        self.deployment, self.config, self._target_groups = later, config, target_groups(config)
        for name, group in later.groups.items():
            self.restart_reasons.setdefault(name, Counter())
            self._on_state(name, group.state, "reloaded")
        engine.part(_MOVING, None, 0)
        if later.placement is not None:
            self._take_over(later, kept)

    def _take_over(self, later: Deployment, kept: Kept | None = None) -> None:
        """Attach the present deployment, which is placed, to the engine of the one before."""
        assert later.placement is not None
        assert self.engine is not None
        rows = journal_rows(later.buffers, later.placement)
        self.engine.part(_MOVING, rows, rows.n_pages if rows is not None else 0)
        if self.snapshots is not None and later.transfers is not None:
            self.snapshots.shards = later.transfers
        later.serve(self.engine, kept)

    async def _end(self, deployment: Deployment) -> None:
        """Stop a deployment that does not serve."""
        await deployment.stop(STOP_S)
        if self._stopping is None:
            self._deployments.remove(deployment)
            deployment.close()

    # ---- of the service

    @property
    @abstractmethod
    def groups(self) -> dict[str, GroupSupervisor]:
        """The groups of the present deployment, by name."""

    @property
    @abstractmethod
    def state(self) -> str:
        """Whether requests are served."""

    @abstractmethod
    def reason(self) -> str:
        """Why requests are not served now; empty when they are."""

    @abstractmethod
    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until something changed after which ``condition`` holds."""

    @abstractmethod
    def _deploy(self, config: Config, succeeds: Deployment | None = None) -> Deployment:
        """Make a deployment that does not serve yet."""

    @abstractmethod
    def _on_state(self, group: str, state: State, reason: str) -> None:
        """Take a state of a group of the present deployment."""


def _failed(deployment: Deployment) -> str | None:
    """Return which of the groups that serving needs is FAILED, and why; None if none is."""
    needed = {group for group in deployment.needed if deployment.groups[group].state is State.FAILED}
    return next((f"group {name} is FAILED: {deployment.groups[name].reason}" for name in sorted(needed)), None)
