"""The waiting queue: requests not yet admitted, in the order in which they start, and each client's share of it.

Probes first, then requests that go next (a sequence was preempted for them, or they lost theirs with a daemon); then
the client that was served least; within a client preempted requests, which are being read already, then the shortest
prompt, with ageing.  Ageing counts work, not seconds, so it holds on any machine: a request charges its size to the
older ones it overtakes, and one that was charged twice its own size is next of its client.
Pure.  Invariant: later requests of the same client for which nothing is preempted compute less than ``3 n + 64`` prompt
tokens before a request of n tokens is first among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

from lucevisor.engine.request import RequestState
from lucevisor.engine.scheduling.shares import ClientShares
from lucevisor.engine.sequence import RequestRecord
from lucevisor.model.values import PAGE_TOKENS

PATIENCE: Final = 2
"""Later requests overtake a request until they took so many times its own size."""


class RequestQueue:
    """Waiting requests; iteration has no particular order, ``in_order`` has."""

    def __init__(self, shares: ClientShares) -> None:
        self._shares = shares
        self._waiting: dict[RequestRecord, None] = {}
        self._order: list[RequestRecord] | None = None  # as long as it holds
        self._n_waiting: Counter[str] = Counter()  # by client, without preempted requests

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._waiting)

    def add(self, record: RequestRecord) -> None:
        """Add a request."""
        self._waiting[record] = None
        self._order = None
        if record.started_at is None and record.probe is None:
            self._n_waiting[record.request.client_id] += 1

    def remove(self, record: RequestRecord) -> None:
        """Remove a request."""
        del self._waiting[record]
        self._order = None
        client = record.request.client_id
        if record.started_at is None and record.probe is None:
            self._n_waiting[client] -= 1
            if not self._n_waiting[client]:
                del self._n_waiting[client]

    def start(self, record: RequestRecord) -> None:
        """Remove a request that starts, and age those it overtakes."""
        self.remove(record)
        if record.probe is None and record.started_at is None and not record.goes_next:
            size = max(PAGE_TOKENS, record.size)  # even the shortest prompt takes a place
            for other in self._waiting:
                if other.arrival < record.arrival and other.request.client_id == record.request.client_id:
                    other.n_passed += size

    def reordered(self) -> None:
        """Note that the size or the turn of a waiting request changed."""
        self._order = None

    def n_waiting(self, client: str) -> int:
        """Return how many requests of a client wait for their first start."""
        return self._n_waiting[client]

    def n_clients(self, client: str) -> int:
        """Return how many clients have such requests, ``client`` included."""
        return len(self._n_waiting) + (client not in self._n_waiting)

    def rivals(self, client: str, live: Collection[RequestRecord]) -> list[RequestRecord]:
        """Return the requests that start before a further one of ``client``, next first: its own, and as many of each
        other client.
        """
        n_own, taken = self._n_waiting[client], Counter[str]()
        rivals = []
        for record in self.in_order(live):
            taken[record.request.client_id] += 1
            if taken[record.request.client_id] <= n_own:
                rivals.append(record)
        return rivals

    def in_order(self, live: Collection[RequestRecord]) -> list[RequestRecord]:
        """Return the waiting requests, next first.  ``live``: the running ones, whose prompts count for their
        clients."""
        if self._order is None or self._shares.contested:
            self._order = self.sorted(self._waiting, live)
        return self._order

    def sorted(self, records: Collection[RequestRecord], live: Collection[RequestRecord]) -> list[RequestRecord]:
        """Return some of the waiting requests, next first, as of now."""
        promised: Counter[str] = Counter()
        if self._shares.contested:
            for record in live:
                if record.live is not None and record.state is RequestState.PREFILL:
                    promised[record.request.client_id] += len(record.tokens) - record.live.n_scheduled

        def turn(record: RequestRecord) -> tuple[int, int, int, int, int]:
            if record.probe is not None or record.goes_next:
                return record.probe is None, 0, 0, 0, record.arrival
            client, new = record.request.client_id, record.started_at is None
            aged = max(0, PATIENCE * record.size - record.n_passed) if new else 0
            return 2, self._shares.lead(client) + promised[client], new, aged, record.arrival

        return sorted(records, key=turn)
