"""Admission: which waiting requests start now, and with what is cached of them.

Pure.  The order is the queue's; whether there is room is decided by running.py.  The first request that does not fit
holds up those behind it, so none is starved by smaller ones; which of them starts in the place of a running request is
decided by preemption.py.
"""

from __future__ import annotations

from collections import deque

from lucevisor.engine.prefix_reuse import NO_MATCH, PrefixReuse
from lucevisor.engine.request import RequestState
from lucevisor.engine.running import RunningRequests
from lucevisor.engine.scheduling.batching import has_long
from lucevisor.engine.scheduling.chunking import SharedChunks
from lucevisor.engine.scheduling.preemption import Preemption
from lucevisor.engine.scheduling.queue import RequestQueue
from lucevisor.engine.scheduling.shares import ClientShares
from lucevisor.engine.sequence import RequestRecord
from lucevisor.kv.prefix_records import PrefixMatch
from lucevisor.protocol.steps import Operation


class Admission:
    """Starts requests of the queue."""

    def __init__(
        self,
        queue: RequestQueue,
        running: RunningRequests,
        reuse: PrefixReuse,
        shares: ClientShares,
        preemption: Preemption,
    ) -> None:
        self.open = True  # False: only probes start; the others wait
        self._preemption = preemption
        self._queue = queue
        self._running = running
        self._reuse = reuse
        self._shares = shares

    def admit(self, now: float, last_step: int, chunks: SharedChunks) -> list[Operation]:
        """Start all requests there is room for, and those for which others give way; return the operations that close
        and open their sequences."""
        operations = self._admit(now, last_step, chunks)
        while self.open and len(self._queue):
            place = self._preemption.next_place(self._queue.in_order(self._running))
            if place is None:
                break
            record, victim = place
            operations += self._preemption.preempt(victim, now)
            record.goes_next = True
            self._queue.reordered()
            operations += self._admit(now, last_step, chunks)
        return operations

    def _admit(self, now: float, last_step: int, chunks: SharedChunks) -> list[Operation]:
        operations: list[Operation] = []
        waiting = deque(() if self._running.full else self._queue.in_order(self._running))
        while waiting:
            record = waiting.popleft()
            # A preempted request waits for its token in flight, which must not be drawn twice.
            admitting = (self.open or record.probe is not None) and not record.n_in_flight
            if not admitting or self._running.full:
                break
            if self._reuse.must_wait(record, self._running):
                continue
            match = self._reuse.match(record)
            if record.prefix.swapped is not None and not self._running.fits(record, match):
                break
            if self._preemption.swap_in(record, match):
                continue
            opened = self._start(record, match, now, last_step, chunks)
            if opened is None and record.probe is None and match.position:
                # The slot it would share may be the only one to evict for the rest of it: then start without.
                opened = self._start(record, NO_MATCH, now, last_step, chunks)
            if opened is None:
                break
            operations += opened
            if self._shares.contested:  # its prompt now counts for its client
                waiting = deque(self._queue.sorted(waiting, self._running))
        return operations

    def _start(
        self, record: RequestRecord, match: PrefixMatch, now: float, last_step: int, chunks: SharedChunks
    ) -> list[Operation] | None:
        """Start a queued request with what is cached of it; None while there is no room for it."""
        operations = self._running.open(record, match)
        if operations is None or record.live is None:
            return None
        self._queue.start(record)
        record.goes_next = False
        self._preemption.forget(record)
        record.move(RequestState.PREFILL)
        if record.started_at is None:
            record.started_at = now
        record.live.n_prefill = len(record.tokens) - record.live.n_computed
        record.live.last_step = last_step
        if record.probe is None:
            chunks.started(record.live.n_prefill, now, beside_long=has_long(self._running, chunks))
        self._reuse.started(record, match, now)
        return operations
