"""The prefix cache: lookup, publication and eviction of cached prompt prefixes.

Pure: ``now`` is an argument, and the caller fills pages and copies states.  Models with recurrent layers resume only at
the end of a slot, others at any cached page whose window is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lucevisor.kv.page_pool import PageAllocator, PagePools
from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.prefix_tree import (
    NO_STATE,
    CacheTier,
    Node,
    Origin,
    PrefixSlot,
    PrefixTree,
    SlotSource,
    pages_of_path,
)
from lucevisor.kv.residency import Residency
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.pages import pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.messages import SlotPlace

SHARED: Final = (KvGroup.FULL, KvGroup.RECURRENT)
"""The KV groups that may share memory."""


@dataclass(slots=True)
class MeasuredRate:
    """Units a second.  With each measurement the earlier ones count a tenth less."""

    n: float = 0.0
    seconds: float = 0.0
    measured_at: float = 0.0

    def add(self, n: int, seconds: float, now: float) -> None:
        self.n, self.seconds, self.measured_at = 0.9 * self.n + n, 0.9 * self.seconds + seconds, now

    def seconds_for(self, n: int) -> float | None:
        return n * self.seconds / self.n if self.n else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSettings:
    """Limits.  ``unit_bytes``: of a page, or of a sequence's recurrent states, over all shards.  ``checkpoint_pages``:
    prompts without chat turns get a slot at a multiple of so many pages; 0: none."""

    max_slots: int = 0
    memory_bytes: int = 0
    min_tokens: int = 256
    checkpoint_pages: int = 4
    unit_bytes: Mapping[KvGroup, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The cached part of a prompt: ``position`` tokens in the pages ``full`` (some in host memory: ``paged_out``) and
    ``window`` (from entry ``first_window`` on), the first ``position % 64`` positions of ``tail``, and ``state``.

    ``n_known``: tokens that other prompts began with too, usable or not.
    """

    position: int
    n_known: int = 0
    full: tuple[int, ...] = ()
    first_window: int = 0
    window: tuple[int, ...] = ()
    tail: Mapping[KvGroup, int] = field(default_factory=dict)
    state: int = NO_STATE
    slot: PrefixSlot | None = None
    paged_out: PagedOut | None = None

    @property
    def tier(self) -> CacheTier:
        """The memory that the tokens came from; another one than the devices' counts at the first use only."""
        slot = self.slot
        return slot.origin if slot is not None and slot.origin in ("host", "disk") and not slot.n_uses else "device"


@dataclass(slots=True, eq=False)
class Reservation:
    """Ids for a prefix being restored, until it is adopted or cancelled.  ``draft_epoch``: of their allocation."""

    n_tokens: int
    first_window: int
    ids: dict[KvGroup, list[int]]
    draft_epoch: int = 0
    paged_out: PagedOut | None = None
    origin: Origin = "disk"

    @property
    def drafted(self) -> bool:
        """True if a drafter is attached and keeps state of all pages."""
        return self.draft_epoch > 0 and (self.paged_out is None or self.paged_out.approximate)

    @property
    def state(self) -> int:
        return self.ids[KvGroup.RECURRENT][0] if KvGroup.RECURRENT in self.ids else NO_STATE

    @property
    def place(self) -> SlotPlace:
        full, window = self.ids.get(KvGroup.FULL, []), self.ids.get(KvGroup.WINDOW, [])
        return SlotPlace(self.n_tokens, full, window, self.first_window, self.state)

    def entries(self, kv_group: KvGroup, start: int, stop: int) -> list[int]:
        first = self.first_window if kv_group is KvGroup.WINDOW else 0
        return self.ids[kv_group][max(0, start - first) : max(0, stop - first)]


@dataclass(slots=True)
class PrefixHooks:
    """Called while a step is planned: they may pin, but must not call the engine.

    ``on_evict``: a pin taken here delays the eviction.  ``on_invalid``: what slots hold of these tokens is wrong.
    ``fetch``: a request (id, tokens, how many are cached) starts; True: it waits until ``Engine.resume``.  ``find``:
    how many tokens would be cached then.
    """

    on_slot: Callable[[PrefixSlot], None] = lambda _: None
    on_evict: Callable[[PrefixSlot], None] = lambda _: None
    on_invalid: Callable[[TokenBuffer], None] = lambda _: None
    fetch: Callable[[str, TokenBuffer, int], bool] = lambda _id, _tokens, _n_cached: False
    find: Callable[[TokenBuffer, int], int] = lambda _tokens, n_cached: n_cached


class PrefixIndex:
    """Prefix slots over the pools of a model.

    A slot is worth the tokens to compute again without it, over the prompts since its last use.  The least valuable one
    that frees what is needed is evicted first; pinned ones stay.
    """

    def __init__(
        self, pools: PagePools, settings: PrefixSettings, window_tokens: int | None, residency: Residency | None = None
    ) -> None:
        self.settings: Final = settings
        self.hooks: Final = PrefixHooks()
        self.recurrent = KvGroup.RECURRENT in pools
        self.block_granular = not self.recurrent and window_tokens is None  # a prompt can resume at any cached page
        self.n_evictions = 0
        self.version = 0  # changes whenever the result of a match may
        self._residency = residency
        self._sequence_pools, self.pools = pools, pools.slot_pools
        self.tree = PrefixTree(self.pools, window_tokens)
        self._slots: dict[int, PrefixSlot] = {}  # by number, oldest first
        self._n_made = self.n_prompts = 0  # slots ever, and prompts that a slot could have been used for
        self.reservations: set[Reservation] = set()

    # ---- state and lookup

    @property
    def enabled(self) -> bool:
        state_bytes = self.settings.unit_bytes.get(KvGroup.RECURRENT, 0) if self.recurrent else 0
        return self.settings.max_slots > 0 and state_bytes <= self.settings.memory_bytes

    @property
    def slots(self) -> list[PrefixSlot]:
        return list(self._slots.values())

    @property
    def pinning(self) -> bool:
        """True if pins or reservations keep ids from sequences for now."""
        return bool(self.reservations) or any(slot.pins for slot in self._slots.values())

    def find_slot(self, tokens: Sequence[int], n_tokens: int) -> PrefixSlot | None:
        return self.tree.find_slot(TokenBuffer.of(tokens), n_tokens)

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix that leaves a token to compute."""
        packed, most = TokenBuffer.of(tokens), len(tokens) - 1
        walk = self.tree.walk(packed, most)
        n_known = walk.n_pages * PAGE_TOKENS
        n_usable = 0 if self.recurrent else self.tree.n_usable_pages(walk) * PAGE_TOKENS
        if self._residency is not None and not self._residency.attends_host:  # what follows depends on what was out
            n_usable = min(n_usable, (self._residency.pool_pages - 1) * PAGE_TOKENS)
        slot = next(iter(self.tree.slots_on(walk, packed, most)), None)
        if slot is not None and slot.n_tokens and slot.n_tokens >= n_usable:
            return self._match(walk.nodes, slot.n_tokens, n_known, slot)
        return self._match(walk.nodes, n_usable, n_known, None) if n_usable else PrefixMatch(0, n_known)

    def record_use(self, match: PrefixMatch, now: float) -> None:
        """Count the use of a match, once per prompt, hit or not."""
        self.n_prompts += 1
        if match.slot is not None and match.slot.alive:
            self.touch(match.slot, now)
            match.slot.n_uses += 1

    def touch(self, slot: PrefixSlot, now: float) -> None:
        slot.last_use, slot.used_at, slot.evict_on_unpin = self.n_prompts, now, False

    # ---- making slots

    def worth_caching(self, n_tokens: int, *, branches: bool = False) -> bool:
        """Return whether a prefix is long enough; one that ``branches``, which others are about to begin with, is."""
        return self.enabled and n_tokens >= max(1, 0 if branches else self.settings.min_tokens)

    def allocate_state(self, n_tokens_saved: int) -> int | None:
        if not self.reclaim_checkpoint(n_tokens_saved):
            return None
        taken = self.pools[KvGroup.RECURRENT].allocate(1)
        return None if taken is None else taken[0]

    def n_saved(self, tokens: Sequence[int], n_tokens: int) -> int:
        """Return how many tokens a slot at ``n_tokens`` would save beyond the existing slots."""
        known = self.tree.longest_slot(TokenBuffer.of(tokens), n_tokens - 1)
        return n_tokens - (known.n_tokens if known is not None else 0)

    def publish(
        self, tokens: Sequence[int], source: SlotSource, now: float, *, pinned: bool = False, branches: bool = False
    ) -> PrefixSlot | None:
        """Cache the first ``source.n_tokens`` tokens.  Takes over the caller's reference to the state in any case.

        Returns None if the prefix is too short, its window is gone, or it was evicted at once.  ``pinned``: pin the
        slot.
        """
        packed = TokenBuffer.of(tokens)
        known = made = None
        if self.worth_caching(source.n_tokens, branches=branches):
            known = self.tree.find_slot(packed, source.n_tokens)
            made = self._add(packed, source, now) if known is None else None
        if source.state != NO_STATE:  # a slot that was made has a reference of its own
            self.pools[KvGroup.RECURRENT].release([source.state])
        if known is not None:
            self.touch(known, now)
            known.pins += pinned
        if made is None:
            return known
        made.pins += pinned
        self.trim()
        if made.alive:
            self.hooks.on_slot(made)
        return made if made.alive else None

    # ---- restoring

    def reserve(self, n_tokens: int, paged_out: PagedOut | None = None) -> Reservation | None:
        """Allocate ids for a prefix to restore, evicting slots if need be; None if there are not enough.

        ``paged_out``: which of its pages get ids in host memory.
        """
        leaving = paged_out.entries if paged_out is not None else ()
        n_device = pages_of(n_tokens) - len(leaving)
        first, needs = self.tree.first_window(n_tokens), {KvGroup.FULL: n_device, KvGroup.RECURRENT: 1}
        needs[KvGroup.WINDOW] = pages_of(n_tokens) - first
        needs = {kv_group: n for kv_group, n in needs.items() if kv_group in self.pools}
        if not self.worth_caching(n_tokens) or not self.reclaim_host(len(leaving)):
            return None
        if not self._reclaim(self.pools, needs):
            return None
        ids, hosts = self.pools.allocate(needs), self.pools.host_pages.allocate(len(leaving))
        if ids is None or hosts is None:
            return None
        reservation = Reservation(n_tokens, first, ids, paged_out=paged_out)
        if KvGroup.FULL in ids:
            pool = self.pools[KvGroup.FULL]
            reservation.draft_epoch = pool.epoch
            pool.stamp(ids[KvGroup.FULL], 0)  # until it is known that the file has the drafter's state
            held, out = iter(ids[KvGroup.FULL]), dict(zip(leaving, hosts, strict=True))
            entries = range(pages_of(n_tokens))
            ids[KvGroup.FULL] = [out[entry] if entry in out else next(held) for entry in entries]
        self.reservations.add(reservation)
        return reservation

    def adopt(
        self, tokens: Sequence[int], reservation: Reservation, now: float, *, drafted: bool = False
    ) -> PrefixSlot | None:
        """Publish a prefix whose bytes are complete in its reserved ids, pinned for the waiting request.

        ``drafted``: with the state of the drafter.  None if the shards lost their state, or the slot was evicted at
        once.
        """
        if reservation not in self.reservations:
            return None
        if len(tokens) != reservation.n_tokens:
            raise ValueError(f"{len(tokens)} tokens are adopted into ids reserved for {reservation.n_tokens}")
        self.reservations.remove(reservation)
        if drafted and KvGroup.FULL in reservation.ids:
            for allocator, pages in self.pools.tiers(KvGroup.FULL, reservation.ids[KvGroup.FULL]):
                allocator.stamp(pages, reservation.draft_epoch)
        out = reservation.paged_out
        source = SlotSource(reservation.n_tokens, reservation.entries, reservation.state, reservation.origin, out)
        reservation.ids.pop(KvGroup.RECURRENT, None)  # the index takes it over
        slot = self.publish(tokens, source, now, pinned=True)
        self._release(reservation)
        self.trim()
        return slot

    def drafted(self, slot: PrefixSlot) -> bool:
        """Return whether the drafter that is attached has the state of all of a slot."""
        if KvGroup.FULL not in self.pools:
            return False
        epoch, tiers = self.pools[KvGroup.FULL].epoch, self.pools.tiers(KvGroup.FULL, slot.pages(KvGroup.FULL))
        return epoch > 0 and all(allocator.epoch_of(page) == epoch for allocator, pages in tiers for page in pages)

    def cancel(self, reservation: Reservation) -> None:
        """Release the ids of a reservation that is not over yet."""
        if reservation in self.reservations:
            self.reservations.remove(reservation)
            self._release(reservation)

    # ---- pins

    def pin(self, slot: PrefixSlot) -> None:
        slot.pins += 1

    def unpin(self, slot: PrefixSlot) -> None:
        """Remove a pin; with the last one goes a slot whose eviction was delayed."""
        slot.pins -= 1
        if slot.alive and not slot.pins:
            if slot.evict_on_unpin:
                self._remove(slot)
            self.trim()

    def drop(self, slot: PrefixSlot) -> None:
        """Remove a slot whose content is lost or wrong, even a pinned one."""
        if slot.alive:
            self._remove(slot)

    def clear(self) -> None:
        """Drop everything, pins and reservations included: the shards lost their state."""
        for slot in self.slots:
            self._remove(slot)
        for reservation in self.reservations:
            self._release(reservation)
        self.reservations.clear()

    # ---- eviction

    @property
    def evicting(self) -> bool:
        return any(slot.evict_on_unpin for slot in self._slots.values())

    @property
    def n_bytes(self) -> int:
        """Bytes that only slots hold."""
        return sum(
            self.pools[kv_group].n_evictable * self.settings.unit_bytes.get(kv_group, 0)
            for kv_group in self.pools.kv_groups
        )

    def can_reclaim(self, needs: Mapping[KvGroup, int], shared: Mapping[KvGroup, Collection[int]]) -> bool:
        """Return whether evicting all unpinned slots would free so many ids; ``shared`` ones would stay."""
        pools = self._sequence_pools
        for kv_group, n in needs.items():
            n_missing = 0 if pools.shares([kv_group]) else n - pools[kv_group].n_free
            if n_missing > 0 and n_missing > self._n_reclaimable(kv_group, shared.get(kv_group, ())):
                return False
        if pools.shares(needs) and pools.extents is not None:
            n_states = needs.get(KvGroup.RECURRENT, 0) - pools.extents.n_without_state
            if n_states > 0 and n_states > self._n_reclaimable(KvGroup.RECURRENT, shared.get(KvGroup.RECURRENT, ())):
                return False
            n_missing = pools.shared_pages(needs) - pools[KvGroup.FULL].n_free
            if n_missing > 0:
                found = {kv_group: self._n_reclaimable(kv_group, shared.get(kv_group, ())) for kv_group in SHARED}
                return n_missing <= pools.shared_pages(found)
        return True

    def can_reclaim_host(self, n: int, shared: Collection[int]) -> bool:
        hosts = self.pools.host_pages
        return n <= hosts.n_free or n <= hosts.n_free + self._n_reclaimable(KvGroup.FULL, shared, hosts)

    def _n_reclaimable(self, kv_group: KvGroup, shared: Collection[int], allocator: PageAllocator | None = None) -> int:
        """Return how many ids evicting all unpinned slots would free; ``shared`` ones would stay."""
        allocator = allocator or self._sequence_pools[kv_group]
        pinned = {page for slot in self._slots.values() if slot.pins for page in self._ids(slot, kv_group)}
        return allocator.n_evictable - allocator.n_evictable_of(pinned.union(shared))

    def reclaim_host(self, n: int) -> bool:
        """Evict slots until so many pages in host memory are free; False if that is not enough."""
        hosts = self.pools.host_pages
        while n > hosts.n_free:
            victim = self._next_victim([hosts]) if n <= hosts.n_free + hosts.n_evictable else None
            if victim is None:
                return False
            self._evict(victim)
        return True

    def reclaim(self, needs: Mapping[KvGroup, int]) -> bool:
        """Evict slots until so many ids of each KV group are free for a sequence; False if that is not enough."""
        return self._reclaim(self._sequence_pools, needs)

    def reclaim_checkpoint(self, n_tokens_saved: int) -> bool:
        """Evict a slot for the state of one that saves more tokens, unless a state is free; False if none is worth
        less."""
        need, states = {KvGroup.RECURRENT: 1}, self.pools[KvGroup.RECURRENT]
        if states.n_free:
            return True
        if self.pools.fits_elsewhere(need):  # the next step frees an extent
            return False
        victim = self._next_victim([self.pools[kv_group] for kv_group in self.pools.memory_of(need)])
        if victim is None or self._value(victim) >= n_tokens_saved:
            return False
        self._evict(victim)
        return True

    def trim(self) -> None:
        """Evict slots until number and bytes are within the settings; also after a sequence that shared pages ended."""
        while len(self._slots) > self.settings.max_slots or self.n_bytes > self.settings.memory_bytes:
            kv_groups = self.pools.kv_groups if self.n_bytes > self.settings.memory_bytes else ()
            victim = self._next_victim([self.pools[kv_group] for kv_group in kv_groups])
            if victim is None:
                return
            self._evict(victim)

    def n_owners(self, page: int) -> int:
        return int(self.tree.holds(KvGroup.FULL)[page] > 0)

    def pinned_pages(self) -> set[int]:
        return {page for slot in self._slots.values() if slot.pins for page in slot.pages(KvGroup.FULL)}

    def move_pages(self, moves: Mapping[int, int]) -> None:
        """Hold other pages of KV group full with the same content."""
        self.tree.move_pages(moves)
        self.version += 1

    # ---- inside

    def _add(self, tokens: TokenBuffer, source: SlotSource, now: float) -> PrefixSlot | None:
        """Make a slot; None if the tree cannot hold it (``PrefixTree.add``)."""
        slot = self.tree.add(tokens, source, self._n_made)
        if slot is None:
            return None
        self._n_made += 1
        self.version += 1
        slot.parent = self.tree.longest_slot(tokens, slot.n_tokens - 1)
        if slot.node.n_slots > 1:
            for other in self._slots.values():
                if other.parent is slot.parent and other.begins_with(slot):
                    other.parent = slot
        self._slots[slot.number] = slot
        self.touch(slot, now)
        return slot

    def _remove(self, slot: PrefixSlot) -> None:
        self.version += 1
        self.tree.remove(slot)
        del self._slots[slot.number]
        for other in self._slots.values():
            if other.parent is slot:
                other.parent = slot.parent

    def _value(self, slot: PrefixSlot) -> float:
        return self._n_lost(slot) / (self.n_prompts - slot.last_use + 1)

    def _n_lost(self, slot: PrefixSlot) -> int:
        known = slot.parent.n_tokens if slot.parent is not None else 0
        if self.block_granular:
            node = slot.node  # pages shared with other slots stay
            while node.n_slots == 1 and node.parent is not None:
                node = node.parent
            known = max(known, node.stop * PAGE_TOKENS)
        return slot.n_tokens - known

    def _next_victim(self, exhausted: Collection[PageAllocator]) -> PrefixSlot | None:
        """Return the next slot to evict: one that frees an id of ``exhausted`` if any does, then by value and use."""
        slots = [slot for slot in self._slots.values() if not slot.pins]
        return min(
            slots,
            key=lambda s: (
                bool(exhausted) and not self._would_free(s, exhausted),
                self._value(s),
                s.last_use,
                s.number,
            ),
            default=None,
        )

    def _evict(self, slot: PrefixSlot) -> None:
        self.hooks.on_evict(slot)
        if slot.pins:
            slot.evict_on_unpin = True
        elif slot.alive:
            self.n_evictions += 1
            self._remove(slot)

    def _reclaim(self, pools: PagePools, needs: Mapping[KvGroup, int]) -> bool:
        while not pools.fits(needs):
            if pools.fits_elsewhere(needs):  # the next step frees an extent
                return False
            exhausted = [kv_group for kv_group, n in needs.items() if n > pools[kv_group].n_free] or [*needs]
            exhausted = pools.memory_of(exhausted)
            gives = all(pools[kv_group] is self.pools[kv_group] for kv_group in exhausted) or pools.shares(exhausted)
            victim = self._next_victim([pools[kv_group] for kv_group in exhausted]) if gives else None  # of others none
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _ids(self, slot: PrefixSlot, kv_group: KvGroup) -> list[int]:
        if kv_group is KvGroup.RECURRENT:
            return [slot.state] if slot.state != NO_STATE else []
        return slot.pages(kv_group)

    def _would_free(self, slot: PrefixSlot, exhausted: Collection[PageAllocator]) -> bool:
        if slot.state != NO_STATE and self._is_sole_owner(KvGroup.RECURRENT, slot.state, exhausted):
            return True
        if any(self._is_sole_owner(kv_group, page, exhausted) for kv_group, page in slot.tail.items()):
            return True
        at = slot.node
        while at.parent is not None and (at.n_slots == 1 or at.n_windows == 1):
            for kv_group, pages in at.pages.items():
                n_needing = at.n_windows if kv_group is KvGroup.WINDOW else at.n_slots
                needed = kv_group is not KvGroup.WINDOW or at.start >= slot.first_window
                if n_needing == 1 and needed and any(self._is_sole_owner(kv_group, page, exhausted) for page in pages):
                    return True
            at = at.parent
        return False

    def _is_sole_owner(self, kv_group: KvGroup, unit: int, exhausted: Collection[PageAllocator]) -> bool:
        allocator = self.pools.allocator_of(kv_group, unit)
        return allocator in exhausted and self.tree.holds(kv_group)[unit] == 1 and allocator.evictable(unit)

    def _match(self, nodes: Sequence[Node], position: int, n_known: int, slot: PrefixSlot | None) -> PrefixMatch:
        first, n_pages = self.tree.first_window(position), position // PAGE_TOKENS
        return PrefixMatch(
            position,
            n_known,
            full=tuple(pages_of_path(nodes, KvGroup.FULL, 0, n_pages)),
            first_window=first,
            window=tuple(pages_of_path(nodes, KvGroup.WINDOW, first, n_pages)),
            tail=dict(slot.tail) if slot is not None else {},
            state=slot.state if slot is not None else NO_STATE,
            slot=slot,
            paged_out=slot.paged_out if slot is not None else None,
        )

    def _release(self, reservation: Reservation) -> None:
        for kv_group, ids in reservation.ids.items():
            self.pools.release(kv_group, ids)
