"""The waiting queue: requests not yet admitted, in the order in which they start.

Probes first, then preempted requests, whose clients are reading already; then the key that was served least; within a
key the shortest prompt, with ageing.  Ageing counts work, not seconds, so it holds on any machine: a request charges
its size to the older ones it overtakes, and one that was charged twice its own size is next of its key.
Pure.  Invariant: later requests of the same key compute less than ``3 n + 64`` prompt tokens before a request of n
tokens is first among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Final

from lucevisor.engine.request import RequestState
from lucevisor.engine.scheduling.shares import KeyShares
from lucevisor.engine.sequence import RequestRecord
from lucevisor.model.values import PAGE_TOKENS

PATIENCE: Final = 2
"""Later requests overtake a request until they took so many times its own size."""


class RequestQueue:
    """Waiting requests; iteration has no particular order, ``in_order`` has."""

    def __init__(self, shares: KeyShares) -> None:
        self._shares = shares
        self._waiting: dict[RequestRecord, None] = {}
        self._order: list[RequestRecord] | None = None  # as long as it holds

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._waiting)

    def add(self, record: RequestRecord) -> None:
        """Add a request."""
        self._waiting[record] = None
        self._order = None

    def remove(self, record: RequestRecord) -> None:
        """Remove a request."""
        del self._waiting[record]
        self._order = None

    def start(self, record: RequestRecord) -> None:
        """Remove a request that starts, and age those it overtakes."""
        self.remove(record)
        if record.probe is None and record.started_at is None:
            size = max(PAGE_TOKENS, record.size)  # even the shortest prompt takes a place
            for other in self._waiting:
                if other.arrival < record.arrival and other.request.key_id == record.request.key_id:
                    other.n_passed += size

    def resized(self) -> None:
        """Note that the size of a waiting request changed."""
        self._order = None

    def in_order(self, live: Collection[RequestRecord]) -> list[RequestRecord]:
        """Return the waiting requests, next first.  ``live``: the running ones, whose prompts count for their keys."""
        if self._order is None or self._shares.contested:
            self._order = self.sorted(self._waiting, live)
        return self._order

    def sorted(self, records: Collection[RequestRecord], live: Collection[RequestRecord]) -> list[RequestRecord]:
        """Return some of the waiting requests, next first, as of now."""
        promised: Counter[str] = Counter()
        if self._shares.contested:
            for record in live:
                if record.live is not None and record.state is RequestState.PREFILL:
                    promised[record.request.key_id] += len(record.tokens) - record.live.n_scheduled

        def turn(record: RequestRecord) -> tuple[int, int, int, int]:
            if record.probe is not None:
                return 0, 0, 0, record.arrival
            if record.started_at is not None:
                return 1, 0, 0, record.arrival
            key = record.request.key_id
            aged = max(0, PATIENCE * record.size - record.n_passed)
            return 2, self._shares.lead(key) + promised[key], aged, record.arrival

        return sorted(records, key=turn)
