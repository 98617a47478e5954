"""The engine core: joins scheduler and pipeline, and hands events to the readers of requests.

One thread, no task of its own: every entry (a request, a cancellation, a result, a pipeline that comes or goes) changes
the scheduler, sends all steps that have become possible, then delivers events.  When a daemon is lost, requests are
held (recovery.py): running ones go back to the queue with all their tokens, new ones are taken, and the next pipeline
computes them.  Without a hold running ones end with the error, and new ones are refused with NotReady.

Invariant: a request that submit returned gets exactly one FinishedEvent, even if the pipeline fails or the engine is
closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lucevisor import suspend_clock
from lucevisor.engine import validation
from lucevisor.engine.journal import RowStore, make_journal
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.masking import MaskMaker
from lucevisor.engine.page_ranking import PageRelevance, note_rankings
from lucevisor.engine.pipeline import Pipeline, PipelineFailure, PipelineResult, StageLink, StepInFlight
from lucevisor.engine.policy import SchedulingPolicy
from lucevisor.engine.rebuild import CannotRebuild, RebuildPlan
from lucevisor.engine.recovery import PauseReason, Recovery, StageRecovery, StateReplay
from lucevisor.engine.request import (
    Event,
    FinishedEvent,
    GenerationRequest,
    NotReady,
    QueueFull,
    RequestError,
    RequestHandle,
)
from lucevisor.engine.rows import IdsOutput, RowCollector, RowsMissing
from lucevisor.engine.scheduler import Events, Scheduler, SwapSpace
from lucevisor.engine.sequence import WantedRows
from lucevisor.engine.statistics import EngineStatistics, RateWindow, StepTotals
from lucevisor.engine.step import WrongResult
from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.prefix_cache import PrefixIndex, Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import Space
from lucevisor.protocol.messages import SlotPlace
from lucevisor.protocol.steps import Operation, SamplingParams, Step, StepResult
from lucevisor.protocol.validation import UnansweredStep


class Changes:
    """The engine calls ``notify`` after every entry."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters, which check their conditions again."""
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def holds_within(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` holds; False if it takes longer."""
        try:
            async with suspend_clock.timeout(timeout_s):
                await self.wait_for(condition)
        except TimeoutError:
            return False
        return True


MAX_LOSSES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings and callbacks of an engine.  Callbacks run inside the engine: they must not block and must not call it.

    ``max_queue``: requests that may wait.  ``hold_s``: seconds for which requests wait for a lost daemon; 0: not at
    all.  ``max_losses``: losses in a row, without a token in between, that end a running request.  ``rows`` and
    ``journal_pages``: the memory of the journal; without one all stages compute again what one has lost.
    ``rate_window_s``: the span of ``tokens_per_s`` in statistics.  ``blame`` names the first stage of a step whose rows
    are NaN or infinite.  ``validate``: check all accounts whenever the engine is idle; raises AccountingError.
    ``mask_threads`` False: masks are made on the calling thread.  ``policy``: the scheduler's; None: FairShare.

    ``on_step`` gets every finished step, ``on_pipeline_failed`` the reason why the pipeline failed, and
    ``on_drafter_lost`` the reason why the drafter was detached.
    """

    max_queue: int
    hold_s: float = 0.0
    max_losses: int = MAX_LOSSES
    rows: RowStore | None = None
    journal_pages: int = 0
    rate_window_s: float = 10.0
    blame: Callable[[Step], str] = lambda _: "the output stage"
    validate: bool = False
    mask_threads: bool = True
    policy: SchedulingPolicy | None = None
    clock: Callable[[], float] = time.monotonic
    on_step: Callable[[PipelineResult], None] = lambda _: None
    on_pipeline_failed: Callable[[PipelineFailure], None] = lambda _: None
    on_drafter_lost: Callable[[PipelineFailure], None] = lambda _: None


class Engine:
    """Requests in, events out, over the attached pipeline."""

    def __init__(self, limits: EngineLimits, settings: EngineSettings) -> None:
        self._settings, self._clock = settings, settings.clock
        self.scheduler = Scheduler(limits, policy=settings.policy)
        self.pipeline: Pipeline | None = None
        journal = make_journal(settings.rows, self.scheduler.pools, settings.journal_pages)
        self._stages = StageRecovery(self.scheduler, journal)
        self.recovery = Recovery(settings.hold_s, settings.max_losses)
        self._unavailable = "the model is being loaded"
        self._refusal = ""  # set for good by drain and close
        self._handles: dict[str, RequestHandle] = {}
        self._rows: dict[str, RowCollector] = {}  # by request
        self.relevance = PageRelevance(self.proceed)
        self._masks = MaskMaker(self._cancel, threaded=settings.mask_threads)
        self._outbox: deque[tuple[str, Event]] = deque()
        self._changes = Changes()
        self._n_ids_runs = 0
        self.slots = SlotAccess(self, self._changes, self._clock)
        self.drafter = DrafterAttachment(self, settings.on_drafter_lost)
        self.freezer = Freezer(self, self._stages, self.recovery, self._changes, self._clock)
        self.on_submit: Callable[[GenerationRequest], bool] = lambda _: False
        self._totals = StepTotals()
        self._generated = RateWindow(settings.rate_window_s, self._clock())
        self._invalid: tuple[str, float] | None = None  # what computes no numbers, and since when

    # ---- requests

    def submit(self, request: GenerationRequest) -> RequestHandle:
        """Queue a request and start it when there is room, or hold it until ``resume`` if ``on_submit`` returns True.

        Raises NotReady without a pipeline or a hold, or while draining, QueueFull, InvalidRequest, ContextOverflow.
        """
        self._check_taking(request)
        return self._submit(request, None, hold=self.on_submit(request))

    def resume(self, request_id: str) -> None:
        """Let a held request start, whether or not a prefix was restored for it."""
        self.scheduler.resume(request_id)
        self.proceed()

    async def run_ids(self, ids: Sequence[int], *, want_hidden: bool, rows_per_step: int) -> IdsOutput:
        """Run token ids through the pipeline and return the logits and hidden states of every position.

        Scheduled like any request, in chunks of at most ``rows_per_step`` tokens, so that their rows fit one payload
        (``rows.max_rows_per_step``).  Raises what submit raises, RowsMissing if the pipeline failed, ProtocolError if a
        payload is not what its result says.
        """
        self._n_ids_runs += 1
        request_id = f"ids-{self._n_ids_runs}"
        request = GenerationRequest(
            request_id=request_id, prompt=TokenBuffer(ids), max_tokens=1, sampling=SamplingParams(temperature=0.0)
        )
        self._check_taking(request)
        collector = self._rows[request_id] = RowCollector(len(request.prompt), hidden=want_hidden)
        try:
            with self._submit(request, WantedRows(hidden=want_hidden, rows=rows_per_step)) as handle:
                async for event in handle:
                    if isinstance(event, FinishedEvent) and event.error is not None:
                        raise RowsMissing(f"the ids did not go through: {event.error.message}")
        finally:
            del self._rows[request_id]
        return collector.output()

    @property
    def prefixes(self) -> PrefixIndex:
        return self.scheduler.reuse.index

    # ---- the pipeline

    def use_swap_space(self, swap: SwapSpace) -> None:
        """Let requests that are preempted from now on give their state to host memory."""
        self.scheduler.preemption.swap = swap

    @property
    def ready(self) -> bool:
        """True if requests are served."""
        return self.pipeline is not None and self._planning and not self._refusal

    @property
    def rebuilding(self) -> bool:
        """True if lost stages are being rebuilt."""
        return self._stages.active

    @property
    def holding(self) -> bool:
        """True if requests wait for a daemon that was lost."""
        return self.recovery.holding

    @property
    def rebuilds(self) -> bool:
        """True if lost stages may be rebuilt while others keep what they have."""
        return self._stages.enabled and self.recovery.hold_s > 0

    def attach(
        self,
        pipeline: Pipeline,
        *,
        restored: bool = False,
        before_steps: Callable[[bool], None] = lambda restored: None,
    ) -> None:
        """Use a pipeline whose daemons hold no sequences; queued and held requests start.

        ``restored``: they have the bytes of what was frozen before ``detach_frozen``, so running requests go on.
        ``before_steps`` is called with whether they do, before the first step.
        """
        opening = self._stages.opening if restored else None
        if opening is None and self._stages.opening is not None:  # parted, and the bytes are not there
            self.detach(RequestError("shard_lost", self._unavailable))
        self.pipeline = pipeline
        pipeline.on_first_stage_done = self._on_first_stage_done
        self.drafter.listen(pipeline)
        self._stages.attach(pipeline, self.proceed)
        self.scheduler.attach(pipeline.n_stages, opening or (), has_doorbells=pipeline.has_doorbells)
        if opening is not None:
            self.recovery.record_rebuilt(0, self._stages.n_frozen * pipeline.n_stages)
        self.freezer.resume()
        before_steps(opening is not None)
        self.proceed()

    @property
    def state_restored(self) -> bool:
        """True if the stages that came back last had the bytes of the frozen state."""
        return self._stages.restored

    def detach(self, error: RequestError, *, permanent: bool = False) -> None:
        """Drop the pipeline, and hold requests until the next attach; without a hold, end running ones with ``error``
        and refuse new ones with its message.

        ``permanent`` (no pipeline will come by itself) ends queued requests, too.  It may be called again, and a later
        attach, say after an operator's restart, serves again.
        """
        now = self._clock()
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
            if not self._stages.active:
                self.recovery.begin_hold(now, "restart" if self.freezer.paused else "loss")
        self._stages.detach()
        if permanent:
            self.recovery.give_up()
        self._unavailable = error.message
        events = self.scheduler.lose_all(error, now, self.recovery.hold)
        if permanent:
            events += self.scheduler.fail(self.scheduler.queue, error, now)
        self.proceed(events)

    def detach_frozen(self, error: RequestError, rows: RowStore | None, journal_pages: int) -> None:
        """Leave the pipeline after a freeze; the next one may have what was frozen (``attach``).

        ``error``: the reason why requests are not served meanwhile.  ``rows``, ``journal_pages``: the memory of the
        journal over the next pipeline's boundaries.
        """
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self.scheduler.detach_drafter()
        self._stages.detach_frozen(make_journal(rows, self.scheduler.pools, journal_pages))
        self._unavailable = error.message

    def set_unavailable(self, error: RequestError) -> None:
        """Set the reason why requests are not served: ``error``'s message."""
        self._unavailable = error.message

    def lose_stages(self, stages: Collection[int], error: RequestError) -> bool:
        """Hold requests until ``restore``, as the daemons of some stages are lost; the other stages keep their state.

        Returns False where that is impossible: then it does what ``detach`` does.
        """
        if self.pipeline is None or not self.rebuilds or not self._stages.lose(self.pipeline, stages):
            self.detach(error)
            return False
        now = self._clock()
        self.recovery.begin_hold(now, "restart" if self.freezer.paused else "loss")
        self._unavailable = error.message
        lost = [record for record in self.scheduler.running if not self.recovery.survives(record)]
        self.proceed(self.scheduler.fail(lost, error, now))
        return True

    def restore(
        self,
        links: Mapping[int, StageLink],
        on_end: Callable[[bool], None],
        *,
        restored: bool = False,
        replayed: Collection[int] = (),
    ) -> bool:
        """Rebuild all lost stages in the daemons behind ``links``, by stage, which hold no sequences.

        ``restored``: they have the bytes of what was frozen before the loss, so nothing is computed again.
        ``replayed``: stages whose daemons computed what ``make_replay`` made since the last loss.  ``on_end`` is called
        with whether that worked; if not, the pipeline is detached by then.  Returns False if no stage is lost.
        """
        any_lost = self._stages.restore(links, on_end, restored=restored, replayed=replayed)
        self.proceed()
        return any_lost

    async def make_replay(self, stages: Collection[int], timeout_s: float) -> StateReplay | None:
        """Return what lost stages have computed; None if steps are on their way to other stages for longer, it is too
        much, or impossible: then ``restore`` does that.

        The caller closes the file.  It holds until another stage is lost.
        """
        plans: dict[int, RebuildPlan] = {}

        def prepared() -> bool:
            stage_plans = self._stages.prepare(stages, self._clock())
            plans.update(stage_plans or {})
            return stage_plans is not None

        try:
            return self._stages.make_replay(plans) if await self._changes.holds_within(prepared, timeout_s) else None
        except CannotRebuild:
            return None

    def _rebuild(self) -> None:
        try:
            if self._stages.advance(self._clock()):
                self.recovery.record_rebuilt(self._stages.n_tokens, self._stages.n_restored)
                for plan in self._stages.masked():
                    if self.pipeline is not None:
                        self._masks.make_masks(plan, self.pipeline)
                if not self._stages.active:  # a new daemon may be lost again already
                    self.freezer.resume()
                    self._stages.report_end(rebuilt=True)
        except CannotRebuild as error:
            self.detach(RequestError("shard_lost", f"{self._unavailable}; {error}"))
            self._stages.report_end(rebuilt=False)

    def on_result(self, result: PipelineResult) -> None:
        """Apply a finished step; the pipeline's ``on_result``."""
        now = self._clock()
        self._stages.on_step_finished(result.step.step_id)
        self._totals.add(result)
        n_before = self.scheduler.n_generated_tokens
        try:
            scheduled = self.scheduler.in_flight[0] if self.scheduler.in_flight else None
            if scheduled is not None:
                note_rankings(scheduled, result.step.rank_pages, result.results)
            blamed = self._find_invalid_stage(result, now)
            events = self.scheduler.apply(result.results[-1], now, blamed, result.results)
        except WrongResult as error:
            last = result.results[-1].stage
            self.on_failed(
                PipelineFailure(last, "protocol_error", f"stage {last}, the last, sent a wrong result: {error}")
            )
            return
        for part in scheduled.parts.values() if result.step.want_logits and scheduled is not None else ():
            if (collector := self._rows.get(part.record.request.request_id)) is not None:
                collector.add(result)
        self._generated.add(self.scheduler.n_generated_tokens - n_before, now)
        self.proceed(events)
        self._settings.on_step(result)

    def _find_invalid_stage(self, result: PipelineResult, now: float) -> str:
        """Return the stage whose numbers are invalid in a step, if some are; note it until tokens are drawn again."""
        last = result.results[-1]
        if last.invalid:
            blamed = self._settings.blame(result.step)
            self._invalid = f"{blamed} computed numbers that are NaN or infinite", now
            return blamed
        if last.sampled:
            self._invalid = None
        return ""

    @property
    def invalid(self) -> str:
        """The stage that computed NaN or infinities instead of the newest tokens within ``rate_window_s``, or empty."""
        if self._invalid is None or self._clock() - self._invalid[1] > self._settings.rate_window_s:
            return ""
        return self._invalid[0]

    def _on_first_stage_done(self) -> None:
        """Send what waited for the first stage."""
        if self.scheduler.on_first_stage_done():
            self.proceed()

    def on_failed(self, failure: PipelineFailure) -> None:
        """Detach a failed pipeline and pass the failure on; the pipeline's ``on_failed``."""
        self.detach(RequestError(failure.code, failure.message))
        self._settings.on_pipeline_failed(failure)

    def oldest_in_flight(self) -> StepInFlight | None:
        """Return the step a daemon has worked on for longest, for the watchdog."""
        return None if self.pipeline is None else self.pipeline.oldest_in_flight(self._clock())

    def find_unanswered(self, stage: int, step_id: int) -> UnansweredStep | None:
        """Return a step that a stage has yet to answer, for the check of its answer."""
        pending = None if self.pipeline is None else self.pipeline.find_unanswered(stage, step_id)
        if pending is None or self.pipeline is None:
            return None
        n_top: dict[int, int] = {}
        if stage == self.pipeline.n_stages - 1:
            scheduled = next((step for step in self.scheduler.in_flight if step.step_id == step_id), None)
            parts = scheduled.parts.items() if scheduled is not None else ()
            n_top = {sequence: part.record.request.sampling.n_top_logprobs for sequence, part in parts}
        return UnansweredStep(*pending, n_top)

    # ---- the end

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; return whether all accepted ones ended in time."""
        self._refusal = self._refusal or "the server is shutting down"
        return await self._changes.holds_within(lambda: self.scheduler.idle, timeout_s)

    def close(self, error: RequestError) -> None:
        """End all requests with ``error`` and refuse new ones from now on."""
        self._refusal = self._refusal or error.message
        self.detach(error, permanent=True)
        self._masks.close()
        self.relevance.close()

    def statistics(self) -> EngineStatistics:
        """Return counts and rates as of now."""
        reason = "" if self.ready else self._refusal or self._unavailable
        return EngineStatistics.of(
            self.scheduler, self._totals, self._generated, self.recovery, self._clock(), self._stages.progress,
            reason=reason,
        )  # fmt: skip

    # ---- inside

    @property
    def _planning(self) -> bool:
        return not self.freezer.paused and not self._stages.active

    def _check_taking(self, request: GenerationRequest) -> None:
        if self._refusal or not (self.ready or self.recovery.holding):
            raise NotReady(self._refusal or self._unavailable)
        client, max_queue = request.client_id, self._settings.max_queue
        if not self.scheduler.accepts(request, max_queue):
            queue, retry_s = self.scheduler.queue, self.scheduler.retry_after_s(client)
            raise QueueFull(queue.n_waiting(client), queue.n_clients(client), max_queue, retry_s)

    def _submit(self, request: GenerationRequest, wanted: WantedRows | None, *, hold: bool = False) -> RequestHandle:
        self.scheduler.submit(request, self._clock(), wanted, hold=hold)
        handle = self._handles[request.request_id] = RequestHandle(request.request_id, self._cancel)
        self.proceed()
        return handle

    def _cancel(self, request_id: str, error: RequestError | None = None) -> None:
        self.proceed(self.scheduler.cancel(request_id, self._clock(), error))

    def proceed(self, events: Events | None = None) -> None:
        """Send every possible step, then deliver events: shards start before readers do."""
        self._outbox += events or []
        if self._stages.active:
            self._rebuild()
        while (pipeline := self.pipeline) is not None and self._planning:
            if (plan := self.scheduler.next_plan(self._clock())) is None:
                break
            live_sequences = self.scheduler.in_flight[-1].live_sequences
            if not self.scheduler.limits.stages_rank:
                self.relevance.request_rankings(self.scheduler.in_flight[-1])
            pipeline.drafts.suspended = self.scheduler.drafting.suspended
            pipeline.submit(plan.step, opening=plan.opening)
            self._masks.make_masks(plan, pipeline)
            self._stages.on_step_planned(plan, live_sequences)  # the shards work already
        self._outbox += self.scheduler.failed
        self.scheduler.failed.clear()
        # A dead link reenters here through on_failed; the outbox keeps events in order.
        while self._outbox:
            request_id, event = self._outbox.popleft()
            self._handles[request_id].push(event)
            if type(event) is FinishedEvent:
                del self._handles[request_id]
        self._changes.notify()
        if self._settings.validate and self.scheduler.idle:
            validation.check(self.scheduler)


class DrafterAttachment:
    """The drafter of an engine, and what becomes of its answers.  ``on_lost``: called when it was detached by itself.

    Invariant: scheduler and pipeline have a drafter, or neither has; a wrong answer only detaches it.
    """

    def __init__(self, engine: Engine, on_lost: Callable[[PipelineFailure], None]) -> None:
        self._engine, self._on_lost = engine, on_lost

    def listen(self, pipeline: Pipeline) -> None:
        """Take the answers of the drafter that a new pipeline may get."""
        pipeline.drafts.on_drafted = self._drafted
        pipeline.drafts.on_lost = self._lost

    def attach(self, link: StageLink, *, with_output: bool, restored: bool = False) -> None:
        """Draft with the draft stage behind ``link``, whose daemon holds no sequences yet.

        ``with_output``: it is the output stage's daemon.  ``restored``: it has the state of the drafter before, and no
        step was planned since that was detached.
        """
        pipeline = self._engine.pipeline
        assert pipeline is not None
        self._engine.scheduler.attach_drafter(with_output=with_output, restored=restored)
        pipeline.drafts.attach(link, with_output=with_output)
        self._engine.proceed()

    def detach(self) -> None:
        """Go on without drafts.  Does nothing without a drafter; the pipeline takes its own along when it goes."""
        pipeline = self._engine.pipeline
        if pipeline is not None:
            pipeline.drafts.detach()
        self._engine.scheduler.detach_drafter()
        self._engine.proceed()

    def _drafted(self, result: StepResult) -> None:
        try:
            goes_on = self._engine.scheduler.drafting.on_drafts(result)
        except WrongResult as error:
            text = f"the draft stage sent a wrong result: {error}"
            self._lost(PipelineFailure(result.stage, "protocol_error", text))
        else:
            if goes_on or self._engine.rebuilding:
                self._engine.proceed()

    def _lost(self, failure: PipelineFailure) -> None:
        self.detach()
        self._on_lost(failure)


@dataclass(frozen=True, slots=True)
class FrozenState:
    """All state that sequences and prefix slots have in the shards, between two steps.

    ``units``: the pages and states in use, by space.  ``opening``: what opens the running sequences over them in a
    daemon that has these units.  ``n_tokens``: of these sequences.
    """

    units: Mapping[Space, Sequence[int]]
    opening: Sequence[Operation]
    n_tokens: int


class Freezer:
    """Pauses an engine for an operator, between two steps, so that the state of all stages can be moved.

    Like the kernel's cgroup freezer: ``freeze``, then ``thaw``, or other daemons that go on.
    Invariant: the bytes that a FrozenState names stay in every daemon that lives on, until steps are planned again.
    """

    def __init__(
        self, engine: Engine, stages: StageRecovery, recovery: Recovery, changes: Changes, clock: Callable[[], float]
    ) -> None:
        self._engine, self._stages, self._recovery = engine, stages, recovery
        self._changes, self._clock = changes, clock
        self.paused = False

    async def freeze(self, timeout_s: float, reason: PauseReason = "restart") -> FrozenState | None:
        """Plan no step until lost stages are there again or a pipeline is attached, and wait until those on their way
        are done; requests are held meanwhile.

        Returns what the shards hold then, for ``restore`` or ``attach`` with ``restored``.  None if it took longer, or
        the pipeline was lost.
        """
        self.paused = True
        self._recovery.begin_hold(self._clock(), reason)
        at_rest = await self._changes.holds_within(
            lambda: not self.paused or self._engine.pipeline is None or self._flush(), timeout_s
        )
        if not at_rest or not self.paused or self._engine.pipeline is None:
            return None
        running, pools = self._engine.scheduler.running, self._engine.scheduler.pools
        n_tokens = sum(record.live.n_computed for record in running if record.live is not None)
        frozen = FrozenState(pools.in_use(), running.opening_operations(restored=True), n_tokens)
        self._stages.freeze(frozen.opening, frozen.n_tokens)
        return frozen

    def thaw(self) -> None:
        """Plan again after a freeze.  Does nothing if the freeze has ended already."""
        if self.paused and self._engine.pipeline is not None and not self._stages.active:
            self.resume()
            self._engine.proceed()

    def resume(self) -> None:
        """Plan steps again after a freeze or a loss: the pipeline is whole."""
        self.paused = False
        self._recovery.end_hold(self._clock())

    async def quiesce(self, timeout_s: float) -> bool:
        """Start no queued request until the next attach; return whether the running ones ended in time.

        For the orderly restart of a group without holds: new requests are still accepted, and wait.
        """
        scheduler = self._engine.scheduler
        scheduler.admission.open = False
        return await self._changes.holds_within(
            lambda: scheduler.n_running == 0 and scheduler.n_in_flight == 0, timeout_s
        )

    def _flush(self) -> bool:
        """Send what waits for a step; return whether every daemon has done all that was decided."""
        pipeline = self._engine.pipeline
        if pipeline is None or self._stages.active or self._engine.scheduler.n_in_flight or not pipeline.settled:
            return False
        plan = self._engine.scheduler.flush_step(self._clock())
        if plan is not None:
            self._stages.on_step_planned(plan, {})
            pipeline.submit(plan.step, opening=plan.opening)
        return plan is None


class SlotAccess:
    """Prefix slots of an engine for those who copy their bytes: slots to save, and places for slots to restore.

    Invariant: nothing writes to a place that was handed out until it is released, adopted or cancelled.
    """

    def __init__(self, engine: Engine, changes: Changes, clock: Callable[[], float]) -> None:
        self._engine, self._changes, self._clock = engine, changes, clock
        self._index = engine.scheduler.reuse.index

    async def synchronize(self) -> bool:
        """Wait until every stage has done all that was decided up to now; False if the pipeline fails first."""
        pipeline, goal = self._engine.pipeline, self._engine.scheduler.flush()
        self._engine.proceed()
        if pipeline is None:
            return False
        await self._changes.wait_for(
            lambda: pipeline is not self._engine.pipeline or self._engine.scheduler.last_finished >= goal
        )
        return pipeline is self._engine.pipeline

    async def export(self, slot: PrefixSlot) -> SlotPlace | None:
        """Pin a slot and return its place once its bytes are there in every stage.

        Nothing writes to its first ``n_tokens`` positions until the caller calls ``release``.  None, without a pin, if
        the slot is gone or the pipeline fails.
        """
        self._index.pin(slot)
        if slot.alive and await self.synchronize() and slot.alive:
            full, window = (slot.pages(space) for space in (Space.FULL, Space.WINDOW))
            return SlotPlace(slot.n_tokens, full, window, slot.first_window, slot.state)
        self.release(slot)
        return None

    def release(self, slot: PrefixSlot) -> None:
        """Undo the pin of ``export``."""
        self._index.unpin(slot)
        self._engine.proceed()

    def can_restore(self, n_tokens: int, n_saved: int, paged_out: PagedOut | None) -> bool:
        """Return whether the first ``n_tokens`` of a prefix of ``n_saved`` may be restored, pages of which were
        ``paged_out``: what was computed with pages left out stands for nothing that is computed without.
        """
        limits = self._engine.scheduler.limits
        if not limits.stays_whole(n_tokens + 1):
            return False
        if paged_out is None or not paged_out.approximate or n_tokens < paged_out.n_exact:
            return True
        return n_tokens == n_saved and limits.residency is not None and limits.residency.ranks_pages

    async def reserve(self, n_tokens: int, paged_out: PagedOut | None = None) -> Reservation | None:
        """Allocate pages and a state for a prefix of ``n_tokens``, to which no step in flight writes any more.

        ``paged_out``: which of its pages were in host memory when it was saved; those beyond the pool go there.

        The caller must ``adopt`` it once every stage has its bytes, or ``cancel_reservation``.  None if there is no
        room, KV Flash would drop some of it, or the pipeline fails.
        """
        reservation = self._engine.scheduler.reuse.reserve(n_tokens, paged_out)
        if reservation is not None and not await self.synchronize():
            self.cancel_reservation(reservation)
            return None
        return reservation

    def adopt(self, tokens: Sequence[int], reservation: Reservation, *, drafted: bool = False) -> PrefixSlot | None:
        """Publish a restored prefix, pinned; ``release`` it once the requests that wait for it have started.

        ``drafted``: the drafter's state was restored, too.  None if it is not kept: the pipeline failed meanwhile, or
        it is not worth caching.
        """
        slot = self._index.adopt(tokens, reservation, self._clock(), drafted=drafted)
        self._engine.proceed()
        return slot

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Free reserved pages.  Does nothing if they are freed or adopted already."""
        self._index.cancel(reservation)
        self._engine.proceed()

    async def wait_for_capacity(self) -> None:
        """Wait until the queue is empty and another sequence could start."""
        scheduler = self._engine.scheduler
        n_most = scheduler.limits.max_sequences
        await self._changes.wait_for(
            lambda: self._engine.pipeline is not None and not scheduler.n_queued and scheduler.n_running < n_most
        )
