"""One epoch of serving: a placement with its groups, boundary buffers, pipeline and transfers.

A deployment starts its groups, awaits every hello, places the model once, and has the daemons load; one that is
restarted gets the same Load again.  Those of several models may share groups.  Those of one model share the weights: a
later one may load while an earlier one serves, and takes over the engine with ``attach`` after its ``detach``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

import msgspec
import numpy as np
import structlog

from lucevisor import suspend_clock
from lucevisor.config import Auto, Config
from lucevisor.config.formats import DeviceRef
from lucevisor.deployment.assembly import PipelineAssembly, RestoredLinks, SuccessorState
from lucevisor.deployment.boundaries import Boundaries
from lucevisor.deployment.extra_models import ROW_NUMBER_BYTES, EncoderClient, ScorerClient
from lucevisor.deployment.group_settings import group_threads, spin_s, target_groups
from lucevisor.deployment.measurements import LINK_S, links_for, read_links, speeds_for
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.weights import ServedWeights, open_offered
from lucevisor.engine.core import FrozenState
from lucevisor.engine.pipeline import StageFailure
from lucevisor.engine.request import RequestError
from lucevisor.engine.shell import Engine
from lucevisor.errors import LucevisorError
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.kv_transfer.transfers import ExportedState, KvTransfer
from lucevisor.model.gguf_files import OpenFile
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import Dtype
from lucevisor.placement.devices import with_target_devices
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Infeasible, Placement
from lucevisor.placement.stages import LoadFiles, load_message
from lucevisor.protocol.arena import SharedBuffer
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import ArenaPlan, Hello, Loaded, arena_regions
from lucevisor.protocol.messages import Progress, Unload, Unloaded
from lucevisor.protocol.steps import RowsCopy, Step, StepResult
from lucevisor.protocol.transport import Channel
from lucevisor.protocol.validation import UnansweredStep
from lucevisor.supervision.daemon import Callbacks, LoadWithFiles
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.machine import SupervisionLimits
from lucevisor.suspend_clock import SuspendAwareClock


class PlacementBarrier:
    """Waits for the hellos of all ``groups``, and 5 s for ``others``, then places the model once."""

    def __init__(
        self,
        groups: Collection[str],
        place: Callable[[Mapping[str, Hello]], Awaitable[Placement]],
        others: Collection[str] = (),
    ) -> None:
        self._groups, self._others = frozenset(groups), frozenset(others)
        self._place = place
        self._hellos: dict[str, Hello] = {}
        self._failed: set[str] = set()  # others that failed, so nobody waits for them
        self._news = asyncio.Event()  # set by a hello or a failure
        self._placed = _new_future()
        self._placing = asyncio.Lock()

    async def wait(self, group: str, hello: Hello) -> Placement:
        """Add a group's hello and return the placement.  Raises LucevisorError."""
        self._hellos[group] = hello
        self._failed.discard(group)
        self._news.set()
        if self._placed.done() and self._placed.exception() is not None:
            self._placed = _new_future()  # a restart: the model may fit now
        if self._groups <= self._hellos.keys():
            async with self._placing:  # measuring takes a while, in which a daemon may come a second time
                if not self._placed.done():
                    await self._wait_for_others()
                if not self._placed.done() and self._groups <= self._hellos.keys():
                    try:
                        self._placed.set_result(await self._place(self._hellos))
                    except LucevisorError as e:
                        self._placed.set_exception(e)
        return await asyncio.shield(self._placed)

    async def _wait_for_others(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with suspend_clock.timeout(5.0):
                while self._others - self._hellos.keys() - self._failed:
                    self._news.clear()
                    await self._news.wait()

    def remove(self, group: str) -> None:
        self._hellos.pop(group, None)
        self._failed.add(group)
        self._news.set()

    def cancel(self) -> None:
        if not self._placed.done():
            self._placed.cancel()


def _new_future() -> asyncio.Future[Placement]:
    future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
    # retrieved at once: who awaits it gets it anyway
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


_SHARED = (
    "dtype", "kv_dtype", "max_context", "max_sequences", "prefill_chunk", "max_step_tokens", "pools", "pool_pages",
    "drafting", "deterministic",
)  # fmt: skip


def with_sizes(config: Config, sizes: Placement | None) -> Config:
    """Return ``config`` with the engine's automatic values replaced by those of ``sizes``, if given."""
    if sizes is None:
        return config
    engine = replace(
        config.engine,
        dtype=sizes.dtype.value,  # type: ignore[arg-type]  # of those that the key takes
        kv_dtype=sizes.kv_dtype.value,
        max_context=sizes.max_context,
        max_sequences=sizes.max_sequences,
        prefill_chunk=sizes.prefill_chunk,
        pages=sizes.pools.full_pages or config.engine.pages,
    )
    return replace(config, engine=engine)


def infeasible_reason(placement: Placement | Infeasible, sizes: Placement | None) -> str:
    """Return why a placement is not possible, or not with the ``sizes`` of running requests; or ""."""
    if isinstance(placement, Infeasible):
        return placement.message
    if sizes is None:
        return ""
    other = [name for name in _SHARED if getattr(placement, name) != getattr(sizes, name)]
    if (placement.draft is None) != (sizes.draft is None):
        other.append("draft")
    if not other:
        return ""
    differences = ", ".join(f"{name}: {getattr(placement, name)} instead of {getattr(sizes, name)}" for name in other)
    return (
        f"it fits only with other sizes than the running requests have ({differences}); `lucevisor stop`, then `start`"
    )


_EXPONENTS: Final = {
    Dtype.FLOAT32: (np.uint32, 0x7F800000),
    Dtype.FLOAT16: (np.uint16, 0x7C00),
    Dtype.BFLOAT16: (np.uint16, 0x7F80),
}
"""Numbers are NaN or infinite if all these bits are set."""

log = structlog.get_logger("lucevisor.deployment")


class DeploymentOwner(Protocol):
    """The service of a deployment.  All methods are called from the event loop."""

    @property
    def host_memory(self) -> HostMemory: ...

    def on_placed(self, deployment: Deployment) -> None:
        """Called when the model is placed and no daemon loads yet; it attaches then, unless another one serves."""

    async def drain_for_restart(self) -> FrozenState | None:
        """Suspend requests; return the state of the shards if a daemon's successor may take it over."""

    def on_not_loaded(self, deployment: Deployment, reason: str) -> None:
        """Called when a daemon that serves other models could not load this one."""

    def on_change(self) -> None:
        """Called when ``complete`` or ``loaded`` may have changed."""

    def on_state(self, deployment: Deployment, group: str, state: State, reason: str) -> None: ...

    def on_progress(self, deployment: Deployment, group: str, progress: Progress) -> None: ...


class Deployment:
    """For a running event loop.  ``sizes``: those of the deployment whose engine it is to serve."""

    def __init__(
        self,
        epoch: int,
        config: Config,
        model: ServedModel,
        weights: ServedWeights,
        limits: SupervisionLimits,
        owner: DeploymentOwner,
        sizes: Placement | None = None,
    ) -> None:
        self.epoch = epoch
        self.placement: Placement | None = None
        self.infeasible_reason = ""  # why it cannot be placed: it needs more memory than there is
        self.problem = ""  # why it is not loaded although a request needs it, or cannot be placed
        self._boundaries: Boundaries | None = None
        self.transfers: KvTransfer | None = None
        self.scoring: ScorerClient | None = None  # of PFlash, when it is placed
        self.vision: EncoderClient | None = None  # of images, when it is placed
        self.config, self._model, self._weights, self._limits, self._owner = config, model, weights, limits, owner
        self._sizes = sizes
        self._remote: Final = {name for name, group in config.groups.items() if not group.shares_memory}
        self._offered: dict[str, list[OpenFile]] = {}  # by remote group, to be open until its Load is sent
        self._placing = PlacementBarrier(self.needed, self._place, config.groups.keys() - self.needed)
        self.links: dict[str, Channel] = {}  # of READY groups
        self.loads: dict[str, Loaded] = {}  # what they have loaded
        self._draft_loaded = False  # the draft group is READY and has loaded the drafter
        self._draft_problem = ""  # why the draft group runs without the drafter
        self._detached = ""  # why the engine dropped the drafter
        self._image_links: dict[str, Channel] = {}  # by group, those with room for images
        self._replacements = SuccessorState()
        self._engine: Engine | None = None
        self._assembly: PipelineAssembly | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        self.groups: Mapping[str, GroupSupervisor] = {}  # those of its configuration; set when all models have one
        self.wanted = True  # its daemons load the model as they start
        self._with_buffers: set[str] = set()  # groups whose processes have the boundary memory
        self._parked_links: dict[str, Channel] = {}  # of daemons that keep the model's weights in host memory
        self._unloading: dict[str, asyncio.Future[Unloaded]] = {}  # by group that has yet to answer
        self._n_progress = 0  # reports of progress, by which a load shows that it goes on
        self._active = asyncio.Event()  # there are daemons to watch
        self.callbacks: Final = Callbacks(
            make_load=self._make_load,
            wanted=lambda: self.wanted,
            on_unloaded=self._on_unloaded,
            check_loaded=self._check_loaded,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_frame=self._on_frame,
            find_step=self._find_step,
            on_state=self._on_state,
            on_draining=self._on_draining,
            on_progress=self._on_progress,
        )

    # ---- start and stop

    async def start(self) -> None:
        self._watchdog = asyncio.create_task(self._watch(), name="watchdog")
        await asyncio.gather(*(group.start() for group in self.groups.values() if group.state is State.STOPPED))

    async def stop(self, deadline_s: float) -> None:
        await asyncio.gather(*(group.stop(deadline_s=deadline_s) for group in self.groups.values()))

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._placing.cancel()
        if self._boundaries is not None:
            self._boundaries.close()
        self._replacements.close()

    # ---- serving

    @property
    def buffers(self) -> Mapping[tuple[bool, int], SharedBuffer]:
        return {} if self._boundaries is None else self._boundaries.buffers

    @property
    def loaded(self) -> bool:
        return self.links.keys() >= set(self.needed)

    @property
    def failed(self) -> str | None:
        """The first FAILED group with layers, with the reason, if any."""
        failed = [group for group in self.needed if self.groups[group].state is State.FAILED]
        return next((f"group {name} is FAILED: {self.groups[name].reason}" for name in sorted(failed)), None)

    def attach(self, engine: Engine, restored: RestoredLinks | None = None) -> None:
        """Attach to ``engine`` when every group with layers is READY, now and after each loss.

        Call it when this is placed and no other one serves ``engine``.  ``restored``: daemons with what was frozen.
        """
        links, draft_restored = restored or RestoredLinks()
        assert self.placement is not None
        assert self.transfers is not None
        self._engine = engine
        stage_groups, draft = [stage.group for stage in self.placement.stages], self.placement.draft
        draft_group = "" if draft is None else draft.group
        self._assembly = PipelineAssembly(engine, stage_groups, self._owner.on_change, self.transfers, draft_group)
        for group, link in self.links.items():
            with_draft = group == draft_group and self._draft_loaded
            self._assembly.on_ready(
                group, link, with_draft=with_draft, restored=link in links, draft_restored=draft_restored
            )

    def load(self) -> None:
        self.wanted = True
        for group in self.groups.values():
            group.load_model(self.callbacks)

    async def unload(self, *, park: bool) -> int:
        """Have the daemons free the model's memory; return the bytes of weights that they keep in host memory.

        The engine has left the pipeline, and is attached again at the next load.
        """
        self.wanted = False
        links, self.links = {**self._parked_links, **self.links}, {}
        if self._assembly is not None:
            self._assembly.detach()
        if self.transfers is not None:
            await self.transfers.quiesce("the model is unloaded")
        for group, link in links.items():
            self._unloading[group] = asyncio.get_running_loop().create_future()
            with contextlib.suppress(ProtocolError):  # supervision notices a closed link, and calls on_lost
                link.send(Unload(park))
        answers = await asyncio.gather(*self._unloading.values())
        parked = [group for group, answer in zip(self._unloading, answers, strict=True) if answer.parked_bytes]
        self._parked_links = {group: links[group] for group in parked if group in self._with_buffers}
        self._unloading.clear()
        self.loads.clear()
        self._draft_loaded = False
        for group in links:
            for part in (self.transfers, self.scoring, self.vision):
                if part is not None:
                    part.on_lost(group, "the model is unloaded")
        if self._engine is not None:
            self.attach(self._engine)
        log.info("model unloaded", model=self._model.name, groups=[*links], park=park,
                 parked_bytes=sum(answer.parked_bytes for answer in answers))  # fmt: skip
        return sum(answer.parked_bytes for answer in answers)

    @property
    def complete(self) -> bool:
        return self._assembly is not None and self._assembly.complete

    @property
    def drafting(self) -> bool:
        return self._assembly is not None and self._assembly.drafting

    def detach(self, error: RequestError | None = None) -> None:
        """Detach from the engine for good; running requests end with ``error``, else it has left already."""
        self._engine = None
        if self._assembly is not None:
            self._assembly.detach(error)

    def pipeline_failed(self, failure: StageFailure) -> None:
        """Replace a daemon that answered out of order."""
        assert self.placement is not None
        group = self.placement.stages[failure.stage].group
        states = [str(move) for move in self._engine.core.transitions] if self._engine is not None else []
        log.error("pipeline failed", group=group, code=failure.code, reason=failure.message, states=states)
        if self._assembly is not None:
            self._assembly.pipeline_failed()
        # Later: the engine may be in the middle of sending.
        asyncio.get_running_loop().call_soon(self.groups[group].distrust, failure.message)

    def blame(self, step: Step) -> str:
        """Return the first stage whose rows of a step are NaN or infinite, else the last."""
        assert self.placement is not None
        stages, found = self.placement.stages, len(self.placement.stages) - 1
        dtype, bits = _EXPONENTS[self.placement.dtype]
        n_numbers = step.n_tokens * self._model.spec.boundary_width
        for boundary in range(found):
            rows = np.frombuffer(self.buffers[False, boundary].region(step.region), dtype)[:n_numbers]
            if ((rows & bits) == bits).any():
                found = boundary
                break
        blamed = f"stage {found} (group {stages[found].group})"
        log.error("logits are not numbers", stage=found, group=stages[found].group, step=step.step_id)
        return blamed

    def drafter_failed(self, failure: StageFailure) -> None:
        self._detached = failure.message
        if self._assembly is not None:
            self._assembly.detach_drafter(failure.message)
        if failure.code != "shard_lost":  # supervision notices a closed link
            asyncio.get_running_loop().call_soon(self.groups[self.draft_group].distrust, failure.message)

    # ---- the drafter

    @property
    def draft_group(self) -> str:
        return "" if self.placement is None or self.placement.draft is None else self.placement.draft.group

    def draft_layers(self, groups: Collection[str]) -> Sequence[LayerSpec]:
        drafter = self._model.drafter
        return drafter.spec.model.layers if drafter and self.drafting and self.draft_group in groups else ()

    async def export_state(self, frozen: FrozenState, groups: Collection[str]) -> ExportedState:
        """Copy the state of ``groups``, a drafter's among it, to host memory.  Raises LucevisorError."""
        assert self.placement is not None
        assert self.transfers is not None
        ranges = [stage.layers for group in groups for stage in self.placement.stages_of(group)]
        layers = [layer for layer in self._model.spec.layers if any(layer.index in range_ for range_ in ranges)]
        memory, drafter = self._owner.host_memory, self.draft_layers(groups)
        state = ExportedState(memory, layers, self.placement.kv_dtype, frozen.units, drafter)
        try:
            await state.save(self.transfers, groups)
        except BaseException:
            state.close()
            raise
        return state

    def draft_reason(self) -> str:
        """Return why a drafter that is configured is not attached, or ""."""
        if self.drafting or self.placement is None or self._model.drafter is None:
            return ""
        if self.placement.draft is None:
            return f"it is left out: {self.placement.draft_left_out}"
        group = self.groups[self.draft_group]
        if group.state is not State.READY:
            return f"group {group.name} is {group.state.name}" + (f": {group.reason}" if group.reason else "")
        return self._draft_problem or self._detached or "the pipeline is being assembled"

    @property
    def needed(self) -> list[str]:
        """The groups with layers, which serving needs; before it is placed, those that may have some."""
        if self.placement is None:
            return target_groups(self.config)
        return list(dict.fromkeys(stage.group for stage in self.placement.stages))

    # ---- callbacks of supervision

    async def _make_load(self, group: str, hello: Hello) -> LoadWithFiles | None:
        self._active.set()
        try:
            return await self._load_order(group, hello)
        except LucevisorError as error:
            if self.config.model.preload:
                raise
            self.problem = str(error)
            log.error("model not loaded", model=self._model.name, group=group, reason=self.problem)
            self._owner.on_not_loaded(self, self.problem)  # its requests get the reason; others are loaded
            return None

    async def _load_order(self, group: str, hello: Hello) -> LoadWithFiles | None:
        placement = await self._placing.wait(group, hello)
        self.problem = ""
        if not self.wanted:
            return None
        if group not in placement.groups:
            why = placement.hosts_left_out or f"the drafter is left out: {placement.draft_left_out}"
            raise LucevisorError(f"it has nothing to run: {why}")
        scorer = self._model.scorer
        score_files = [str(path) for path in scorer.files.paths] if scorer is not None else []
        encoder = self._model.encoder
        vision_files = [str(path) for path in encoder.files.paths] if encoder is not None else []
        files, draft_files = await self._weights.model.load_files(), None
        if group == self.draft_group:
            draft_files = await self._draft_files(alone=not placement.stages_of(group))
        threads = group_threads(self.config, group)
        alone = not self.config.neighbours or self.config.replica  # else other models wait for the compute thread
        polls_s = spin_s(self.config) if alone else 0.0
        load = load_message(placement, group, files, threads, draft_files, score_files, vision_files, polls_s)
        load = msgspec.structs.replace(load, adapters=await self._weights.adapter_files())
        order = await self._replacements.load_order(group, load, self._assembly)
        assert self._boundaries is not None
        arenas, fds = list[ArenaPlan](), list[int]()
        if group not in self._with_buffers:
            arenas, fds = self._boundaries.open(group, load.arenas, hello.rows_address)
        waits = self._engine is not None and self._engine.busy and not self.complete
        others = [neighbour.config.model for neighbour in self.config.neighbours if not self.config.replica]
        parkable = not self.config.model.pin and any(other.ttl or not other.preload for other in others)
        warm_up = order.load.warm_up and not waits
        load = msgspec.structs.replace(order.load, arenas=arenas, warm_up=warm_up, parkable=parkable)
        if group in self._remote:
            offered, self._offered[group] = await asyncio.to_thread(open_offered, load)
            load = msgspec.structs.replace(load, offered=offered)
        sources = [file.fileno() for file in self._offered.get(group, ())]
        return LoadWithFiles(load, [*fds, *order.fds, *sources], self._model.spec.vocabulary)

    async def _draft_files(self, *, alone: bool) -> LoadFiles | None:
        """Return the drafter's files; None when they cannot be used and the daemon has layers to serve."""
        self._draft_problem = ""
        try:
            return await self._weights.draft.load_files()
        except LucevisorError as error:
            if alone:
                raise
            self._draft_problem = str(error)
            log.error("the drafter is not loaded", group=self.draft_group, reason=str(error))
            return None

    async def _place(self, hellos: Mapping[str, Hello]) -> Placement:
        await self._weights.wait_until_stable()
        inventory = {group: hello.devices for group, hello in hellos.items()}
        config, model = with_target_devices(self.config, inventory), self._model
        speeds = await speeds_for(model.spec, model.files, config, inventory)
        automatic = isinstance(config.placement.split, Auto)
        links = (
            await links_for(config, lambda group: self.groups[group].time_way(LINK_S))
            if automatic
            else read_links(config)
        )
        config = with_sizes(config, self._sizes)
        result = plan(model.spec, config, inventory, speeds, model.draft_spec, model.scorer, links, model.encoder)
        self.infeasible_reason = infeasible_reason(result, self._sizes)
        if isinstance(result, Infeasible) or self.infeasible_reason:
            raise LucevisorError(self.infeasible_reason)
        for notice in result.notices:
            log.warning("placement notice", notice=notice)
        devices = [f"{d.device} {d.layers}" for d in result.devices]
        log.info("placement", epoch=self.epoch, dtype=str(result.dtype), kv_dtype=str(result.kv_dtype),
                 max_context=result.max_context, devices=devices)  # fmt: skip
        self.placement = result
        self._boundaries = Boundaries(result, self._remote, self._owner.host_memory)
        layers = {stage.group: [stage_.layers for stage_ in result.stages_of(stage.group)] for stage in result.stages}
        self.transfers = KvTransfer(layers, self.draft_group)
        self.scoring = ScorerClient(result.scorer) if result.scorer is not None else None
        if result.encoder is not None:
            row_bytes = ROW_NUMBER_BYTES * model.spec.hidden_size
            self.vision = EncoderClient(result.encoder, row_bytes, config.recovery.hold_s)
        self._owner.on_placed(self)
        return result

    def _check_loaded(self, group: str, loaded: Loaded) -> str:
        if self._weights.admitted(loaded.identities):
            return ""
        return f"group {group} read another state of the files than the one that runs"

    def _on_ready(self, group: str, link: Channel, _hello: Hello, loaded: Loaded) -> None:
        if self._boundaries is not None and group not in self._with_buffers:
            self._with_buffers.add(group)
            self._boundaries.on_ready(group, link)
        if not self.wanted:  # it was unloaded meanwhile
            with contextlib.suppress(ProtocolError):
                link.send(Unload())
            return
        self._parked_links.pop(group, None)
        self.links[group], self.loads[group] = link, loaded
        assert self.placement is not None
        for index, measured in loaded.workspace_bytes.items():
            planned = self.placement.workspace_bytes(DeviceRef(group, index))
            log.info("workspace", device=f"{group}:{index}", planned_bytes=planned, measured_bytes=measured)
        with_draft = False
        if group == self.draft_group:
            self._draft_problem = self._draft_problem or loaded.draft_problem
            with_draft = self._draft_loaded = not self._draft_problem
        if self.transfers is not None:
            self.transfers.on_ready(group, link)
        if self.scoring is not None:
            self.scoring.on_ready(group, link, loaded.score_problem)
        if self.vision is not None:
            self._expect_images(group, link)
            self.vision.on_ready(group, link, loaded.vision_problem)
        state = self._replacements.take(group)
        if state is not None:
            self._create_task(
                self._restore_replacement(group, link, state, with_draft=with_draft), f"state for {group}"
            )
        elif self._assembly is not None:
            self._assembly.on_ready(group, link, with_draft=with_draft, replayed=loaded.replayed)
        else:
            self._owner.on_change()

    def _expect_images(self, group: str, link: Channel) -> None:
        """Let an image, or the embedding rows of the steps in flight, wait on a link."""
        placement, encoder = self.placement, self._model.encoder
        assert placement is not None
        assert placement.encoder is not None
        assert encoder is not None
        if self._image_links.get(group) is link:  # the model was loaded over it before
            return
        self._image_links[group] = link
        if group == placement.encoder.group:
            link.max_queued_bytes += 3 * encoder.cell_pixels**2 * placement.encoder.max_tokens
        if group == placement.stages[0].group:
            step_bytes = placement.max_step_tokens * ROW_NUMBER_BYTES * self._model.spec.hidden_size
            link.max_queued_bytes += arena_regions(len(placement.stages) + 1) * step_bytes

    def _on_lost(self, group: str, reason: str) -> None:
        self.links.pop(group, None)
        self.loads.pop(group, None)
        if group == self.draft_group:
            self._draft_loaded = False
        if (unloading := self._unloading.get(group)) is not None and not unloading.done():
            unloading.set_result(Unloaded())
        if self._assembly is not None:
            self._assembly.on_lost(group, reason)
        self._with_buffers.discard(group)
        self._parked_links.pop(group, None)
        if self._boundaries is not None:
            self._boundaries.on_lost(group)
        for part in (self.transfers, self.scoring, self.vision):
            if part is not None:
                part.on_lost(group, reason)
        self._owner.on_change()

    def _on_progress(self, group: str, progress: Progress) -> None:
        self._n_progress += 1
        self._owner.on_progress(self, group, progress)

    def _on_unloaded(self, group: str, unloaded: Unloaded) -> None:
        waiting = self._unloading.get(group)
        if waiting is not None and not waiting.done():
            waiting.set_result(unloaded)
        elif self.wanted and not unloaded.problem:  # of a load that was not wanted any more, and is again
            self.groups[group].load_model(self.callbacks)
        elif self.wanted:
            log.error("model not loaded", model=self._model.name, group=group, reason=unloaded.problem)
            self._owner.on_not_loaded(self, f"group {group}: {unloaded.problem}")

    def _find_step(self, _group: str, stage: int, step_id: int) -> UnansweredStep | None:
        return None if self._engine is None else self._engine.find_unanswered(stage, step_id)

    def _on_frame(self, group: str, frame: Frame) -> None:
        if isinstance(frame.message, RowsCopy):
            assert self._boundaries is not None
            if fault := self._boundaries.rows_arrived(group, frame.message, frame.payload):
                self.groups[group].distrust(fault)
            return
        if isinstance(frame.message, StepResult) and self._boundaries is not None:
            self._boundaries.step_answered(group)
        if any(part is not None and part.frame(group, frame) for part in (self.transfers, self.scoring, self.vision)):
            return
        if self._assembly is not None:
            self._assembly.on_frame(group, frame)

    def _on_state(self, group: str, state: State, reason: str) -> None:
        if self.placement is None and state in (State.BACKOFF, State.FAILED):
            self._placing.remove(group)
        if state is State.FAILED:
            self._replacements.drop(group)
        self._owner.on_state(self, group, state, reason)

    def _on_draining(self, group: str, daemon: int) -> None:
        self._create_task(self._drain(group, daemon), f"drain for {group}")

    def _create_task(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved; deadlines hold anyway
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, group: str, daemon: int) -> None:
        if group in self.needed:
            frozen = await self._owner.drain_for_restart()
            if frozen is not None:
                try:
                    self._replacements.add(group, await self.export_state(frozen, [group]))
                except LucevisorError as error:  # its next daemon computes it again
                    log.warning("state is not saved for the next daemon", group=group, reason=str(error))
        elif self._assembly is not None and group == self.draft_group:
            self._assembly.detach_drafter("its group is restarted")
        self.groups[group].drained(daemon)

    async def _restore_replacement(self, group: str, link: Channel, state: ExportedState, *, with_draft: bool) -> None:
        assert self.transfers is not None
        restored = True
        try:
            await state.load(self.transfers, [group])
        except LucevisorError as error:
            log.warning("saved state was not restored; it is computed again", group=group, reason=str(error))
            restored = False
        if self._assembly is not None and self.links.get(group) is link:
            draft_restored = restored and state.with_draft
            self._assembly.on_ready(
                group, link, with_draft=with_draft, restored=restored, draft_restored=draft_restored
            )

    # ---- watchdog

    async def _watch(self) -> None:
        while True:
            await self._active.wait()
            await self._watch_daemons()

    async def _watch_daemons(self) -> None:
        """Once a second, report work that has taken a daemon longer than the limit; return when there are none."""
        clock, seen_at = SuspendAwareClock(), dict[tuple[str, str], float]()
        while self.links or self.wanted or self._unloading:
            await asyncio.sleep(1.0)
            try:
                now = clock()
                seen_at = {work: seen_at.get(work, now) for work in self._work_in_progress()}
                for (group, what), at in seen_at.items():
                    if now - at > self._limits.step_s:
                        log.error("daemon overdue", group=group, what=what, waited_s=round(now - at, 1))
                        self.groups[group].overdue(what, now - at)
            except Exception:  # a bug elsewhere must not end the watch
                log.exception("check for overdue work failed; the watchdog continues")
        self._active.clear()

    def _work_in_progress(self) -> Iterator[tuple[str, str]]:
        """Yield groups and what they work on; of the steps the first, as others wait behind it."""
        for model in (self.scoring, self.vision):
            if model is not None and model.work_in_progress:
                yield model.placed.group, model.work_in_progress
        for group in self._unloading:
            yield group, "an unload"
        if self.wanted and self.placement is not None:
            for group in self.placement.groups:
                if group not in self.links and self.groups[group].state is State.READY:
                    yield group, f"a load ({self._n_progress} reports of progress)"
        if self._assembly is None or self._engine is None or self.placement is None:
            return
        oldest = self._engine.oldest_in_flight()
        if oldest is not None:
            drafts = oldest.stage == len(self.placement.stages)
            group = self.draft_group if drafts else self.placement.stages[oldest.stage].group
            yield group, f"step {oldest.step_id} at stage {oldest.stage}"
        for group in self._assembly.resetting:
            yield group, "a reset"
