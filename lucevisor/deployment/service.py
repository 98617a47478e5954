"""One running supervisor: groups, placement, arenas, engine.  Builds them, keeps them, stops them; knows no HTTP.

Order at start: read the model's header, start every group, wait for all hellos, plan once, create the arenas, load,
assemble the chain; beside loading, hash the weights and open the snapshots.  A daemon that is restarted later gets the
same Load again: the placement is kept for the supervisor's life, and files with other bytes are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import structlog

from lucevisor import awake
from lucevisor.config import Config
from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.deployment.engine_limits import engine_limits
from lucevisor.deployment.readiness import Readiness
from lucevisor.deployment.speeds import cache_directory, speeds_for
from lucevisor.deployment.watchdog import Work, watch
from lucevisor.deployment.weights import ModelWeights
from lucevisor.engine.core import Engine, EngineSettings
from lucevisor.engine.pipeline import PipelineFailure, PipelineResult
from lucevisor.engine.request import RequestError
from lucevisor.errors import LucevisorError, NotReadyError, unusable
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Infeasible, Placement
from lucevisor.placement.stages import load_message
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.asyncio_link import Link
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import DeviceInfo, Hello, Loaded
from lucevisor.protocol.messages import Heartbeat, Progress
from lucevisor.snapshots.manager import SnapshotManager, open_snapshots
from lucevisor.supervision.callbacks import Callbacks, LoadOrder
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.staging import stage_packages
from lucevisor.supervision.states import State

ServiceState = Literal["ready", "starting", "degraded", "failed", "draining"]

DRAIN_S = 2.0
SAVE_S = 10.0
STOP_S = 2.0
RESTART_S = 30.0
"""Deadlines of a first stop: running requests get DRAIN_S to end, prefix slots SAVE_S to be saved to disk, daemons
STOP_S to leave before SIGKILL.  RESTART_S: an orderly restart waits half of it for running requests, and kills at the
end of it."""

log = structlog.get_logger("service")


class Observer(Protocol):
    """Who watches a start: the command line's progress bars, or a test."""

    def state(self, group: str, state: State, reason: str) -> None: ...
    def progress(self, group: str, progress: Progress) -> None: ...
    def ready(self, service: Service) -> None: ...


@dataclass(frozen=True, slots=True)
class Model:
    """The model as the supervisor knows it: its file and what the header says."""

    spec: ModelSpec
    files: tuple[Path, ...]
    name: str  # id in /v1/models


class Service:
    """Made inside a running event loop.  ``on_engine`` is called once, when placement made the engine.  ``limits``: the
    deadlines of supervision; restarts are limited by the configuration."""

    def __init__(
        self,
        config: Config,
        model: Model,
        run_dir: Path,
        observer: Observer,
        on_engine: Callable[[Engine], None] = lambda _: None,
        limits: SupervisionLimits | None = None,
    ) -> None:
        self.config, self.model = config, model
        self.placement: Placement | None = None
        self.engine: Engine | None = None
        self.arenas: dict[int, Arena] = {}
        self.started_at = time.monotonic()
        self._observer, self._on_engine = observer, on_engine
        self._assembly: PipelineAssembly | None = None
        assert model.spec.files is not None
        self._weights = ModelWeights(model.spec.files, cache_directory())
        self.snapshots: SnapshotManager | None = None
        self._opening: asyncio.Task[None] | None = None  # while snapshots are wanted and not open yet
        self._links: dict[str, Link] = {}
        self._saving: asyncio.Task[int] | None = None
        self._hellos: dict[str, Hello] = {}
        self._placed = _new_future()
        self._placing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._loaded = asyncio.Event()  # all groups together, once
        self._stopping: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._was_ready = False
        self._restarting = asyncio.Lock()
        self.restart_reasons: dict[str, Counter[str]] = {name: Counter() for name in config.groups}
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        try:
            staging = stage_packages(run_dir)
        except OSError as error:
            raise unusable(run_dir, error) from error
        limit = config.recovery.restart_limit
        self._limits = replace(limits or SupervisionLimits(), n_restarts=limit.count, window_s=float(limit.seconds))
        self._readiness = Readiness(self._limits)
        callbacks = Callbacks(
            make_load=self._make_load,
            check_loaded=self._check_loaded,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_frame=self._on_frame,
            on_state=self._on_state,
            on_draining=self._on_draining,
            on_progress=observer.progress,
            on_heartbeat=self._on_heartbeat,
        )
        self.groups: dict[str, GroupSupervisor] = {
            name: GroupSupervisor(
                group, self._threads(name), staging, callbacks, devices=group_devices(config, name), limits=self._limits
            )
            for name, group in config.groups.items()
        }

    # ---- life

    async def start(self) -> None:
        """Start every group; returns when all are spawned.  READY is awaited with :meth:`wait_ready`."""
        self._watchdog = asyncio.create_task(watch(self._limits.step_s, self._in_hand, self._overdue), name="watchdog")
        await asyncio.gather(*(g.start() for g in self.groups.values()))

    async def wait_ready(self, timeout_s: float | None = None) -> bool:
        """True when requests are served, False at the deadline, when a group FAILED or when stopping."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: self.state in ("ready", "failed", "draining"))
        return self.state == "ready"

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, drain_s: float = DRAIN_S, stop_s: float = STOP_S) -> None:
        """Stop everything.  Any number of callers share one shutdown; a further call with shorter deadlines shortens
        it."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(drain_s, stop_s), name="stop")
        elif stop_s < STOP_S:
            if self._saving is not None:
                self._saving.cancel()
            self._end_requests()  # before their groups go: the reason is the stop, not a lost shard
            await asyncio.gather(*(g.stop(deadline_s=stop_s) for g in self.groups.values()))
        await asyncio.shield(self._stopping)

    async def _stop(self, drain_s: float, stop_s: float) -> None:
        self._notify()
        if self.engine is not None and self._assembly is not None and self._assembly.complete and drain_s > 0:
            await self.engine.drain(drain_s)
            await self._save_all(SAVE_S)
        self._end_requests()
        await asyncio.gather(*(g.stop(deadline_s=stop_s) for g in self.groups.values()))
        await self._weights.close()
        if self._opening is not None:  # it ends by itself now, unless the disk hangs
            self._loaded.set()
            await asyncio.wait({self._opening}, timeout=STOP_S)
        if self.snapshots is not None:
            await self.snapshots.close()
        if self._watchdog is not None:
            self._watchdog.cancel()
        if not self._placed.done():
            self._placed.cancel()
        for arena in self.arenas.values():
            arena.close()
        self._notify()

    def _end_requests(self) -> None:
        """End what still runs or waits, and take nothing more; idempotent."""
        error = RequestError(
            "shutting_down", "the supervisor is stopping; send the request to another one, or again later"
        )
        if self.engine is not None:
            self.engine.close(error)
        if self._assembly is not None:
            self._assembly.close(error)

    async def _save_all(self, deadline_s: float) -> None:
        """Save prefix slots to disk before the shards lose them; a second stop cuts it short."""
        if self.snapshots is not None and self._assembly is not None and self._assembly.complete:
            self._saving = asyncio.create_task(self.snapshots.save_all(deadline_s), name="save all slots")
            with contextlib.suppress(asyncio.CancelledError, TimeoutError):
                async with awake.timeout(deadline_s + 1.0):  # a disk that hangs holds up no stop
                    await self._saving
            self._saving = None

    async def restart(self, group: str, *, now: bool) -> None:
        """Restart one group's daemon; returns when the chain serves again, or waits for another group that FAILED.
        Raises LucevisorError naming group and reason."""
        one = self.groups.get(group)
        if one is None:
            raise LucevisorError(f"there is no group {group!r}: the groups are {', '.join(self.groups)}")
        async with self._restarting:
            if self._stopping is not None:  # also since this one waited for its turn
                raise LucevisorError("the supervisor is stopping")
            await one.restart(now=now, deadline_s=RESTART_S)
            self.restart_reasons[group]["operator"] += 1
            await one.wait(State.STARTING, State.FAILED, timeout_s=2 * RESTART_S)
            tried = (State.LOADING, State.READY, State.FAILED)
            await self._until(
                lambda: self.state in ("ready", "draining") or (self.state == "failed" and one.state in tried)
            )
            if self.state == "draining" or one.state is State.FAILED:
                raise NotReadyError(f"group {group} did not come back: {self.reason()}")

    # ---- what it looks like from outside

    @property
    def state(self) -> ServiceState:
        if self._stopping is not None:
            return "draining"
        if any(g.state is State.FAILED for g in self.groups.values()):
            return "failed"
        if self._assembly is not None and self._assembly.complete and self._opening is None:
            return "ready"
        return "degraded" if self._was_ready else "starting"

    def reason(self) -> str:
        """Why requests are not served now; empty when they are."""
        if self.state == "ready":
            return ""
        if self._stopping is not None:
            return "the supervisor is stopping"
        parts = [
            f"group {name} is {g.state.name}" + (f": {g.reason}" if g.reason else "")
            for name, g in self.groups.items()
            if g.state is not State.READY
        ]
        if not parts and self._opening is not None:
            return f"the weights are being hashed for cache.dir, {self._weights.progress()}: once for each model file"
        return "; ".join(parts) or "the chain is being put together"

    def ready_in_s(self) -> float | None:
        """Return in how many seconds requests are likely to be served; None when that is not known."""
        return None if self._stopping is not None else self._readiness.wait_s(self.groups, time.monotonic())

    # ---- callbacks of supervision

    async def _make_load(self, group: str, hello: Hello) -> LoadOrder:
        self._hellos[group] = hello
        if self._placed.done() and self._placed.exception() is not None:
            self._placed = _new_future()  # a restart: what did not fit may fit now
        if len(self._hellos) == len(self.groups):
            async with self._placing:  # measuring takes a while, in which a daemon may come a second time
                if not self._placed.done():
                    try:
                        self._placed.set_result(await self._place())
                    except LucevisorError as e:
                        self._placed.set_exception(e)
        placement = await asyncio.shield(self._placed)
        identities = await self._weights.admit()
        load = load_message(placement, group, [str(f) for f in self.model.files], self._threads(group), identities)
        return LoadOrder(load, [self.arenas[a.boundary].fd for a in load.arenas])

    async def _place(self) -> Placement:
        await self._weights.settle()
        inventory: Mapping[str, list[DeviceInfo]] = {g: h.devices for g, h in self._hellos.items()}
        speeds = await speeds_for(self.model.spec, self.model.files, self.config, inventory)
        result = plan(self.model.spec, self.config, inventory, speeds)
        if isinstance(result, Infeasible):
            raise LucevisorError(result.message)
        for notice in result.notices:
            log.warning("placement notice", notice=notice)
        log.info("placement", dtype=str(result.dtype), kv_dtype=str(result.kv_dtype), max_context=result.max_context,
                 devices=[f"{d.device} {d.layers}" for d in result.devices])  # fmt: skip
        self.placement = result
        self.arenas = {a.boundary: Arena.create(a) for a in result.arenas}
        limits = engine_limits(self.config.cache, self.model.spec, result)
        settings = EngineSettings(
            max_queue=self.config.server.max_queue, on_pipeline_failed=self._on_pipeline_failed, on_step=self._on_step
        )
        self.engine = Engine(limits, settings)
        self._assembly = PipelineAssembly(self.engine, [s.group for s in result.stages], self._notify)
        if self.config.cache.dir and self.config.cache.prefix_slots:
            self._opening = asyncio.create_task(self._open_snapshots(self.engine, result), name="open snapshots")
        self._on_engine(self.engine)
        return result

    async def _open_snapshots(self, engine: Engine, placement: Placement) -> None:
        """Begin to use ``cache.dir`` when all weights are hashed; without that no file may be read or written."""
        try:
            if not self._weights.fits_memory():
                await self._loaded.wait()  # two readers at two places would read the disk twice
            digests = await self._weights.digests()
            found = await open_snapshots(engine, self.config.cache, self.model.spec, digests, placement)
            for group, link in self._links.items():
                found.shards.ready(group, link)
            found.start()
            self.snapshots = found
        except LucevisorError as error:
            if self._stopping is None:
                log.error("snapshots are off until the next start", reason=str(error))
        finally:
            self._opening = None
            self._notify()

    def _threads(self, name: str) -> int:
        """Threads of a cpu group; 0 elsewhere: the host side of a GPU group has one thread of work."""
        if self.config.groups[name].backend != "cpu":
            return 0
        return self.config.threads_of(name, len(os.sched_getaffinity(0)))

    def _check_loaded(self, group: str, loaded: Loaded) -> str:
        """Why a daemon's weights must not join those of the others; empty when they are the same model's."""
        if self._weights.admitted(loaded.identities):
            return ""
        return f"group {group} read another state of the model file than the one that runs"

    def _on_ready(self, group: str, link: Link, _hello: Hello, _loaded: Loaded) -> None:
        self._links[group] = link
        if self.snapshots is not None:
            self.snapshots.shards.ready(group, link)
        if self._assembly is not None:
            self._assembly.ready(group, link)

    def _on_lost(self, group: str, reason: str) -> None:
        self._links.pop(group, None)
        if self._assembly is not None:
            self._assembly.lost(group, reason)
        if self.snapshots is not None:
            self.snapshots.shards.lost(group, reason)
        self._notify()

    def _on_frame(self, group: str, frame: Frame) -> None:
        if self.snapshots is not None and self.snapshots.shards.frame(group, frame):
            return
        if self._assembly is not None:
            self._assembly.frame(group, frame)

    def _on_state(self, group: str, state: State, reason: str) -> None:
        self._readiness.changed(group, state, time.monotonic())
        if state is State.BACKOFF:
            self.restart_reasons[group]["lack" if self.groups[group].lacking else "failure"] += 1
        if self.placement is None and state in (State.BACKOFF, State.FAILED):
            self._hellos.pop(group, None)  # what a dead process saw is no basis for a plan
        if self.engine is not None and self._assembly is not None and not self._assembly.complete:
            away = RequestError("shard_lost", f"{self.reason()}; send the request again later")
            self.engine.detach(away, permanent=state is State.FAILED)
        self._observer.state(group, state, reason)
        self._notify()

    def _on_draining(self, group: str, child: int) -> None:
        task = asyncio.create_task(self._drain_for_restart(group, child), name=f"drain for {group}")
        task.add_done_callback(_retrieve)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain_for_restart(self, group: str, child: int) -> None:
        if self.engine is not None and await self.engine.quiesce(RESTART_S / 2):
            await self._save_all(SAVE_S)
        self.groups[group].drained(child)

    def _on_step(self, result: PipelineResult) -> None:
        if self.snapshots is not None:
            self.snapshots.meter.add(result)

    def _on_heartbeat(self, group: str, heartbeat: Heartbeat) -> None:
        log.debug("heartbeat", group=group, phase=heartbeat.phase, busy_s=round(heartbeat.busy_s, 3))

    def _on_pipeline_failed(self, failure: PipelineFailure) -> None:
        """A daemon answered out of order: only a new process of it is trusted again."""
        assert self.placement is not None
        group = self.placement.stages[failure.stage].group
        log.error("pipeline failed", group=group, code=failure.code, reason=failure.message)
        if failure.code == "shard_lost":  # its link is closed, which supervision hears of
            return
        # Later: the engine may be in the middle of sending.
        asyncio.get_running_loop().call_soon(self.groups[group].distrust, failure.message)

    def _notify(self) -> None:
        if self._assembly is not None and self._assembly.complete:
            self._loaded.set()
            self._weights.begin()
        if self.state == "ready" and not self._was_ready:
            self._was_ready = True
        self._changed.set()
        if self.state == "ready":
            self._observer.ready(self)

    def _overdue(self, work: Work, waited_s: float) -> None:
        log.error("overdue", group=work.group, what=work.what, waited_s=round(waited_s, 1))
        self.groups[work.group].overdue(work.what, waited_s)

    def _in_hand(self) -> Iterator[Work]:
        """What the daemons work on.  Of all steps only the one begun first: those behind it wait for it."""
        oldest = self.engine.oldest_in_flight() if self.engine is not None else None
        if oldest is not None and self.placement is not None:
            yield Work(self.placement.stages[oldest.stage].group, f"step {oldest.step_id} at stage {oldest.stage}")
        if self._assembly is not None:
            for group in self._assembly.resetting:
                yield Work(group, "a reset")


def group_devices(config: Config, name: str) -> list[int]:
    """Indices of the group's devices that the placement names."""
    return [d.index for d in config.placement.devices if d.group == name]


def _new_future() -> asyncio.Future[Placement]:
    future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_retrieve)
    return future


def _retrieve(future: asyncio.Future[Placement] | asyncio.Task[None]) -> None:
    """Mark an exception as seen: whoever awaits the future still gets it."""
    if not future.cancelled():
        future.exception()
