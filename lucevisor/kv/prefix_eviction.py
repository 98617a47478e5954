"""Which prefix slots go first: eviction for requests that need ids, and to keep number and bytes within the settings.

A slot is worth the tokens that would have to be recomputed without it, divided by the prompts since its last use.  The
least valuable goes first, among those that free what is needed.  Knows neither lookup nor publication
(prefix_cache.py).  Why freed ids can be reused at once: engine/scheduler.py.
Invariant: pinned slots stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from lucevisor.kv.page_pool import PageAllocator, PagePools
from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.kv.prefix_slots import PrefixSlots
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot, PrefixTree
from lucevisor.model.values import PAGE_TOKENS, Space


class PrefixEvictor:
    """Evicts slots, which allocate in the ``slot_pools`` of ``pools``; ``on_evict`` is called before each, and may pin
    it.

    ``block_granular``: a prompt can resume at any cached page.
    """

    def __init__(
        self,
        pools: PagePools,
        tree: PrefixTree,
        slots: PrefixSlots,
        settings: PrefixSettings,
        on_evict: Callable[[PrefixSlot], None],
        *,
        block_granular: bool,
    ) -> None:
        self._sequence_pools, self._pools = pools, pools.slot_pools
        self._tree, self._slots, self._settings = tree, slots, settings
        self._on_evict = on_evict
        self._block_granular = block_granular
        self.n_evictions = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of pages and states that only slots hold."""
        return sum(
            self._pools[space].n_evictable * self._settings.unit_bytes.get(space, 0) for space in self._pools.spaces
        )

    def can_reclaim(self, needs: Mapping[Space, int], shared: Mapping[Space, Collection[int]]) -> bool:
        """Whether evicting all unpinned slots would free so many ids of each space for a sequence.

        ``shared``: ids that the caller is about to own as well; they would stay.
        """
        for space, n in needs.items():
            allocator = self._sequence_pools[space]
            if n > allocator.n_free:
                pinned = {page for slot in self._slots if slot.pins for page in self._ids(slot, space)}
                staying = allocator.n_evictable_of(pinned.union(shared.get(space, ())))
                if n > allocator.n_free + allocator.n_evictable - staying:
                    return False
        return True

    def can_reclaim_host(self, n: int, shared: Collection[int]) -> bool:
        """The same for pages in host memory."""
        hosts = self._pools.host_pages
        if n <= hosts.n_free:
            return True
        pinned = {page for slot in self._slots if slot.pins for page in self._ids(slot, Space.FULL)}
        return n <= hosts.n_free + hosts.n_evictable - hosts.n_evictable_of(pinned.union(shared))

    def reclaim_host(self, n: int) -> bool:
        """Evict slots until so many pages in host memory are free; False if that is not enough."""
        hosts = self._pools.host_pages
        while n > hosts.n_free:
            victim = self._next_victim([hosts]) if n <= hosts.n_free + hosts.n_evictable else None
            if victim is None:
                return False
            self._evict(victim)
        return True

    def reclaim(self, needs: Mapping[Space, int]) -> bool:
        """Evict slots until so many ids of each space are free for a sequence; False if that is not enough."""
        return self._reclaim(self._sequence_pools, needs)

    def reclaim_for_slot(self, needs: Mapping[Space, int]) -> bool:
        """The same for a slot."""
        return self._reclaim(self._pools, needs)

    def reclaim_checkpoint(self, n_tokens_saved: int) -> bool:
        """Evict a slot for the state of one that saves so many tokens, unless a state is free; False if all are worth
        more.
        """
        states = self._pools[Space.RECURRENT]
        if states.n_free:
            return True
        victim = self._next_victim([states])
        if victim is None or self._value(victim) >= n_tokens_saved:
            return False
        self._evict(victim)
        return True

    def trim(self) -> None:
        """Evict slots until number and bytes are within the settings.  Call it after a sequence ended, too: pages that
        it shared now count for the slots alone.
        """
        while len(self._slots) > self._settings.max_slots or self.n_bytes > self._settings.memory_bytes:
            spaces = self._pools.spaces if self.n_bytes > self._settings.memory_bytes else ()
            victim = self._next_victim([self._pools[space] for space in spaces])
            if victim is None:
                return
            self._evict(victim)

    # ---- inside

    def _value(self, slot: PrefixSlot) -> float:
        return self._n_lost(slot) / (self._slots.n_prompts - slot.last_use + 1)

    def _n_lost(self, slot: PrefixSlot) -> int:
        """Return how many tokens would have to be recomputed without the slot."""
        known = slot.parent.n_tokens if slot.parent is not None else 0
        if self._block_granular:
            node = slot.node  # pages shared with other slots stay
            while node.n_slots == 1 and node.parent is not None:
                node = node.parent
            known = max(known, node.stop * PAGE_TOKENS)
        return slot.n_tokens - known

    def _next_victim(self, lacking: Collection[PageAllocator]) -> PrefixSlot | None:
        """Return the next slot to evict: one that frees an id of ``lacking`` if any does, then by value and use."""
        slots = [slot for slot in self._slots if not slot.pins]
        return min(
            slots,
            key=lambda s: (bool(lacking) and not self._frees(s, lacking), self._value(s), s.last_use, s.number),
            default=None,
        )

    def _evict(self, slot: PrefixSlot) -> None:
        self._on_evict(slot)
        if slot.pins:
            slot.evict_on_unpin = True
        elif slot.alive:
            self.n_evictions += 1
            self._slots.remove(slot)

    def _reclaim(self, pools: PagePools, needs: Mapping[Space, int]) -> bool:
        while not pools.fits(needs):
            lacking = [space for space, n in needs.items() if n > pools[space].n_free]
            gives = all(pools[space] is self._pools[space] for space in lacking)  # slots own none of other pools
            victim = self._next_victim([pools[space] for space in lacking]) if gives else None
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _ids(self, slot: PrefixSlot, space: Space) -> list[int]:
        if space is Space.RECURRENT:
            return [slot.state] if slot.state != NO_STATE else []
        return slot.pages(space)

    def _frees(self, slot: PrefixSlot, lacking: Collection[PageAllocator]) -> bool:
        """Whether removing a slot frees an id of one of the allocators at once."""
        if slot.state != NO_STATE and self._lone(Space.RECURRENT, slot.state, lacking):
            return True
        if any(self._lone(space, page, lacking) for space, page in slot.tail.items()):
            return True
        at = slot.node
        while at.parent is not None and (at.n_slots == 1 or at.n_windows == 1):
            for space, pages in at.pages.items():
                n_needing = at.n_windows if space is Space.WINDOW else at.n_slots
                needed = space is not Space.WINDOW or at.start >= slot.first_window
                if n_needing == 1 and needed and any(self._lone(space, page, lacking) for page in pages):
                    return True
            at = at.parent
        return False

    def _lone(self, space: Space, unit: int, lacking: Collection[PageAllocator]) -> bool:
        allocator = self._pools.allocator_of(space, unit)
        return allocator in lacking and self._tree.holds(space)[unit] == 1 and allocator.evictable(unit)
