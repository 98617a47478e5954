"""Failover: holding requests while daemons are lost, rebuilding lost stages, and replays for loading daemons.

A new daemon gets the tables as they are after all steps that were planned, then every sequence up to its first slice in
a step that it has to run; these steps follow without their operations. Rows come from the journal; a stage with the
embedding needs none. Invariants: a replay is the rebuild that ``StageRecovery.restore`` would begin, or there is none;
no page is written that another sequence, rebuilt before or needed by a waiting step, reads; every page that a sequence
still owns afterwards has been rebuilt, or waiting steps write it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace

from lucevisor.engine.events import PAUSE_REASONS, PauseReason
from lucevisor.engine.journal import Journal, RowCopy, pages_between
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.pipeline import Embeddings, Pipeline
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.sequence import LiveSequence, RequestRecord
from lucevisor.engine.step import ScheduledSequence, ScheduledStep, StepPlan, embeddings_of, mask_jobs
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.pages import first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.loading import StageReplay
from lucevisor.protocol.steps import CopyPage, CopyState, OpenSequence, Operation, SetPages, Slice, Step, ZeroState

FIRST_STEP: Final = 1 << 40
"""Ids of steps that rebuild a stage begin here, where no scheduler's come to."""


class CannotRebuild(Exception):
    """A stage cannot be rebuilt alone, so all stages compute the sequences again.  The message has the reason."""


@dataclass(frozen=True, slots=True)
class RebuildStep:
    """A step for one stage alone. ``rows``: its boundary rows in the journal; ``embeddings``: of images, for the first
    stage."""

    step: Step
    rows: Sequence[RowCopy] = ()
    embeddings: Embeddings = field(default_factory=dict)


@dataclass(slots=True)
class RebuildPlan:
    """The steps that rebuild a stage, in order; ``n_tokens`` in all."""

    steps: list[RebuildStep] = field(default_factory=list)
    n_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WaitingSteps:
    """Steps on their way when the stages are rebuilt, by the lost stage that they wait for."""

    by_stage: Mapping[int, Sequence[Step]]

    def first_starts(self) -> dict[int, int]:
        """Return where the first slice of each sequence starts."""
        starts: dict[int, int] = {}
        for step in sorted((s for steps in self.by_stage.values() for s in steps), key=lambda s: s.step_id):
            for slice_ in step.slices:
                starts.setdefault(slice_.sequence, slice_.start)
        return starts

    def behind(self, stage: int) -> list[Step]:
        """Return the steps that ``stage`` had answered before it was lost, in order."""
        answered = [step for at, steps in self.by_stage.items() if at > stage for step in steps]
        return sorted(answered, key=lambda step: step.step_id)


class Rebuilder:
    """Plans the rebuild of stages from the running ``records``; ``slots`` on their pages come back with them
    (``kept``)."""

    def __init__(
        self,
        limits: EngineLimits,
        pools: PagePools,
        journal: Journal,
        records: Sequence[RequestRecord],
        waiting: WaitingSteps,
        n_regions: int,
        slots: Sequence[PrefixSlot] = (),
    ) -> None:
        self._limits, self._pools, self._journal, self._waiting = limits, pools, journal, waiting
        self._n_regions = n_regions
        starts = waiting.first_starts()
        self._stops = {
            record.live: (record, starts.get(record.live.sequence, record.live.n_computed))
            for record in records
            if record.live is not None
        }
        for live, (_, stop) in self._stops.items():
            live.table.slide(stop)  # slots that share what it owns count as whole, and only what is visible is rebuilt
        self._n_steps = 0
        if any(live.table.n_out for live in self._stops):
            raise CannotRebuild("pages of a sequence were paged out: what follows them cannot be computed alone")
        self._check_window_pages()
        self._slots: dict[LiveSequence, list[PrefixSlot]] = {live: [] for live in self._stops}
        for slot in slots:
            self._keep(slot)

    @property
    def kept(self) -> set[PrefixSlot]:
        """The prefix slots that the rebuilt stages hold afterwards."""
        return {slot for slots in self._slots.values() for slot in slots}

    def plan(self, stage: int) -> RebuildPlan:
        """Return the steps that rebuild a stage.  Raises CannotRebuild if rows are missing or pages are too few."""
        plan = RebuildPlan()
        plan.steps.append(RebuildStep(self._step(self._opening(), [])))
        rebuilt: set[int] = set()  # window pages
        for live, (record, stop) in self._stops.items():
            spare = self._spare_pages(live, stop, rebuilt)
            for start, end in self._chunks(record, stop, {slot.n_tokens for slot in self._slots[live]}):
                tokens = [*record.tokens[start:end]]
                step = self._step(self._window_tables(live, start, end, stop, spare), [
                    Slice(live.sequence, start, tokens, sample=False)
                ])  # fmt: skip
                plan.steps.append(self._computed(stage, step))
                plan.n_tokens += end - start
                ending = [slot for slot in self._slots[live] if slot.n_tokens == end]
                if copies := [operation for slot in ending for operation in self._copies(live, slot)]:
                    plan.steps.append(RebuildStep(self._step(copies, [])))
            if stop and KvGroup.WINDOW in self._pools:
                plan.steps.append(RebuildStep(self._step(self._tables(live, KvGroup.WINDOW), [])))
                rebuilt.update(page for _, page in self._window_pages(live, stop))
        for step in self._waiting.behind(stage):
            alone = replace(step, step_id=self._next_id(), operations=[])
            plan.steps.append(self._computed(stage, alone))
        return plan

    def _computed(self, stage: int, step: Step) -> RebuildStep:
        """Return a step with what its stage reads.  Raises CannotRebuild if rows are missing."""
        if stage:
            return RebuildStep(step, self.rows(stage, step))
        records = {live.sequence: record for live, (record, _) in self._stops.items()}
        return RebuildStep(step, embeddings=embeddings_of((records[s.sequence], s) for s in step.slices))

    def rows(self, stage: int, step: Step) -> list[RowCopy]:
        """Return where the rows of a step for a stage lie.  Raises CannotRebuild if any is missing."""
        if stage == 0:
            return []
        lives = {live.sequence: live for live in self._stops}
        found_rows: list[RowCopy] = []
        row = 0
        for slice_ in step.slices:
            n = len(slice_.tokens)
            pages = pages_between(lives[slice_.sequence], slice_.start, slice_.start + n)
            copies = self._journal.find_rows(stage - 1, pages, slice_.start, slice_.start + n, row)
            if copies is None:
                raise CannotRebuild(f"the journal lacks rows of positions {slice_.start} to {slice_.start + n - 1}")
            found_rows += copies
            row += n
        return found_rows

    # ---- inside

    def _step(self, operations: list[Operation], slices: list[Slice]) -> Step:
        step_id = self._next_id()
        return Step(step_id, step_id % self._n_regions, operations, slices)

    def _next_id(self) -> int:
        self._n_steps += 1
        return FIRST_STEP + self._n_steps

    def _chunks(self, record: RequestRecord, stop: int, cuts: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yield slices up to ``stop`` that end at ``cuts``, too."""
        start, chunk = 0, self._limits.prefill_chunk
        while start < stop:
            end = min([(start // chunk + 1) * chunk, stop, *(cut for cut in cuts if cut > start)])
            if self._limits.whole_images:
                end = record.beside_images(start, end)
            yield start, end
            start = end

    def _keep(self, slot: PrefixSlot) -> None:
        """Keep a slot if a sequence begins with it, on its whole pages.  Window pages are not rebuilt for slots."""
        n, n_pages = slot.n_tokens, slot.n_tokens // PAGE_TOKENS
        for live, (record, stop) in self._stops.items() if KvGroup.WINDOW not in self._pools else ():
            pages = slot.pages(KvGroup.FULL)[:n_pages] if KvGroup.FULL in self._pools else []
            same = not pages or pages == live.table.entries(KvGroup.FULL, 0, n_pages)
            if 0 < n <= stop and same and record.tokens.n_common(slot.tokens, n) == n:
                self._slots[live].append(slot)
                return

    def _copies(self, live: LiveSequence, slot: PrefixSlot) -> Iterator[Operation]:
        """Yield what gives a slot its own part, when its sequence has just been computed up to its end."""
        if slot.state != NO_STATE:
            yield CopyState(live.state, slot.state)
        for kv_group, page in slot.tail.items():
            [source] = live.table.entries(kv_group, slot.n_tokens // PAGE_TOKENS, slot.n_tokens // PAGE_TOKENS + 1)
            if source != page:
                yield CopyPage(kv_group, source, page, slot.n_tokens % PAGE_TOKENS)

    def _opening(self) -> list[Operation]:
        operations: list[Operation] = []
        for live, (record, _) in self._stops.items():
            request, adapter = record.request, record.tokens.adapter
            opening = OpenSequence(
                live.sequence,
                live.state,
                request.sampling,
                mu=record.mu,
                n_prompt=len(request.prompt),
                images=request.image_spans,
                adapter=adapter,
            )
            operations.append(opening)
            if live.state != NO_STATE:
                operations.append(ZeroState(live.state))
            for kv_group in (KvGroup.FULL, KvGroup.WINDOW):
                operations += self._tables(live, kv_group)
        return operations

    def _tables(self, live: LiveSequence, kv_group: KvGroup) -> list[Operation]:
        if kv_group not in self._pools:
            return []
        known = live.table.known(kv_group)
        return [SetPages(live.sequence, kv_group, known.first, known.pages)] if known.pages else []

    # ---- window pages: a sequence needs those it has released again while it is computed from the start

    def _check_window_pages(self) -> None:
        """Raise CannotRebuild if waiting steps of a sequence see or write a page, released meanwhile, that is rebuilt
        for another one."""
        if KvGroup.WINDOW not in self._pools:
            return
        rebuilt: dict[int, list[LiveSequence]] = {}
        for live, (_, stop) in self._stops.items():
            for _, page in self._window_pages(live, stop):
                rebuilt.setdefault(page, []).append(live)
        for live, (_, stop) in self._stops.items():
            held = set(live.table.held(KvGroup.WINDOW))
            for page in self._visible_pages(live, stop):
                for other in rebuilt.get(page, ()):
                    if other is not live and not (page in held and page in other.table.held(KvGroup.WINDOW)):
                        raise CannotRebuild(
                            "a window page was given to another sequence while steps waited for the stage"
                        )

    def _visible_pages(self, live: LiveSequence, stop: int) -> list[int]:
        """Return the pages that tokens at ``stop`` and after it attend to or write."""
        assert self._limits.window_tokens is not None
        known = live.table.known(KvGroup.WINDOW)
        return known.pages[max(0, first_visible_page(stop, self._limits.window_tokens) - known.first) :]

    def _window_pages(self, live: LiveSequence, stop: int) -> list[tuple[int, int]]:
        """Return the entries below ``stop`` that a token there attends to, and their pages."""
        assert self._limits.window_tokens is not None
        known, first = live.table.known(KvGroup.WINDOW), first_visible_page(stop, self._limits.window_tokens)
        entries = range(max(first, known.first), pages_of(stop))
        return [(entry, known.pages[entry - known.first]) for entry in entries]

    def _spare_pages(self, live: LiveSequence, stop: int, rebuilt: set[int]) -> list[int]:
        """Return window pages that may hold what the sequence has released, until others are rebuilt."""
        if KvGroup.WINDOW not in self._pools:
            return []
        needed = {page for _, page in self._window_pages(live, stop)}
        return [page for page in self._pools[KvGroup.WINDOW].ids if page not in rebuilt and page not in needed]

    def _window_tables(self, live: LiveSequence, start: int, end: int, stop: int, spare: list[int]) -> list[Operation]:
        """Return the window table for a chunk of a sequence rebuilt up to ``stop``: its own pages from the last window
        on, spare ones, in turn, before."""
        window = self._limits.window_tokens
        if window is None:
            return []
        first, last = first_visible_page(start, window), pages_of(end)
        known = live.table.known(KvGroup.WINDOW)
        first_own = max(known.first, first_visible_page(stop, window))
        n_spare = min(last, first_own) - first
        if n_spare <= 0:
            return []
        if n_spare > len(spare):
            raise CannotRebuild(f"{n_spare} window pages are needed for a while, {len(spare)} are there")
        pages = [spare[entry % len(spare)] for entry in range(first, first + n_spare)]
        return [SetPages(live.sequence, KvGroup.WINDOW, first, pages)]


@dataclass(frozen=True, slots=True)
class Pauses:
    """Pauses of one reason, and their seconds in all."""

    n: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RecoveryStatistics:
    """Since the start. ``held``: requests that wait for a daemon now, ``held_s``: for how long. A pause lasts from a
    loss, or the last step before a restart, until steps are planned again; ``longest_pause_s`` to the next token of a
    request. ``n_continued``: running requests that went on, once for each pause; of their tokens all stages computed
    ``n_recomputed`` again, lost stages alone ``n_rebuilt``, and ``n_kept`` were handed to a new daemon. ``rebuilding``:
    tokens done in the present rebuild, and of how many."""

    held: int = 0
    held_s: float = 0.0
    pauses: Mapping[PauseReason, Pauses] = field(default_factory=lambda: dict.fromkeys(PAUSE_REASONS, Pauses()))
    longest_pause_s: float = 0.0
    n_continued: int = 0
    n_recomputed: int = 0
    n_rebuilt: int = 0
    n_kept: int = 0
    rebuilding: tuple[int, int] = (0, 0)


class RequestHold:
    """The hold of an engine.  ``hold_s`` 0: requests are never held."""

    def __init__(self, hold_s: float, max_losses: int) -> None:
        self.hold_s, self._max_losses = hold_s, max_losses
        self.since: float | None = None  # the present hold's begin
        self._reason: PauseReason = "loss"
        self._n_holds = 0  # losses and restarts
        self._totals = RecoveryStatistics()

    @property
    def holding(self) -> bool:
        """True if requests wait for a daemon."""
        return self.since is not None

    def begin_hold(self, now: float, reason: PauseReason = "loss") -> None:
        """Begin to hold: the pipeline or a stage of it is lost, or it is paused to restart one."""
        self._n_holds += 1
        if self.hold_s > 0 and self.since is None:
            self.since, self._reason = now, reason

    def end_hold(self, now: float) -> None:
        """End the hold: there is a pipeline again."""
        if self.since is not None:
            seconds, totals, before = now - self.since, self._totals, self._totals.pauses[self._reason]
            pauses = {**totals.pauses, self._reason: Pauses(before.n + 1, before.seconds + seconds)}
            self._totals = dataclasses.replace(
                totals, pauses=pauses, longest_pause_s=max(totals.longest_pause_s, seconds)
            )
        self.give_up()

    def give_up(self) -> None:
        self.since = None

    def survives(self, record: RequestRecord) -> bool:
        """Count the last loss or restart under a running request, once; return whether it is held."""
        if record.last_loss != self._n_holds:
            n_known, lost = len(record.tokens), self._reason == "loss"
            counts = lost and record.n_in_flight > 0  # a request that only waits for its next chunk is not to blame
            record.n_losses = counts if n_known > record.n_tokens_at_loss else record.n_losses + counts
            record.last_loss, record.n_tokens_at_loss = self._n_holds, n_known
            record.paused_at = self.since if record.paused_at is None else record.paused_at
            self._totals = dataclasses.replace(self._totals, n_continued=self._totals.n_continued + 1)
        return record.n_losses < self._max_losses

    def hold(self, record: RequestRecord) -> bool:
        """Return whether a running request whose sequence all shards have lost is held."""
        if not self.holding or not self.survives(record):
            return False
        if record.live is not None:
            n_recomputed = self._totals.n_recomputed + record.live.n_computed
            self._totals = dataclasses.replace(self._totals, n_recomputed=n_recomputed)
        return True

    def record_rebuilt(self, n_tokens: int, n_kept: int) -> None:
        """Count what lost stages computed again, and the tokens whose state new daemons took over."""
        totals = self._totals
        self._totals = dataclasses.replace(totals, n_rebuilt=totals.n_rebuilt + n_tokens, n_kept=totals.n_kept + n_kept)

    def statistics(
        self, n_unfinished: int, now: float, longest_pause_s: float = 0.0, rebuilding: tuple[int, int] = (0, 0)
    ) -> RecoveryStatistics:
        """Return the counts as of now; ``n_unfinished``: requests that run or wait; the others as in
        RecoveryStatistics."""
        totals = dataclasses.replace(self._totals, longest_pause_s=max(self._totals.longest_pause_s, longest_pause_s))
        if self.since is None:
            return totals
        return dataclasses.replace(totals, held=n_unfinished, held_s=now - self.since, rebuilding=rebuilding)


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The steps of each lost stage, and where the journal has their boundary rows."""

    stages: Sequence[StageReplay]
    rows: Sequence[Sequence[RowCopy]]


class StageRecovery:
    """Lost stages of the pipeline that is attached.  Without a ``journal`` only frozen state brings one back."""

    def __init__(self, scheduler: Scheduler, journal: Journal | None) -> None:
        self._scheduler, self._journal = scheduler, journal
        self._pipeline: Pipeline | None = None  # while stages of it are lost
        self._daemons: dict[int, int] = {}  # new ones, by lost stage
        self._plans: dict[int, RebuildPlan] = {}  # of the lost stages, as of now
        self._to_send: dict[int, deque[RebuildStep]] = {}
        self._regions: dict[int, deque[int]] = {}  # of the steps that each stage has
        self._steps: dict[int, Step] = {}  # on their way, without what is of no use any more
        self._ended: list[tuple[int, ScheduledSequence]] = []  # slices, by step, that are dropped when these go on
        self._rows: list[tuple[int, RebuildStep]] = []  # by stage: of the steps on their way
        self._output_lost = False
        self.reopen_operations: Sequence[Operation] | None = None  # of what was frozen; None: steps were planned since
        self.n_frozen = 0  # tokens of it
        self.restored = False  # the new daemons have what was frozen, those of the last rebuild if none is under way
        self.n_restored = 0  # tokens of the sequences whose state new daemons took over
        self.n_tokens = 0  # of the sequences, once for each stage
        self.n_done = 0

    @property
    def enabled(self) -> bool:
        """True if a stage may be lost alone: there is a journal, or frozen state."""
        return self._journal is not None or self.reopen_operations is not None

    @property
    def active(self) -> bool:
        return self._pipeline is not None

    @property
    def progress(self) -> tuple[int, int]:
        """Tokens that lost stages have computed again, and of how many."""
        return (self.n_done, self.n_tokens) if self._to_send else (0, 0)

    def on_rows(self, step: Step, stage: int) -> None:
        """File the rows that a stage made of a step."""
        if self._journal is not None:
            self._journal.on_stage_answered(step.step_id, stage)

    def on_stage_rebuilt(self, stage: int) -> None:
        """Record that a stage has answered a step that rebuilds it."""
        self._regions[stage].popleft()

    def detach(self) -> None:
        """Drop the pipeline and the state of its shards."""
        self._pipeline = self.reopen_operations = None
        self._ended.clear()
        self._forget_plans()
        if self._journal is not None:
            self._journal.clear()

    def detach_frozen(self, journal: Journal | None) -> None:
        """Leave the pipeline for one with another journal; the frozen state stays valid."""
        reopen_operations = self.reopen_operations or ()
        self._journal = journal
        self.detach()
        self.reopen_operations = [*reopen_operations]

    def freeze(self, reopen_operations: Sequence[Operation], n_tokens: int) -> None:
        """Record the state of all stages between two steps; valid for one loss, if no step is planned before that."""
        self.reopen_operations, self.n_frozen = [*reopen_operations], n_tokens

    def on_step_planned(self, plan: StepPlan, scheduled: ScheduledStep | None = None) -> None:
        """Record a step that was sent, and the sequences of its slices."""
        if plan.step.slices or not self.active:  # else it waits for the lost stages
            self.reopen_operations = None
        if self._journal is not None:
            self._journal.on_step_planned(plan.step, {} if scheduled is None else scheduled.live_sequences)

    def on_step_finished(self, step_id: int) -> None:
        """Record a step that the last stage has answered."""
        if self._journal is not None:
            self._journal.on_step_finished(step_id)

    def lose(self, pipeline: Pipeline, stages: Iterable[int]) -> bool:
        """Record lost stages; the rebuild starts when all have new daemons. False if nothing is frozen and no stage
        would be left, or there is no journal."""
        lost = {*stages, *pipeline.lost}
        if pipeline.lost:
            self.reopen_operations = None  # it is of use for one loss, the one that it was made for
        if self.reopen_operations is None and (self._journal is None or len(lost) == pipeline.n_stages):
            return False
        self._pipeline = pipeline
        self._daemons.clear()
        self._forget_plans()
        pipeline.lose(lost)
        return True

    def prepare(self, stages: Collection[int], now: float) -> dict[int, RebuildPlan] | None:
        """Return what rebuilds these of the lost stages, for their daemons to compute before ``restore``; None while
        steps are on their way to others. It holds until another stage is lost. Raises CannotRebuild."""
        if self._pipeline is None or self.reopen_operations is not None:
            raise CannotRebuild("no stage is lost, or what it had is saved")
        if KvGroup.WINDOW in self._scheduler.pools:
            raise CannotRebuild("window pages are reused as a text goes on, so layers cannot be replayed one by one")
        if not self._plans:
            pipeline = self._pipeline
            if not self._settle(pipeline, now):
                return None
            self._begin(pipeline)
        return {stage: self._plans[stage] for stage in stages}

    def replay(self, plans: Mapping[int, RebuildPlan]) -> ReplayPlan | None:
        """Return the steps of ``prepare``, by stage; None if they are too many."""
        n_tokens = sum(plan.n_tokens for plan in plans.values())
        if any(step.embeddings for plan in plans.values() for step in plan.steps):
            return None  # they come with steps alone
        if self._journal is None or not 0 < n_tokens <= 1 << 17:  # else the message and the rows are too large
            return None
        replays, n_rows = [], 0
        for stage, plan in plans.items():
            replays.append(StageReplay(stage, [step.step for step in plan.steps], n_rows))
            n_rows += sum(copy.n for step in plan.steps for copy in step.rows)
        return ReplayPlan(replays, [step.rows for plan in plans.values() for step in plan.steps])

    def restore(self, daemons: Mapping[int, int], *, restored: bool, replayed: Collection[int] = ()) -> None:
        """Rebuild the lost stages in ``daemons``, which hold no sequences. ``restored``: they have all that was frozen.
        ``replayed``: stages that have computed what ``prepare`` returned."""
        self._daemons, self.restored = dict(daemons), restored
        for stage in replayed if self.active else ():
            self._to_send[stage].clear()
            self.n_done += self._plans[stage].n_tokens

    def advance(self, now: float) -> bool:
        """Do what is possible; return whether the pipeline is whole now. Raises CannotRebuild."""
        if self._pipeline is None or not self._daemons:
            return False
        if not self._to_send:
            if not self._settle(self._pipeline, now):
                return False
            self._begin(self._pipeline)
        for stage, steps in self._to_send.items():
            regions = self._regions[stage]
            if self._to_send.get(stage - 1) or self._regions.get(stage - 1):
                continue  # the stage before writes where this one would read
            while steps and len(regions) < 2 and steps[0].step.region not in regions:
                self._send(self._pipeline, stage, steps.popleft())
        if any(self._to_send.values()) or any(self._regions.values()):
            return False
        self._finish(self._pipeline)
        return True

    def masked(self) -> list[StepPlan]:
        """Return the steps that went on whose masks are to be made again, since the output stage was lost."""
        if not self._output_lost:
            return []
        jobs = {scheduled.step_id: mask_jobs(scheduled.parts.values()) for scheduled in self._scheduler.in_flight}
        return [StepPlan(step, (), jobs[step_id]) for step_id, step in self._steps.items() if jobs[step_id]]

    # ---- inside

    def _settle(self, pipeline: Pipeline, now: float) -> bool:
        """Send what waits for a step; return whether all steps on their way wait for lost stages."""
        while pipeline.settled and (plan := self._scheduler.flush_step(now)) is not None:
            self.on_step_planned(plan)
            pipeline.submit(plan.step, draft_operations=plan.draft_operations)
        return pipeline.settled

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._to_send.clear()

    def _begin(self, pipeline: Pipeline) -> None:
        """Plan what lost stages compute, now that all steps in flight wait for them.  Raises CannotRebuild."""
        lost = sorted(pipeline.lost)
        self.restored = self.restored and self.reopen_operations is not None
        self.n_tokens = self.n_done = self.n_restored = 0
        if self.restored:
            self._reopen(lost)
        elif self._journal is None:
            raise CannotRebuild("there is no journal")
        elif self._scheduler.reuse.index.reservations:
            raise CannotRebuild("a prefix slot is being restored")
        else:
            self._output_lost = pipeline.n_stages - 1 in pipeline.lost
            self._steps = self._without_ended(pipeline, self._journal)
            self._plan(pipeline, self._journal, lost)

    def _without_ended(self, pipeline: Pipeline, journal: Journal) -> dict[int, Step]:
        """Take the slices of requests that have ended out of the steps in flight; return these by id."""
        if any(entry.stage and entry.step.drafts_of for entry in pipeline.in_flight):
            raise CannotRebuild("the drafts that a lost stage began with are unknown")
        self._drop_ended()
        ended: dict[int, set[int]] = {}
        for step_id, part in self._ended:
            ended.setdefault(step_id, set()).add(part.slice.sequence)
        for step_id, sequences in ended.items():
            journal.remove_slices(step_id, sequences)
        return {entry.step.step_id: self._without(entry.step, ended) for entry in pipeline.in_flight}

    def _plan(self, pipeline: Pipeline, journal: Journal, lost: Sequence[int]) -> None:
        """Plan the steps that lost stages run again, and those in flight that they run first."""
        scheduler = self._scheduler
        self._drop_unfinished([part for _, part in self._ended])
        waiting = {
            stage: [self._steps[entry.step.step_id] for entry in pipeline.in_flight if entry.stage == stage]
            for stage in lost
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
        for slot in scheduler.reuse.index.slots:  # of which the lost stages had a part
            if slot not in rebuilder.kept:
                scheduler.reuse.index.drop(slot)
        self._plans = {stage: rebuilder.plan(stage) for stage in lost}
        waiting_rows = [
            (stage, step, rebuilder.rows(stage, step)) for stage, steps in waiting.items() for step in steps
        ]
        self._rows = [(stage, RebuildStep(step, rows)) for stage, step, rows in waiting_rows if rows]
        self._to_send = {stage: deque(plan.steps) for stage, plan in self._plans.items()}
        self._regions = {stage: deque() for stage in self._plans}
        self.n_tokens = sum(plan.n_tokens for plan in self._plans.values())

    def _reopen(self, lost: Sequence[int]) -> None:
        """Open the sequences as they were frozen; the steps that wait carry what was decided since."""
        assert self.reopen_operations is not None
        step = Step(FIRST_STEP, 0, [*self.reopen_operations], [])
        self._steps, self._rows, self._output_lost = {}, [], False
        self._to_send = {stage: deque([RebuildStep(step)]) for stage in lost}
        self._regions = {stage: deque() for stage in lost}
        self.n_restored = self.n_frozen * len(lost)

    def _drop_ended(self) -> None:
        """Drop the slices of sequences that were closed since. Raises CannotRebuild if a sequence began with a slot
        that they were to complete in the later stages."""
        for scheduled in self._scheduler.in_flight:
            for sequence, part in [*scheduled.parts.items()]:
                if part.record.live is not part.live:
                    del scheduled.parts[sequence]
                    part.record.n_in_flight -= 1
                    self._ended.append((scheduled.step_id, part))
        for record in self._scheduler.running:
            began_at = record.live.began_at if record.live is not None else 0
            if any(_reaches(record.tokens, began_at, part) for _, part in self._ended):
                raise CannotRebuild(
                    "a sequence began with a prefix that was not computed before its sequence was closed"
                )

    def _drop_unfinished(self, unfinished: Sequence[ScheduledSequence]) -> None:
        """Drop the slots that may have something of slices which stages after the lost ones will never compute."""
        index = self._scheduler.reuse.index
        for slot in index.slots:
            if any(_reaches(slot.tokens, slot.n_tokens, part) for part in unfinished):
                index.drop(slot)

    def _without(self, step: Step, ended: Mapping[int, set[int]]) -> Step:
        if step.step_id not in ended:
            return step
        if step.want_logits:
            raise CannotRebuild("a step returns rows of a sequence that has been closed")
        if any(slice_.masked for slice_ in step.slices) and not self._output_lost:
            raise CannotRebuild("the output stage has masks of a sequence that was closed since")
        remaining = [slice_ for slice_ in step.slices if slice_.sequence not in ended[step.step_id]]
        return replace(step, slices=remaining)

    def _send(self, pipeline: Pipeline, stage: int, rebuild_step: RebuildStep) -> None:
        if rebuild_step.rows and self._journal is not None:
            self._journal.place(stage - 1, rebuild_step.step, rebuild_step.rows)
        self._regions[stage].append(rebuild_step.step.region)
        pipeline.rebuild(stage, rebuild_step.step, self._daemons[stage], rebuild_step.embeddings)
        self.n_done += sum(len(slice_.tokens) for slice_ in rebuild_step.step.slices)

    def _finish(self, pipeline: Pipeline) -> None:
        """Let the steps on their way go on."""
        for stage, rebuild_step in self._rows:
            assert self._journal is not None
            self._journal.place(stage - 1, rebuild_step.step, rebuild_step.rows)
        self._pipeline = self.reopen_operations = (
            None  # what waited is done now, by other stages than the lost ones, too
        )
        self._ended.clear()
        self._forget_plans()
        pipeline.restore(self._daemons, self._steps, applied=not self.restored)


def _reaches(tokens: TokenBuffer, n_tokens: int, part: ScheduledSequence) -> bool:
    """Return whether the first ``n_tokens`` tokens, which others computed, may include some of a slice."""
    start = part.slice.start
    return n_tokens > start and tokens.n_common(part.record.tokens, n_tokens) > start
