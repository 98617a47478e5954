"""Decides what the pipeline computes next: admission, chunked prefill, continuous batching, preemption.

Pure: requests and step results in, step plans and events out; ``now`` (seconds, monotonic) is an argument.  Knows no
sockets, clocks or text.  The rules, and what they promise: docs/scheduling.md.

Ids may be reused while steps are in flight, because every stage runs its steps in order: what is planned later is
written later.  Operations that no step carries yet wait in one ordered list for the next plan.
Invariants: only running requests, prefix slots and reservations own ids; a sequence has at most one undrawn token in
flight; a finished request is in no list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import attrgetter

from lucevisor.engine.request import (
    Event,
    GenerationRequest,
    InvalidRequest,
    Reason,
    RequestError,
    RequestState,
    TokenEvent,
    invalid_logits,
    no_host_memory,
)
from lucevisor.engine.scheduling.backlog import Backlog
from lucevisor.engine.scheduling.batching import choose_slices, step_budget
from lucevisor.engine.scheduling.chunking import SharedChunks
from lucevisor.engine.scheduling.state import Events, SchedulerState
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.engine.step import (
    ScheduledSequence,
    ScheduledSlice,
    ScheduledStep,
    StepPlan,
    all_decodes,
    drawn_tokens,
    is_plain,
    mask_jobs,
)
from lucevisor.kv.page_table import HostMemoryFull
from lucevisor.kv.prefix_records import PrefixMatch
from lucevisor.protocol.loading import arena_regions
from lucevisor.protocol.steps import Operation, Sampled, Slice, Step, StepResult


class Scheduler(SchedulerState):
    """Requests in, step plans out.  ``n_stages``: of the pipeline, until ``attach`` gives another number."""

    # ---- requests

    def submit(
        self,
        request: GenerationRequest,
        now: float,
        wanted: WantedRows | None = None,
        *,
        hold: bool = False,
        probe: PrefixMatch | None = None,
    ) -> None:
        """Queue a request.  Raises InvalidRequest or ContextOverflow if it can never be served.

        ``hold``: do not start it before ``resume``; others pass it.  ``probe``: start it first, from this match, whose
        pages the caller keeps until it is over.
        """
        if request.request_id in self._records:
            raise InvalidRequest(
                "request_id", f"{request.request_id!r} is in use by an unfinished request; choose another"
            )
        if wanted is not None and wanted.rows < 1:
            raise InvalidRequest("rows", f"is {wanted.rows}; a step needs at least 1")
        record = RequestRecord(request, self._n_arrivals, self.limits.max_answer_tokens(request), now, wanted, probe)
        self._n_arrivals += 1
        self.reuse.submitted(record)
        record.prefix.held = hold
        self._records[request.request_id] = record
        self._shares.enter(request.client_id)
        self._queue.add(record)

    def accepts(self, request: GenerationRequest, max_queue: int) -> bool:
        """Whether a request may wait: clients share the queue equally.

        Beyond that one is accepted for each running request in whose place it may start, so that a full queue refuses
        no short request for the sake of long ones.
        """
        n_over = self._queue.n_waiting(request.client_id) - self.queue_share(request.client_id, max_queue)
        if n_over < 0:
            return True
        found = self.preemption.places().shorter(request, len(request.prompt))
        return len([*islice(found, n_over + 1)]) > n_over

    def queue_share(self, client: str, max_queue: int) -> int:
        """Return how many requests of a client may wait."""
        return max(1, max_queue // self._queue.n_clients(client))

    def resume(self, request_id: str) -> None:
        """Let a held request start.  Does nothing if it is over already."""
        record = self._records.get(request_id)
        if record is not None:
            record.prefix.held = False
            self.reuse.resize(record)
            self._queue.reordered()

    def cancel(self, request_id: str, now: float, error: RequestError | None = None) -> Events:
        """End a request, as failed if there is an ``error``, and free its ids.  Does nothing if it is over already."""
        record = self._records.get(request_id)
        return [] if record is None else [self._finish(record, "error" if error else "cancelled", now, error=error)]

    def lose_all(self, error: RequestError, now: float, keep: Callable[[RequestRecord], bool]) -> Events:
        """The shards lost all sequences: requeue the running requests to ``keep``, end the others with ``error``."""
        self.reuse.index.clear()
        for record in [record for record in self.running if keep(record)]:
            record.goes_next = True
            self._operations += self.preemption.requeue(record)
        events = self.fail([*self.running, *(one for one in self._queue if one.probe is not None)], error, now)
        self.drafting.detach()  # it goes with the pipeline
        self.in_flight.clear()
        self._backlog.clear()
        self._waits.stopped()
        self.last_applied = self._last_step  # what was in flight is never answered
        self._operations.clear()  # the shards start empty
        self._flushing = False
        for record in self._queue:
            record.n_in_flight = 0
        return events

    def fail(self, records: Iterable[RequestRecord], error: RequestError, now: float) -> Events:
        """End unfinished requests with ``error``."""
        return [self._finish(record, "error", now, error=error) for record in [*records]]

    def end_probes(self, now: float) -> Events:
        """End the waiting probes, whose pages the only running request needs."""
        self.starving = False
        return [self._finish(one, "cancelled", now) for one in [*self._queue] if one.probe is not None]

    # ---- steps

    def attach(self, n_stages: int, opening: Sequence[Operation] = (), *, rings: bool = False) -> None:
        """Plan for a fresh pipeline of ``n_stages`` stages; queued requests may start.  ``opening``: first of all.

        ``rings``: of several stages the last one tells the first one tokens and drafts.
        """
        self._operations[:0] = opening
        self.runs_ahead = rings or n_stages == 1
        self.drafting.n_stages, self.drafting.tells_first = n_stages, self.runs_ahead
        if n_stages != self.n_stages:
            self.n_stages = n_stages
            self.chunks = SharedChunks(n_stages, self.limits.prefill_chunk)
            self._backlog = Backlog(n_stages)
        self.admission.open = True

    def attach_drafter(self, *, with_output: bool, kept: bool = False) -> None:
        """Ask a drafter from the next step on, a fresh one or with state that was ``kept``; ``with_output``: it runs
        in the output stage's daemon.

        Raises ValueError if the limits have no room for one, RuntimeError if there is one.
        """
        opening = bool(self.running or self._operations)
        self.drafting.attach(with_output=with_output, opening=opening, kept=kept)

    def detach_drafter(self) -> None:
        """Go on without drafts.  Does nothing without a drafter."""
        self.drafting.detach()

    def next_plan(self, now: float) -> StepPlan | None:
        """Return the next step for the pipeline, or None if there is none until a result or a request comes."""
        n_unfinished = self._last_step - self.last_finished
        if len(self.in_flight) >= arena_regions(self.n_stages) or n_unfinished >= self.limits.n_regions(self.n_stages):
            return None
        if len(self.in_flight) > self.n_stages and not self.runs_ahead:
            return None
        if self.drafting.turns() and (plan := self._turn_drafter(now)) is not None:
            return plan
        if self.drafting.opening:
            return self.cut(now)
        self._operations += self.admission.admit(now, self._last_step, self.chunks)  # nobody runs ahead beside a prompt
        step_id, measured = self._last_step + 1, (self.chunks, self._backlog, self._shares)
        budget = step_budget(step_id, self.n_stages, *measured, now, self.running, runs_ahead=self.runs_ahead)
        while chosen := choose_slices(list(self.running), self.in_flight, self.limits, budget, self.drafting):
            n_stopped = self._n_stopped
            if secured := self._secure(chosen, now):
                drafts = self.limits.speculation.max_drafts > 0
                return self._plan([self._fit(one) for one in secured] if drafts else secured, now)
            if self._n_stopped == n_stopped:  # else all that were chosen are gone: choose again
                break
        return self.cut(now) if self._flushing else None

    @property
    def _n_stopped(self) -> int:
        """Requests that a lack of pages preempted or ended."""
        return self.preemption.n_preempted + len(self.failed)

    def _turn_drafter(self, now: float) -> StepPlan | None:
        """Let the drafter rest, with a step that closes its sequences, or wake it."""
        if self.drafting.resting:
            self.drafting.wake(opening=bool(self.running or self._operations))
            return None
        plan = self._plan([], now)  # planned before it rests: the drafter answers it
        return replace(plan, opening=self.drafting.rest(plan.step.operations))

    def cut(self, now: float) -> StepPlan | None:
        """Return a step without slices that carries all waiting operations, or None if there are none."""
        if self.drafting.opening:  # what waits for a step was planned before; the drafter gets its outcome
            return replace(self._plan([], now), opening=self.drafting.open_running())
        return self._plan([], now) if self._operations else None

    def flush(self) -> int:
        """Send waiting operations with the next plan, even without a slice, and return the step after which
        (``last_finished``) every stage has done all that was decided up to now."""
        self._flushing = bool(self._operations)
        return self._last_step + self._flushing

    def first_stage_done(self, now: float) -> bool:
        """The first stage finished its oldest step; return whether prompts may have waited for that."""
        self.learn()
        self._backlog.first_stage_done(now)
        return RequestState.PREFILL in self.running.states

    def apply(self, result: StepResult, now: float, blamed: str = "the output stage") -> Events:
        """Apply the last stage's result of the oldest step in flight.  ``blamed``: the stage whose numbers are invalid,
        if some are.

        Raises WrongResult, changing nothing, if it does not answer that step.  Each sampling slice has one token, and
        one more for each accepted draft; tokens after the end of a request are dropped.
        """
        drawn = drawn_tokens(self.in_flight[0] if self.in_flight else None, result)
        self.in_flight[0].take_scores(result.scored)
        scheduled = self.in_flight.popleft()
        self._backlog.answered(now)
        self._waits.applied(scheduled, drawn, self.running.states, now, idle=not self.in_flight)
        self.last_applied = scheduled.step_id
        events: Events = []
        for sequence, part in scheduled.parts.items():
            part.record.n_in_flight -= 1
            if sequence in result.invalid:
                if not part.record.ended:
                    self.reuse.discard(part.record)
                    events.append(self._finish(part.record, "error", now, error=invalid_logits(blamed)))
            elif tokens := drawn.get(sequence):
                self._take(events, part, tokens, now)
        self.drafting.applied(scheduled, now, result.upkeep_s)
        return events

    def timed(self, slices: Sequence[Slice], results: Sequence[StepResult]) -> None:
        """Note how long each stage took for a step, the oldest in flight; ``learn`` tells the policy of drafts."""
        self.learn()
        stages_s, cold = [stage.compute_s for stage in results], any(stage.cold for stage in results)
        if self.in_flight:
            self.drafting.stepped(self.in_flight[0], sum(stages_s))
        if (self.in_flight and self.in_flight[0].plain) or all_decodes(slices):
            self._unlearned = partial(self.drafting.measured, slices, stages_s, cold=cold)
        else:
            self.chunks.measured(slices, max(stages_s), cold=cold)

    def sent(self) -> None:
        """The step behind a result was sent, if there is one: learn what that took, which takes as long as a plan.

        Of several stages the first one is about to start, maybe on this core: it learns when that is done.
        """
        if self.n_stages == 1:
            self.learn()

    def learn(self) -> None:
        """Tell the policy of drafts what it was not told yet."""
        unlearned, self._unlearned = self._unlearned, None
        if unlearned is not None:
            unlearned()

    # ---- inside: choice, pages, plans

    def _secure(self, chosen: list[ScheduledSlice], now: float) -> list[ScheduledSlice]:
        """Give every slice its pages, oldest request first, evicting slots and then preempting the youngest request if
        too few are free.  Returns the slices that have them; a request whose pages host memory cannot hold ends."""
        secured = []
        for one in sorted(chosen, key=attrgetter("record.arrival")):
            if one.record.live is one.live and one.live.table.covers(one.stop):
                secured.append(one)
                continue
            while one.record.live is one.live:  # not preempted for an older one, nor for itself
                try:
                    operations = self.running.grow(one)
                except HostMemoryFull as full:
                    self.failed.append(self._finish(one.record, "error", now, error=no_host_memory(str(full))))
                    break
                if operations is not None:
                    self._operations += operations
                    secured.append(one)
                if operations is not None or one.runs_ahead:  # which is not worth another request's pages
                    break
                if self.reuse.index.evictor.reclaim(one.live.table.needs(one.stop)) or self.running.release_ahead():
                    continue
                if self.preemption.pages_come:
                    break
                if len(self.running) == 1 and self.reuse.index.pinning:
                    self.starving = True
                    break  # a snapshot is being written or read: its pages come back by themselves
                self._operations += self.preemption.preempt(self.running.youngest, now)
        return secured

    def _fit(self, one: ScheduledSlice) -> ScheduledSlice:
        one, operations = self.drafting.fit(one)
        self._operations += operations
        return one

    def _plan(self, chosen: list[ScheduledSlice], now: float) -> StepPlan:
        self._last_step += 1
        follows = chosen[0].live.last_step if chosen and chosen[0].runs_ahead else 0
        drafts_of = max([one.live.awaiting for one in chosen if one.drafts_pend], default=0) if self.n_stages > 1 else 0
        p_min = self.drafting.p_min if len(chosen) == 1 else 0
        slices = [one.schedule(self._last_step, self.drafting.draft_from(one.live), p_min) for one in chosen]
        self._shares.charge(
            (one.record.request.client_id, len(s.tokens) - s.n_drafts) for one, s in zip(chosen, slices, strict=True)
        )
        n_decoding = sum([one.record.state is RequestState.DECODE for one in chosen])
        plain = all([is_plain(piece) for piece in slices])  # noqa: C419 - a list is quicker
        if n_decoding < len(chosen):
            self.chunks.charge((one.n_prefill, s) for one, s in zip(chosen, slices, strict=True))
        wanted = chosen[0].record.wanted if chosen else None
        step = Step(
            step_id=self._last_step,
            region=self._last_step % self.limits.n_regions(self.n_stages),
            operations=self._operations,
            slices=slices,
            want_logits=wanted is not None,
            want_hidden=wanted is not None and wanted.hidden,
            rank_pages=[one.live.sequence for one in chosen if one.live.ranking] if self.limits.stages_rank else [],
            follows=follows if self.n_stages > 1 else 0,
            drafts_of=drafts_of,
            upkeep=bool(chosen) and self.drafting.keeps_up(slices, self.n_stages),
        )
        self._operations = []
        self._flushing = False
        for one in chosen:  # with the next step: the states are those at the end of this one's slices
            self._operations += self.reuse.advanced(one.record, now)
        parts = {
            s.sequence: ScheduledSequence(one.record, one.live, s, one.n_proposed)
            for one, s in zip(chosen, slices, strict=True)
        }
        self._waits.planned(now)
        self.in_flight.append(ScheduledStep(step.step_id, parts, n_decoding > 0, follows, plain))
        self.drafting.planned(self.in_flight[-1], upkeep=step.upkeep)
        self._backlog.sent(self.chunks.step_s(slices), now)
        return StepPlan(step, tuple([one.record.request.request_id for one in chosen]), mask_jobs(parts.values()))

    # ---- inside: results and ends

    def _take(self, events: Events, part: ScheduledSequence, drawn: Sequence[Sampled], now: float) -> None:
        """Append the tokens drawn for a slice; all but the last are accepted drafts, which are computed already."""
        record, live = part.record, part.live
        self.drafting.drawn(part, drawn)
        for i, sampled in enumerate(drawn):
            if record.ended:
                break
            drafted = i + 1 < len(drawn)
            if drafted and record.live is live:
                live.accept(i)
            self._accept(events, record, sampled, now, drafted=drafted)
        if part.slice.n_drafts and record.live is live:
            self._shares.charge([(record.request.client_id, len(drawn) - 1)])
            self._operations += self.running.settle(live)

    def _accept(self, events: Events, record: RequestRecord, sampled: Sampled, now: float, *, drafted: bool) -> None:
        request = record.request
        record.append(sampled)
        self.n_generated_tokens += not record.uncached
        if record.first_token_at is None:
            record.first_token_at = now
        if record.paused_at is not None:
            self.longest_pause_s = max(self.longest_pause_s, now - record.paused_at)
            record.paused_at = None
        if record.state is RequestState.PREFILL:
            record.move(RequestState.DECODE)
        if sampled.token in request.stop_ids:
            events.append(self._finish(record, "stop", now, stop_id=sampled.token))
            return
        events.append((request.request_id, TokenEvent(sampled.token, sampled.logprob, tuple(sampled.top), drafted)))
        if record.n_tokens >= record.most_tokens:
            events.append(self._finish(record, "length", now))

    def _finish(
        self, record: RequestRecord, reason: Reason, now: float, *, error: RequestError | None = None,
        stop_id: int | None = None,
    ) -> tuple[str, Event]:  # fmt: skip
        if record.live is not None:
            self._operations += self.running.settle(record.live)
            if error is None:
                self._operations += self.reuse.ending(record, now)
            self._operations += self.running.close(record)
        elif record.state is RequestState.QUEUED:
            self._queue.remove(record)
        ends = {"cancelled": RequestState.CANCELLED, "error": RequestState.FAILED}
        record.move(ends.get(reason, RequestState.FINISHED))
        self.reuse.ended(record)
        self._waits.finished(record, reason)
        self.preemption.forget(record)
        self._shares.leave(record.request.client_id)
        del self._records[record.request.request_id]
        return record.request.request_id, record.finished_event(reason, now, error, stop_id)
