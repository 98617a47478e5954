"""Decides what the pipeline computes next: admission, chunked prefill, continuous batching, preemption.

Pure: requests and step results in, step plans and events out; ``now`` (seconds, monotonic) is an argument.  Knows no
sockets, no clock and no text.  The rules, and what they promise: docs/scheduling.md.

Why ids may be given away while steps are in flight: every stage executes steps in order, so a step planned later writes
later.  Operations that no step carries yet stay in one ordered list and ride on the next plan.

Invariants: ids are owned by live sequences and prefix slots only; a live sequence has at most one undrawn token under
way; a finished request is in no list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial

from lucevisor.engine.backlog import Backlog
from lucevisor.engine.batching import ScheduledSlice, StepBudget, choose, has_others
from lucevisor.engine.chunking import SharedChunks
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.prefix_reuse import NO_MATCH, PrefixReuse
from lucevisor.engine.queue import RequestQueue
from lucevisor.engine.request import (
    Event,
    GenerationRequest,
    InvalidRequest,
    Reason,
    RequestError,
    RequestState,
    TokenEvent,
)
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.engine.shares import KeyShares
from lucevisor.engine.step import ScheduledSequence, ScheduledStep, StepPlan, WrongResult, drawn_tokens
from lucevisor.engine.waits import WaitEstimate
from lucevisor.kv.page_pool import PageAllocator, PageUse
from lucevisor.kv.prefix_records import PrefixMatch
from lucevisor.kv.prefix_tree import NO_STATE
from lucevisor.model.values import Space
from lucevisor.protocol.loading import arena_regions
from lucevisor.protocol.steps import CloseSequence, Operation, Sampled, SetPages, Slice, Step, StepResult

__all__ = ["NO_STATE", "Events", "Scheduler", "StepPlan", "WrongResult"]

Events = list[tuple[str, Event]]
"""What to tell whom: (request id, event), in order."""


class Scheduler:
    """Requests in, step plans out."""

    def __init__(self, limits: EngineLimits, n_stages: int = 1) -> None:
        """``n_stages``: of the pipeline it plans for, until ``attach`` gives another number."""
        self.limits = limits
        self.n_stages = n_stages
        self.admitting = True  # False: queued requests stay queued, running ones go on
        self.starving = False  # the only running request lacks pages that pins or reservations hold
        self.n_preemptions = 0
        self.n_generated_tokens = 0
        self.last_applied = 0  # the last step whose result came
        self.pools = limits.make_pools()
        self.reuse = PrefixReuse(limits, self.pools)
        self.sequence_ids = PageAllocator(limits.max_sequences, "sequences")
        self._records: dict[str, RequestRecord] = {}
        self._shares = KeyShares(credit=4 * limits.prefill_chunk)
        self._queue = RequestQueue(self._shares)
        self.chunks = SharedChunks(n_stages, limits.prefill_chunk)
        self._waits = WaitEstimate()
        self._live: dict[int, RequestRecord] = {}
        self._operations: list[Operation] = []
        self._flushing = False  # operations that wait for a step get one of their own
        self.in_flight: deque[ScheduledStep] = deque()
        self._backlog = Backlog(n_stages)
        self._n_arrivals = 0
        self._last_step = 0

    # ---- what there is

    @property
    def n_queued(self) -> int:
        """Requests that hold nothing in the shards yet, or no more."""
        return len(self._queue)

    @property
    def n_running(self) -> int:
        """Requests that hold pages."""
        return len(self._live)

    @property
    def n_in_flight(self) -> int:
        """Steps planned and not yet applied."""
        return len(self.in_flight)

    @property
    def running(self) -> Collection[RequestRecord]:
        """Requests that hold pages."""
        return self._live.values()

    @property
    def queued(self) -> Iterable[RequestRecord]:
        """Requests that wait, in no order that matters."""
        return self._queue

    @property
    def unfinished(self) -> Collection[str]:
        """Ids of all requests that run or wait."""
        return self._records.keys()

    @property
    def idle(self) -> bool:
        """Whether no request is left and no step is on its way."""
        return not self._records and not self.in_flight

    def pages(self) -> dict[Space, PageUse]:
        """Return ids used and there are, of each space of the model."""
        return self.pools.use()

    def wait_s(self) -> float | None:
        """Return in how many seconds a request behind all others would start; None before enough was measured."""
        return self._waits.wait_s(self._live.values(), self._queue.in_turn(self._live.values()))

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
        """Queue a request.  Raises InvalidRequest or ContextOverflow when it can never be served.

        ``hold``: it does not start before ``resume``, and lets others pass.  ``probe``: it goes before all others, and
        starts there, in pages that the caller keeps until it is over.
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
        self._shares.enter(request.key_id)
        self._queue.add(record)

    def resume(self, request_id: str) -> None:
        """Let a request start that was held.  Does nothing when it is over already."""
        record = self._records.get(request_id)
        if record is not None:
            record.prefix.held = False
            self.reuse.resize(record)
            self._queue.resized()

    def cancel(self, request_id: str, now: float) -> Events:
        """End a request; its ids are free when this returns.  Does nothing when it is over already."""
        record = self._records.get(request_id)
        return [] if record is None else [self._finish(record, "cancelled", now)]

    def fail_all(self, error: RequestError, now: float) -> Events:
        """The shards lost their sequences: end the running requests with ``error``; queued ones stay.

        A preempted request counts as queued: all its tokens are here, so it goes on when the shards are back.
        """
        self.reuse.index.clear()
        ending = [*self._live.values(), *(record for record in self._queue if record.probe is not None)]
        events = [self._finish(record, "error", now, error=error) for record in ending]
        self.in_flight.clear()
        self._backlog.clear()
        self._waits.stopped()
        self.last_applied = self._last_step  # nobody will answer what was on its way
        self._operations.clear()  # the shards start empty
        self._flushing = False
        for record in self._queue:
            record.n_in_flight = 0
        return events

    def fail_queued(self, error: RequestError, now: float) -> Events:
        """End the queued requests with ``error``."""
        return [self._finish(record, "error", now, error=error) for record in list(self._queue)]

    def end_probes(self, now: float) -> Events:
        """End the probes that wait: what their pages keep from the only running request comes back."""
        self.starving = False
        return [self._finish(record, "cancelled", now) for record in [*self._queue] if record.probe is not None]

    # ---- steps

    def attach(self, n_stages: int) -> None:
        """Plan for a pipeline of ``n_stages`` stages that holds no sequences; queued requests may start."""
        if n_stages != self.n_stages:
            self.n_stages = n_stages
            self.chunks = SharedChunks(n_stages, self.limits.prefill_chunk)
            self._backlog = Backlog(n_stages)
        self.admitting = True

    def next_plan(self, now: float) -> StepPlan | None:
        """Return the next step for the pipeline, or None when there is none until a result or a request comes."""
        if len(self.in_flight) >= arena_regions(self.n_stages):
            return None
        self._admit(now)
        room = self._room(now)
        while picks := choose(self._live.values(), self.in_flight, self.limits, room):
            # Securing pages may preempt every pick while older requests are in flight: choose again.
            n_preemptions = self.n_preemptions
            if secured := self._secure(picks):
                return self._plan(secured, now)
            if n_preemptions == self.n_preemptions:
                break
        return self._plan([], now) if self._flushing else None

    def flush(self) -> int:
        """Let operations that wait for a step go with the next plan, whatever it carries.

        Returns the step after whose result every stage has done all that was decided up to now.
        """
        self._flushing = bool(self._operations)
        return self._last_step + self._flushing

    def first_stage_done(self, now: float) -> bool:
        """The head is done with the oldest step it had; return whether there are prompts, which may wait for that."""
        self._backlog.first_stage_done(now)
        return any(record.state is RequestState.PREFILL for record in self._live.values())

    def apply(self, result: StepResult, now: float) -> Events:
        """Take the tail's result of the oldest step in flight.  Raises WrongResult, and changes nothing, when it does
        not fit it.

        Each sampling slice gets a token, and one more for each draft that was accepted; those behind the end of a
        request and those of a request that ended meanwhile are dropped.
        """
        drawn = drawn_tokens(self.in_flight[0] if self.in_flight else None, result)
        scheduled = self.in_flight.popleft()
        self._backlog.answered(now)
        self._waits.applied(scheduled, self._live.values(), now, idle=not self.in_flight)
        self.last_applied = scheduled.step_id
        events: Events = []
        for sequence, part in scheduled.parts.items():
            part.record.n_in_flight -= 1
            events += self._take(part, drawn.get(sequence, []), now)
        return events

    def propose(self, request_id: str, drafts: Sequence[int]) -> None:
        """Let the next slice of a decoding request verify ``drafts``, the tokens that are expected to come next.

        Those beyond the request's last token are dropped.  Does nothing for a request that is over, that has no token
        yet, or whose newest token is under way.  Raises ValueError for a model with recurrent layers, whose state
        cannot be rolled back.
        """
        if Space.RECURRENT in self.pools:
            raise ValueError("drafts cannot be verified: the state of recurrent layers cannot be rolled back")
        record = self._records.get(request_id)
        if record is None or record.live is None or record.state is not RequestState.DECODE:
            return
        if record.live.n_scheduled < len(record.tokens):
            record.live.drafts = list(drafts[: record.max_tokens - record.n_generated - 1])

    # ---- inside: admission and choice

    def _room(self, now: float) -> StepBudget:
        whole = self.limits.prefill_chunk
        shared = self.chunks.expects_short(now) or has_others(self._live.values(), self.chunks.most_short)
        follow = partial(self.chunks.may_follow, self._backlog, now)
        # Keys closer together than a chunk count as equal: the shortest prompt goes first.
        n_stages, step_id = self.n_stages, self._last_step + 1
        return StepBudget(step_id, n_stages, self.chunks, shared, follow, lambda key: self._shares.lead(key) // whole)

    def _admit(self, now: float) -> None:
        n_free = self.limits.max_sequences - len(self._live)
        waiting = deque(self._queue.in_turn(self._live.values()) if n_free else ())
        while waiting:
            record = waiting.popleft()
            # A preempted request whose last token is still under way waits for it: the token is not drawn twice.
            admitting = (self.admitting or record.probe is not None) and not record.n_in_flight
            if not admitting or len(self._live) >= self.limits.max_sequences:
                return
            if self.reuse.must_wait(record, self._live.values()):
                continue
            match = self.reuse.match(record)
            # What it would share may be all there is to give up for the rest of it: then it starts without.
            if not self._start(record, match, now) and (
                record.probe is not None or not match.position or not self._start(record, NO_MATCH, now)
            ):
                return
            if self._shares.contested:  # its prompt is promised to its key now
                waiting = deque(self._queue.sorted(waiting, self._live.values()))

    def _start(self, record: RequestRecord, match: PrefixMatch, now: float) -> bool:
        """Start a queued request with what is remembered of it; False when there is no room for it yet."""
        if not self._fits(record, match):
            return False
        [sequence] = self.sequence_ids.allocate(1) or [NO_STATE]
        opened = self.reuse.open(record, sequence, match)
        if opened is None:
            self.sequence_ids.release([sequence])
            return False
        record.live, operations = opened
        self._operations += operations
        self._queue.start(record)
        record.move(RequestState.PREFILL)
        if record.started_at is None:
            record.started_at = now
        record.live.n_prefill = len(record.tokens) - record.live.n_computed
        record.live.last_step = self._last_step
        if record.probe is None:
            self.chunks.started(record.live.n_prefill, now)
        self._live[sequence] = record
        self.reuse.started(record, match, now)
        return True

    def _fits(self, record: RequestRecord, match: PrefixMatch) -> bool:
        needs = self.limits.pages_needed(len(record.tokens))
        if Space.FULL in needs:
            needs[Space.FULL] -= len(match.full)
        for other in self._live.values():
            for space, n in self.limits.pages_needed(len(other.tokens)).items():
                held = 0 if other.live is None else len(other.live.table.held(space))
                needs[space] += max(0, n - held) + 1  # promised to it, and one to grow by
        if Space.RECURRENT in self.pools:
            needs[Space.RECURRENT] = 1
        return self.reuse.index.can_reclaim(needs, {Space.FULL: match.full, Space.WINDOW: match.window})

    # ---- inside: pages and plans

    def _secure(self, picks: list[ScheduledSlice]) -> list[ScheduledSlice]:
        """Give every pick its pages, oldest request first; when there are none, slots give theirs, then the youngest
        request.
        """
        secured = []
        for pick in sorted(picks, key=lambda pick: pick.record.arrival):
            while pick.record.live is pick.live:  # not preempted for an older one, nor for itself
                growths = pick.live.table.grow(pick.live.n_scheduled, pick.stop)
                if growths is not None:
                    self._operations += [SetPages(pick.live.sequence, g.space, g.first, g.pages) for g in growths]
                    secured.append(pick)
                    break
                if self.reuse.index.reclaim(pick.live.table.missing(pick.stop)):
                    continue
                if len(self._live) == 1 and self.reuse.index.pinning:
                    self.starving = True
                    break  # a snapshot is being written or read: its pages come back by themselves
                self._preempt(max(self._live.values(), key=lambda record: record.arrival))
        return secured

    def _preempt(self, record: RequestRecord) -> None:
        self._close(record)
        record.move(RequestState.QUEUED)
        self._queue.add(record)
        self.n_preemptions += 1

    def _plan(self, picks: list[ScheduledSlice], now: float) -> StepPlan:
        self._last_step += 1
        slices = []
        for pick in picks:
            live, start, n_tokens = pick.live, pick.live.n_scheduled, len(pick.record.tokens)
            n_drafts = max(0, pick.stop - n_tokens)
            tokens = pick.record.tokens[start : pick.stop] + live.drafts[:n_drafts]
            slices.append(Slice(live.sequence, start, tokens, sample=pick.stop >= n_tokens, n_drafts=n_drafts))
            live.drafts = []
            live.n_computed, live.n_scheduled = pick.stop - n_drafts, pick.stop
            pick.live.last_step = self._last_step
            pick.record.n_in_flight += 1
        self._shares.charge((p.record.request.key_id, len(s.tokens)) for p, s in zip(picks, slices, strict=True))
        self.chunks.charge((p.n_prefill, s) for p, s in zip(picks, slices, strict=True))
        wanted = picks[0].record.wanted if picks else None
        step = Step(
            step_id=self._last_step,
            region=self._last_step % arena_regions(self.n_stages),
            operations=self._operations,
            slices=slices,
            want_logits=wanted is not None,
            want_hidden=wanted is not None and wanted.hidden,
        )
        self._operations = []
        self._flushing = False
        for pick in picks:  # on the next step: the states are those behind this one's slices
            self._operations += self.reuse.advanced(pick.record, now)
        parts = {
            s.sequence: ScheduledSequence(pick.record, pick.live, s) for pick, s in zip(picks, slices, strict=True)
        }
        decodes = any(pick.record.state is RequestState.DECODE for pick in picks)
        self._waits.planned(now)
        self.in_flight.append(ScheduledStep(step.step_id, parts, decodes))
        self._backlog.sent(self.chunks.step_s(slices), now)
        return StepPlan(step, tuple(pick.record.request.request_id for pick in picks))

    # ---- inside: results and ends

    def _take(self, part: ScheduledSequence, drawn: Sequence[Sampled], now: float) -> Events:
        """Take the tokens drawn for a slice: all but the last are drafts, whose computation stands."""
        record, live = part.record, part.live
        events: Events = []
        for i, sampled in enumerate(drawn):
            if record.ended:
                break
            live.n_computed += i + 1 < len(drawn)
            events += self._accept(record, sampled, now)
        if part.slice.n_drafts:
            live.n_scheduled = live.n_computed
        return events

    def _accept(self, record: RequestRecord, sampled: Sampled, now: float) -> Events:
        request = record.request
        record.tokens.append(sampled.token)
        self.n_generated_tokens += not record.uncached
        if record.first_token_at is None:
            record.first_token_at = now
        if record.state is RequestState.PREFILL:
            record.move(RequestState.DECODE)
        if sampled.token in request.stop_ids:
            return [self._finish(record, "stop", now, stop_id=sampled.token)]
        events: Events = [(request.request_id, TokenEvent(sampled.token, sampled.logprob, tuple(sampled.top)))]
        if record.n_generated >= record.max_tokens:
            events.append(self._finish(record, "length", now))
        return events

    def _finish(
        self,
        record: RequestRecord,
        reason: Reason,
        now: float,
        *,
        error: RequestError | None = None,
        stop_id: int | None = None,
    ) -> tuple[str, Event]:
        if record.live is not None:
            if error is None:
                self._operations += self.reuse.ending(record, now)
            self._close(record)
        elif record.state is RequestState.QUEUED:
            self._queue.remove(record)
        ends = {"cancelled": RequestState.CANCELLED, "error": RequestState.FAILED}
        record.move(ends.get(reason, RequestState.FINISHED))
        self.reuse.ended(record)
        self._waits.finished(record, reason)
        self._shares.leave(record.request.key_id)
        del self._records[record.request.request_id]
        return record.request.request_id, record.finished_event(reason, now, error, stop_id)

    def _close(self, record: RequestRecord) -> None:
        """Take all that a record holds in the shards; what no slot holds is free at once, see the top of this file."""
        live = record.live
        if live is None:
            return
        live.table.release()
        if live.state != NO_STATE:
            self.pools[Space.RECURRENT].release([live.state])
        self.sequence_ids.release([live.sequence])
        del self._live[live.sequence]
        record.live = None
        self._operations.append(CloseSequence(live.sequence))
