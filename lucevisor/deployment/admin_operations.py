"""Restart a group, reload the configuration.  Invariant: one operation at a time, and none once the stop has begun."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final

import structlog

from lucevisor import suspend_clock
from lucevisor.config import Config, changed_keys
from lucevisor.config.checks import OVERRIDE
from lucevisor.deployment.assembly import RestoredLinks
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.service import RESTART_S, ModelService, Service
from lucevisor.engine.shell import Engine
from lucevisor.errors import (
    NO_VALUE,
    AdminError,
    ConfigError,
    ConfigErrors,
    LucevisorError,
    NotReadyError,
    nearest,
    show,
)
from lucevisor.kv_transfer.transfers import ExportedState
from lucevisor.supervision.events import State

DEPLOYMENT_KEYS: Final[tuple[str, ...]] = ("placement.", "groups.", "draft.device", "recovery.journal",
                   "recovery.spares", "recovery.restart_limit")  # fmt: skip
"""Keys, and prefixes of keys, that may change with another deployment."""
LATE_KEYS: Final = frozenset({"server.drain_s"})
"""Keys that are read at each use, so that a change needs no other daemons."""


def changed_values(before: Config, after: Config, at_once: Collection[str]) -> dict[str, object]:
    """Return the changed keys, with their values in ``after`` (None: gone).  ``at_once``: those that need no other
    daemons.

    Raises ConfigErrors naming those that can only change with another start.
    """
    changed = changed_keys(before, after)
    values = {key: _value(after.as_dict(), key) for key in changed}
    why, hint = "cannot change while the supervisor runs", "leave it as it was, or `lucevisor stop`, then `start`"
    movable = DEPLOYMENT_KEYS
    if before.models or before.replicas:
        what = "several models" if before.models else "replicas"
        why, movable = f"cannot change while the supervisor serves {what}", ()
    fixed = [key for key in changed if key not in at_once and not key.startswith(movable)]
    if fixed:
        given = {override.partition("=")[0] for override in after.overrides}
        files = {key: OVERRIDE if key in given else str(after.file) for key in fixed}
        shown = {key: NO_VALUE if isinstance(values[key], Mapping) else values[key] for key in fixed}
        raise ConfigErrors([ConfigError(key, shown[key], why, hint, file=files[key]) for key in fixed])
    return values


def _value(tree: Mapping[str, Any], key: str) -> object:
    table, _, rest = key.partition(".")
    return _value(tree.get(table, {}), rest) if rest else tree.get(table)


async def freeze_and_export(engine: Engine, earlier: Deployment) -> ExportedState:
    """Suspend requests, and copy all state to host memory.  Raises LucevisorError, and then requests continue."""
    assert earlier.placement is not None
    try:
        timeout_s = 15.0  # for the steps in flight
        frozen = await engine.freeze(timeout_s, "reload")
        while frozen is None and engine.ready:  # a daemon was lost, and came back
            frozen = await engine.freeze(timeout_s, "reload")
        if frozen is None:
            raise LucevisorError("running requests could not be paused; try again")
        return await earlier.export_state(frozen, {stage.group for stage in earlier.placement.stages})
    except BaseException:
        resume_requests(engine, earlier)
        raise


def resume_requests(engine: Engine, earlier: Deployment) -> None:
    if earlier.transfers is not None:
        earlier.transfers.resume()
    engine.thaw()


async def restore_state(state: ExportedState, later: Deployment) -> RestoredLinks:
    """Copy state to the READY daemons of a deployment; return their links.  Raises LucevisorError."""
    assert later.placement is not None
    assert later.transfers is not None
    links = dict(later.links)
    groups = {stage.group for stage in later.placement.stages}
    await state.load(later.transfers, groups)
    if later.links != links:
        raise LucevisorError("a new daemon was lost while the state moved; try again")
    return RestoredLinks(links.values(), state.with_draft and later.draft_group in groups)


log = structlog.get_logger("lucevisor.deployment")


class AdminOperations:
    """Restarts and reloads of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._one_at_a_time = asyncio.Lock()

    def check_group(self, group: str) -> None:
        groups = self._service.groups
        if group not in groups:
            hint = f"nearest: {nearest(group, groups, 0.0)}"
            raise AdminError(f"there is no group {show(group)}: the groups are {', '.join(groups)}; {hint}")

    async def restart_all(self, groups: Collection[str], *, now: bool) -> None:
        """Restart groups one by one, those of a replica while others serve its requests; returns when all are back.

        Raises LucevisorError naming group and reason, and goes no further then.
        """
        for group in groups:
            self.check_group(group)
        replicas = [[*service.groups] for service in self._service.models.values() if service.replica]
        for names in replicas or [[*groups]]:
            chosen = [group for group in groups if group in names]
            async with self._one_at_a_time, self._drained(chosen[0] if chosen and not now else ""):
                for group in chosen:
                    await self._restart(group, now=now)

    @contextlib.asynccontextmanager
    async def _drained(self, group: str) -> AsyncIterator[None]:
        service = self._service
        name = next((model.replica for model in service.models.values() if group in model.groups), "")
        if service.replicated is None or not name:
            yield
            return
        try:
            drained = await service.replicated.drain(name, service.config.server.drain_s, RESTART_S / 2)
            log.info("replica drained" if drained else "replica not drained: no other one serves", replica=name)
            yield
        finally:
            service.replicated.end_drain(name)

    async def _restart(self, group: str, *, now: bool) -> None:
        """Restart one group's daemon; returns when requests are served again.  Raises LucevisorError."""
        self.check_group(group)  # since this call waited for its turn, it may be gone, or the service be stopping
        service, supervised = self._service, self._service.groups[group]
        if service.stopping:
            raise LucevisorError("the supervisor is stopping")
        if not now:
            with contextlib.suppress(TimeoutError):  # the restart takes longer without
                async with suspend_clock.timeout(15.0):
                    await supervised.prepare()
        await supervised.restart(now=now, deadline_s=RESTART_S)
        service.restart_reasons[group]["operator"] += 1
        tried = (State.LOADING, State.READY, State.FAILED)  # of a new process: the old one has left these
        await supervised.wait(State.STARTING, *tried, timeout_s=2 * RESTART_S)
        users = [model for model in service.models.values() if group in model.deployment.needed]
        if users:
            await service.changes.wait_for(
                lambda: (
                    all(model.state in ("ready", "draining") for model in users)
                    or (any(model.state == "failed" for model in users) and supervised.state in tried)
                )
            )
        else:  # it runs the drafter alone
            await service.changes.wait_for(lambda: service.stopping or supervised.state in (State.READY, State.FAILED))
        if supervised.state is State.FAILED or service.stopping:
            raise NotReadyError(f"group {group} did not come back: {service.reason() or supervised.reason}")

    def check_reload(self, config: Config, at_once: Collection[str]) -> None:
        """Raise ConfigErrors if keys differ that only another start can change."""
        changed_values(self._service.config, config, LATE_KEYS.union(at_once))

    async def reload(self, config: Config, at_once: Collection[str] = ()) -> dict[str, object]:
        """Switch to another configuration; return the changed keys and their values when requests are served with it.

        ``at_once``: keys that the caller applies.  Raises LucevisorError, and then nothing has changed.
        """
        service = self._service
        async with self._one_at_a_time:
            no_daemons = LATE_KEYS.union(at_once)
            changed = changed_values(service.config, config, no_daemons)
            if service.state != "ready" or not service.config.recovery.hold_s:
                reason = service.reason() or "recovery.hold_s is 0, so requests cannot wait for their state"
                raise NotReadyError(f"nothing is reloaded: {reason}")
            if not no_daemons.issuperset(changed):
                engine = service.only.engine
                assert engine is not None
                await self._move(service.only, engine, config)
            service.config = config
            await service.changes.wait_for(lambda: service.state in ("ready", "failed", "draining"))
            return changed

    async def _move(self, model: ModelService, engine: Engine, config: Config) -> None:
        """Switch to another deployment, loaded beside the present one or, if both do not fit, after its end."""
        service = self._service
        if model.control is not None:
            await model.control.load()  # layers move from daemons to daemons
        earlier, later = model.deployment, service.deploy(model, config)
        try:
            await self._load(later)
            state = await freeze_and_export(engine, earlier)
            try:
                restored = await restore_state(state, later)
            except BaseException:
                resume_requests(engine, earlier)
                raise
        except BaseException:
            await service.end(later)
            if not later.infeasible_reason or service.stopping:
                raise
            log.warning(
                "old and new deployment do not fit at once: requests wait while the weights are loaded",
                reason=later.infeasible_reason,
            )
            await self._replace(model, engine, config)
        else:
            model.switch(engine, config, later, restored)
            await service.end(earlier)

    async def _load(self, later: Deployment) -> None:
        """Start a deployment and await its daemons.  Raises LucevisorError."""
        service = self._service
        await later.start()
        await service.changes.wait_for(lambda: later.loaded or service.stopping or later.failed is not None)
        if not later.loaded:
            raise LucevisorError(f"nothing is reloaded: {later.failed or 'the supervisor is stopping'}")

    async def _replace(self, model: ModelService, engine: Engine, config: Config) -> None:
        """End the deployment and start another one with its state, or where that fails itself again; that raises."""
        service, earlier = self._service, model.deployment
        state = await freeze_and_export(engine, earlier)
        model.detach(engine)
        await service.end(earlier)
        problem: LucevisorError | None = None
        for configuration in (config, service.config):
            later = service.deploy(model, configuration)
            restored = RestoredLinks()
            try:
                await self._load(later)
                restored = await restore_state(state, later)
            except LucevisorError as error:
                log.error("reload failed", reason=str(error))
                problem = problem or error
                if configuration is config and not later.loaded and not service.stopping:
                    await service.end(later)
                    continue
            state.close()
            model.switch(engine, configuration, later, restored)
            break
        if problem is not None and model.config is not config:
            raise problem
