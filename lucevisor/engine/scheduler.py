"""The scheduler: waiting queue, admission, continuous batching, chunked prefill and preemption (docs/scheduling.md).

Pure: requests and step results in, step plans and events out; ``now`` (seconds, monotonic) is an argument. Ids may be
reused while steps are in flight, because every stage runs its steps in order. Invariants: only running requests, prefix
slots and reservations own ids; a sequence has at most one undrawn token in flight; a finished request is in no list."""

from __future__ import annotations

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from lucevisor.engine.drafting import Drafting, with_same_draft_step
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.pipeline import NO_PAYLOAD
from lucevisor.engine.policy import FairShare
from lucevisor.engine.prefix_reuse import NO_MATCH, PrefixReuse
from lucevisor.engine.request import (
    ContextOverflow,
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
from lucevisor.engine.running_requests import RunningRequests
from lucevisor.engine.sequence import RequestRecord, WantedRows
from lucevisor.engine.step import (
    ScheduledSequence,
    ScheduledSlice,
    ScheduledStep,
    StepPlan,
    drawn_tokens,
    embeddings_of,
    is_plain,
    mask_jobs,
)
from lucevisor.kv.page_table import HostMemoryFull
from lucevisor.kv.prefix_cache import PrefixMatch
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.loading import arena_regions
from lucevisor.protocol.steps import Operation, Sampled, Step, StepResult


class RequestQueue:
    """The waiting queue.  Iteration has no particular order; ``in_order`` has that of the policy."""

    def __init__(self, policy: FairShare) -> None:
        self._policy = policy
        self._waiting: dict[RequestRecord, None] = {}
        self._order: list[RequestRecord] | None = None  # as long as it holds
        self._n_waiting: Counter[str] = Counter()  # by client, without preempted requests

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._waiting)

    def add(self, record: RequestRecord) -> None:
        self._waiting[record] = None
        self._order = None
        if record.started_at is None:
            self._n_waiting[record.request.client_id] += 1

    def remove(self, record: RequestRecord) -> None:
        del self._waiting[record]
        self._order = None
        client = record.request.client_id
        if record.started_at is None:
            self._n_waiting[client] -= 1
            if not self._n_waiting[client]:
                del self._n_waiting[client]

    def start(self, record: RequestRecord) -> None:
        self.remove(record)
        if record.started_at is None:
            self._policy.on_started(record, self._waiting)

    def invalidate_order(self) -> None:
        """Sort again, because the size or the priority of a waiting request changed."""
        self._order = None

    def n_waiting(self, client: str) -> int:
        """Return how many requests of a client wait for their first start."""
        return self._n_waiting[client]

    def n_clients(self, client: str) -> int:
        return len(self._n_waiting) + (client not in self._n_waiting)

    def n_before(self, client: str) -> int:
        """Return how many requests start before a further one of ``client``: its own, and as many of each other."""
        return sum(min(n, self._n_waiting[client]) for n in self._n_waiting.values())

    def in_order(self, running: Iterable[RequestRecord]) -> list[RequestRecord]:
        """Return the waiting requests, next first."""
        if self._order is None or not self._policy.order_is_stable:
            self._order = self._policy.waiting_order(self._waiting, running)
        return self._order


class Admission:
    """Starts requests of the queue, of which the first one that does not fit holds up those behind it, and preempts
    running ones, which continue from a prefix slot of what they have computed.
    """

    def __init__(self, running: RunningRequests, queue: RequestQueue, reuse: PrefixReuse, policy: FairShare) -> None:
        self._running, self._queue, self._reuse, self._policy = running, queue, reuse, policy
        self.open = True  # False: no request starts
        self.n_preempted = 0

    def admit(self, now: float, last_step: int) -> list[Operation]:
        """Start all requests there is room for, and those for which others give way; return the operations."""
        operations = self._admit(now, last_step)
        while self.open and len(self._queue):
            place = self.next_preemption(self._queue.in_order(self._running))
            if place is None:
                break
            record, victim = place
            operations += self.preempt(victim, now)
            record.has_priority = True
            self._queue.invalidate_order()
            operations += self._admit(now, last_step)
        return operations

    def _admit(self, now: float, last_step: int) -> list[Operation]:
        operations: list[Operation] = []
        waiting = deque(() if self._running.full else self._queue.in_order(self._running))
        while waiting:
            record = waiting.popleft()
            # A preempted request waits for its token in flight, which must not be drawn twice.
            if not self.open or record.n_in_flight or self._running.full:
                break
            if self._reuse.must_wait(record, self._running):
                continue
            match = self._reuse.match(record)
            if self._running.fits(record, match) and self._reuse.fetch(record, match):
                continue
            opened = self._start(record, match, now, last_step)
            if opened is None and match.position:
                # The slot it would share may be the only one to evict for the rest of it: then start without.
                opened = self._start(record, NO_MATCH, now, last_step)
            if opened is None:
                break
            operations += opened
            if not self._policy.order_is_stable:  # its prompt now counts for its client
                waiting = deque(self._policy.waiting_order(waiting, self._running))
        return operations

    def _start(self, record: RequestRecord, match: PrefixMatch, now: float, last_step: int) -> list[Operation] | None:
        """Start a queued request with what is cached of it; None while there is no room for it."""
        operations = self._running.open(record, match)
        if operations is None or record.live is None:
            return None
        self._queue.start(record)
        record.has_priority = False
        record.move(RequestState.PREFILL)
        if record.started_at is None:
            record.started_at = now
        record.live.n_prefill = len(record.tokens) - record.live.n_computed
        record.live.last_step = last_step
        self._reuse.on_started(record, match, now)
        return operations

    @property
    def pages_pending(self) -> bool:
        """True if pages will be free once slots are copied to host memory, so that no other request is preempted."""
        return self._reuse.index.evicting

    def next_preemption(self, waiting: Iterable[RequestRecord]) -> tuple[RequestRecord, RequestRecord] | None:
        """Return the first waiting request that may start in the place of a running one, and that one."""
        candidates = self._policy.victims(self._running)
        for record in waiting:
            if record.has_priority and self.pages_pending:
                return None
            victim = None if record.n_in_flight else candidates.victim(record)
            if victim is not None and not self._reuse.must_wait(record, self._running):
                return record, victim
            if record.has_priority:
                return None
        return None

    def preempt(self, record: RequestRecord, now: float) -> list[Operation]:
        """Leave what a running request has computed to a prefix slot, and requeue it."""
        operations = self._reuse.publish_preempted(record, now)
        if record.live is not None:
            record.n_computed_before = max(record.n_computed_before, record.live.n_computed)
        self.n_preempted += 1
        return operations + self.requeue(record)

    def requeue(self, record: RequestRecord) -> list[Operation]:
        """Return a running request to the queue, without what it holds in the shards."""
        operations = self._running.close(record)
        record.move(RequestState.QUEUED)
        record.prefix.fetched = None
        self._queue.add(record)
        return operations


def has_rows(record: RequestRecord) -> bool:
    """Return whether a request has tokens that no step computes yet."""
    return record.live is not None and record.live.n_scheduled < record.n_tokens


Events = list[tuple[str, Event]]
"""(request id, event) pairs, in order."""


class Scheduler:
    """``n_stages``: of the pipeline, until ``attach`` gives another number."""

    def __init__(self, limits: EngineLimits, n_stages: int = 1, policy: type[FairShare] = FairShare) -> None:
        self.limits = limits
        self.n_stages = n_stages
        self.runs_ahead = n_stages == 1  # decodes may be planned before their tokens are known
        self.failed: Events = []  # events of requests that ended while a step was planned
        self.n_generated_tokens = 0
        self.longest_pause_s = 0.0  # from a loss to the next token of a request
        self.last_applied = 0  # the last step whose result was applied
        self.pools = limits.make_pools()
        self.reuse = PrefixReuse(limits, self.pools)
        self.running = RunningRequests(limits, self.pools, self.reuse)
        self.drafting = Drafting(limits, self.pools, self.running, n_stages)
        self._records: dict[str, RequestRecord] = {}
        self._policy = policy(limits)
        self.queue = RequestQueue(self._policy)
        self.admission = Admission(self.running, self.queue, self.reuse, self._policy)
        self._operations: list[Operation] = []
        self._flushing = False  # send waiting operations with a step of their own if need be
        self.in_flight: deque[ScheduledStep] = deque()
        self._n_at_first_stage = 0  # steps that it has not answered
        self._service_s = 0.0  # mean time from start to end of a request; 0: none ended
        self._n_arrivals = 0
        self._last_step = 0

    # ---- requests

    def submit(
        self,
        request: GenerationRequest,
        now: float,
        wanted: WantedRows | None = None,
    ) -> None:
        """Queue a request.  Raises InvalidRequest or ContextOverflow if it can never be served."""
        self._check_id(request)
        if wanted is not None and wanted.rows < 1:
            raise InvalidRequest("rows", f"is {wanted.rows}; a step needs at least 1")
        self._add(RequestRecord(request, self._n_arrivals, self.limits.max_answer_tokens(request), now, wanted))

    def _check_id(self, request: GenerationRequest) -> None:
        if request.request_id in self._records:
            raise InvalidRequest(
                "request_id", f"{request.request_id!r} is in use by an unfinished request; choose another"
            )

    def _add(self, record: RequestRecord) -> None:
        self._n_arrivals += 1
        self.reuse.on_submitted(record)
        self._records[record.request.request_id] = record
        self._policy.on_submitted(record.request.client_id)
        self.queue.add(record)

    def accepts(self, request: GenerationRequest, max_queue: int) -> bool:
        """Return whether a request may wait."""
        client, queue = request.client_id, self.queue
        return self._policy.accepts(request, queue.n_waiting(client), queue.n_clients(client), max_queue)

    def resume(self, request_id: str) -> None:
        """Let a request start that waited for a lower tier.  Does nothing if it is over already."""
        record = self._records.get(request_id)
        if record is not None:
            record.prefix.held = False
            self.reuse.resize(record)
            self.queue.invalidate_order()

    def cancel(self, request_id: str, now: float, error: RequestError | None = None) -> Events:
        """End a request, as failed if there is an ``error``, unless it is over already."""
        record = self._records.get(request_id)
        return [] if record is None else [self._finish(record, "error" if error else "cancelled", now, error=error)]

    def release(self, *, running: bool = False) -> list[RequestRecord]:
        """Give up the requests that wait, in their order, for another scheduler; ``running``: all, as no step is in
        flight. Those whose rows are wanted stay, as do those of which a token is on its way."""
        for record in [record for record in self.running if running and record.wanted is None]:
            self._operations += self.admission.requeue(record)
        released = sorted(self.queue, key=lambda record: (not record.has_priority, record.arrival))
        released = [record for record in released if record.wanted is None and not record.n_in_flight]
        for record in released:
            self.queue.remove(record)
            self._policy.on_finished(record.request.client_id)
            del self._records[record.request.request_id]
        return released

    def adopt(self, record: RequestRecord) -> None:
        """Queue a request that another scheduler has released. Raises InvalidRequest or ContextOverflow, changing
        nothing."""
        self._check_id(record.request)
        max_tokens = min(record.max_tokens, self.limits.max_answer_tokens(record.request))
        if max_tokens <= record.n_generated and not record.request.pooled:
            raise ContextOverflow(len(record.tokens), self.limits.max_context, self.limits.max_paged_tokens)
        record.move_to(self._n_arrivals, max_tokens)
        self._add(record)

    def lose_all(self, error: RequestError, now: float, keep: Callable[[RequestRecord], bool]) -> Events:
        """Requeue the running requests to ``keep``, as the shards lost all sequences; end the others with ``error``."""
        self.reuse.index.clear()
        for record in [record for record in self.running if keep(record)]:
            record.has_priority = True
            self._operations += self.admission.requeue(record)
        events = self.fail(self.running, error, now)
        self.drafting.detach()  # it goes with the pipeline
        self.in_flight.clear()
        self._n_at_first_stage = 0
        self.last_applied = self._last_step  # what was in flight is never answered
        self._operations.clear()  # the shards start empty
        self._flushing = False
        for record in self.queue:
            record.n_in_flight = 0
        return events

    def fail(self, records: Iterable[RequestRecord], error: RequestError, now: float) -> Events:
        return [self._finish(record, "error", now, error=error) for record in [*records]]

    # ---- steps

    def attach(
        self, n_stages: int, reopen_operations: Sequence[Operation] = (), *, has_doorbells: bool = False
    ) -> None:
        """Plan for a fresh pipeline; queued requests may start. ``reopen_operations`` go first. ``has_doorbells``: the
        last stage publishes tokens and drafts to the first one in shared memory."""
        self._operations[:0] = reopen_operations
        self.runs_ahead = has_doorbells or n_stages == 1
        self.drafting.n_stages, self.drafting.has_token_ring = n_stages, self.runs_ahead
        self.n_stages, self._n_at_first_stage = n_stages, 0
        self.admission.open = True

    def attach_drafter(self, *, with_output: bool, restored: bool = False) -> None:
        """Ask a drafter from the next step on, fresh or with ``restored`` state; see events.DrafterReady."""
        must_open = bool(self.running or self._operations)
        self.drafting.attach(with_output=with_output, must_open_sequences=must_open, restored=restored)

    def detach_drafter(self) -> None:
        self.drafting.detach()

    def next_plan(self, now: float) -> StepPlan | None:
        """Return the next step for the pipeline, or None if there is none until a result or a request comes."""
        n_unfinished = self._last_step - self.last_finished
        if len(self.in_flight) >= arena_regions(self.n_stages) or n_unfinished >= self.limits.n_regions(self.n_stages):
            return None
        if len(self.in_flight) > self.n_stages and not self.runs_ahead:
            return None
        if self.drafting.toggle_due() and (plan := self._toggle_drafter(now)) is not None:
            return plan
        if self.drafting.must_open_sequences:
            return self.flush_step(now)
        self._operations += self.running.free_extent()
        self._operations += self.admission.admit(now, self._last_step)  # none runs ahead beside a prompt
        while chosen := self.choose_slices(now):
            n_stopped = self._n_stopped
            if with_pages := self._allocate_pages(chosen, now):
                for i, slice_ in enumerate(with_pages if self.limits.speculation.max_drafts else ()):
                    with_pages[i], operations = self.drafting.fit(slice_)
                    self._operations += operations
                return self._plan(with_pages, now)
            if self._n_stopped == n_stopped:  # else all that were chosen are gone: choose again
                break
        return self.flush_step(now) if self._flushing else None

    @property
    def _n_stopped(self) -> int:
        """Requests that a lack of pages preempted or ended."""
        return self.admission.n_preempted + len(self.failed)

    def _toggle_drafter(self, now: float) -> StepPlan | None:
        """Suspend the drafter, with a step that closes its sequences, or resume it."""
        if self.drafting.suspended:
            self.drafting.resume(must_open_sequences=bool(self.running or self._operations))
            return None
        plan = self._plan([], now)  # planned before it is suspended: the drafter answers it
        return replace(plan, draft_operations=self.drafting.suspend(plan.step.operations))

    def flush_step(self, now: float) -> StepPlan | None:
        """Return a step without slices that carries all waiting operations, or None if there are none."""
        if self.drafting.must_open_sequences:  # what waits for a step was planned before; the drafter gets its outcome
            return replace(self._plan([], now), draft_operations=self.drafting.open_running())
        return self._plan([], now) if self._operations else None

    def flush(self) -> int:
        """Send waiting operations with the next plan, even without a slice; return the step after which every stage has
        done all that was decided up to now."""
        self._flushing = bool(self._operations)
        return self._last_step + self._flushing

    def on_first_stage_done(self) -> bool:
        """Record that the first stage finished its oldest step; return whether prompts may have waited for that."""
        self._n_at_first_stage = max(0, self._n_at_first_stage - 1)
        return RequestState.PREFILL in self.running.states

    def apply(
        self,
        result: StepResult,
        now: float,
        blamed: str = "the output stage",
        results: Sequence[StepResult] = (),
        payload: memoryview = NO_PAYLOAD,
    ) -> Events:
        """Apply the last stage's result of the oldest step in flight; ``results``: of all stages, for their times;
        ``blamed``: the stage whose numbers are invalid. Raises WrongResult, changing nothing, if it does not answer
        that step."""
        drawn = drawn_tokens(self.in_flight[0] if self.in_flight else None, result)
        pooled = self.in_flight[0].pooled(result, payload)
        self.in_flight[0].take_prompt_logprobs(result.prompt_logprobs)
        stages_s = [stage.compute_s for stage in results or [result]]
        cold = any(stage.cold for stage in results or [result])
        scheduled = self.in_flight.popleft()
        self._n_at_first_stage = min(self._n_at_first_stage, len(self.in_flight))
        self.last_applied = scheduled.step_id
        events: Events = []
        for sequence, part in scheduled.parts.items():
            part.record.n_in_flight -= 1
            if sequence in result.invalid:
                if not part.record.ended:
                    self.reuse.drop_slots(part.record)
                    events.append(self._finish(part.record, "error", now, error=invalid_logits(blamed)))
            elif tokens := drawn.get(sequence):
                self._append_tokens(events, part, tokens, now)
            elif sequence in pooled and not part.record.ended:
                part.record.first_token_at = now
                events.append(self._finish(part.record, "stop", now, pooled=pooled[sequence]))
        self.drafting.on_step_applied(scheduled, now, sum(stages_s), result.upkeep_s, cold=cold)
        return events

    # ---- inside: choice of slices

    def choose_slices(self, now: float) -> list[ScheduledSlice]:
        """Choose the slices of a step within its token budget: decodes first, longest waiting first, then prompts, as
        the policy orders them. Pages are allocated afterwards."""
        records = list(self.running)
        if any(step.num_draft_tokens for step in self.in_flight) and not any(has_rows(record) for record in records):
            return []  # all wait for results, and drafts are never run ahead of
        if len(self.in_flight) > self.n_stages:
            return self.choose_ahead(records)
        decodes, prompts, placeholders = [], [], self.drafting.verifies_placeholders
        for record in records:
            if record.live is not None and has_rows(record) and not record.live.ranking:
                if record.state is RequestState.PREFILL:
                    prompts.append(record)
                elif placeholders or not record.live.waiting_for_step:
                    decodes.append(ScheduledSlice(record, record.live, record.n_tokens))
        n_left = self.limits.max_step_tokens
        if prompts:
            busy = self._n_at_first_stage > 0 or len(self.in_flight) >= self.n_stages
            share = self._policy.share_step(prompts, records, self._last_step, now, busy=busy)
            prompts, n_left = [*share.prompts], share.prefill_tokens
            if not share.decodes:
                decodes.clear()
        decodes.sort(key=lambda slice_: (slice_.live.last_step, slice_.record.arrival))
        if self.n_stages > 1:
            decodes = with_same_draft_step(decodes)
        chosen = self.drafting.with_drafts(decodes[: self._n_decodes(records)])
        room = self.limits.max_step_tokens - sum(slice_.n_tokens for slice_ in chosen)
        chosen += self._choose_prompts(prompts, min(n_left, room), room, alone=not chosen)
        return chosen or self.choose_ahead(records)

    def _choose_prompts(
        self, prompts: Iterable[RequestRecord], n_left: int, room: int, *, alone: bool
    ) -> list[ScheduledSlice]:
        """Choose slices of prompts, in order: ``n_left`` tokens at most, ``room`` where an image takes more."""
        chosen: list[ScheduledSlice] = []
        for record in prompts:
            if record.wanted is not None and (chosen or not alone):
                continue  # its rows are the step's payload, so no other request may be in it
            if (chunk := self._prompt_chunk(record, n_left, room)) is None:
                continue
            chosen.append(chunk)
            n_left -= chunk.n_tokens
            room -= chunk.n_tokens
            if record.wanted is not None:
                break
        return chosen

    def _prompt_chunk(self, record: RequestRecord, n_left: int, room: int) -> ScheduledSlice | None:
        """Return the next slice of a prompt, cut at a page if it has more than ``n_left`` tokens; where no image may be
        cut, it may have up to ``room``."""
        assert record.live is not None
        start = record.live.n_scheduled
        stop = record.next_stop(start, self.limits.prefill_chunk)
        if self.limits.ranks_prompt(len(record.tokens)) and start < len(record.tokens) - 1:
            stop = min(stop, len(record.tokens) - 1)  # the last token sees what those before it chose
        if self.limits.whole_texts and stop - start > n_left:
            return None
        if stop - start > n_left and record.wanted is None:  # its slices are limited by rows
            stop = (start + n_left) // PAGE_TOKENS * PAGE_TOKENS
        if self.limits.whole_images and record.request.images and stop > start:
            stop = record.beside_images(start, stop)
            stop = stop if stop - start <= max(n_left, room) else start
        return ScheduledSlice(record, record.live, stop) if stop > start else None

    def _n_decodes(self, records: Collection[RequestRecord]) -> int:
        """Return the size of a micro-batch of decodes; 0 while all are under way, or their drafts are being made."""
        n_groups = self.drafting.n_groups(self.n_stages)
        ids = {step.step_id for step in self.in_flight}
        n_under_way = sum(step.decodes and step.depends_on_step not in ids for step in self.in_flight)
        if n_under_way + self.drafting.n_drafting >= n_groups:
            return 0
        return -(-[record.state for record in records].count(RequestState.DECODE) // n_groups)

    def choose_ahead(self, records: Collection[RequestRecord]) -> list[ScheduledSlice]:
        """Choose the decodes after the oldest step in flight that none follows, so that no stage idles between steps;
        their tokens are ``PENDING``. None unless every running request can run ahead or ends with what is in flight."""
        if not self.runs_ahead or any(step.num_draft_tokens for step in self.in_flight):
            return []
        for record in records:  # one loop for all: it runs for every step
            live = record.live
            if live is None or not record.may_run_ahead or record.state is not RequestState.DECODE:
                return []
            if live.ranking or live.draft_states:  # its pages may be others then, or drafts are verified
                return []
            if not live.n_computed == live.n_scheduled >= record.n_tokens:
                return []
        followed = {step.depends_on_step for step in self.in_flight}
        for step in self.in_flight:
            chosen = [] if step.step_id in followed else self._slices_behind(step)
            if chosen:
                if len(chosen) > -(-len(records) // self.n_stages):  # others have ended: deal into equal parts again
                    return []
                return [] if self.drafting.would_draft(chosen) else chosen
        return []

    @staticmethod
    def _slices_behind(step: ScheduledStep) -> list[ScheduledSlice]:
        """Return the decodes that follow a step, in its order: by arrival."""
        chosen = []
        for part in step.parts.values():
            record, live = part.record, part.live
            more = record.n_tokens + 1 < record.max_total_tokens
            if more and record.live is live and live.n_scheduled == record.n_tokens:
                chosen.append(ScheduledSlice(record, live, live.n_scheduled + 1))
        return chosen

    # ---- inside: pages and plans

    def _allocate_pages(self, chosen: list[ScheduledSlice], now: float) -> list[ScheduledSlice]:
        """Give every slice its pages, oldest request first, evicting slots and then preempting what the policy names.
        Returns the slices that have them; a request whose pages host memory cannot hold ends."""
        with_pages = []
        for slice_ in sorted(chosen, key=attrgetter("record.arrival")):
            if slice_.record.live is slice_.live and slice_.live.table.covers(slice_.stop):
                with_pages.append(slice_)
                continue
            while slice_.record.live is slice_.live:  # not preempted for an older one, nor for itself
                try:
                    operations = self.running.grow(slice_)
                except HostMemoryFull as full:
                    self.failed.append(self._finish(slice_.record, "error", now, error=no_host_memory(str(full))))
                    break
                if operations is not None:
                    self._operations += operations
                    with_pages.append(slice_)
                if operations is not None or slice_.runs_ahead:  # which is not worth another request's pages
                    break
                if self.reuse.index.reclaim(slice_.live.table.needs(slice_.stop)) or self.running.release_ahead():
                    continue
                if self.admission.pages_pending:
                    break
                if len(self.running) == 1 and self.reuse.index.pinning:
                    break  # a snapshot is being written or read: its pages come back by themselves
                self._operations += self.admission.preempt(self._policy.page_victim(self.running), now)
        return [slice_ for slice_ in with_pages if slice_.record.live is slice_.live]  # the others were preempted

    def _plan(self, chosen: list[ScheduledSlice], now: float) -> StepPlan:
        self._last_step += 1
        depends_on_step = chosen[0].live.last_step if chosen and chosen[0].runs_ahead else 0
        waiting = [slice_.live.waiting_for_step for slice_ in chosen if slice_.drafts_pend] if self.n_stages > 1 else []
        drafts_of = max(waiting, default=0)
        slices = [slice_.schedule(self._last_step, self.drafting.draft_from(slice_.live)) for slice_ in chosen]
        self._policy.on_planned(
            (slice_.record.request.client_id, len(s.tokens) - s.n_drafts)
            for slice_, s in zip(chosen, slices, strict=True)
        )
        n_decoding = sum([slice_.record.state is RequestState.DECODE for slice_ in chosen])
        plain = all([is_plain(s) for s in slices])  # noqa: C419 - a list is quicker
        wanted = chosen[0].record.wanted if chosen else None
        step = Step(
            step_id=self._last_step,
            region=self._last_step % self.limits.n_regions(self.n_stages),
            operations=self._operations,
            slices=slices,
            want_logits=wanted is not None,
            want_hidden=wanted is not None and wanted.hidden,
            rank_pages=[slice_.live.sequence for slice_ in chosen if slice_.live.ranking]
            if self.limits.stages_rank
            else [],
            depends_on_step=depends_on_step if self.n_stages > 1 else 0,
            drafts_of=drafts_of,
            upkeep=bool(chosen) and self.drafting.is_upkeep(slices, self.n_stages),
        )
        self._operations = []
        self._flushing = False
        for slice_ in chosen:  # with the next step: the states are those at the end of this one's slices
            self._operations += self.reuse.on_slice_planned(slice_.record, now)
        parts = {
            s.sequence: ScheduledSequence(slice_.record, slice_.live, s, slice_.num_real_drafts)
            for slice_, s in zip(chosen, slices, strict=True)
        }
        self.in_flight.append(ScheduledStep(step.step_id, parts, n_decoding > 0, depends_on_step, plain))
        self.drafting.on_step_planned(self.in_flight[-1], upkeep=step.upkeep)
        self._n_at_first_stage += 1
        return StepPlan(
            step,
            tuple([slice_.record.request.request_id for slice_ in chosen]),
            mask_jobs(parts.values()),
            embeddings={} if plain else embeddings_of(zip([slice_.record for slice_ in chosen], slices, strict=True)),
        )

    # ---- inside: results and ends

    def _append_tokens(self, events: Events, part: ScheduledSequence, drawn: Sequence[Sampled], now: float) -> None:
        """Append the tokens drawn for a slice; all but the last are accepted drafts, which are computed already."""
        record, live = part.record, part.live
        self.drafting.on_tokens(part, drawn)
        for i, sampled in enumerate(drawn):
            if record.ended:
                break
            drafted = i + 1 < len(drawn)
            if drafted and record.live is live:
                live.accept(i)
            self._append_token(events, record, sampled, now, drafted=drafted)
        if part.slice.n_drafts and record.live is live:
            self._policy.on_planned([(record.request.client_id, len(drawn) - 1)])
            self._operations += self.running.end_verification(live)

    def _append_token(
        self, events: Events, record: RequestRecord, sampled: Sampled, now: float, *, drafted: bool
    ) -> None:
        request = record.request
        record.append(sampled)
        self.n_generated_tokens += not record.uncached
        if record.first_token_at is None:
            record.first_token_at = now
            self.reuse.on_first_token(record, now)
        if record.paused_at is not None:
            self.longest_pause_s = max(self.longest_pause_s, now - record.paused_at)
            record.paused_at = None
        if record.state is RequestState.PREFILL:
            record.move(RequestState.DECODE)
        if sampled.token in request.stop_ids:
            events.append(self._finish(record, "stop", now, stop_id=sampled.token))
            return
        events.append((request.request_id, TokenEvent(sampled.token, sampled.logprob, tuple(sampled.top), drafted)))
        if record.n_tokens >= record.max_total_tokens:
            events.append(self._finish(record, "length", now))

    def _finish(
        self, record: RequestRecord, reason: Reason, now: float, *, error: RequestError | None = None,
        stop_id: int | None = None, pooled: array[float] | None = None,
    ) -> tuple[str, Event]:  # fmt: skip
        if record.live is not None:
            self._operations += self.running.end_verification(record.live)
            if error is None:
                self._operations += self.reuse.on_finishing(record, now)
            self._operations += self.running.close(record)
        elif record.state is RequestState.QUEUED:
            self.queue.remove(record)
        ends = {"cancelled": RequestState.CANCELLED, "error": RequestState.FAILED}
        record.move(ends.get(reason, RequestState.FINISHED))
        self.reuse.on_finished(record)
        if record.started_at is not None and reason != "error" and record.wanted is None:
            seconds = now - record.started_at
            self._service_s += (seconds - self._service_s) / (16 if self._service_s else 1)
        self._policy.on_finished(record.request.client_id)
        del self._records[record.request.request_id]
        return record.request.request_id, record.finished_event(reason, now, error, stop_id, pooled)

    # ---- what there is

    @property
    def n_queued(self) -> int:
        """Requests that have no sequence in the shards, or lost it to preemption."""
        return len(self.queue)

    @property
    def n_running(self) -> int:
        """Requests that have a sequence in the shards."""
        return len(self.running)

    @property
    def n_in_flight(self) -> int:
        """Steps planned whose result was not applied yet."""
        return len(self.in_flight)

    @property
    def n_tokens_due(self) -> int:
        """Tokens that are known and not computed yet, of all requests."""
        n_running = sum(record.n_tokens - record.live.n_scheduled for record in self.running if record.live is not None)
        return max(0, n_running) + sum(record.n_to_prefill for record in self.queue)

    @property
    def unfinished(self) -> Collection[str]:
        """Ids of all requests that run or wait."""
        return self._records.keys()

    @property
    def idle(self) -> bool:
        """True if no request is left and no step is in flight."""
        return not self._records and not self.in_flight

    @property
    def last_finished(self) -> int:
        """The last step that every stage has done, the draft stage included."""
        waiting = self.drafting.outstanding
        return min(self.last_applied, waiting[0].step_id - 1) if waiting else self.last_applied

    def retry_after_s(self, client: str) -> int:
        """Return the seconds until the last waiting request of a client is likely to start: requests before it times
        the mean time of one, over the sequences that run; 5 before one has ended."""
        if not self._service_s:
            return 5
        wait_s = self.queue.n_before(client) * self._service_s / max(1, self.n_running)
        return min(600, max(1, math.ceil(wait_s)))
