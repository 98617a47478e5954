"""Joins READY daemons into a pipeline and attaches it to the engine.

When every group with layers is READY, each daemon drops its sequences (Reset, answered by ResetDone); then a pipeline
over their links is attached.  Of a lost daemon only the replacement is reset and rebuilt (engine/recovery.py), if the
engine can.  Invariant: steps go only to READY daemons that were reset since they were lost or the pipeline was closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from io import FileIO
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from lucevisor.engine.request import RequestError
from lucevisor.engine.shell import DraftStage, Engine, StateReplay
from lucevisor.kv_transfer.transfers import ExportedState, KvTransfer
from lucevisor.protocol.arena import ORDERED
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.frames import Frame
from lucevisor.protocol.loading import Load
from lucevisor.protocol.steps import PendingCancelled, Reset, ResetDone, StepResult
from lucevisor.protocol.transport import Channel
from lucevisor.supervision.daemon import LoadWithFiles

log = structlog.get_logger("lucevisor.deployment")


_DROPPED: Final = "the daemon drops its sequences"


class DraftAssembly:
    """Attaches the draft stage of ``group`` to the engine.

    ``alone``: the group runs no other stage; ``with_output``: it runs the output stage.
    """

    def __init__(
        self,
        engine: Engine,
        group: str,
        transfers: KvTransfer,
        *,
        alone: bool,
        with_output: bool,
        on_change: Callable[[], None],
    ) -> None:
        self.group = group
        self._alone, self._with_output = alone, with_output
        self.attached = False
        self._engine, self._transfers, self._on_change = engine, transfers, on_change
        self._link: Channel | None = None
        self._serving = False  # a pipeline is attached
        self._n_resets = 0
        self._token = 0  # of the last Reset; 0: none is unanswered

    @property
    def resetting(self) -> bool:
        return self._token > 0

    def on_ready(self, link: Channel) -> None:
        self._link = link
        if self._serving:
            self._prepare()

    def on_lost(self, reason: str) -> None:
        self._link, self._token = None, 0
        self.detach(reason)

    def detach(self, reason: str) -> None:
        if self.attached:
            self.attached = False
            log.warning("drafter detached", group=self.group, reason=reason)
            self._engine.detach_drafter()
            self._on_change()

    def for_stages(self, *, restored: bool) -> DraftStage | None:
        """Return what to attach with the stages of its daemon, if it has no daemon of its own.

        ``restored``: its daemon has the state of the one before, as of the last step.
        """
        if self._alone or self._link is None:
            return None
        return DraftStage(self._link, self._with_output, restored)

    def stages_attached(self, drafter: DraftStage | None) -> None:
        """Called when the engine has new stages, and the ``drafter`` of ``for_stages``."""
        self._serving = True
        if drafter is not None:
            self._report_attached(restored=drafter.restored)
        elif self._link is not None:
            self._prepare()

    def pipeline_detached(self) -> None:
        self._serving, self._token = False, 0
        self.attached = False

    def reset_done(self, token: int) -> None:
        if token == self._token:
            self._token = 0
            self._attach()

    def _prepare(self) -> None:
        """Reset a daemon of its own; that of a stage was reset before the pipeline was attached."""
        if not self._alone:
            self._attach()
            return
        assert self._link is not None
        self._n_resets += 1
        self._token = self._n_resets
        self._transfers.cancel_waiting(self.group, _DROPPED)
        try:
            self._link.send(Reset(self._token))
        except ProtocolError:  # the link's on_closed tells supervision, which calls on_lost()
            self._token = 0

    def _attach(self) -> None:
        assert self._link is not None
        self._engine.attach_drafter(DraftStage(self._link, self._with_output))
        self._report_attached(restored=False)

    def _report_attached(self, *, restored: bool) -> None:
        self.attached = True
        log.info("drafter attached", group=self.group, restored=restored)
        self._on_change()


class PipelineAssembly:
    """Joins the daemons of one placement into a pipeline.

    ``stage_groups[s]`` runs stage s, ``draft_group`` the draft stage, if any.  ``on_change``: of ``complete``,
    ``drafting``.
    """

    def __init__(
        self,
        engine: Engine,
        stage_groups: Sequence[str],
        on_change: Callable[[], None],
        transfers: KvTransfer,
        draft_group: str = "",
    ) -> None:
        self._engine, self._transfers = engine, transfers
        self._stage_groups = list(stage_groups)
        self._on_change = on_change
        self._draft: DraftAssembly | None = None
        if draft_group:
            alone, with_output = draft_group not in stage_groups, draft_group == stage_groups[-1]
            self._draft = DraftAssembly(
                engine, draft_group, transfers, alone=alone, with_output=with_output, on_change=on_change
            )
        self._links: dict[str, Channel] = {}
        self._lost: set[str] = set()  # groups whose stages the pipeline has lost
        self._with_state: set[str] = set()  # groups whose daemons took over their predecessors' state
        self._draft_restored = False  # the drafter's daemon took over that of its predecessor, too
        self._replaying: Counter[str] = Counter()  # lost groups, and replays prepared for them since the last loss
        self._replayed: set[str] = set()  # those of them whose daemons computed it while they loaded
        self._resetting: set[str] = set()
        self._token = 0  # identifies the last Reset
        self._attached = False
        self._draft_stage: DraftStage | None = None  # attached when the lost stages are rebuilt
        self._detached = False

    @property
    def complete(self) -> bool:
        return self._attached and not self._lost

    @property
    def holding(self) -> bool:
        return self._engine.core.recovery.holding

    @property
    def drafting(self) -> bool:
        return self._draft is not None and self._draft.attached

    @property
    def resetting(self) -> frozenset[str]:
        drafter = {self._draft.group} if self._draft is not None and self._draft.resetting else set()
        return frozenset(self._resetting | drafter)

    async def replay(self, group: str, timeout_s: float) -> StateReplay | None:
        """Return the steps that a lost group's next daemon computes while it loads; the caller closes their file.

        None without such steps, and after two daemons that did not load: the replay may be what fails.
        """
        if group not in self._lost or self._replaying[group] == 2:
            return None
        stages = [stage for stage, name in enumerate(self._stage_groups) if name == group]
        self._replaying[group] += 1  # here, for a loss that comes before it is sent makes it out of date
        found = await self._engine.make_replay(stages, timeout_s)
        if found is None and self._replaying[group]:
            self._replaying[group] -= 1  # no load carried it
        return found

    def on_ready(
        self,
        group: str,
        link: Channel,
        *,
        with_draft: bool = False,
        restored: bool = False,
        draft_restored: bool = False,
        replayed: bool = False,
    ) -> None:
        """Called when a daemon has loaded; ``with_draft``: the drafter, too; ``restored``: it has the frozen state,
        with ``draft_restored`` also the drafter's; ``replayed``: it computed what ``replay`` returned."""
        if self._detached:  # it was loading when the stop began
            return
        if self._draft is not None and group == self._draft.group and with_draft:
            self._draft.on_ready(link)
        if group not in self._stage_groups:
            return
        self._links[group] = link
        if restored:
            self._with_state.add(group)
            self._draft_restored |= draft_restored and with_draft
        if replayed and group in self._replaying:
            self._replayed.add(group)
        if set(self._links) == set(self._stage_groups):
            self._reset(self._lost or self._links.keys())

    def on_lost(self, group: str, reason: str) -> None:
        """Called when a daemon has exited or is about to."""
        if group in self._stage_groups:
            known = self._links.pop(group, None) is not None
            self._with_state.discard(group)
            self._draft_restored = False
            self._replayed.discard(group)
            self._resetting.clear()
            if known or group not in self._lost:  # else the dead link has been reported already
                self._lose_stages(group, RequestError("shard_lost", _lost(group, reason)))
        if self._draft is not None and group == self._draft.group:
            self._draft.on_lost(reason)
            if group in self._lost:
                self._draft.pipeline_detached()  # until it is rebuilt

    def detach_drafter(self, reason: str) -> None:
        if self._draft is not None:
            self._draft.detach(reason)

    def on_frame(self, group: str, frame: Frame) -> None:
        """Take a frame of a READY daemon's link.  Answers to an earlier Reset or pipeline are dropped."""
        match frame.message:
            case ResetDone(token) if group not in self._stage_groups:
                if self._draft is not None and group == self._draft.group:
                    self._draft.reset_done(token)
            case ResetDone(token):
                if token == self._token and group in self._resetting:
                    self._resetting.discard(group)
                    if not self._resetting:
                        self._all_reset()
            case StepResult() | PendingCancelled() as result if self._attached:
                text = f"group {group} answered for stage {result.stage}, which it does not run"
                if self._runs(group, result.stage):
                    self._engine.receive(result, frame.payload)
                elif group in self._stage_groups:  # the engine would blame the group whose stage it is
                    self._engine.fail(self._stage_groups.index(group), text)
                else:
                    self._engine.fail_drafter(text)
            case _:
                pass

    def detach(self, error: RequestError | None = None) -> None:
        """Detach for good.  ``error`` ends running requests; None: the caller detaches the engine."""
        had_one = self._attached
        self._detached = True
        self._links.clear()
        self._resetting.clear()
        self._on_pipeline_dropped()
        if had_one and error is not None:
            self._engine.detach(error)
            self._on_change()

    def _runs(self, group: str, stage: int) -> bool:
        if stage == len(self._stage_groups):
            return self._draft is not None and self._draft.group == group
        return 0 <= stage < len(self._stage_groups) and self._stage_groups[stage] == group

    def _reset(self, groups: Collection[str]) -> None:
        self._token += 1
        self._resetting = set(groups) - self._replayed
        for group in [*self._resetting]:
            self._transfers.cancel_waiting(group, _DROPPED)
            try:
                self._links[group].send(Reset(self._token))
            except ProtocolError:  # the link's on_closed tells supervision, which calls on_lost()
                return
        if not self._resetting:
            self._all_reset()

    def _all_reset(self) -> None:
        if not self._lost:
            self._attach()
            return
        links = {stage: self._links[g] for stage, g in enumerate(self._stage_groups) if g in self._lost}
        log.info("rebuilding", groups=sorted(self._lost), replayed=sorted(self._replayed))
        replayed = [stage for stage in links if self._stage_groups[stage] in self._replayed]
        self._forget_replays()
        draft_restored, self._draft_restored = self._draft_restored, False
        if self._draft is not None and self._draft.group in self._lost:
            self._draft_stage = self._draft.for_stages(restored=draft_restored)
        restored = self._lost <= self._with_state
        if not self._engine.restore(
            links, self._restored, restored=restored, replayed=replayed, drafter=self._draft_stage
        ):
            self._restored(False)  # it gave up meanwhile

    def _restored(self, rebuilt: bool) -> None:
        """Called when the engine has rebuilt the lost stages, or has detached the pipeline."""
        lost, self._lost = self._lost, set()
        drafter, self._draft_stage = self._draft_stage, None
        self._with_state.clear()
        if rebuilt:
            log.info("rebuilt", groups=sorted(lost))
            if self._draft is not None and self._draft.group in lost:
                self._draft.stages_attached(drafter)
        else:
            self._on_pipeline_dropped()
            if set(self._links) == set(self._stage_groups):
                self._reset(self._links.keys())
        self._on_change()

    def _lose_stages(self, group: str, error: RequestError) -> None:
        if not self._attached:
            return
        stages = [stage for stage, name in enumerate(self._stage_groups) if name == group]
        self._forget_replays()  # they are out of date
        if self._engine.lose_stages(stages, error):
            self._lost.add(group)
        else:
            self._on_pipeline_dropped()
        self._on_change()

    def _on_pipeline_dropped(self) -> None:
        self._attached, self._draft_stage = False, None
        self._lost.clear()
        self._draft_restored = False
        self._forget_replays()
        if self._draft is not None:
            self._draft.pipeline_detached()

    def _forget_replays(self) -> None:
        self._replaying.clear()
        self._replayed.clear()

    def _attach(self) -> None:
        links = [self._links[group] for group in self._stage_groups]
        has_doorbells = ORDERED and len(set(self._stage_groups)) == len(self._stage_groups)
        log.info("pipeline ready", stages=self._stage_groups)
        whole = self._with_state >= set(self._stage_groups)
        self._with_state.clear()
        draft_restored, self._draft_restored = self._draft_restored, False
        drafter = self._draft.for_stages(restored=whole and draft_restored) if self._draft is not None else None
        self._attached = True
        self._engine.attach(
            links, has_doorbells=has_doorbells, restored=whole, drafter=drafter, on_dead_link=self._on_dead_link
        )
        if self._draft is not None and self._attached:
            self._draft.stages_attached(drafter)
        self._on_change()

    def _on_dead_link(self, stage: int, reason: str) -> None:
        self.on_lost(self._stage_groups[stage], reason)

    def pipeline_failed(self) -> None:
        """Called when the engine has dropped the pipeline because a daemon answered what it must not."""
        self._on_pipeline_dropped()
        self._on_change()


def _lost(group: str, reason: str) -> str:
    return f"group {group} was lost while the request ran: {reason}; send the request again"


class RestoredLinks(NamedTuple):
    """Links of daemons that have read what others held."""

    links: Collection[Channel] = ()
    with_draft: bool = False


class SuccessorState:
    """State for the next daemon of each group: exported state, or steps to replay while loading."""

    def __init__(self) -> None:
        self._exported: dict[str, ExportedState] = {}
        self._rows: dict[str, FileIO] = {}  # the files that loads carry

    async def load_order(self, group: str, load: Load, assembly: PipelineAssembly | None) -> LoadWithFiles:
        """Return a load with the steps to replay meanwhile; where requests wait it skips the warm-up, as kernels are
        cached."""
        self._close_rows(group)
        if assembly is None or assembly.complete:
            return LoadWithFiles(load)
        replay = None if group in self._exported else await assembly.replay(group, 1.0)
        if replay is None:
            return LoadWithFiles(replace(load, warm_up=not assembly.holding))
        self._rows[group] = replay.file
        return LoadWithFiles(replace(load, replay=[*replay.stages], warm_up=False), [replay.file.fileno()])

    def add(self, group: str, state: ExportedState) -> None:
        self.drop(group)  # of one that did not load
        self._exported[group] = state

    def take(self, group: str) -> ExportedState | None:
        self._close_rows(group)
        return self._exported.pop(group, None)

    def drop(self, group: str) -> None:
        self._close_rows(group)
        if group in self._exported:
            self._exported.pop(group).close()

    def close(self) -> None:
        for group in {*self._exported, *self._rows}:
            self.drop(group)

    def _close_rows(self, group: str) -> None:
        if group in self._rows:
            self._rows.pop(group).close()
