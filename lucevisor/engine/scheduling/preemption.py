"""What becomes of a running request whose pages others need: it waits again, and what it computed goes to host memory.

Pure.  What was computed is published as a prefix slot, pinned until the owner of host memory has its bytes; its pages
are free then.  When the request may start again they are read back as another slot, from which it goes on.  Without
room there, or where pages are out already, it is computed again.
Invariant: a request has bytes in host memory only while it waits.
"""

from __future__ import annotations

from typing import Protocol

from lucevisor.engine.prefix_reuse import PrefixReuse
from lucevisor.engine.request import RequestState
from lucevisor.engine.running import RunningRequests
from lucevisor.engine.scheduling.queue import RequestQueue
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


class Preemption:
    """Preempts running requests and starts them again.  ``swap`` None: all is computed again."""

    def __init__(self, running: RunningRequests, queue: RequestQueue, reuse: PrefixReuse) -> None:
        self._running, self._queue, self._reuse = running, queue, reuse
        self.swap: SwapSpace | None = None
        self.n_preempted = 0
        self.n_swapped = 0  # of them, those whose bytes went to host memory

    @property
    def pages_come(self) -> bool:
        """Whether pages of preempted requests are free soon, so that no other one is to give its own."""
        return self.swap is not None and self.swap.n_writing > 0

    def preempt(self, now: float) -> list[Operation]:
        """Take the youngest request's pages, now or as soon as they are copied."""
        record = self._running.youngest
        operations = self._swap_out(record, now)
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
