"""Which running request gives way to others, and what becomes of it: it waits again, and what it computed goes to host
memory.

Pages: the youngest request gives way to an older one that cannot go on.  Sequences: a waiting request may start in the
place of a running one of the client with the most sequences, if those are two more than its own client's, which was
served no more; or in the place of one that had its sequence for at least as many steps as the waiting one may take,
which are the chunks of its prompt and its ``max_tokens``.  So a short request waits for no long one, a client has its
share of the sequences, and a request that is preempted again and again still gets half of the service.
Pure.  What was computed is published as a prefix slot, pinned until the owner of host memory has its bytes; its pages
are free then.  When the request may start again they are read back as another slot, from which it goes on.  Without
room there, or where pages are out already, it is computed again.
Invariant: a request has bytes in host memory only while it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from lucevisor.engine.prefix_reuse import PrefixReuse
from lucevisor.engine.request import GenerationRequest, RequestState
from lucevisor.engine.running import RunningRequests
from lucevisor.engine.scheduling.queue import RequestQueue
from lucevisor.engine.scheduling.shares import ClientShares
from lucevisor.engine.sequence import RequestRecord, SwappedPrefix
from lucevisor.kv.prefix_records import PrefixMatch, Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.protocol.steps import Operation


class SwapSpace(Protocol):
    """Host memory for what preempted requests have computed.  Nothing here waits."""

    @property
    def n_writing(self) -> int:
        """Slots that are being written: their pages are free soon."""

    def write(self, slot: PrefixSlot) -> SwappedPrefix | None:
        """Begin to copy a pinned slot, to be released when its bytes are there; None: no room, it is released now."""

    def read(self, record: RequestRecord, swapped: SwappedPrefix, reservation: Reservation) -> None:
        """Begin to copy it back into reserved ids; then they are adopted, and the request resumed."""

    def drop(self, swapped: SwappedPrefix) -> None:
        """Free the copy: nobody needs it any more."""


class Places:
    """The sequences that running requests hold, as of now.  ``chunk``: tokens of a prompt that a step computes.
    ``swaps``: what they computed goes to host memory.
    """

    def __init__(self, running: Iterable[RequestRecord], shares: ClientShares, chunk: int, *, swaps: bool) -> None:
        self._shares, self._chunk, self._swaps = shares, chunk, swaps
        self._held: Counter[str] = Counter()
        self._by_service: list[RequestRecord] = []  # the longest served first
        for record in running:
            self._held[record.request.client_id] += 1
            if not record.uncached:
                self._by_service.append(record)
        self._by_service.sort(key=lambda record: (-record.stint(chunk), record.arrival))
        self._most = max(self._held.values(), default=0)
        self._by_share: dict[str, RequestRecord | None] = {}  # by client, what _richer found
        self._longest = self._by_service[0].stint(chunk) if self._by_service else 0

    def victim(self, record: RequestRecord) -> RequestRecord | None:
        """Return the running request that gives way to a waiting one; None if it has to wait."""
        client = record.request.client_id
        if client not in self._by_share:
            self._by_share[client] = self._richer(client)
        if (found := self._by_share[client]) is not None:
            return found
        if record.started_at is not None:
            return None
        return next(self.shorter(record.request, record.size), None)

    def _richer(self, client: str) -> RequestRecord | None:
        """Return the running request that gives way to any request of a client, as its own client has two more."""
        if self._most < self._held[client] + 2:
            return None
        richest = (one for one in self._by_service if self._held[one.request.client_id] == self._most)
        found = next(richest, None)
        if found is None or self._shares.lead(client) > self._shares.lead(found.request.client_id):
            return None
        return found

    def shorter(self, request: GenerationRequest, n_prompt: int) -> Iterator[RequestRecord]:
        """Return the running requests that give way to one with so many tokens to prefill, as it is shorter than their
        service.

        Each has its client's own sequence, or that of a client with more sequences.
        """
        n_steps = -(-n_prompt // self._chunk) + request.max_tokens
        if n_steps > self._longest:  # nearly all of a long queue
            return
        own = self._held[request.client_id]
        for record in self._by_service:
            served = record.stint(self._chunk)
            if served < n_steps:
                return
            again = 0 if self._swaps or record.live is None else record.live.n_computed / self._chunk
            may = record.request.client_id == request.client_id or self._held[record.request.client_id] > own
            if may and served >= again:
                yield record


class Preemption:
    """Preempts running requests and starts them again.  ``swap`` None: all is computed again."""

    def __init__(
        self, running: RunningRequests, queue: RequestQueue, reuse: PrefixReuse, shares: ClientShares, chunk: int
    ) -> None:
        self._running, self._queue, self._reuse, self._shares = running, queue, reuse, shares
        self._chunk = chunk
        self.swap: SwapSpace | None = None
        self.n_preempted = 0
        self.n_swapped = 0  # of them, those whose bytes went to host memory

    @property
    def pages_come(self) -> bool:
        """Whether pages of preempted requests are free soon, so that no other one is to give its own."""
        return self.swap is not None and self.swap.n_writing > 0

    def places(self) -> Places:
        """Return who holds a sequence now."""
        return Places(self._running, self._shares, self._chunk, swaps=self.swap is not None)

    def next_place(self, waiting: Iterable[RequestRecord]) -> tuple[RequestRecord, RequestRecord] | None:
        """Return the first waiting request that may start in the place of a running one, and that one."""
        places = self.places()
        for record in waiting:
            if record.goes_next and self.pages_come:
                return None
            victim = None if record.probe is not None or record.n_in_flight else places.victim(record)
            if victim is not None and not self._reuse.must_wait(record, self._running):
                return record, victim
            if record.goes_next:
                return None
        return None

    def preempt(self, record: RequestRecord, now: float) -> list[Operation]:
        """Take a running request's pages, now or as soon as they are copied."""
        operations = self._swap_out(record, now)
        if record.live is not None:
            record.n_served = max(record.n_served, record.live.n_computed)
        self.n_preempted += 1
        return operations + self.requeue(record)

    def requeue(self, record: RequestRecord) -> list[Operation]:
        """Let a running request wait again, without what it holds in the shards."""
        operations = self._running.close(record)
        record.move(RequestState.QUEUED)
        self._queue.add(record)
        return operations

    def swap_in(self, record: RequestRecord, match: PrefixMatch) -> bool:
        """Begin to bring a waiting request's bytes back if there is room for it; whether it waits for them."""
        swapped = record.prefix.swapped
        if swapped is None or self.swap is None or match.position >= swapped.n_tokens:
            return False
        reservation = self._reuse.reserve(swapped.n_tokens, swapped.paged_out) if swapped.whole else None
        if reservation is None:
            self.forget(record)
            return False
        record.prefix.held, reservation.origin = True, "preempted"
        self.swap.read(record, swapped, reservation)
        return True

    def forget(self, record: RequestRecord) -> None:
        """Give back what a request has in host memory, if anything."""
        swapped, record.prefix.swapped = record.prefix.swapped, None
        if swapped is not None and self.swap is not None:
            self.swap.drop(swapped)

    def _swap_out(self, record: RequestRecord, now: float) -> list[Operation]:
        self.forget(record)
        if self.swap is None:
            return []
        slot, operations = self._reuse.set_aside(record, now)
        if slot is not None:
            record.prefix.swapped = self.swap.write(slot)
            self.n_swapped += record.prefix.swapped is not None
        return operations
