"""What snapshots ask of an engine: prefix slots that stay put while daemons write them, and places for those they read.

The engine (core.py) has one, as ``slots``.  Knows no files.
Invariant: nothing writes to a place that was handed out until it is released, adopted or cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lucevisor.engine.changes import Changes
from lucevisor.engine.pipeline import Pipeline
from lucevisor.engine.scheduler import Scheduler
from lucevisor.kv.prefix_records import Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.residency import PagedOut
from lucevisor.model.values import Space
from lucevisor.protocol.messages import SlotPlace


class SlotAccess:
    """Prefix slots of an engine, for those who copy their bytes.

    ``pipeline``: the one attached now.  ``proceed`` sends the steps that have become possible.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        changes: Changes,
        *,
        pipeline: Callable[[], Pipeline | None],
        proceed: Callable[[], None],
    ) -> None:
        self._scheduler, self._clock, self._changes = scheduler, clock, changes
        self._pipeline, self._proceed = pipeline, proceed
        self._index = scheduler.reuse.index

    async def synchronize(self) -> bool:
        """Wait until every stage has done all that was decided up to now; False if the pipeline fails first."""
        pipeline, goal = self._pipeline(), self._scheduler.flush()
        self._proceed()
        if pipeline is None:
            return False
        await self._changes.wait_for(lambda: pipeline is not self._pipeline() or self._scheduler.last_finished >= goal)
        return pipeline is self._pipeline()

    async def export(self, slot: PrefixSlot) -> SlotPlace | None:
        """Pin a slot and return its place once its bytes are there in every stage.

        Nothing writes to its first ``n_tokens`` positions until the caller calls ``release``.  None, without a pin, if
        the slot is gone or the pipeline fails.
        """
        self._index.pin(slot)
        if slot.alive and await self.synchronize() and slot.alive:
            full, window = (slot.pages(space) for space in (Space.FULL, Space.WINDOW))
            return SlotPlace(slot.n_tokens, full, window, slot.first_window, slot.state)
        self.release(slot)
        return None

    def release(self, slot: PrefixSlot) -> None:
        """Undo the pin of ``export``."""
        self._index.unpin(slot)
        self._proceed()

    def can_restore(self, n_tokens: int, n_saved: int, paged_out: PagedOut | None) -> bool:
        """Whether the first ``n_tokens`` of a prefix of ``n_saved`` may be restored, pages of which were ``paged_out``:
        what was computed with pages left out stands for nothing that is computed without.
        """
        limits = self._scheduler.limits
        if not limits.stays_whole(n_tokens + 1):
            return False
        if paged_out is None or not paged_out.approximate or n_tokens < paged_out.n_exact:
            return True
        return n_tokens == n_saved and limits.residency is not None and limits.residency.ranks_pages

    async def reserve(self, n_tokens: int, paged_out: PagedOut | None = None) -> Reservation | None:
        """Allocate pages and a state for a prefix of ``n_tokens``, to which no step in flight writes any more.

        ``paged_out``: which of its pages were in host memory when it was saved; those beyond the pool go there.

        The caller must ``adopt`` it once every stage has its bytes, or ``cancel_reservation``.  None if there is no
        room, KV Flash would drop some of it, or the pipeline fails.
        """
        reservation = self._scheduler.reuse.reserve(n_tokens, paged_out)
        if reservation is not None and not await self.synchronize():
            self.cancel_reservation(reservation)
            return None
        return reservation

    def adopt(self, tokens: Sequence[int], reservation: Reservation, *, drafted: bool = False) -> PrefixSlot | None:
        """Publish a restored prefix, pinned; ``release`` it once the requests that wait for it have started.

        ``drafted``: the drafter's state was restored, too.  None if it is not kept: the pipeline failed meanwhile, or
        it is not worth caching.
        """
        slot = self._index.adopt(tokens, reservation, self._clock(), drafted=drafted)
        self._proceed()
        return slot

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Free reserved pages.  Does nothing if they are freed or adopted already."""
        self._index.cancel(reservation)
        self._proceed()

    async def wait_for_capacity(self) -> None:
        """Wait until the queue is empty and another sequence could start."""
        scheduler = self._scheduler
        n_most = scheduler.limits.max_sequences
        await self._changes.wait_for(
            lambda: self._pipeline() is not None and not scheduler.n_queued and scheduler.n_running < n_most
        )
