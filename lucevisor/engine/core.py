"""The engine core: events in, instructions out. Pure: ``now`` is an argument.

Joins scheduler, pipeline and recovery. Invariants: a request that was taken gets exactly one FinishedEvent; state
changes are those of ``events.TRANSITIONS``; the same events at the same times give the same instructions."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lucevisor.engine import events as ev
from lucevisor.engine import validation
from lucevisor.engine.events import TRANSITIONS, EngineState, InvalidEngineTransition
from lucevisor.engine.journal import HasRows, Journal, make_journal
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.page_ranking import note_rankings
from lucevisor.engine.pipeline import (
    DrafterDetached,
    DraftsAnswered,
    FirstStageDone,
    OldestStep,
    Outcome,
    Pipeline,
    PipelineResult,
    RowsReady,
    StageFailure,
    StageRebuilt,
    StepsReturned,
)
from lucevisor.engine.policy import FairShare
from lucevisor.engine.recovery import CannotRebuild, RebuildPlan, ReplayPlan, RequestHold, StageRecovery
from lucevisor.engine.request import Event, GenerationRequest, NotReady, QueueFull, RequestError
from lucevisor.engine.scheduler import Scheduler
from lucevisor.engine.statistics import EngineStatistics, RateWindow, StepTotals
from lucevisor.engine.step import ScheduledStep, StepPlan, WrongResult
from lucevisor.model.values import KvGroup
from lucevisor.protocol.steps import Operation, Step, StepResult
from lucevisor.protocol.validation import UnansweredStep

MAX_LOSSES: Final = 4


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """``max_queue``: requests that may wait. ``hold_s``: how long requests wait for a lost daemon; 0: not at all.
    ``max_losses``: losses in a row, without a token in between, that end a running request. ``journal_pages``: memory
    of the journal; without one all stages compute again what one has lost. ``rate_window_s``: span of ``tokens_per_s``.
    ``validate``: check all accounts whenever the engine is idle; raises AccountingError."""

    max_queue: int
    hold_s: float = 0.0
    max_losses: int = MAX_LOSSES
    journal_pages: int = 0
    rate_window_s: float = 10.0
    validate: bool = False
    policy: type[FairShare] = FairShare


class Transition(NamedTuple):
    """A change of state, and the event or the reason for it."""

    now: float
    before: EngineState
    after: EngineState
    reason: str

    def __str__(self) -> str:
        return f"{self.now:.3f} {self.before} -> {self.after}: {self.reason}"


@dataclass(frozen=True, slots=True)
class FrozenState:
    """All state that sequences and prefix slots have in the shards, between two steps.

    ``units``: the pages and states in use, by KV group.  ``reopen_operations`` open the running sequences over them in
    a daemon that has these units.  ``n_tokens``: of these sequences.
    """

    units: dict[KvGroup, Sequence[int]]
    reopen_operations: Sequence[Operation]
    n_tokens: int


class EngineCore:
    """``has_rows`` answers for the boundary memory of the present pipeline."""

    def __init__(
        self, limits: EngineLimits, settings: CoreSettings, now: float, has_rows: HasRows = lambda _, __: True
    ) -> None:
        self._settings, self._now, self._has_rows = settings, now, has_rows
        self._out: list[ev.Instruction] = []
        self._events: list[tuple[str, Event]] = []
        self.state = EngineState.UNAVAILABLE
        self.transitions: deque[Transition] = deque(maxlen=32)
        self.scheduler = Scheduler(limits, policy=settings.policy)
        self.pipeline: Pipeline | None = None
        self.frozen: FrozenState | None = None  # while FROZEN
        self.replay_plans: dict[int, RebuildPlan] | None = None  # by stage, of the last PrepareReplay
        self._stage_recovery = StageRecovery(self.scheduler, self._journal(settings.journal_pages))
        self.recovery = RequestHold(settings.hold_s, settings.max_losses)
        self._drafter: ev.DrafterReady | None = None  # to attach when the lost stages are rebuilt
        self.unavailable_reason = "the model is being loaded"
        self.refusal_reason = ""  # set for good by Refuse and Close
        self.flush_goal = 0  # the step after which every stage has done what was decided before the last Flush
        self._ranks_apart = limits.residency is not None and limits.residency.ranks_pages and not limits.stages_rank
        self._proceed_due = False
        self._blamed = "the output stage"
        self.totals = StepTotals()
        self._generated = RateWindow(settings.rate_window_s, now)
        self._invalid: tuple[str, float] | None = None  # what computes no numbers, and since when

    def handle(self, event: ev.CoreEvent, now: float) -> list[ev.Instruction]:
        """Take one event at ``now`` (seconds, monotonic) and return the instructions, in order. Raises SubmitError for
        a request that is refused and CannotRebuild for a replay that cannot be prepared; then nothing has changed."""
        self._now = now
        if self.pipeline is not None:
            self.pipeline.now = now
        if type(event) is ev.StageAnswer:  # nearly all are
            self._receive(event)
        else:
            self._dispatch(event)
        self._take_outcomes()
        while self._proceed_due:
            self._proceed_due = False
            self._proceed()
            self._take_outcomes()
        if self._events:
            self._out.append(ev.Deliver(self._events))
            self._events = []
        if self._settings.validate and self.scheduler.idle:
            validation.check(self.scheduler)
        instructions = self._out.copy()
        self._out.clear()
        return instructions

    def _receive(self, answer: ev.StageAnswer) -> None:
        if answer.blamed:  # the answer of another stage may come later
            self._blamed = answer.blamed
        if self.pipeline is not None:
            self.pipeline.receive(answer.result, answer.payload)
        if self.state is not EngineState.SERVING:  # else an outcome asks for it
            self._proceed_due = True

    def _dispatch(self, event: ev.CoreEvent) -> None:
        self._proceed_due = True
        match event:
            case ev.Submit(request, wanted):
                self.check_taking(request)
                self.scheduler.submit(request, self._now, wanted)
                self._proceed_due = False  # others may come with it
            case ev.Cancel(request_id, error):
                self._events += self.scheduler.cancel(request_id, self._now, error)
            case ev.Resume(request_id):
                self.scheduler.resume(request_id)
            case ev.Release(running):
                running = running and self.state is EngineState.FROZEN
                self._out.append(ev.Released(self.scheduler.release(running=running)))
            case ev.Adopt(record):
                self._check_serving()
                self.scheduler.adopt(record)
            case ev.MasksMade(step_id, made):
                if self.pipeline is not None and any(
                    entry.step.step_id == step_id for entry in self.pipeline.in_flight
                ):
                    self.pipeline.send_masks(made)
                for failed, why in made.failures:
                    text = f"the output cannot be constrained further: {why}; use a simpler schema or grammar"
                    self._events += self.scheduler.cancel(failed, self._now, RequestError("constraint_failed", text))
            case ev.PagesRanked(step_id, sequence, scores):
                self._rank_pages(step_id, sequence, scores)
            case ev.Flush():
                self.flush_goal = self.scheduler.flush()
            case ev.Tick():
                pass
            case _:
                self._on_pipeline_event(event)

    def _on_pipeline_event(self, event: ev.CoreEvent) -> None:
        match event:
            case ev.StagesReady():
                if self.state is not EngineState.CLOSED:  # else they were loading when the stop began
                    self._attach(event)
            case ev.StagesLost(stages, error):
                self._lose_stages(stages, error)
            case ev.StagesReplaced(daemons, restored, replayed, drafter):
                self._drafter = drafter
                self._stage_recovery.restore(daemons, restored=restored, replayed=replayed)
            case ev.PipelineLost(error, permanent):
                self._detach(error, permanent=permanent)
            case ev.Unload(reason, failure):
                self._unload(reason, failure)
            case ev.PipelineHandedOff(error, journal_pages):
                self._leave_pipeline(error, journal_pages)
            case ev.ShardStateUnknown(failure):
                self._fail_pipeline(failure)
            case ev.Unavailable(error):
                self.unavailable_reason = error.message
            case ev.DrafterReady():
                if self.pipeline is not None:
                    self._attach_drafter(self.pipeline, event)
            case ev.DrafterLost():
                self._detach_drafter()
            case ev.DrafterBroken(code, message):
                if self.pipeline is not None:
                    self.pipeline.drafts.lose(code, message)
            case ev.Freeze(reason):
                if self.state is EngineState.SERVING:
                    self._move(EngineState.DRAINING, f"freeze: {reason}")
                    self.recovery.begin_hold(self._now, reason)
            case ev.Thaw():
                if self.state in (EngineState.DRAINING, EngineState.FROZEN) and self.pipeline is not None:
                    self._serve("thaw")
            case ev.Quiesce():
                self.scheduler.admission.open = False
            case ev.PrepareReplay(stages):
                self.replay_plans = self._stage_recovery.prepare(stages, self._now)
            case ev.Refuse(reason):
                self.refusal_reason = self.refusal_reason or reason
            case ev.Close(error):
                self.refusal_reason = self.refusal_reason or error.message
                self._detach(error, permanent=True)
                self._move(EngineState.CLOSED, error.message)

    # ---- outcomes of the pipeline

    def _take_outcomes(self) -> None:
        while self.pipeline is not None and self.pipeline.outcomes:
            self._on_outcome(self.pipeline, self.pipeline.outcomes.popleft())

    def _on_outcome(self, pipeline: Pipeline, outcome: Outcome) -> None:
        match outcome:
            case PipelineResult():
                self._on_step_result(pipeline, outcome)
            case RowsReady(step, stage):
                self._stage_recovery.on_rows(step, stage)
                self._proceed_due |= self._stage_recovery.active
            case FirstStageDone():
                self._proceed_due |= self.scheduler.on_first_stage_done()
            case DraftsAnswered(result):
                self._on_drafts(result)
            case StepsReturned():
                self._proceed_due = True
            case StageRebuilt(stage):
                self._stage_recovery.on_stage_rebuilt(stage)
                self._proceed_due = True
            case DrafterDetached(failure):
                self._detach_drafter()
                self._out.append(ev.ReportDrafterFailure(failure))
            case StageFailure():
                self._fail_pipeline(outcome)

    def _on_step_result(self, pipeline: Pipeline, result: PipelineResult) -> None:
        """Apply a finished step: rankings, tokens, statistics, then the next step, then drafts that came early."""
        self._stage_recovery.on_step_finished(result.step.step_id)
        self.totals.add(result)
        n_before = self.scheduler.n_generated_tokens
        scheduled = self.scheduler.in_flight[0] if self.scheduler.in_flight else None
        try:
            if scheduled is not None and (result.step.rank_pages or any(a.page_scores for a in result.results)):
                note_rankings(scheduled, result.step.rank_pages, result.results)
            blamed = self._note_invalid(result.results[-1])
            self._events += self.scheduler.apply(
                result.results[-1], self._now, blamed, result.results, result.payloads[-1]
            )
        except WrongResult as error:
            last = result.results[-1].stage
            text = f"stage {last}, the last, sent a wrong result: {error}"
            self._fail_pipeline(StageFailure(last, "protocol_error", text))
            return
        wanted = ""
        if result.step.want_logits and scheduled is not None:
            wanted = next((part.record.request.request_id for part in scheduled.parts.values()), "")
        self._generated.add(self.scheduler.n_generated_tokens - n_before, self._now)
        self._proceed()
        self._out.append(ev.StepFinished(result, wanted))
        if pipeline is self.pipeline:
            pipeline.drafts.deliver_drafts()

    def _note_invalid(self, last: StepResult) -> str:
        """Return the stage whose numbers are invalid in a step, if some are; note it until tokens are drawn again."""
        if last.invalid:
            self._invalid = f"{self._blamed} computed numbers that are NaN or infinite", self._now
            return self._blamed
        if last.sampled:
            self._invalid = None
        return ""

    def _on_drafts(self, result: StepResult) -> None:
        if not self.scheduler.drafting.attached:
            return  # it was detached by an answer before this one
        try:
            self._proceed_due |= self.scheduler.drafting.on_drafts(result) or self._stage_recovery.active
        except WrongResult as error:
            text = f"the draft stage sent a wrong result: {error}"
            if self.pipeline is not None:
                self.pipeline.drafts.lose("protocol_error", text)

    def _rank_pages(self, step_id: int, sequence: int, scores: Sequence[float]) -> None:
        for record in self.scheduler.running:
            live = record.live
            if live is not None and live.sequence == sequence and live.ranking == step_id:
                live.ranking = 0
                live.table.rank(scores)

    # ---- pipelines that come and go

    def _attach(self, ready: ev.StagesReady) -> None:
        reopen = self._stage_recovery.reopen_operations if ready.restored else None
        if reopen is None and self._stage_recovery.reopen_operations is not None:  # parted, and the bytes are not there
            self._detach(RequestError("shard_lost", self.unavailable_reason))
        pipeline = self.pipeline = Pipeline(ready.daemons, self._out, has_doorbells=ready.has_doorbells)
        pipeline.now = self._now
        self.scheduler.attach(pipeline.n_stages, reopen or (), has_doorbells=pipeline.has_doorbells)
        if reopen is not None:
            self.recovery.record_rebuilt(0, self._stage_recovery.n_frozen * pipeline.n_stages)
        self._serve("stages ready")
        if (drafter := ready.drafter) is not None:
            self._attach_drafter(pipeline, drafter, restored=drafter.restored and reopen is not None)

    def _detach(self, error: RequestError, *, permanent: bool = False) -> None:
        """Drop the pipeline; hold requests, or end running ones with ``error``, and queued ones if ``permanent``."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
            if not self._stage_recovery.active:
                self.recovery.begin_hold(self._now, self._pause_reason)
        self._stage_recovery.detach()
        self._drafter = None
        if permanent:
            self.recovery.give_up()
        self.unavailable_reason = error.message
        self._events += self.scheduler.lose_all(error, self._now, self.recovery.hold)
        if permanent:
            self._events += self.scheduler.fail(self.scheduler.queue, error, self._now)
        if self.state not in (EngineState.CLOSED, EngineState.UNLOADED):
            self._move(EngineState.HOLDING if self.recovery.holding else EngineState.UNAVAILABLE, error.message)

    def _unload(self, reason: str, error: RequestError | None) -> None:
        """Drop the pipeline, and have all requests wait until the model is loaded."""
        if self.state is EngineState.CLOSED:
            return
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self._stage_recovery.detach()
        self._drafter = None
        self.recovery.end_hold(self._now)
        self.unavailable_reason = reason
        self._events += self.scheduler.lose_all(RequestError("shard_lost", reason), self._now, lambda _: True)
        if error is not None:
            self._events += self.scheduler.fail(self.scheduler.queue, error, self._now)
        self._move(EngineState.UNLOADED, reason)

    @property
    def _pause_reason(self) -> ev.PauseReason:
        return "restart" if self.state in (EngineState.DRAINING, EngineState.FROZEN) else "loss"

    def _leave_pipeline(self, error: RequestError, journal_pages: int) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self.scheduler.detach_drafter()
        self._stage_recovery.detach_frozen(self._journal(journal_pages))
        self.unavailable_reason = error.message
        if self.state in (EngineState.SERVING, EngineState.DRAINING, EngineState.REBUILDING):
            self.recovery.begin_hold(self._now, "reload")
            self._move(EngineState.HOLDING if self.recovery.holding else EngineState.UNAVAILABLE, error.message)

    def _fail_pipeline(self, failure: StageFailure) -> None:
        if self.pipeline is not None:
            self._detach(RequestError(failure.code, failure.message))
            self._out.append(ev.ReportPipelineFailure(failure))

    def _lose_stages(self, stages: frozenset[int], error: RequestError) -> None:
        reason = self._pause_reason
        if self.pipeline is None or not self.rebuilds or not self._stage_recovery.lose(self.pipeline, stages):
            self._detach(error)
            return
        self._move(EngineState.REBUILDING, error.message)
        self._take_outcomes()  # of steps whose stage was lost after it had rung
        if not self._stage_recovery.active:  # a result was wrong
            return
        self._drafter = None
        self.recovery.begin_hold(self._now, reason)
        self.unavailable_reason = error.message
        lost = [record for record in self.scheduler.running if not self.recovery.survives(record)]
        self._events += self.scheduler.fail(lost, error, self._now)

    def _rebuild(self) -> None:
        try:
            if not self._stage_recovery.advance(self._now):
                return
        except CannotRebuild as error:
            self._detach(RequestError("shard_lost", f"{self.unavailable_reason}; {error}"))
            self._out.append(ev.RebuildEnded(rebuilt=False))
            return
        self.recovery.record_rebuilt(self._stage_recovery.n_tokens, self._stage_recovery.n_restored)
        self._out += [ev.MakeMasks(plan.step.step_id, plan.mask_jobs) for plan in self._stage_recovery.masked()]
        self._serve("stages rebuilt")
        drafter, self._drafter = self._drafter, None
        if drafter is not None and self.pipeline is not None:
            self._attach_drafter(self.pipeline, drafter, restored=drafter.restored and self._stage_recovery.restored)
        self._out.append(ev.RebuildEnded(rebuilt=True))

    def _attach_drafter(self, pipeline: Pipeline, drafter: ev.DrafterReady, *, restored: bool | None = None) -> None:
        restored = drafter.restored if restored is None else restored
        self.scheduler.attach_drafter(with_output=drafter.with_output, restored=restored)
        pipeline.drafts.attach(drafter.daemon, with_output=drafter.with_output)

    def _detach_drafter(self) -> None:
        """Go on without drafts.  Scheduler and pipeline have a drafter, or neither has."""
        self._drafter = None
        if self.pipeline is not None:
            self.pipeline.drafts.detach()
        self.scheduler.detach_drafter()
        self._proceed_due = True

    def _serve(self, reason: str) -> None:
        """Plan steps again: the pipeline is whole."""
        self.recovery.end_hold(self._now)
        self._move(EngineState.SERVING, reason)

    def _move(self, after: EngineState, reason: str) -> None:
        before = self.state
        if before is after:
            return
        self.transitions.append(Transition(self._now, before, after, reason))
        if after not in TRANSITIONS[before]:
            raise InvalidEngineTransition("\n".join(map(str, self.transitions)))
        self.state = after
        if after is not EngineState.FROZEN:
            self.frozen = None

    def _journal(self, n_pages: int) -> Journal | None:
        return make_journal(self._out, self._has_rows, self.scheduler.pools, n_pages)

    # ---- steps

    def check_taking(self, request: GenerationRequest) -> None:
        """Raise NotReady or QueueFull if a request is refused now."""
        self._check_serving()
        client, max_queue = request.client_id, self._settings.max_queue
        if not self.scheduler.accepts(request, max_queue):
            queue, retry_s = self.scheduler.queue, self.scheduler.retry_after_s(client)
            raise QueueFull(queue.n_waiting(client), queue.n_clients(client), max_queue, retry_s)

    def _check_serving(self) -> None:
        waits = self.recovery.holding or self.state is EngineState.UNLOADED
        if self.refusal_reason or not (self.ready or waits):
            raise NotReady(self.refusal_reason or self.unavailable_reason)

    def _proceed(self) -> None:
        """Plan every step that is possible."""
        if self._stage_recovery.active:
            self._rebuild()
        while (pipeline := self.pipeline) is not None and self.state is EngineState.SERVING:
            if (plan := self.scheduler.next_plan(self._now)) is None:
                break
            pipeline.drafts.suspended = self.scheduler.drafting.suspended
            self._submit(pipeline, plan, self.scheduler.in_flight[-1])
        if self.state is EngineState.DRAINING and self.pipeline is not None:
            self._flush(self.pipeline)
        self._events += self.scheduler.failed
        self.scheduler.failed.clear()

    def _submit(self, pipeline: Pipeline, plan: StepPlan, scheduled: ScheduledStep) -> None:
        pipeline.submit(plan.step, plan.draft_operations, plan.embeddings)
        if plan.mask_jobs:
            self._out.append(ev.MakeMasks(plan.step.step_id, plan.mask_jobs))
        if self._ranks_apart:
            for part in scheduled.parts.values():
                if part.live.ranking == plan.step.step_id:
                    tokens = part.record.tokens[: part.live.n_computed]
                    self._out.append(ev.RankPages(plan.step.step_id, part.live.sequence, tokens))
        self._stage_recovery.on_step_planned(plan, scheduled)

    def _flush(self, pipeline: Pipeline) -> None:
        """Send what waits for a step; the core is frozen when every daemon has done all that was decided."""
        if self.scheduler.n_in_flight or not pipeline.settled:
            return
        plan = self.scheduler.flush_step(self._now)
        if plan is not None:
            self._stage_recovery.on_step_planned(plan)
            pipeline.submit(plan.step, draft_operations=plan.draft_operations)
            return
        running, pools = self.scheduler.running, self.scheduler.pools
        n_tokens = sum(record.live.n_computed for record in running if record.live is not None)
        self._move(EngineState.FROZEN, "every daemon has done all steps")
        self.frozen = FrozenState(dict(pools.in_use()), running.opening_operations(restored=True), n_tokens)
        self._stage_recovery.freeze(self.frozen.reopen_operations, n_tokens)

    # ---- what there is

    @property
    def ready(self) -> bool:
        """True if requests are served."""
        return self.state is EngineState.SERVING and not self.refusal_reason

    @property
    def rebuilds(self) -> bool:
        """True if lost stages may be rebuilt while others keep what they have."""
        return self._stage_recovery.enabled and self.recovery.hold_s > 0

    def replay(self) -> ReplayPlan | None:
        """Return the replay that was prepared; None if its rows are too many."""
        return self._stage_recovery.replay(self.replay_plans or {})

    def invalid(self, now: float) -> str:
        """The stage that computed NaN or infinities instead of the newest tokens within ``rate_window_s``, or empty."""
        if self._invalid is None or now - self._invalid[1] > self._settings.rate_window_s:
            return ""
        return self._invalid[0]

    def oldest_in_flight(self, now: float) -> OldestStep | None:
        """Return the step a daemon has worked on for longest, for the watchdog."""
        return None if self.pipeline is None else self.pipeline.oldest_in_flight(now)

    def find_unanswered(self, stage: int, step_id: int, now: float) -> UnansweredStep | None:
        """Return a step that a stage has yet to answer, for the check of its answer."""
        pending = None if self.pipeline is None else self.pipeline.find_unanswered(stage, step_id, now)
        if pending is None or self.pipeline is None:
            return None
        n_top: dict[int, int] = {}
        if stage == self.pipeline.n_stages - 1:
            scheduled = next((step for step in self.scheduler.in_flight if step.step_id == step_id), None)
            parts = scheduled.parts.items() if scheduled is not None else ()
            n_top = {sequence: part.record.request.sampling.max_tops for sequence, part in parts}
        return UnansweredStep(*pending, n_top)

    def find_step(self, step_id: int) -> Step | None:
        """Return a step in flight."""
        entries = () if self.pipeline is None else self.pipeline.in_flight
        return next((entry.step for entry in entries if entry.step.step_id == step_id), None)

    def statistics(self, now: float) -> EngineStatistics:
        """Return counts and rates as of now."""
        reason = "" if self.ready else self.refusal_reason or self.unavailable_reason
        return EngineStatistics.of(
            self.scheduler,
            self.totals,
            self._generated,
            self.recovery,
            now,
            self._stage_recovery.progress,
            reason=reason,
        )
