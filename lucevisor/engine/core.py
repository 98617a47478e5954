"""The engine core: joins scheduler and pipeline, and hands events to the readers of requests.

One thread, no task of its own: every entry (a request, a cancellation, a result, a pipeline that comes or goes) changes
the scheduler, sends all steps that have become possible, then delivers events.  Knows ids only: no text, no sockets, no
pages.
When a daemon is lost, requests are held (recovery.py): running ones go back to the queue with all their tokens, new
ones are taken, and the next pipeline computes them.  Without a hold running ones end with the error, and new ones are
refused with NotReady.

Invariant: a request that submit returned gets exactly one FinishedEvent, even if the pipeline fails or the engine is
closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from lucevisor.engine import validation
from lucevisor.engine.changes import Changes
from lucevisor.engine.drafter import DrafterAttachment
from lucevisor.engine.freezer import Freezer
from lucevisor.engine.journal import RowStore, make_journal
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.masking import MaskMaker
from lucevisor.engine.page_ranking import PageRelevance, note_rankings
from lucevisor.engine.pipeline import Pipeline, PipelineFailure, PipelineResult, StageLink, StepInFlight
from lucevisor.engine.rebuild import CannotRebuild
from lucevisor.engine.recovery import Recovery, StageRecovery, StageReplays
from lucevisor.engine.request import (
    Event,
    FinishedEvent,
    GenerationRequest,
    NotReady,
    QueueFull,
    RequestError,
    RequestHandle,
)
from lucevisor.engine.rows import IdsOutput, RowCollector, RowsMissing, RowSteps
from lucevisor.engine.scheduler import Events, Scheduler, SwapSpace
from lucevisor.engine.sequence import WantedRows
from lucevisor.engine.settings import EngineSettings
from lucevisor.engine.slot_access import SlotAccess
from lucevisor.engine.statistics import EngineStatistics, RateWindow, StepTotals
from lucevisor.engine.step import WrongResult
from lucevisor.kv.prefix_cache import PrefixIndex
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.protocol.steps import Sampling
from lucevisor.protocol.validation import AskedStep


class Engine:
    """Requests in, events out, over the attached pipeline."""

    def __init__(self, limits: EngineLimits, settings: EngineSettings) -> None:
        if settings.max_queue < 1:
            raise ValueError(f"max_queue is {settings.max_queue}; every request passes the queue, so give 1 or more")
        self._settings, self._clock = settings, settings.clock
        self._scheduler = Scheduler(limits)
        self._pipeline: Pipeline | None = None
        journal = make_journal(settings.rows, self._scheduler.pools, settings.journal_pages)
        self._stages = StageRecovery(self._scheduler, journal)
        self.recovery = Recovery(settings.hold_s, settings.max_losses)
        self.recovery.progress = lambda: self._stages.progress
        self._unavailable = "the model is being loaded"
        self._refusal = ""  # set for good by drain and close
        self._handles: dict[str, RequestHandle] = {}
        self._rows = RowSteps()
        self.relevance = PageRelevance(lambda: self._proceed([]))
        self._masks = MaskMaker(self._cancel, threaded=settings.mask_threads)
        self._outbox: deque[tuple[str, Event]] = deque()
        self._changes = Changes()
        self._n_ids_runs = 0
        self.slots = SlotAccess(
            self._scheduler,
            self._clock,
            self._changes,
            pipeline=lambda: self._pipeline,
            proceed=lambda: self._proceed([]),
        )
        self.drafter = DrafterAttachment(
            self._scheduler,
            settings.on_drafter_lost,
            pipeline=lambda: self._pipeline,
            proceed=lambda possible: self._proceed([]) if possible or self._stages.active else None,
        )
        self.freezer = Freezer(
            self._scheduler,
            self._stages,
            self.recovery,
            self._changes,
            self._clock,
            pipeline=lambda: self._pipeline,
            proceed=lambda: self._proceed([]),
        )
        self.replays = StageReplays(self._stages, self._changes, self._clock)
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
        self._scheduler.resume(request_id)
        self._proceed([])

    async def run_ids(self, ids: Sequence[int], *, want_hidden: bool, rows_per_step: int) -> IdsOutput:
        """Run token ids through the pipeline and return the logits and hidden states of every position.

        Scheduled like any request, in chunks of at most ``rows_per_step`` tokens, so that their rows fit one payload
        (``rows.max_rows_per_step``).  Raises what submit raises, RowsMissing if the pipeline failed, ProtocolError if a
        payload is not what its result says.
        """
        self._n_ids_runs += 1
        request_id = f"ids-{self._n_ids_runs}"
        request = GenerationRequest(
            request_id=request_id, prompt=TokenBuffer(ids), max_tokens=1, sampling=Sampling(temperature=0.0)
        )
        self._check_taking(request)
        collector = self._rows.open(request_id, RowCollector(len(request.prompt), hidden=want_hidden))
        try:
            with self._submit(request, WantedRows(hidden=want_hidden, rows=rows_per_step)) as handle:
                async for event in handle:
                    if isinstance(event, FinishedEvent) and event.error is not None:
                        raise RowsMissing(f"the ids did not go through: {event.error.message}")
        finally:
            self._rows.close(request_id)
        return collector.output()

    @property
    def prefixes(self) -> PrefixIndex:
        """The prefix index: to look at, to set hooks, to pin."""
        return self._scheduler.reuse.index

    # ---- the pipeline

    def use_swap_space(self, swap: SwapSpace) -> None:
        """Let requests that are preempted from now on give their state to host memory."""
        self._scheduler.preemption.swap = swap

    @property
    def ready(self) -> bool:
        """Whether requests are served."""
        return self._pipeline is not None and self._planning and not self._refusal

    @property
    def holding(self) -> bool:
        """Whether requests wait for a daemon that was lost."""
        return self.recovery.holding

    @property
    def rebuilds(self) -> bool:
        """Whether lost stages may be rebuilt while others keep what they have."""
        return self._stages.enabled and self.recovery.hold_s > 0

    def attach(
        self, pipeline: Pipeline, *, kept: bool = False, before_steps: Callable[[bool], None] = lambda kept: None
    ) -> None:
        """Use a pipeline whose daemons hold no sequences; queued and held requests start.

        ``kept``: they have the bytes of what was frozen before ``part``, so running requests go on as well.
        ``before_steps`` is called with whether they do, before the first step.  Raises RuntimeError when one is
        attached already.
        """
        if self._pipeline is not None:
            raise RuntimeError("a pipeline is attached already; detach it first")
        opening = self._stages.opening if kept else None
        if opening is None and self._stages.opening is not None:  # parted, and the bytes are not there
            self.detach(RequestError("shard_lost", self._unavailable))
        self._pipeline = pipeline
        pipeline.on_first_stage_done = self._on_first_stage_done
        self.drafter.listen(pipeline)
        self._stages.attach(pipeline, lambda: self._proceed([]))
        self._scheduler.attach(pipeline.n_stages, opening or (), rings=pipeline.rings)
        if opening is not None:
            self.recovery.rebuilt(0, self._stages.n_frozen * pipeline.n_stages)
        self.freezer.end()
        before_steps(opening is not None)
        self._proceed([])

    @property
    def state_kept(self) -> bool:
        """Whether the stages that were restored last had the bytes of what was frozen."""
        return self._stages.kept

    def detach(self, error: RequestError, *, permanent: bool = False) -> None:
        """Drop the pipeline, and hold requests until the next attach; without a hold, end running ones with ``error``
        and refuse new ones with its message.

        ``permanent`` (no pipeline will come by itself) ends queued requests, too.  It may be called again, and a later
        attach, say after an operator's restart, serves again.
        """
        now = self._clock()
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
            if not self._stages.active:
                self.recovery.begin(now, "restart" if self.freezer.paused else "loss")
        self._stages.detach()
        if permanent:
            self.recovery.give_up()
        self._unavailable = error.message
        self._rows.forget_steps()
        events = self._scheduler.lose_all(error, now, self.recovery.keep)
        if permanent:
            events += self._scheduler.fail(self._scheduler.queued, error, now)
        self._proceed(events)

    def part(self, error: RequestError, rows: RowStore | None, journal_pages: int) -> None:
        """Leave the pipeline after a freeze; the next one may have what was frozen (``attach``).

        ``error``: says meanwhile why requests are not served.  ``rows``, ``journal_pages``: the memory of the journal
        over the next pipeline's boundaries.
        """
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._scheduler.detach_drafter()
        self._stages.part(make_journal(rows, self._scheduler.pools, journal_pages))
        self._unavailable = error.message

    def away(self, error: RequestError) -> None:
        """Set the reason why requests are not served: ``error``'s message."""
        self._unavailable = error.message

    def lose_stages(self, stages: Collection[int], error: RequestError) -> bool:
        """The daemon of some stages is lost: hold requests until ``restore``, and keep what the other stages have.

        False: that is impossible, so it does what ``detach`` does.
        """
        if self._pipeline is None or not self.rebuilds or not self._stages.lose(self._pipeline, stages):
            self.detach(error)
            return False
        now = self._clock()
        self.recovery.begin(now, "restart" if self.freezer.paused else "loss")
        self._unavailable = error.message
        lost = [record for record in self._scheduler.running if not self.recovery.survives(record)]
        self._proceed(self._scheduler.fail(lost, error, now))
        return True

    def restore(
        self,
        links: Mapping[int, StageLink],
        on_end: Callable[[bool], None],
        *,
        kept: bool = False,
        replayed: Collection[int] = (),
    ) -> bool:
        """Rebuild all lost stages in the daemons behind ``links``, by stage, which hold no sequences.

        ``kept``: they have the bytes of what was frozen before the loss, so nothing is computed again.  ``replayed``:
        stages whose daemons computed what ``replays`` made since the last loss.  ``on_end`` hears whether that
        worked; if not, the pipeline is detached by then.  False: no stage is lost.
        """
        any_lost = self._stages.restore(links, on_end, kept=kept, replayed=replayed)
        self._proceed([])
        return any_lost

    def _rebuild(self) -> None:
        """Go on with the rebuild of lost stages."""
        try:
            if self._stages.advance(self._clock()):
                self.recovery.rebuilt(self._stages.n_tokens, self._stages.n_kept)
                for plan in self._stages.masked():
                    if self._pipeline is not None:
                        self._masks.planned(plan, self._pipeline)
                if not self._stages.active:  # a new daemon may be lost again already
                    self.freezer.end()
                    self._stages.end(rebuilt=True)
        except CannotRebuild as error:
            self.detach(RequestError("shard_lost", f"{self._unavailable}; {error}"))
            self._stages.end(rebuilt=False)

    def on_result(self, result: PipelineResult) -> None:
        """Apply a finished step; the pipeline's ``on_result``."""
        now = self._clock()
        self._stages.finished(result.step.step_id)
        self._totals.add(result)
        n_before = self._scheduler.n_generated_tokens
        try:
            if self._scheduler.in_flight:
                note_rankings(self._scheduler.in_flight[0], result.step.rank_pages, result.results)
            blamed = self._judge(result, now)
            events = self._scheduler.apply(result.results[-1], now, blamed, result.results)
        except WrongResult as error:
            last = result.results[-1].stage
            self.on_failed(
                PipelineFailure(last, "protocol_error", f"stage {last}, the last, sent a wrong result: {error}")
            )
            return
        self._rows.collect(result)
        self._generated.add(self._scheduler.n_generated_tokens - n_before, now)
        self._proceed(events)
        self._settings.on_step(result)

    def _judge(self, result: PipelineResult, now: float) -> str:
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
        """Which stage computed NaN or infinities in place of the newest tokens, within ``rate_window_s`` seconds."""
        if self._invalid is None or self._clock() - self._invalid[1] > self._settings.rate_window_s:
            return ""
        return self._invalid[0]

    def _on_first_stage_done(self) -> None:
        """Send what waited for the first stage."""
        if self._scheduler.on_first_stage_done():
            self._proceed([])

    def on_failed(self, failure: PipelineFailure) -> None:
        """Detach a failed pipeline and pass the failure on; the pipeline's ``on_failed``."""
        self.detach(RequestError(failure.code, failure.message))
        self._settings.on_pipeline_failed(failure)

    def oldest_in_flight(self) -> StepInFlight | None:
        """Return the step a daemon has worked on for longest, for the watchdog."""
        return None if self._pipeline is None else self._pipeline.oldest_in_flight(self._clock())

    def asked(self, stage: int, step_id: int) -> AskedStep | None:
        """Return a step that a stage has yet to answer, for the check of its answer."""
        found = None if self._pipeline is None else self._pipeline.asked(stage, step_id)
        if found is None or self._pipeline is None:
            return None
        n_top: dict[int, int] = {}
        if stage == self._pipeline.n_stages - 1:
            scheduled = next((one for one in self._scheduler.in_flight if one.step_id == step_id), None)
            parts = scheduled.parts.items() if scheduled is not None else ()
            n_top = {sequence: part.record.request.sampling.n_top_logprobs for sequence, part in parts}
        return AskedStep(*found, n_top)

    # ---- the end

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; return whether all accepted ones ended in time."""
        self._refusal = self._refusal or "the server is shutting down"
        return await self._changes.holds_within(lambda: self._scheduler.idle, timeout_s)

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
            self._scheduler, self._totals, self._generated, self.recovery, self._clock(), reason=reason
        )

    # ---- inside

    @property
    def _planning(self) -> bool:
        return not self.freezer.paused and not self._stages.active

    def _check_taking(self, request: GenerationRequest) -> None:
        if self._refusal or not (self.ready or self.recovery.holding):
            raise NotReady(self._refusal or self._unavailable)
        client, max_queue = request.client_id, self._settings.max_queue
        if not self._scheduler.accepts(request, max_queue):
            queue, retry_s = self._scheduler.queue, self._scheduler.retry_after_s(client)
            raise QueueFull(queue.n_waiting(client), queue.n_clients(client), max_queue, retry_s)

    def _submit(self, request: GenerationRequest, wanted: WantedRows | None, *, hold: bool = False) -> RequestHandle:
        self._scheduler.submit(request, self._clock(), wanted, hold=hold)
        handle = self._handles[request.request_id] = RequestHandle(request.request_id, self._cancel)
        self._proceed([])
        return handle

    def _cancel(self, request_id: str, error: RequestError | None = None) -> None:
        self._proceed(self._scheduler.cancel(request_id, self._clock(), error))

    def _proceed(self, events: Events) -> None:
        """Send every possible step, then deliver events: shards start before readers do."""
        self._outbox += events
        if self._stages.active:
            self._rebuild()
        while (pipeline := self._pipeline) is not None and self._planning:
            if (plan := self._scheduler.next_plan(self._clock())) is None:
                break
            self._rows.planned(plan)
            lives = self._scheduler.in_flight[-1].lives
            if not self._scheduler.limits.stages_rank:
                self.relevance.planned(self._scheduler.in_flight[-1])
            self._stages.sending(plan)
            pipeline.drafts.suspended = self._scheduler.drafting.suspended
            pipeline.submit(plan.step, opening=plan.opening)
            self._masks.planned(plan, pipeline)
            self._stages.planned(plan, lives)  # the shards work already
        self._outbox += self._scheduler.failed
        self._scheduler.failed.clear()
        # A dead link reenters here through on_failed; the outbox keeps events in order.
        while self._outbox:
            request_id, event = self._outbox.popleft()
            self._handles[request_id].push(event)
            if type(event) is FinishedEvent:
                del self._handles[request_id]
        self._changes.notify()
        if self._settings.validate and self._scheduler.idle:
            validation.check(self._scheduler)
