"""Decides what the chain computes next: admission, chunked prefill, continuous batching, preemption.

Pure: requests and step results in, step plans and events out; ``now`` (seconds, monotonic) is an argument.  Knows no
sockets, no clock and no text.

How a step is filled.  Decodes first, so a long prompt never starves them; then prefill chunks, oldest request first, as
many as ``max_step_tokens`` allows.  Decoding sequences are dealt into as many micro-batches as there are stages, so
that every stage has one to work on; those that waited longest go first.  A prompt's chunks depend on no result and
follow each other down the chain; a decode waits for its previous token.  At most one step a stage and one more are in
flight, which is also the number of arena regions, so no region is written before its last reader is done.

Memory.  A request is admitted (in order of arrival) when the pages of all its known tokens are free, those promised to
running ones and one a running one set aside.  When pages run out nevertheless, the youngest request gives its own back
and returns to the front of the queue with the tokens it has; computed again they continue as before, since a draw
depends on seed, position and logits alone.

Why ids may be given away while steps are in flight: every stage executes steps in order, so a step planned later writes
later.  Operations that no step carries yet stay in one ordered list and ride on the next plan.  Nothing is lost while
they wait: page and state ids are the supervisor's, and a daemon keeps no more than a table for each of max_sequences.

Invariants: ids are owned by live sequences only; a live sequence has at most one undrawn token under way; a finished
request is in no list.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import (
    ContextOverflow,
    Event,
    GenerationRequest,
    InvalidRequest,
    Reason,
    RequestError,
    RequestState,
    TokenEvent,
)
from lucevisor.engine.sequence import LiveSequence, RequestRecord, Wanted
from lucevisor.memory.pages import PageAllocator, PageUse
from lucevisor.memory.tables import PageTable, most_window_pages, pages_of
from lucevisor.wire.messages import (
    CloseSequence,
    OpenSequence,
    Operation,
    Sampled,
    SetPages,
    Slice,
    Step,
    StepResult,
    ZeroState,
)
from lucevisor.wire.values import Space

NO_STATE = -1
"""``OpenSequence.state`` of a model without recurrent layers."""

Events = list[tuple[str, Event]]
"""What to tell whom: (request id, event), in order."""


class WrongResult(Exception):
    """A step result that does not answer the step it names: supervisor and daemons no longer agree on the state."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step to send, and whose slices it carries (``request_ids[i]`` owns ``step.slices[i]``)."""

    step: Step
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    record: RequestRecord
    slice: Slice


@dataclass(frozen=True, slots=True)
class _Flight:
    step_id: int
    parts: dict[int, _Part]  # by sequence id as it was when the step was planned
    decodes: bool


@dataclass(frozen=True, slots=True)
class _Pick:
    record: RequestRecord
    live: LiveSequence
    stop: int


class Scheduler:
    """Requests in, step plans out."""

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.admitting = True  # False: queued requests stay queued, running ones go on
        self.n_preemptions = 0
        self.n_generated_tokens = 0
        self._pools = limits.make_pools()
        self._sequences = PageAllocator(limits.max_sequences, "sequences")
        self._records: dict[str, RequestRecord] = {}
        self._queue: deque[RequestRecord] = deque()
        self._live: dict[int, RequestRecord] = {}
        self._operations: list[Operation] = []
        self._in_flight: deque[_Flight] = deque()
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
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        """Whether no request is left and no step is on its way."""
        return not self._records and not self._in_flight

    def pages(self) -> dict[Space, PageUse]:
        """Return ids used and there are, of each space of the model."""
        return self._pools.use()

    # ---- requests

    def submit(self, request: GenerationRequest, now: float, wanted: Wanted | None = None) -> None:
        """Queue a request.  Raises InvalidRequest or ContextOverflow when it can never be served."""
        if request.request_id in self._records:
            raise InvalidRequest(
                "request_id", f"{request.request_id!r} is in use by an unfinished request; choose another"
            )
        if not request.prompt:
            raise InvalidRequest("prompt", "is empty; give at least one token")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"is {request.max_tokens}; ask for at least 1 token")
        if wanted is not None and wanted.rows < 1:
            raise InvalidRequest("rows", f"is {wanted.rows}; a step needs at least 1")
        n_prompt, capacity = len(request.prompt), self.limits.capacity_tokens
        if n_prompt + 1 > capacity:
            raise ContextOverflow(n_prompt, self.limits.max_context, self.limits.page_tokens)
        max_tokens = min(request.max_tokens, capacity - n_prompt)
        record = RequestRecord(request, self._n_arrivals, max_tokens, now, wanted)
        self._n_arrivals += 1
        self._records[request.request_id] = record
        self._queue.append(record)

    def cancel(self, request_id: str, now: float) -> Events:
        """End a request; its ids are free when this returns.  Does nothing when it is over already."""
        record = self._records.get(request_id)
        return [] if record is None else [self._finish(record, "cancelled", now)]

    def fail_all(self, error: RequestError, now: float) -> Events:
        """The shards lost their sequences: end the running requests with ``error``; queued ones stay.

        A preempted request counts as queued: all its tokens are here, so it goes on when the shards are back.
        """
        events = [self._finish(record, "error", now, error=error) for record in list(self._live.values())]
        self._in_flight.clear()
        self._operations.clear()  # the shards start empty
        for record in self._queue:
            record.n_in_flight = 0
        return events

    def fail_queued(self, error: RequestError, now: float) -> Events:
        """End the queued requests with ``error``."""
        return [self._finish(record, "error", now, error=error) for record in list(self._queue)]

    # ---- steps

    def next_plan(self, now: float) -> StepPlan | None:
        """Return the next step to send down the chain, or None when there is none until a result or a request comes."""
        if len(self._in_flight) >= self.limits.n_regions:
            return None
        self._admit(now)
        while picks := self._choose():
            # Securing pages may preempt every pick while older requests are in flight: choose again.
            if secured := self._secure(picks):
                return self._plan(secured)
        return None

    def apply(self, result: StepResult, now: float) -> Events:
        """Take the tail's result of the oldest step in flight.  Raises WrongResult, and changes nothing, when it does
        not fit it.

        Each sampling slice gets one or more tokens (a verify step more than one); those behind the end of a request and
        those of a request that ended meanwhile are dropped.
        """
        drawn = self._check(result)
        flight = self._in_flight.popleft()
        events: Events = []
        for sequence, part in flight.parts.items():
            part.record.n_in_flight -= 1
            for sampled in drawn.get(sequence, ()):
                if part.record.ended:
                    break
                events += self._accept(part.record, sampled, now)
        return events

    # ---- inside: admission and choice

    def _admit(self, now: float) -> None:
        while self.admitting and self._queue and len(self._live) < self.limits.max_sequences:
            record = self._queue[0]
            # A preempted request whose last token is still under way waits for it: the token is not drawn twice.
            if record.n_in_flight or not self._fits(record):
                return
            self._queue.popleft()
            self._open(record, now)

    def _fits(self, record: RequestRecord) -> bool:
        needs = self._needs(record)
        for other in self._live.values():
            for space, n in self._needs(other).items():
                held = 0 if other.live is None else len(other.live.table.held(space))
                needs[space] += max(0, n - held) + 1  # promised to it, and one to grow by
        if Space.RECURRENT in self._pools:
            needs[Space.RECURRENT] = 1
        return self._pools.fits(needs)

    def _needs(self, record: RequestRecord) -> dict[Space, int]:
        """Pages of the paged spaces that the known tokens of a request take at once."""
        n_pages = pages_of(len(record.tokens))
        needs = {}
        if Space.FULL in self._pools:
            needs[Space.FULL] = n_pages
        if self.limits.window_tokens is not None:
            most = most_window_pages(self.limits.window_tokens, self.limits.prefill_chunk, self.limits.max_context)
            needs[Space.WINDOW] = min(n_pages, most)
        return needs

    def _open(self, record: RequestRecord, now: float) -> None:
        [sequence] = self._sequences.allocate(1) or [NO_STATE]
        state = NO_STATE
        if Space.RECURRENT in self._pools:
            [state] = self._pools[Space.RECURRENT].allocate(1) or [NO_STATE]
        record.move(RequestState.PREFILL)
        record.live = LiveSequence(sequence, state, PageTable(self._pools, self.limits.window_tokens))
        if record.started_at is None:
            record.started_at = now
        self._live[sequence] = record
        self._operations.append(OpenSequence(sequence, state, record.request.sampling))
        if state != NO_STATE:
            self._operations.append(ZeroState(state))

    def _choose(self) -> list[_Pick]:
        """Pick the slices of a step by age, waiting time and token budget; pages are secured afterwards."""
        ready = [
            _Pick(record, record.live, record.next_stop(record.live.n_planned, self.limits.prefill_chunk))
            for record in self._live.values()
            if record.live is not None and record.live.n_planned < len(record.tokens)
        ]
        decodes = [pick for pick in ready if pick.record.state is RequestState.DECODE]
        decodes.sort(key=lambda pick: (pick.live.last_step, pick.record.arrival))
        chunks = [pick for pick in ready if pick.record.state is RequestState.PREFILL]
        chunks.sort(key=lambda pick: pick.record.arrival)
        budget = self.limits.max_step_tokens
        picks: list[_Pick] = []
        for pick in decodes[: self._n_decodes()] + chunks:
            n_tokens = pick.stop - pick.live.n_planned
            if n_tokens > budget or (pick.record.wanted is not None and picks):
                continue
            picks.append(pick)
            budget -= n_tokens
            if pick.record.wanted is not None:
                break  # its rows come back as payload: nobody else's rows among them
        return picks

    def _n_decodes(self) -> int:
        """Return how many sequences make one micro-batch; 0 while every stage has one."""
        if sum(flight.decodes for flight in self._in_flight) >= self.limits.n_stages:
            return 0
        n_decoding = sum(record.state is RequestState.DECODE for record in self._live.values())
        return -(-n_decoding // self.limits.n_stages)

    # ---- inside: pages and plans

    def _secure(self, picks: list[_Pick]) -> list[_Pick]:
        """Give every pick its pages, oldest request first; preempt the youngest when there are none."""
        secured = []
        for pick in sorted(picks, key=lambda pick: pick.record.arrival):
            while pick.record.live is pick.live:  # not preempted for an older one, nor for itself
                growths = pick.live.table.grow(pick.live.n_planned, pick.stop)
                if growths is not None:
                    self._operations += [SetPages(pick.live.sequence, g.space, g.first, g.pages) for g in growths]
                    secured.append(pick)
                    break
                self._preempt(max(self._live.values(), key=lambda record: record.arrival))
        return secured

    def _preempt(self, record: RequestRecord) -> None:
        self._close(record)
        record.move(RequestState.QUEUED)
        self._queue.appendleft(record)
        self.n_preemptions += 1

    def _plan(self, picks: list[_Pick]) -> StepPlan:
        self._last_step += 1
        slices = []
        for pick in picks:
            start, tokens = pick.live.n_planned, pick.record.tokens
            slices.append(Slice(pick.live.sequence, start, tokens[start : pick.stop], sample=pick.stop == len(tokens)))
            pick.live.n_planned = pick.stop
            pick.live.last_step = self._last_step
            pick.record.n_in_flight += 1
        wanted = picks[0].record.wanted
        step = Step(
            step_id=self._last_step,
            region=self._last_step % self.limits.n_regions,
            operations=self._operations,
            slices=slices,
            want_logits=wanted is not None,
            want_hidden=wanted is not None and wanted.hidden,
        )
        self._operations = []
        parts = {s.sequence: _Part(pick.record, s) for pick, s in zip(picks, slices, strict=True)}
        decodes = any(pick.record.state is RequestState.DECODE for pick in picks)
        self._in_flight.append(_Flight(step.step_id, parts, decodes))
        return StepPlan(step, tuple(pick.record.request.request_id for pick in picks))

    # ---- inside: results and ends

    def _check(self, result: StepResult) -> dict[int, list[Sampled]]:
        """Return the drawn tokens by sequence id, when they are those the step asked for."""
        if not self._in_flight or self._in_flight[0].step_id != result.step_id:
            expected = self._in_flight[0].step_id if self._in_flight else "none"
            raise WrongResult(f"a result of step {result.step_id} came; the oldest step in flight is {expected}")
        parts = self._in_flight[0].parts
        drawn: dict[int, list[Sampled]] = {}
        for sampled in result.sampled:
            drawn.setdefault(sampled.sequence, []).append(sampled)
        asked = {sequence for sequence, part in parts.items() if part.slice.sample}
        if asked != drawn.keys():
            raise WrongResult(
                f"step {result.step_id} asked for tokens of sequences {sorted(asked)}, the result has {sorted(drawn)}"
            )
        return drawn

    def _accept(self, record: RequestRecord, sampled: Sampled, now: float) -> Events:
        request = record.request
        record.tokens.append(sampled.token)
        self.n_generated_tokens += 1
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
            self._close(record)
        elif record.state is RequestState.QUEUED:
            self._queue.remove(record)
        ends = {"cancelled": RequestState.CANCELLED, "error": RequestState.FAILED}
        record.move(ends.get(reason, RequestState.FINISHED))
        del self._records[record.request.request_id]
        return record.request.request_id, record.finished_event(reason, now, error, stop_id)

    def _close(self, record: RequestRecord) -> None:
        """Take everything a record holds in the shards; the ids are free at once, see the top of this file."""
        live = record.live
        if live is None:
            return
        live.table.release()
        if live.state != NO_STATE:
            self._pools[Space.RECURRENT].release([live.state])
        self._sequences.release([live.sequence])
        del self._live[live.sequence]
        record.live = None
        self._operations.append(CloseSequence(live.sequence))
