"""One running supervisor: its groups and its models, each with its engine, weights, snapshots and deployment.

Replicas are models of one name behind one router, with groups of their own.  At start groups are started, each model is
placed when its groups have sent hello, then loaded; meanwhile weights are hashed.  A stop lets requests end, saves
prefix slots, ends what still runs, stops the groups, and closes the files. Invariant: any number of callers share one
shutdown, and nothing is restarted once it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import structlog

from lucevisor import suspend_clock
from lucevisor.config import CacheConfig, Config
from lucevisor.deployment.assembly import RestoredLinks
from lucevisor.deployment.boundaries import journal_rows
from lucevisor.deployment.cache_files import cache_directory
from lucevisor.deployment.deployment import Deployment
from lucevisor.deployment.group_settings import group_devices, group_threads
from lucevisor.deployment.model_swap import ModelState
from lucevisor.deployment.model_swapper import NOT_LOADED, LoadControl, ModelSwapper
from lucevisor.deployment.served_model import ServedModel, pipelines
from lucevisor.deployment.weights import ServedWeights
from lucevisor.engine.core import MAX_LOSSES, FrozenState
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.replicas import ReplicatedEngine
from lucevisor.engine.request import RequestError
from lucevisor.engine.shell import Changes, Engine, EngineSettings
from lucevisor.engine.validation import enabled
from lucevisor.errors import LucevisorError, unusable
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.kv_transfer.host_tier import HostTier
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend
from lucevisor.placement.result import Placement
from lucevisor.placement.sizing import slot_unit_bytes
from lucevisor.protocol.messages import Progress
from lucevisor.snapshots.file_format import DraftModel
from lucevisor.snapshots.manager import SnapshotManager, open_store
from lucevisor.snapshots.policy import SavePolicy
from lucevisor.snapshots.store import SnapshotStore
from lucevisor.supervision.child import stage_packages
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher, open_listener
from lucevisor.supervision.listener import Listener
from lucevisor.supervision.machine import SupervisionLimits


async def watch_holds(engine: Engine, hold_s: float, give_up: Callable[[RequestError], None]) -> None:
    """Give up the requests of ``engine`` that wait for a lost daemon longer than ``hold_s``."""
    recovery = engine.core.recovery
    while True:
        await engine.changes.wait_for(lambda: recovery.since is not None)
        since = recovery.since
        if not await engine.changes.holds_within(lambda: recovery.since != since, hold_s):  # noqa: B023
            unavailable = engine.statistics().reason
            text = f"{unavailable}; the request was held for {hold_s:g} s (recovery.hold_s); send it again later"
            give_up(RequestError("shard_lost", text))


def engine_limits(
    cache: CacheConfig, spec: ModelSpec, placement: Placement, drafter: ModelSpec | None = None
) -> EngineLimits:
    """Limits of the engine that runs ``placement``.  ``drafter``: the one that is placed."""
    unit_bytes, n_pages = slot_unit_bytes(spec, placement.kv_dtype, drafter), placement.pool_pages
    return EngineLimits(
        max_sequences=placement.max_sequences,
        max_context=placement.max_context,
        prefill_chunk=placement.prefill_chunk,
        long_prefill_tokens=_long_prefill_tokens(placement),
        max_step_tokens=placement.max_step_tokens,
        kv_groups=placement.kv_groups,
        pools=placement.pools,
        window_tokens=placement.window_tokens,
        prefix=PrefixSettings(
            max_slots=placement.prefix_slots,
            memory_bytes=placement.cache_bytes,
            min_tokens=cache.min_tokens,
            checkpoint_pages=cache.checkpoint_pages,
            unit_bytes={kv_group: unit_bytes[kv_group] for kv_group in placement.kv_groups},
        ),
        residency=None if n_pages is None else Residency(n_pages, placement.residency_policy, placement.tau),
        speculation=placement.drafting,
        whole_texts=spec.pooling.whole_texts,
        whole_images=spec.whole_images,
    )


def _long_prefill_tokens(placement: Placement) -> int:
    """Return the prompt tokens of a step beside others: a whole chunk on GPUs, where it takes a quarter second.

    Shorter steps would keep the prompts of all agents waiting for the tokens of one.
    """
    cpu = any(shard.backend is Backend.CPU for stage in placement.stages for shard in stage.shards)
    return min(placement.prefill_chunk, 2 * PAGE_TOKENS) if cpu else placement.prefill_chunk


ServiceState = Literal["ready", "starting", "degraded", "failed", "draining"]

SAVE_S: Final = 10.0
"""Time to save prefix slots at a stop or a restart."""
STOP_S: Final = 2.0
"""Time that daemons have to exit before SIGKILL."""
RESTART_S: Final = 30.0
"""Time of an orderly restart before the daemon is killed; requests are suspended within half of it."""

_MOVING: Final = RequestError("shard_lost", "layers are moving to other daemons; send the request again later")

log = structlog.get_logger("lucevisor.deployment")


class Observer:
    """Watches a start; this one does nothing."""

    def state(self, group: str, state: State, reason: str) -> None:
        """Called when a group changes its state."""

    def progress(self, group: str, progress: Progress) -> None:
        """Called when a shard has loaded more bytes."""

    def ready(self, service: Service) -> None:
        """Called whenever requests are served, again and again."""


class ModelService:
    """One model of a service, or a replica of it."""

    def __init__(self, config: Config, model: ServedModel, owner: Service, weights: ServedWeights) -> None:
        self.config, self.model = config, model
        self.engine: Engine | None = None
        self.snapshots: SnapshotManager | None = None
        self.deployment: Deployment  # set by the owner
        self.weights = weights
        self.host_memory: Final = HostMemory()
        self._owner = owner
        self._opening: asyncio.Task[None] | None = None  # while snapshots are wanted and not open yet
        self._saving: asyncio.Task[int] | None = None
        self._holding: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()  # all groups together, once
        self._was_ready = False

    def make_deployment(self, config: Config, limits: SupervisionLimits, succeeds: Deployment | None) -> Deployment:
        """Make a deployment without groups.  ``succeeds``: the one whose requests it is to serve."""
        epoch = 1 if succeeds is None else succeeds.epoch + 1
        sizes = None if succeeds is None else succeeds.placement
        return Deployment(epoch, config, self.model, self.weights, limits, self, sizes)

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def replica(self) -> str:
        """The name of the replica; empty without any."""
        return self.config.replica

    @property
    def key(self) -> str:
        return f"{self.name}/{self.replica}" if self.replica else self.name

    @property
    def groups(self) -> Mapping[str, GroupSupervisor]:
        return self.deployment.groups

    @property
    def placement(self) -> Placement | None:
        return self.deployment.placement

    @property
    def snapshot_store(self) -> SnapshotStore | None:
        """The snapshots on disk, if they are on and open."""
        return self.snapshots.store if self.snapshots is not None else None

    @property
    def host_tier(self) -> HostTier | None:
        return self.snapshots.host if self.snapshots is not None else None

    # ---- stop

    async def drain(self, drain_s: float) -> None:
        """Let requests end, then save prefix slots."""
        if self.engine is not None and self.deployment.complete and drain_s > 0:
            if not await self.engine.drain(drain_s):
                now = self.engine.statistics()
                log.warning("requests end because of the stop", model=self.name, running=now.running,
                            queued=now.queued, waited_s=drain_s)  # fmt: skip
            await self.save_prefixes(SAVE_S)
        self.end_requests()

    def hurry(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
        self.end_requests()  # before their groups go: the reason is the stop, not a lost shard

    async def close(self) -> None:
        await self.weights.close()
        if self._opening is not None:  # it ends by itself, unless the disk hangs
            self._loaded.set()
            await asyncio.wait({self._opening}, timeout=STOP_S)
        if self.snapshots is not None:
            await self.snapshots.close()

    async def keep_prefixes(self) -> None:
        """Copy prefix slots to host memory before the model leaves its devices, or save them."""
        if self.snapshots is not None and self.deployment.complete:
            if self.snapshots.host is not None:
                await self.snapshots.copy_all()
            else:
                await self.save_prefixes(SAVE_S)

    def end_requests(self) -> None:
        """End running and queued requests and refuse new ones; idempotent."""
        error = RequestError(
            "shutting_down", "the supervisor is stopping; send the request to another server, or again later"
        )
        if self.engine is not None:
            self.engine.close(error)
        self.deployment.detach(error)
        if self._holding is not None:
            self._holding.cancel()

    async def save_prefixes(self, deadline_s: float) -> None:
        """Save prefix slots to ``cache.dir``, if set; a hurried stop cancels it."""
        if self.snapshots is not None and self.snapshot_store is not None and self.deployment.complete:
            self._saving = asyncio.create_task(self.snapshots.save_all(deadline_s), name="save all slots")
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                async with suspend_clock.timeout(deadline_s + 1.0):  # a hung disk does not delay the stop
                    await self._saving
            self._saving = None

    # ---- another deployment (admin_operations.py)

    def switch(self, engine: Engine, config: Config, later: Deployment, restored: RestoredLinks) -> None:
        """Serve with another deployment, whose daemons have the ``restored`` state."""
        self.deployment.detach()
        self.deployment, self.config = later, config
        self._owner.swapper.on_moved(self.key)
        for name, group in later.groups.items():
            self.on_state(later, name, group.state, "reloaded")
        engine.detach_frozen(_MOVING, None, 0)
        if later.placement is not None:
            self._take_over(engine, later, restored)

    def detach(self, engine: Engine) -> None:
        self.deployment.detach()
        engine.detach_frozen(_MOVING, None, 0)

    def _take_over(self, engine: Engine, later: Deployment, restored: RestoredLinks | None = None) -> None:
        assert later.placement is not None
        rows = journal_rows(later.buffers, later.placement, self.host_memory)
        engine.detach_frozen(_MOVING, rows, rows.n_pages if rows is not None else 0)
        later.attach(engine, restored)

    # ---- state

    @property
    def changes(self) -> Changes:
        return self._owner.changes

    @property
    def model_state(self) -> ModelState:
        return self._owner.swapper.state(self.key)

    @property
    def control(self) -> LoadControl | None:
        """Loads and unloads the model; None for a replica."""
        return None if self.replica else LoadControl(self._owner.swapper, self.key)

    @property
    def _comes_by_request(self) -> bool:
        """True while the model is not loaded, or is loaded for requests that wait."""
        engine, state = self.engine, self.model_state
        is_first = state is ModelState.LOADING and self.config.model.preload and not self._was_ready
        return engine is not None and state is not ModelState.LOADED and not is_first

    @property
    def state(self) -> ServiceState:
        if self._owner.stopping:
            return "draining"
        if any(self.groups[name].state is State.FAILED for name in self.deployment.needed):
            return "failed"
        if self._comes_by_request or (self.deployment.complete and self._opening is None):
            return "ready"
        return "degraded" if self._was_ready else "starting"

    def reason(self) -> str:
        """Return why requests are not served now, or ""."""
        if self.state == "ready":
            return ""
        if self._owner.stopping:
            return "the supervisor is stopping"
        parts = [
            f"group {name} is {g.state.name}" + (f": {g.reason}" if g.reason else "")
            for name in self.deployment.needed
            if (g := self.groups[name]).state is not State.READY
        ]
        if not parts and self._opening is not None:
            return (
                f"the weights are being hashed for cache.dir, {self.weights.model.progress()}: once for each model file"
            )
        return "; ".join(parts) or "the pipeline is being assembled"

    def failure(self) -> str:
        """Return why groups that requests need are given up, each reason once, or ""."""
        if self.deployment.infeasible_reason:
            return "the model does not fit: " + self.deployment.infeasible_reason.replace("\n", "; ")
        reasons: dict[str, list[str]] = {}
        for name in self.deployment.needed:
            if (group := self.groups[name]).state is State.FAILED:
                reasons.setdefault(group.reason, []).append(name)
        return "; ".join(f"group {', '.join(names)}: {reason}" for reason, names in reasons.items())

    def retry_in_s(self) -> float | None:
        """Return the seconds until all groups in BACKOFF or FAILED are started again; None if none is due."""
        retries = [self.groups[name].retry_in_s for name in self.deployment.needed]
        return max((seconds for seconds in retries if seconds is not None), default=None)

    # ---- the owner of deployments

    def on_placed(self, deployment: Deployment) -> None:
        """Make the engine for the first placement; take it over with a later one, if present."""
        placement = deployment.placement
        assert placement is not None
        if self.engine is not None:
            if self.deployment is deployment:
                self._take_over(self.engine, deployment)
            return
        rows = journal_rows(deployment.buffers, placement, self.host_memory)
        settings = EngineSettings(
            max_queue=self.config.server.max_queue,
            hold_s=self.config.recovery.hold_s,
            # Before its group is given up.
            max_losses=max(1, min(MAX_LOSSES, self.config.recovery.restart_limit.count - 1)),
            rows=rows,
            journal_pages=rows.n_pages if rows is not None else 0,
            on_pipeline_failed=lambda failure: self.deployment.pipeline_failed(failure),
            on_drafter_lost=lambda failure: self.deployment.drafter_failed(failure),
            blame=lambda step: self.deployment.blame(step),
            validate=enabled(os.environ),
            call_soon=asyncio.get_running_loop().call_soon,
        )
        drafter = self.model.drafter.spec.model if placement.draft is not None and self.model.drafter else None
        cache, layers = self.config.cache, self.model.spec.layers
        draft_layers = drafter.layers if drafter is not None else ()
        self.engine = Engine(engine_limits(cache, self.model.spec, placement, drafter), settings)
        host = None
        if placement.host_cache_bytes != 0:
            host = HostTier(
                self.engine.prefixes, layers, draft_layers, placement.kv_dtype, self.host_memory,
                placement.host_cache_bytes,
            )  # fmt: skip
        if host is not None or cache.dir:
            policy = SavePolicy(cache.min_tokens, cache.disk)
            self.snapshots = SnapshotManager(self.engine, lambda: self.deployment.transfers, policy, host)
            self.snapshots.start()
        self._owner.on_engine_made(self, self.engine)
        deployment.attach(self.engine)
        if not deployment.wanted:
            self.engine.unload(NOT_LOADED)
        if settings.hold_s > 0:
            hold = watch_holds(self.engine, settings.hold_s, partial(self._give_up, self.engine))
            self._holding = asyncio.create_task(hold, name="watch holds")
        if self.snapshots is not None and cache.dir and cache.prefix_slots:
            self._opening = asyncio.create_task(self._open_snapshots(self.snapshots, deployment), name="open snapshots")
        self._owner.swapper.on_placed(self.key)

    def _give_up(self, engine: Engine, error: RequestError) -> None:
        if self.replica:
            engine.detach(error)
        engine.detach(error, permanent=True)

    def on_state(self, deployment: Deployment, group: str, state: State, reason: str) -> None:
        if deployment is not self.deployment:
            self._owner.changes.notify()
            return
        if self.engine is not None and not self.deployment.complete and group in self.deployment.needed:
            away = RequestError("shard_lost", f"{self.reason()}; send the request again later")
            if state is State.FAILED:
                self._give_up(self.engine, away)
            else:
                self.engine.set_unavailable(away)
        self._owner.on_state(self, group, state, reason)
        self.on_change()

    def on_not_loaded(self, deployment: Deployment, reason: str) -> None:
        self._owner.swapper.on_not_loaded(self.key, reason)

    def on_progress(self, deployment: Deployment, group: str, progress: Progress) -> None:
        if deployment is self.deployment:
            self._owner.observer.progress(group, progress)

    async def drain_for_restart(self) -> FrozenState | None:
        if self.engine is None:
            return None
        if self.config.recovery.hold_s:
            await self.save_prefixes(SAVE_S)
            return await self.engine.freeze(RESTART_S / 2)
        if await self.engine.quiesce(RESTART_S / 2):
            await self.save_prefixes(SAVE_S)
        return None

    def on_change(self) -> None:
        if self.deployment.complete:
            self._loaded.set()
            self.weights.begin()
            self._owner.swapper.on_complete(self.key)
        if self.state == "ready":
            self._was_ready = True
        self._owner.on_change()

    async def _open_snapshots(self, snapshots: SnapshotManager, deployment: Deployment) -> None:
        """Open ``cache.dir`` when all weights are hashed: no file may be read or written before."""
        try:
            await self._loaded.wait()  # two readers at two places would read the disk twice
            digests = await self.weights.model.digests()
            placement = deployment.placement
            assert placement is not None
            draft = await self.weights.draft_model() if placement.draft is not None else None
            adapters = await self.weights.adapter_digests()
            snapshots.use(await self._owner.open_store(self, digests, placement, draft, adapters))
        except LucevisorError as error:
            if not self._owner.stopping:
                log.error("snapshots are off until the next start", reason=str(error))
        finally:
            self._opening = None
            self.on_change()


class Service:
    """The models of a configuration, by name (replicas: NAME/REPLICA), and the groups that hold their shards.

    Create it in a running loop.  ``on_engine`` is called once a model, when it is placed.
    """

    def __init__(
        self,
        config: Config,
        models: Sequence[ServedModel],
        run_dir: Path,
        observer: Observer,
        on_engine: Callable[[ModelService, Engine], None] = lambda service, engine: None,
        limits: SupervisionLimits | None = None,
    ) -> None:
        self.config = config
        self.restart_reasons: dict[str, Counter[str]] = {name: Counter() for name in config.groups}
        self.observer, self.on_engine = observer, on_engine
        self.changes = Changes()
        self.opening = ""  # what clients wait for besides the models
        self._stopping: asyncio.Task[None] | None = None
        try:
            staging = stage_packages(run_dir)
        except OSError as error:
            raise unusable(run_dir, error) from error
        self._launcher = Launcher(staging, open_listener(config), config.cluster)
        self._limits = limits or SupervisionLimits()
        self._deployments: list[Deployment] = []  # those with processes
        self.replicated = ReplicatedEngine([*config.replicas]) if config.replicas else None
        self._stores: list[SnapshotStore] = []
        self._opening_store = asyncio.Lock()
        weights = {model.name: ServedWeights(model, cache_directory()) for model in models}  # hashed once
        services = [ModelService(own, model, self, weights[model.name]) for own, model in pipelines(config, models)]
        self.models: Mapping[str, ModelService] = {service.key: service for service in services}
        for service in services:
            service.deployment = service.make_deployment(service.config, self._restart_limits(config), None)
        self.swapper = ModelSwapper(self.models, lambda: self.groups, self.on_change)
        self._start_groups(config, [service.deployment for service in services])

    def _restart_limits(self, config: Config) -> SupervisionLimits:
        limit = config.recovery.restart_limit
        return replace(self._limits, n_restarts=limit.count, window_s=float(limit.seconds))

    def _start_groups(self, config: Config, deployments: Sequence[Deployment]) -> None:
        """Make the groups of new deployments, which share them."""
        groups = {
            name: GroupSupervisor(
                group,
                group_threads(config, name),
                self._launcher,
                [deployment.callbacks for deployment in deployments if name in deployment.config.groups],
                devices=group_devices(config, name),
                limits=self._restart_limits(config),
                n_spares=config.recovery.spares,
            )
            for name, group in config.groups.items()
        }
        for deployment in deployments:
            deployment.groups = {name: groups[name] for name in deployment.config.groups}
        self._deployments += deployments

    # ---- the models together

    @property
    def listener(self) -> Listener | None:
        return self._launcher.listener

    @property
    def only(self) -> ModelService:
        [service] = self.models.values()
        return service

    @property
    def groups(self) -> dict[str, GroupSupervisor]:
        found = {name: group for service in self.models.values() for name, group in service.groups.items()}
        return {name: found[name] for name in dict.fromkeys([*self.config.groups, *found]) if name in found}

    @property
    def used_groups(self) -> list[str]:
        """The groups without those that no placement gives anything to run."""
        places = [(model.groups, model.placement) for model in self.models.values()]
        return [
            name
            for name in self.groups
            if any(name in groups and (placement is None or name in placement.groups) for groups, placement in places)
        ]

    # ---- start and stop

    async def start(self) -> None:
        await asyncio.gather(*(service.deployment.start() for service in self.models.values()))

    async def wait_ready(self, timeout_s: float | None = None) -> bool:
        """True when requests are served, False at the deadline, when a group FAILED or when stopping."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.changes.wait_for(lambda: self.state in ("ready", "failed", "draining"))
        return self.state == "ready"

    async def stop(self, drain_s: float | None = None, stop_s: float = STOP_S) -> None:
        """Stop everything.  All callers share one shutdown; a further call with shorter deadlines shortens it."""
        if self._stopping is None:
            drain_s = self.config.server.drain_s if drain_s is None else drain_s
            self._stopping = asyncio.create_task(self._stop(drain_s, stop_s), name="stop")
        elif stop_s < STOP_S:
            for service in self.models.values():
                service.hurry()
            await self._stop_groups(stop_s)
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_s: float, stop_s: float) -> None:
        self.swapper.close()
        self.on_change()
        await asyncio.gather(*(service.drain(drain_s) for service in self.models.values()))
        await self._stop_groups(stop_s)
        await asyncio.gather(*(service.close() for service in self.models.values()))
        await asyncio.gather(*(asyncio.to_thread(store.close) for store in self._stores))
        for deployment in self._deployments:
            deployment.close()
        if self.listener is not None:
            self.listener.close()
        self.on_change()

    async def _stop_groups(self, stop_s: float) -> None:
        await asyncio.gather(*(deployment.stop(stop_s) for deployment in self._deployments))

    async def save_prefixes(self, deadline_s: float) -> None:
        await asyncio.gather(*(service.save_prefixes(deadline_s) for service in self.models.values()))

    # ---- another deployment (admin_operations.py)

    def deploy(self, service: ModelService, config: Config) -> Deployment:
        """Make a deployment to succeed that of a model, with groups of its own."""
        self._launcher.listener = self._launcher.listener or open_listener(config)
        deployment = service.make_deployment(config, self._restart_limits(config), service.deployment)
        for name in config.groups:
            self.restart_reasons.setdefault(name, Counter())
        self._start_groups(config, [deployment])
        return deployment

    async def end(self, deployment: Deployment) -> None:
        await deployment.stop(STOP_S)
        if self._stopping is None:
            self._deployments.remove(deployment)
            deployment.close()

    # ---- state

    @property
    def stopping(self) -> bool:
        return self._stopping is not None

    @property
    def state(self) -> ServiceState:
        """The state of the model that is worst off; of replicas that of the best."""
        states = {service.state for service in self.models.values()}
        order: tuple[ServiceState, ...] = ("draining", "failed", "starting", "degraded", "ready")
        state = next(state for state in (reversed(order) if self.replicated is not None else order) if state in states)
        return "starting" if state == "ready" and self.opening else state

    def reason(self) -> str:
        """Return why requests are not served now, or ""."""
        if self.state == "ready":
            return ""
        return self._reasons({key: service.reason() for key, service in self.models.items()}) or self.opening

    def failure(self) -> str:
        """Return why groups that requests need are given up, or ""."""
        return self._reasons({key: service.failure() for key, service in self.models.items()})

    def _reasons(self, by_model: Mapping[str, str]) -> str:
        """Return the reasons, each once, with the models that have it unless all have."""
        reasons: dict[str, list[str]] = {}
        for name, reason in by_model.items():
            if reason:
                reasons.setdefault(reason, []).append(name)
        return "; ".join(
            reason if len(names) == len(self.models) else f"model {', '.join(names)}: {reason}"
            for reason, names in reasons.items()
        )

    def retry_in_s(self) -> float | None:
        retries = [service.retry_in_s() for service in self.models.values()]
        return max((seconds for seconds in retries if seconds is not None), default=None)

    # ---- the owner of models

    def on_engine_made(self, service: ModelService, engine: Engine) -> None:
        if self.replicated is not None:
            self.replicated.add(service.replica, engine)
        engine.on_busy = partial(self.swapper.on_busy, service.key)
        self.on_engine(service, engine)

    async def open_store(
        self,
        service: ModelService,
        digests: Mapping[str, str],
        placement: Placement,
        draft: DraftModel | None,
        adapters: Mapping[str, Mapping[str, str]],
    ) -> SnapshotStore:
        """Return the snapshots of a model in its ``cache.dir``, which replicas with the same state share."""
        async with self._opening_store:
            cache, spec = service.config.cache, service.model.spec
            store = await open_store(cache, spec, digests, placement, draft, self._stores, adapters)
            if store not in self._stores:
                self._stores.append(store)
            return store

    def on_state(self, service: ModelService, group: str, state: State, reason: str) -> None:
        """Report a group's change of state, once for all models that it holds."""
        if service is not next(one for one in self.models.values() if group in one.groups):
            return
        supervised = service.groups[group]
        self.swapper.on_group_state(group, state, reason)
        if state is State.BACKOFF or (state is State.FAILED and supervised.retry_in_s is not None):
            self.restart_reasons[group]["resources" if supervised.shortage else "failure"] += 1
        self.observer.state(group, state, reason)

    def on_change(self) -> None:
        self.changes.notify()
        if self.state == "ready":
            self.observer.ready(self)
