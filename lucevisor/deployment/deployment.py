"""One epoch of serving: a placement with its groups, boundary buffers, pipeline and transfers.

A deployment starts its groups, waits for every hello, places the model once, makes the buffers, and has the daemons
load.  A daemon that is restarted gets the same Load again: another placement is another deployment.  Deployments share
nothing but the weights, so a later one may start and load while an earlier one serves; it takes over the engine with
``serve`` after the earlier one's ``release``.  Knows no HTTP, no requests and no snapshots.
Invariant: what a daemon says reaches the deployment that started it, and no other.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import structlog

from lucevisor.config import Config
from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.deployment.group_settings import group_devices, group_threads, spin_s, target_groups, with_cores
from lucevisor.deployment.placing import PlacementOnce
from lucevisor.deployment.scoring import ScoringStage
from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.served_weights import ServedWeights
from lucevisor.deployment.sizes import why_unfit, with_sizes
from lucevisor.deployment.speeds import speeds_for
from lucevisor.deployment.state_memory import Kept, StateMemory
from lucevisor.deployment.successors import Successors, take_over
from lucevisor.deployment.watchdog import Work, watch
from lucevisor.engine.core import Engine
from lucevisor.engine.freezer import FrozenState
from lucevisor.engine.pipeline.steps import PipelineFailure
from lucevisor.engine.request import RequestError
from lucevisor.errors import LucevisorError
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import Dtype
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Infeasible, Placement
from lucevisor.placement.stages import LoadFiles, load_message
from lucevisor.protocol.arena import Arena, descriptors
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import Hello, Loaded
from lucevisor.protocol.messages import Heartbeat, Progress
from lucevisor.protocol.steps import Step
from lucevisor.protocol.transport import Link
from lucevisor.protocol.validation import AskedStep
from lucevisor.snapshots.transfers import ShardTransfers
from lucevisor.supervision.callbacks import Callbacks, LoadOrder
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher
from lucevisor.supervision.policy import SupervisionLimits
from lucevisor.supervision.states import State

_EXPONENTS: Final = {
    Dtype.FLOAT32: (np.uint32, 0x7F800000),
    Dtype.FLOAT16: (np.uint16, 0x7C00),
    Dtype.BFLOAT16: (np.uint16, 0x7F80),
}
"""Numbers are NaN or infinite if all these bits are set."""

log = structlog.get_logger("deployment")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentHooks:
    """What the owner of a deployment gives and hears; all are called from the event loop.

    ``on_placed`` is called once, before any daemon loads: the moment to call ``serve`` unless another deployment
    serves.  ``drain`` brings requests to rest before a daemon is restarted, and returns what the shards hold then, if
    its successor may take it over.  ``on_change``: ``complete`` or ``loaded`` may have changed, or a daemon was lost.
    """

    on_placed: Callable[[Deployment], None]
    drain: Callable[[], Awaitable[FrozenState | None]]
    on_change: Callable[[], None]
    on_state: Callable[[str, State, str], None]
    on_progress: Callable[[str, Progress], None]


class Deployment:
    """Made in a running event loop; ``start``, then ``stop`` and ``close``.  ``epoch`` is for the log; ``sizes``: those
    of the deployment whose engine it is to serve."""

    def __init__(
        self,
        epoch: int,
        config: Config,
        model: ServedModel,
        weights: ServedWeights,
        launcher: Launcher,
        limits: SupervisionLimits,
        hooks: DeploymentHooks,
        sizes: Placement | None = None,
    ) -> None:
        self.epoch = epoch
        self.placement: Placement | None = None
        self.unfit = ""  # why it cannot be placed: it needs more memory than there is
        self.buffers: dict[tuple[bool, int], Arena] = {}  # by (whether it is for captures, boundary)
        self.transfers: ShardTransfers | None = None
        self.scoring: ScoringStage | None = None  # of PFlash, when it is placed
        self._config, self._model, self._weights, self._limits, self._hooks = config, model, weights, limits, hooks
        self._sizes = sizes
        self.needed: Final = target_groups(config)  # the groups with layers, which serving needs
        self._placing = PlacementOnce(self.needed, self._place, config.groups.keys() - self.needed)
        self._links: dict[str, Link] = {}  # of READY groups
        self._draft_loaded = False  # the draft group is READY and has loaded the drafter
        self._draft_problem = ""  # why the draft group runs without the drafter
        self._detached = ""  # why the engine dropped the drafter
        self._successors = Successors(model.spec.layers)
        self._engine: Engine | None = None
        self._assembly: PipelineAssembly | None = None
        self._watchdog: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself holds tasks weakly
        self.groups = self._make_groups(launcher)

    def _make_groups(self, launcher: Launcher) -> dict[str, GroupSupervisor]:
        config = self._config
        callbacks = Callbacks(
            make_load=self._make_load,
            check_loaded=self._check_loaded,
            on_ready=self._on_ready,
            on_lost=self._on_lost,
            on_frame=self._on_frame,
            asked=self._asked,
            on_state=self._on_state,
            on_draining=self._on_draining,
            on_progress=self._hooks.on_progress,
            on_heartbeat=self._on_heartbeat,
        )
        return {
            name: GroupSupervisor(
                group,
                group_threads(config, name),
                launcher,
                callbacks,
                devices=group_devices(config, name),
                limits=self._limits,
                n_spares=config.recovery.spares,
            )
            for name, group in with_cores(config).items()
        }

    # ---- life

    async def start(self) -> None:
        """Start every group; returns when all are spawned."""
        self._watchdog = asyncio.create_task(watch(self._limits.step_s, self._in_hand, self._overdue), name="watchdog")
        await asyncio.gather(*(group.start() for group in self.groups.values()))

    async def stop(self, deadline_s: float) -> None:
        """Stop every group.  A further call with a shorter deadline shortens it."""
        await asyncio.gather(*(group.stop(deadline_s=deadline_s) for group in self.groups.values()))

    def close(self) -> None:
        """Give the buffers back, when all groups have stopped."""
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._placing.cancel()
        for buffer in self.buffers.values():
            buffer.close()
        self._successors.close()

    # ---- serving

    @property
    def loaded(self) -> bool:
        """Whether every group with layers is READY."""
        return self._links.keys() >= set(self.needed)

    @property
    def failed(self) -> str | None:
        """Which of the groups that serving needs is FAILED, and why; None if none is."""
        failed = [group for group in self.needed if self.groups[group].state is State.FAILED]
        return next((f"group {name} is FAILED: {self.groups[name].reason}" for name in sorted(failed)), None)

    def serve(self, engine: Engine, kept: Kept | None = None) -> None:
        """Attach to ``engine`` as soon as every group with layers is READY, and again after each loss; the drafter
        whenever it is there.

        Call it when the deployment is placed, and when no other one serves ``engine``.  ``kept``: what daemons have of
        what the engine had frozen.
        """
        links, draft_kept = kept or Kept()
        assert self.placement is not None
        self._engine = engine
        stage_groups, draft = [stage.group for stage in self.placement.stages], self.placement.draft
        draft_group, yields = "" if draft is None else draft.group, not spin_s(self._config)
        self._assembly = PipelineAssembly(engine, stage_groups, self._hooks.on_change, draft_group, yields=yields)
        for group, link in self._links.items():
            with_draft = group == draft_group and self._draft_loaded
            self._assembly.ready(group, link, with_draft=with_draft, kept=link in links, draft_kept=draft_kept)

    @property
    def complete(self) -> bool:
        """Whether the engine runs steps on this deployment."""
        return self._assembly is not None and self._assembly.complete

    @property
    def drafting(self) -> bool:
        """Whether a drafter is attached to the engine."""
        return self._assembly is not None and self._assembly.drafting

    @property
    def links(self) -> Mapping[str, Link]:
        """The links of the groups that are READY."""
        return self._links

    def retire(self) -> None:
        """Detach from the engine, which has left the pipeline: its steps may run on other stages from now on."""
        self._engine = None
        if self._assembly is not None:
            self._assembly.leave()

    def release(self, error: RequestError) -> None:
        """Detach from the engine for good; running requests end with ``error``."""
        if self._assembly is not None:
            self._assembly.close(error)

    def pipeline_failed(self, failure: PipelineFailure) -> None:
        """A daemon answered out of order: only a new process of it is trusted again."""
        assert self.placement is not None
        group = self.placement.stages[failure.stage].group
        log.error("pipeline failed", group=group, code=failure.code, reason=failure.message)
        if failure.code == "shard_lost":  # supervision notices the closed link
            return
        # Later: the engine may be in the middle of sending.
        asyncio.get_running_loop().call_soon(self.groups[group].distrust, failure.message)

    def blame(self, step: Step) -> str:
        """Return the first stage whose rows of a step are NaN or infinite, as its arena has them; else the last."""
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

    def drafter_failed(self, failure: PipelineFailure) -> None:
        """The engine dropped its drafter, and does without it until the drafter's daemon is replaced."""
        self._detached = failure.message
        if self._assembly is not None:
            self._assembly.detach_drafter(failure.message)
        if failure.code != "shard_lost":  # supervision notices a closed link
            asyncio.get_running_loop().call_soon(self.groups[self.draft_group].distrust, failure.message)

    # ---- the drafter

    @property
    def draft_group(self) -> str:
        """The group of the draft stage; empty without one."""
        return "" if self.placement is None or self.placement.draft is None else self.placement.draft.group

    def draft_layers(self, groups: Collection[str]) -> Sequence[LayerSpec]:
        """The layers of the drafter that is attached, if one of ``groups`` runs it."""
        drafter = self._model.drafter
        return drafter.spec.model.layers if drafter and self.drafting and self.draft_group in groups else ()

    def draft_reason(self) -> str:
        """Why a drafter that is configured is not attached; empty when it is, or there is none."""
        if self.drafting or self.placement is None or self._model.drafter is None:
            return ""
        if self.placement.draft is None:
            return f"it is left out: {self.placement.draft_left_out}"
        group = self.groups[self.draft_group]
        if group.state is not State.READY:
            return f"group {group.name} is {group.state.name}" + (f": {group.reason}" if group.reason else "")
        return self._draft_problem or self._detached or "the pipeline is being put together"

    # ---- callbacks of supervision

    async def _make_load(self, group: str, hello: Hello) -> LoadOrder:
        placement = await self._placing.wait(group, hello)
        if group not in placement.groups:
            raise LucevisorError(f"it has nothing to run: the drafter is left out: {placement.draft_left_out}")
        score_files = [] if self._model.scorer is None else [str(path) for path in self._model.scorer.files.paths]
        files, draft_files = await self._weights.model_files(), None
        if group == self.draft_group:
            draft_files = await self._draft_files(alone=not placement.stages_of(group))
        threads = group_threads(self._config, group)
        load = load_message(placement, group, files, threads, draft_files, score_files, spin_s=spin_s(self._config))
        fds = descriptors([self.buffers[arena.capture, arena.boundary] for arena in load.arenas])
        order = await self._successors.order(group, load, fds, self._assembly)
        return dataclasses.replace(order, vocabulary=self._model.spec.vocabulary)

    async def _draft_files(self, *, alone: bool) -> LoadFiles | None:
        """Return the drafter's files; None when they cannot be used and the daemon has layers to serve."""
        self._draft_problem = ""
        try:
            return await self._weights.draft_files()
        except LucevisorError as error:
            if alone:
                raise
            self._draft_problem = str(error)
            log.error("the drafter is not loaded", group=self.draft_group, reason=str(error))
            return None

    async def _place(self, hellos: Mapping[str, Hello]) -> Placement:
        await self._weights.settle()
        inventory = {group: hello.devices for group, hello in hellos.items()}
        speeds = await speeds_for(self._model.spec, self._model.files, self._config, inventory)
        config, model = with_sizes(self._config, self._sizes), self._model
        result = plan(model.spec, config, inventory, speeds, model.draft_spec, model.score_spec)
        self.unfit = why_unfit(result, self._sizes)
        if isinstance(result, Infeasible) or self.unfit:
            raise LucevisorError(self.unfit)
        for notice in result.notices:
            log.warning("placement notice", notice=notice)
        devices = [f"{d.device} {d.layers}" for d in result.devices]
        log.info("placement", epoch=self.epoch, dtype=str(result.dtype), kv_dtype=str(result.kv_dtype),
                 max_context=result.max_context, devices=devices)  # fmt: skip
        self.placement = result
        self.buffers = {(arena.capture, arena.boundary): Arena.create(arena) for arena in result.arenas}
        layers = {stage.group: [own.layers for own in result.stages_of(stage.group)] for stage in result.stages}
        self.transfers = ShardTransfers(layers, self.draft_group)
        self.scoring = ScoringStage(result.scorer) if result.scorer is not None else None
        self._hooks.on_placed(self)
        return result

    def _check_loaded(self, group: str, loaded: Loaded) -> str:
        """Why a daemon's weights must not join those of the others; empty when they are the same model's."""
        if self._weights.admitted(loaded.identities):
            return ""
        return f"group {group} read another state of the files than the one that runs"

    def _on_ready(self, group: str, link: Link, _hello: Hello, loaded: Loaded) -> None:
        self._links[group] = link
        with_draft = False
        if group == self.draft_group:
            self._draft_problem = self._draft_problem or loaded.draft_problem
            with_draft = self._draft_loaded = not self._draft_problem
        if self.transfers is not None:
            self.transfers.ready(group, link)
        if self.scoring is not None:
            self.scoring.ready(group, link, loaded.score_problem)
        memory = self._successors.loaded(group)
        if memory is not None:
            self._begin(self._take_over(group, link, memory, with_draft=with_draft), f"state for {group}")
        elif self._assembly is not None:
            self._assembly.ready(group, link, with_draft=with_draft, replayed=loaded.replayed)
        else:
            self._hooks.on_change()

    def _on_lost(self, group: str, reason: str) -> None:
        self._links.pop(group, None)
        if group == self.draft_group:
            self._draft_loaded = False
        if self._assembly is not None:
            self._assembly.lost(group, reason)
        self._successors.lost(group, self._assembly)
        for part in (self.transfers, self.scoring):
            if part is not None:
                part.lost(group, reason)
        self._hooks.on_change()

    def _asked(self, _group: str, stage: int, step_id: int) -> AskedStep | None:
        return None if self._engine is None else self._engine.asked(stage, step_id)

    def _on_frame(self, group: str, frame: Frame) -> None:
        if any(part is not None and part.frame(group, frame) for part in (self.transfers, self.scoring)):
            return
        if self._assembly is not None:
            self._assembly.frame(group, frame)

    def _on_state(self, group: str, state: State, reason: str) -> None:
        if self.placement is None and state in (State.BACKOFF, State.FAILED):
            self._placing.forget(group)
        if state is State.FAILED:
            self._successors.drop(group)
        self._hooks.on_state(group, state, reason)

    def _on_draining(self, group: str, child: int) -> None:
        self._begin(self._drain(group, child), f"drain for {group}")

    def _begin(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved; deadlines hold anyway
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self, group: str, child: int) -> None:
        if group in self.needed:
            frozen = await self._hooks.drain()
            if frozen is not None:
                assert self.placement is not None
                assert self.transfers is not None
                drafter = self.draft_layers([group])
                await self._successors.keep(group, self.placement, self.transfers, frozen, drafter)
        elif self._assembly is not None and group == self.draft_group:
            self._assembly.detach_drafter("its group is restarted")
        self.groups[group].drained(child)

    async def _take_over(self, group: str, link: Link, memory: StateMemory, *, with_draft: bool) -> None:
        """Let a new daemon read what its predecessor held, then join the others."""
        assert self.transfers is not None
        kept = await take_over(memory, self.transfers, group)
        if self._assembly is not None and self._links.get(group) is link:
            has_draft = memory.with_draft
            self._assembly.ready(group, link, with_draft=with_draft, kept=kept, draft_kept=kept and has_draft)

    def _on_heartbeat(self, group: str, heartbeat: Heartbeat) -> None:
        log.debug("heartbeat", group=group, phase=heartbeat.phase, busy_s=round(heartbeat.busy_s, 3))

    # ---- the watch for work that takes too long

    def _overdue(self, work: Work, waited_s: float) -> None:
        log.error("overdue", group=work.group, what=work.what, waited_s=round(waited_s, 1))
        self.groups[work.group].overdue(work.what, waited_s)

    def _in_hand(self) -> Iterator[Work]:
        """Return what the daemons work on.  Of the steps only the one begun first counts: the others wait behind it."""
        if self.scoring is not None and self.scoring.in_hand:
            yield Work(self.scoring.placed.group, self.scoring.in_hand)
        if self._assembly is None or self._engine is None or self.placement is None:
            return
        oldest = self._engine.oldest_in_flight()
        if oldest is not None:
            drafts = oldest.stage == len(self.placement.stages)
            group = self.draft_group if drafts else self.placement.stages[oldest.stage].group
            yield Work(group, f"step {oldest.step_id} at stage {oldest.stage}")
        for group in self._assembly.resetting:
            yield Work(group, "a reset")
