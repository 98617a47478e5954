"""Scheduling policies: which request starts next, which gives way, and how prompts and decodes share a step.

The scheduler asks a policy for decisions and records in it what happened; a policy changes no request but
``n_overtaken_tokens``. Pure. docs/scheduling.md has the rules of :class:`FairShare`; another policy is a subclass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import GenerationRequest, RequestState
from lucevisor.engine.sequence import RequestRecord
from lucevisor.model.values import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class StepShare:
    """Limits of a step.  ``prompts``: next first, ``prefill_tokens`` of them at most.  ``decodes`` False: they
    wait for a later step.
    """

    prompts: Sequence[RequestRecord]
    prefill_tokens: int
    decodes: bool = True


class ClientShares:
    """Tokens charged to each client that has unfinished requests, or owes some: a virtual token counter, as in
    "Fairness in Serving Large Language Models".

    A client is an API key, or an address. The one charged least goes first. An idle one that returns is raised to the
    least busy one, so credit cannot be saved up; a busy one falls behind by at most ``credit`` tokens."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()
        self._min_served = 0  # of those with requests

    @property
    def contested(self) -> bool:
        """True if more than one client has unfinished requests."""
        return len(self._requests) > 1

    def add_request(self, client: str) -> None:
        if client not in self._requests:
            self._served[client] = max(self._served.get(client, 0), self._min_served)
            owing = self._served.items()
            self._served = {
                name: n for name, n in owing if n > self._min_served or name in self._requests or name == client
            }
        self._requests[client] += 1
        self._update()

    def remove_request(self, client: str) -> None:
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
        if not self._requests:
            self._served.clear()
        self._update()

    def charge(self, tokens: Iterable[tuple[str, int]]) -> None:
        if not self.contested:
            return  # only differences matter
        for client, n in tokens:
            self._served[client] += n
        least = max(self._served[client] for client in self._requests) - self._credit
        for client in self._requests:
            self._served[client] = max(self._served[client], least)
        self._update()

    def lead(self, client: str) -> int:
        """Return how many more tokens ``client`` was served than the least served busy client."""
        return self._served[client] - self._min_served if self.contested else 0

    def _update(self) -> None:
        self._min_served = min((self._served[client] for client in self._requests), default=0)


class PreemptionCandidates:
    """The running requests as candidates for preemption. ``chunk``: prompt tokens per step.

    A waiting request may replace one of the client with the most sequences, if those are two more than its own
    client's; or one that was served for at least as many steps as the waiting one may take."""

    def __init__(self, running: Iterable[RequestRecord], shares: ClientShares, chunk: int) -> None:
        self._shares, self._chunk = shares, chunk
        self._held: Counter[str] = Counter()
        self._by_service: list[RequestRecord] = []  # the longest served first
        for record in running:
            self._held[record.request.client_id] += 1
            if not record.uncached:
                self._by_service.append(record)
        self._by_service.sort(key=lambda record: (-record.n_steps_served(chunk), record.arrival))
        self._max_held = max(self._held.values(), default=0)
        self._victims_by_client: dict[str, RequestRecord | None] = {}  # by client, the result of _victim_by_share
        self._longest = self._by_service[0].n_steps_served(chunk) if self._by_service else 0

    def victim(self, record: RequestRecord) -> RequestRecord | None:
        """Return the running request to preempt for a waiting one; None if that has to wait."""
        client = record.request.client_id
        if client not in self._victims_by_client:
            self._victims_by_client[client] = self._victim_by_share(client)
        if (candidate := self._victims_by_client[client]) is not None:
            return candidate
        if record.started_at is not None:
            return None
        return next(self._victims_of(record.request, record.n_to_prefill), None)

    def _victim_by_share(self, client: str) -> RequestRecord | None:
        """Return a request of the client with the most sequences, if that has two more than ``client``."""
        if self._max_held < self._held[client] + 2:
            return None
        richest = (record for record in self._by_service if self._held[record.request.client_id] == self._max_held)
        candidate = next(richest, None)
        if candidate is None or self._shares.lead(client) > self._shares.lead(candidate.request.client_id):
            return None
        return candidate

    def _victims_of(self, request: GenerationRequest, n_prompt: int) -> Iterator[RequestRecord]:
        """Yield running requests, of its own client or one with more sequences, served for longer than a waiting one
        may take."""
        n_steps = -(-n_prompt // self._chunk) + request.max_tokens
        if n_steps > self._longest:  # nearly all of a long queue
            return
        n_own = self._held[request.client_id]
        for record in self._by_service:
            served = record.n_steps_served(self._chunk)
            if served < n_steps:
                return
            again = 0 if record.live is None else record.live.n_computed / self._chunk
            may = record.request.client_id == request.client_id or self._held[record.request.client_id] > n_own
            if may and served >= again:
                yield record


MAX_OVERTAKEN_SIZES: Final = 2
"""Sizes of a request that later ones may overtake it by, in tokens, before it is next."""

MAX_SKIPPED_STEPS: Final = 4
"""Steps in a row that may skip a prompt for shorter ones; twice as many while the first stage is never free."""


class FairShare:
    """Clients get equal shares, short requests go first, and none waits for ever.

    First come requests with priority, then those of the client that was served least; within a client preempted
    requests, then the shortest prompt, with ageing: a request charges its size to the older ones it overtakes, and one
    that was charged twice its own size is next."""

    def __init__(self, limits: EngineLimits) -> None:
        self._chunk, self._long_prefill_tokens = limits.prefill_chunk, limits.long_prefill_tokens
        self._max_step_tokens = limits.max_step_tokens
        self._shares = ClientShares(credit=4 * limits.prefill_chunk)
        self._shared_until = 0.0  # until when long prompts leave room for others

    # ---- the queue

    @property
    def order_is_stable(self) -> bool:
        """True while ``waiting_order`` depends on the waiting requests alone."""
        return not self._shares.contested

    def waiting_order(
        self, waiting: Collection[RequestRecord], running: Iterable[RequestRecord]
    ) -> list[RequestRecord]:
        """Return the waiting requests that may start now, next first; those with ``has_priority`` go before others."""
        promised: Counter[str] = Counter()
        if self._shares.contested:
            for record in running:
                if record.live is not None and record.state is RequestState.PREFILL:
                    promised[record.request.client_id] += len(record.tokens) - record.live.n_scheduled

        def order(record: RequestRecord) -> tuple[int, int, int, int, int]:
            if record.has_priority:
                return 1, 0, 0, 0, record.arrival
            client, new = record.request.client_id, record.started_at is None
            aged = max(0, MAX_OVERTAKEN_SIZES * record.n_to_prefill - record.n_overtaken_tokens) if new else 0
            return 2, self._shares.lead(client) + promised[client], new, aged, record.arrival

        return sorted(waiting, key=order)

    def accepts(self, request: GenerationRequest, n_waiting: int, n_clients: int, max_queue: int) -> bool:
        """Clients share a queue of ``max_queue`` equally; short requests may exceed a share by an eighth and one."""
        share = max(1, max_queue // n_clients)
        n_steps = -(-len(request.prompt) // self._chunk) + request.max_tokens
        if n_steps <= 128:  # a short request finds room in a full queue
            share += share // 8 + 1
        return n_waiting < share

    # ---- a step

    def share_step(
        self,
        prompts: Sequence[RequestRecord],
        running: Iterable[RequestRecord],
        last_step: int,
        now: float,
        *,
        busy: bool,
    ) -> StepShare:
        """Prompts go shortest first. While others run beside a long prompt, and for a while after, all prompts share
        ``long_prefill_tokens``, and a long one gets a slice when the first stage is free (not ``busy``)."""

        def n_skipped(record: RequestRecord) -> int:
            return last_step - record.live.last_step if record.live is not None else 0

        def order(record: RequestRecord) -> tuple[bool, int, int, int, int]:
            assert record.live is not None
            overdue = n_skipped(record) >= MAX_SKIPPED_STEPS
            # Clients closer together than a chunk count as equal: the shortest prompt goes first.
            lead = self._shares.lead(record.request.client_id) // self._chunk
            n_tokens = len(record.tokens) - record.live.n_scheduled
            return not overdue, record.live.last_step if overdue else 0, lead, n_tokens, record.arrival

        long_prompts = [record for record in prompts if self._is_long(record)]
        if long_prompts and any(record.state is RequestState.DECODE or not self._is_long(record) for record in running):
            self._shared_until = now + 8.0  # long prompts go on leaving room: a client that was answered may ask again
        if not long_prompts or now >= self._shared_until:
            return StepShare(sorted(prompts, key=order), self._max_step_tokens)
        # A chunk that waits behind another one would be in front of a short prompt, too.
        held = [record for record in long_prompts if n_skipped(record) < 2 * MAX_SKIPPED_STEPS] if busy else []
        allowed = sorted((record for record in prompts if record not in held), key=order)
        # Decodes go with the next chunk of a prompt that is held: a step of their own would delay it.
        return StepShare(allowed, self._long_prefill_tokens, decodes=not held)

    def _is_long(self, record: RequestRecord) -> bool:
        live = record.live
        return live is not None and record.wanted is None and live.n_prefill > self._long_prefill_tokens

    # ---- preemption

    def victims(self, running: Iterable[RequestRecord]) -> PreemptionCandidates:
        """Return the requests that may be preempted for want of sequences."""
        return PreemptionCandidates(running, self._shares, self._chunk)

    def page_victim(self, running: Iterable[RequestRecord]) -> RequestRecord:
        """The youngest request gives its pages up."""
        return max(running, key=lambda record: record.arrival)

    # ---- what happened

    def on_submitted(self, client: str) -> None:
        self._shares.add_request(client)

    def on_started(self, record: RequestRecord, waiting: Iterable[RequestRecord]) -> None:
        if record.has_priority:
            return
        size = max(PAGE_TOKENS, record.n_to_prefill)  # even the shortest prompt takes a sequence
        for other in waiting:
            if other.arrival < record.arrival and other.request.client_id == record.request.client_id:
                other.n_overtaken_tokens += size

    def on_planned(self, tokens: Iterable[tuple[str, int]]) -> None:
        self._shares.charge(tokens)

    def on_finished(self, client: str) -> None:
        self._shares.remove_request(client)
