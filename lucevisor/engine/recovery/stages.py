"""Brings lost stages of a pipeline back while all others keep what they have.

Steps on their way wait for the lost stages; when new daemons run these, each is rebuilt (recovery/rebuild.py), and the
steps go on.  Where state was frozen before the loss and the new daemons have it, they only open the sequences as of
then.  To the scheduler that is one long step.  Knows no sockets; the owner says which stages are lost and who
runs them now.
Invariant: nothing is planned from a loss until all lost stages are rebuilt.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from lucevisor.engine.journal import Journal
from lucevisor.engine.pipeline.pipeline import Pipeline
from lucevisor.engine.pipeline.steps import StageLink
from lucevisor.engine.recovery.rebuild import (
    FIRST_STEP,
    CannotRebuild,
    Rebuilder,
    RebuildPlan,
    RebuildStep,
    WaitingSteps,
)
from lucevisor.engine.scheduling.scheduler import Scheduler
from lucevisor.engine.sequence import LiveSequence
from lucevisor.engine.step import ScheduledSequence, StepPlan, mask_jobs
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import Space
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.steps import Operation, Step

_IN_FLIGHT: Final = 2
"""Steps that a stage under rebuild has at once: one runs, one waits."""


class StageRecovery:
    """Lost stages of the pipeline that is attached.  Without a ``journal`` only frozen state brings one back."""

    def __init__(self, scheduler: Scheduler, journal: Journal | None) -> None:
        self._scheduler = scheduler
        self._use(journal)
        self._pipeline: Pipeline | None = None  # while stages of it are lost
        self._links: dict[int, StageLink] = {}
        self._plans: dict[int, RebuildPlan] = {}  # of the lost stages, as of now
        self._to_send: dict[int, deque[RebuildStep]] = {}
        self._regions: dict[int, deque[int]] = {}  # of the steps that each stage has
        self._steps: dict[int, Step] = {}  # on their way, without what is of no use any more
        self._ended: list[tuple[int, ScheduledSequence]] = []  # slices, by step, that are dropped when these go on
        self._rows: list[tuple[int, RebuildStep]] = []  # by stage: of the steps on their way
        self._on_end: Callable[[bool], None] = lambda _: None
        self._output_lost = False
        self.opening: Sequence[Operation] | None = None  # of what was frozen; None: steps were planned since
        self.n_frozen = 0  # tokens of it
        self.kept = False  # the new daemons have what was frozen, those of the last rebuild if none is under way
        self.n_kept = 0  # tokens of the sequences whose state new daemons took over
        self.n_tokens = 0  # of the sequences, once for each stage
        self.n_done = 0

    @property
    def enabled(self) -> bool:
        """Whether a stage may be lost alone: there is a journal, or frozen state."""
        return self._journal is not None or self.opening is not None

    @property
    def active(self) -> bool:
        """Whether stages are lost."""
        return self._pipeline is not None

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens that lost stages have computed again, and of how many."""
        return (self.n_done, self.n_tokens) if self._to_send else (0, 0)

    def attach(self, pipeline: Pipeline, proceed: Callable[[], None]) -> None:
        """File the rows of a new pipeline; call ``proceed`` whenever ``advance`` may do more."""

        def answered(step: Step, stage: int) -> None:
            if self._journal is not None:
                self._journal.answered(step.step_id, stage)
            if self.active:
                proceed()

        def rebuilt(stage: int) -> None:
            self._regions[stage].popleft()
            proceed()

        pipeline.on_rows, pipeline.on_rebuilt, pipeline.on_recalled = answered, rebuilt, proceed

    def detach(self) -> None:
        """There is no pipeline any more, and nothing in the shards."""
        self._pipeline = self.opening = None
        self._ended.clear()
        self._forget_plans()
        if self._journal is not None:
            self._journal.forget()

    def part(self, journal: Journal | None) -> None:
        """The pipeline is left for one with another journal; what was frozen stays so."""
        opening = self.opening or ()
        self._use(journal)
        self.detach()
        self.opening = [*opening]

    def freeze(self, opening: Sequence[Operation], n_tokens: int) -> None:
        """All stages have done all that was decided; ``opening`` opens the running sequences, of ``n_tokens``, in a
        daemon that has their state.  It holds for one loss, if no step is planned before that.
        """
        self.opening, self.n_frozen = [*opening], n_tokens

    def sending(self, plan: StepPlan) -> None:
        """A step is about to be sent, that writes to its region."""
        if self._journal is not None:
            self._journal.free(plan.step.region)

    def planned(self, plan: StepPlan, lives: Mapping[int, LiveSequence]) -> None:
        """Note a step that is sent."""
        if plan.step.slices or not self.active:  # else it waits for the lost stages
            self.opening = None
        if self._journal is not None:
            self._journal.planned(plan.step, lives)

    def finished(self, step_id: int) -> None:
        """Note a step that the last stage has answered."""
        if self._journal is not None:
            self._journal.finished(step_id)

    def lose(self, pipeline: Pipeline, stages: Iterable[int]) -> bool:
        """These stages are lost, too, or again: begin anew when all have new daemons.  False: nothing is frozen, and no
        stage would be left, or there is no journal.
        """
        lost = {*stages, *pipeline.lost}
        if pipeline.lost:
            self.opening = None  # it is of use for one loss, the one that it was made for
        if self.opening is None and (self._journal is None or len(lost) == pipeline.n_stages):
            return False
        self._pipeline = pipeline
        self._links.clear()
        self._forget_plans()
        pipeline.lose(lost)  # which may deliver results, and those ask for the next step of the rebuild
        return True

    def prepare(self, stages: Collection[int], now: float) -> dict[int, RebuildPlan] | None:
        """Return what rebuilds these of the lost stages, for their daemons to compute before ``restore``; None while
        steps are on their way to others.  Raises CannotRebuild if that is impossible.

        It holds until another stage is lost.
        """
        if self._pipeline is None or self.opening is not None:
            raise CannotRebuild("no stage is lost, or its state is kept")
        if Space.WINDOW in self._scheduler.pools:
            raise CannotRebuild("sliding layers take pages in turn")
        if not self._plans:
            pipeline = self._pipeline
            if not self._settle(pipeline, now):
                return None
            if self._pipeline is not pipeline:  # a link was dead
                raise CannotRebuild("the pipeline is gone")
            self._begin(pipeline)
        return {stage: self._plans[stage] for stage in stages}

    def gather(self, plans: Iterable[RebuildPlan]) -> int:
        """Return the descriptor of a new file, to which the rows of plans are written.  Raises OSError."""
        assert self._journal is not None
        return self._journal.gather([one.rows for plan in plans for one in plan.steps])

    def restore(
        self,
        links: Mapping[int, StageLink],
        on_end: Callable[[bool], None],
        *,
        kept: bool,
        replayed: Collection[int] = (),
    ) -> bool:
        """All lost stages have daemons that hold no sequences, but if ``kept`` all bytes that were frozen, and those of
        ``replayed`` stages what was prepared; ``on_end`` hears whether they were rebuilt.  False: no stage is lost.
        """
        self._links, self._on_end, self.kept = dict(links), on_end, kept
        for stage in replayed if self.active else ():
            self._to_send[stage].clear()
            self.n_done += self._plans[stage].n_tokens
        return self.active

    def advance(self, now: float) -> bool:
        """Do what is possible; return whether that was the last of it, and the pipeline is whole.

        Raises CannotRebuild.
        """
        if self._pipeline is None or not self._links:
            return False
        if not self._to_send:
            if not self._settle(self._pipeline, now):
                return False
            self._begin(self._pipeline)
        for stage, steps in self._to_send.items():
            regions = self._regions[stage]
            if self._to_send.get(stage - 1) or self._regions.get(stage - 1):
                continue  # the stage before writes where this one would read
            while steps and len(regions) < _IN_FLIGHT and steps[0].step.region not in regions:
                self._send(self._pipeline, stage, steps.popleft())
        if any(self._to_send.values()) or any(self._regions.values()):
            return False
        self._finish(self._pipeline)
        return True

    def masked(self) -> list[StepPlan]:
        """Return the steps that went on whose masks are to be made again, since the output stage was lost."""
        if not self._output_lost:
            return []
        jobs = {one.step_id: mask_jobs(one.parts.values()) for one in self._scheduler.in_flight}
        return [StepPlan(step, (), jobs[step_id]) for step_id, step in self._steps.items() if jobs[step_id]]

    def end(self, *, rebuilt: bool) -> None:
        """Tell the owner how it ended."""
        on_end, self._on_end = self._on_end, lambda _: None
        on_end(rebuilt)

    # ---- inside

    def _use(self, journal: Journal | None) -> None:
        self._journal = journal

    def _settle(self, pipeline: Pipeline, now: float) -> bool:
        """Send what waits for a step; return whether all steps on their way wait for lost stages."""
        while pipeline.settled and (plan := self._scheduler.cut(now)) is not None:
            self.planned(plan, {})
            pipeline.submit(plan.step, opening=plan.opening)
        return pipeline.settled

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._to_send.clear()

    def _begin(self, pipeline: Pipeline) -> None:
        """Plan what lost stages compute, now that all steps in flight wait for them.  Raises CannotRebuild."""
        lost = sorted(pipeline.lost)
        self.kept = self.kept and self.opening is not None
        self.n_tokens = self.n_done = self.n_kept = 0
        if self.kept:
            self._reopen(lost)
        elif self._journal is None:
            raise CannotRebuild("there is no journal")
        elif self._scheduler.reuse.index.pinning:
            raise CannotRebuild("a prefix slot is being saved or restored")
        else:
            self._output_lost = pipeline.n_stages - 1 in pipeline.lost
            self._steps = self._without_ended(pipeline, self._journal)
            self._plan(pipeline, self._journal, lost)

    def _without_ended(self, pipeline: Pipeline, journal: Journal) -> dict[int, Step]:
        """Take the slices of requests that have ended out of the steps in flight; return these by id."""
        if any(one.stage and one.step.drafts_of for one in pipeline.in_flight):
            raise CannotRebuild("nobody knows the drafts that a lost stage began with")
        self._drop_ended()
        ended: dict[int, set[int]] = {}
        for step_id, part in self._ended:
            ended.setdefault(step_id, set()).add(part.slice.sequence)
        for step_id, sequences in ended.items():
            journal.without(step_id, sequences)
        return {one.step.step_id: self._without(one.step, ended) for one in pipeline.in_flight}

    def _plan(self, pipeline: Pipeline, journal: Journal, lost: Sequence[int]) -> None:
        """Plan the steps that lost stages run again, and those in flight that they run first."""
        scheduler = self._scheduler
        self._drop_unfinished([part for _, part in self._ended])
        waiting = {
            stage: [self._steps[one.step.step_id] for one in pipeline.in_flight if one.stage == stage] for stage in lost
        }
        rebuilder = Rebuilder(
            scheduler.limits,
            scheduler.pools,
            journal,
            [*scheduler.running],
            WaitingSteps(waiting),
            scheduler.limits.n_regions(scheduler.n_stages),
            scheduler.reuse.index.slots,
        )
        self._drop_lost_slots(rebuilder.kept)
        self._plans = {stage: rebuilder.plan(stage) for stage in lost}
        found = [(stage, step, rebuilder.rows(stage, step)) for stage, steps in waiting.items() for step in steps]
        self._rows = [(stage, RebuildStep(step, rows)) for stage, step, rows in found if rows]
        self._to_send = {stage: deque(plan.steps) for stage, plan in self._plans.items()}
        self._regions = {stage: deque() for stage in self._plans}
        self.n_tokens = sum(plan.n_tokens for plan in self._plans.values())

    def _reopen(self, lost: Sequence[int]) -> None:
        """Open the sequences as they were frozen; the steps that wait carry what was decided since."""
        assert self.opening is not None
        step = Step(FIRST_STEP, 0, [*self.opening], [])
        self._steps, self._rows, self._output_lost = {}, [], False
        self._to_send = {stage: deque([RebuildStep(step)]) for stage in lost}
        self._regions = {stage: deque() for stage in lost}
        self.n_kept = self.n_frozen * len(lost)

    def _drop_ended(self) -> None:
        """Forget the slices of sequences that were closed since, as those of an earlier loss.

        Raises CannotRebuild if a sequence began with a slot that they were to complete in the stages behind.
        """
        for scheduled in self._scheduler.in_flight:
            for sequence, part in [*scheduled.parts.items()]:
                if part.record.live is not part.live:
                    del scheduled.parts[sequence]
                    part.record.n_in_flight -= 1
                    self._ended.append((scheduled.step_id, part))
        for record in self._scheduler.running:
            began_at = record.live.began_at if record.live is not None else 0
            if any(_reaches(record.tokens, began_at, part) for _, part in self._ended):
                raise CannotRebuild("a sequence began with what another one, closed since, was to compute")

    def _drop_unfinished(self, unfinished: Sequence[ScheduledSequence]) -> None:
        """Drop the slots that may have something of slices which stages behind the lost ones will never compute, even
        where a running sequence begins alike: it has pages of its own."""
        index = self._scheduler.reuse.index
        for slot in index.slots:
            if any(_reaches(slot.tokens, slot.n_tokens, part) for part in unfinished):
                index.drop(slot)

    def _drop_lost_slots(self, kept: Collection[PrefixSlot]) -> None:
        """Drop the slots of which the lost stages had a part, but for those that come back with running sequences."""
        index = self._scheduler.reuse.index
        for slot in index.slots:
            if slot not in kept:
                index.drop(slot)

    def _without(self, step: Step, ended: Mapping[int, set[int]]) -> Step:
        if step.step_id not in ended:
            return step
        if step.want_logits:
            raise CannotRebuild("a step returns rows of a sequence that was closed since")
        if any(piece.masked for piece in step.slices) and not self._output_lost:
            raise CannotRebuild("the output stage has masks of a sequence that was closed since")
        kept = [piece for piece in step.slices if piece.sequence not in ended[step.step_id]]
        return replace(step, slices=kept)

    def _send(self, pipeline: Pipeline, stage: int, one: RebuildStep) -> None:
        if one.rows and self._journal is not None:
            self._journal.place(stage - 1, one.step.region, one.rows)
        self._regions[stage].append(one.step.region)
        with contextlib.suppress(ProtocolError, OSError):  # it was lost again, of which the owner hears
            pipeline.rebuild(stage, one.step, self._links[stage])
        self.n_done += sum(len(piece.tokens) for piece in one.step.slices)

    def _finish(self, pipeline: Pipeline) -> None:
        """Let the steps on their way go on."""
        for stage, one in self._rows:
            assert self._journal is not None
            self._journal.place(stage - 1, one.step.region, one.rows)
        self._pipeline = self.opening = None  # what waited is done now, by other stages than the lost ones, too
        self._ended.clear()
        self._forget_plans()
        pipeline.restore(self._links, self._steps, operated=not self.kept)


def _reaches(tokens: TokenBuffer, n_tokens: int, part: ScheduledSequence) -> bool:
    """Whether the first ``n_tokens`` tokens, which others computed, may include some of a slice."""
    start = part.slice.start
    return n_tokens > start and tokens.n_common(part.record.tokens, n_tokens) > start
