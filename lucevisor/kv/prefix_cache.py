"""The prefix cache: lookup and publication of cached prompt prefixes.

Pure: tokens, page ids and ``now`` (seconds) in, page ids out; the caller makes the operations that fill pages and copy
states.  Knows no requests.  Models with recurrent layers resume only at the end of a slot, where their states were
checkpointed; others at any cached page whose window is complete.
Its ``evictor`` decides which slots go first (prefix_eviction.py).
Invariant: slots and bytes stay within the settings, as far as unpinned slots allow; the index owns every id that a slot
needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_eviction import PrefixEvictor
from lucevisor.kv.prefix_records import PrefixHooks, PrefixMatch, PrefixSettings, Reservation
from lucevisor.kv.prefix_slots import PrefixSlots
from lucevisor.kv.prefix_tree import NO_STATE, Node, PrefixSlot, PrefixTree, SlotSource, pages_of_path
from lucevisor.kv.residency import PagedOut, Residency
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.pages import pages_of
from lucevisor.model.values import PAGE_TOKENS, Space


class PrefixIndex:
    """Prefix slots over the pools of a model."""

    def __init__(
        self, pools: PagePools, settings: PrefixSettings, window_tokens: int | None, residency: Residency | None = None
    ) -> None:
        self.settings: Final = settings
        self.hooks = PrefixHooks()
        self.recurrent = Space.RECURRENT in pools
        self.block_granular = not self.recurrent and window_tokens is None  # a prompt can resume at any cached page
        self._residency = residency
        self._pools = pools.slot_pools
        self._tree = PrefixTree(self._pools, window_tokens)
        self._slots = PrefixSlots(self._tree)
        self._reservations: set[Reservation] = set()
        self.evictor = PrefixEvictor(
            pools,
            self._tree,
            self._slots,
            settings,
            on_evict=lambda slot: self.hooks.on_evict(slot),
            block_granular=self.block_granular,
        )

    # ---- state and lookup

    @property
    def tree(self) -> PrefixTree:
        """What is remembered, for checks."""
        return self._tree

    @property
    def pools(self) -> PagePools:
        """Where slots have their ids."""
        return self._pools

    @property
    def version(self) -> int:
        """Changes whenever the result of a match may."""
        return self._slots.n_changes

    @property
    def reservations(self) -> Collection[Reservation]:
        """Ids set aside for prefixes that are being restored."""
        return self._reservations

    @property
    def enabled(self) -> bool:
        """Whether the settings allow any slot."""
        state_bytes = self.settings.unit_bytes.get(Space.RECURRENT, 0) if self.recurrent else 0
        return self.settings.max_slots > 0 and state_bytes <= self.settings.memory_bytes

    @property
    def slots(self) -> list[PrefixSlot]:
        """All slots, oldest first."""
        return list(self._slots)

    @property
    def pinning(self) -> bool:
        """Whether pins or reservations keep ids from sequences for now."""
        return bool(self._reservations) or any(slot.pins for slot in self._slots)

    def find(self, tokens: Sequence[int], n_tokens: int) -> PrefixSlot | None:
        """Return the slot of exactly the first ``n_tokens`` tokens."""
        return self._tree.find(TokenBuffer.of(tokens), n_tokens)

    def match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix that leaves a token to compute; changes nothing."""
        packed, most = TokenBuffer.of(tokens), len(tokens) - 1
        walk = self._tree.walk(packed, most)
        n_known = walk.n_pages * PAGE_TOKENS
        n_usable = 0 if self.recurrent else self._tree.n_usable_pages(walk) * PAGE_TOKENS
        if self._residency is not None and not self._residency.attends_host:  # what follows depends on what was out
            n_usable = min(n_usable, (self._residency.pool_pages - 1) * PAGE_TOKENS)
        slot = next(iter(self._tree.slots_on(walk, packed, most)), None)
        if slot is not None and slot.n_tokens and slot.n_tokens >= n_usable:
            return self._match(walk.nodes, slot.n_tokens, n_known, slot)
        return self._match(walk.nodes, n_usable, n_known, None) if n_usable else PrefixMatch(0, n_known)

    def use(self, match: PrefixMatch, now: float) -> None:
        """Count the use of a match.  Call once per prompt, with or without a hit."""
        self._slots.n_prompts += 1
        if match.slot is not None and match.slot.alive:
            self.touch(match.slot, now)
            match.slot.n_uses += 1

    def touch(self, slot: PrefixSlot, now: float) -> None:
        """Make a slot the most recently used."""
        self._slots.touch(slot, now)

    # ---- making slots

    def worth_caching(self, n_tokens: int) -> bool:
        """Whether prefixes of this length are cached."""
        return self.enabled and n_tokens >= max(1, self.settings.min_tokens)

    def allocate_state(self, n_tokens_saved: int) -> int | None:
        """Allocate a state for a checkpoint that saves so many tokens, if need be by evicting a slot worth less."""
        if not self.evictor.reclaim_checkpoint(n_tokens_saved):
            return None
        taken = self._pools[Space.RECURRENT].allocate(1)
        return None if taken is None else taken[0]

    def n_saved(self, tokens: Sequence[int], n_tokens: int) -> int:
        """Return how many tokens a slot at ``n_tokens`` would save beyond the existing slots."""
        known = self._tree.longest_slot(TokenBuffer.of(tokens), n_tokens - 1)
        return n_tokens - (known.n_tokens if known is not None else 0)

    def publish(
        self, tokens: Sequence[int], source: SlotSource, now: float, *, pinned: bool = False
    ) -> PrefixSlot | None:
        """Cache the first ``source.n_tokens`` tokens.  The index becomes an owner of their pages, and takes over the
        caller's reference to the state in any case.

        Any step planned from now on may use them.  Returns None if the prefix is too short, its window is gone, or it
        was evicted right away.  An existing slot is touched and returned.  ``pinned``: pin the returned slot.
        """
        packed = TokenBuffer.of(tokens)
        known = made = None
        if self.worth_caching(source.n_tokens):
            known = self._tree.find(packed, source.n_tokens)
            made = self._slots.add(packed, source, now) if known is None else None
        if source.state != NO_STATE:  # a slot that was made has a reference of its own
            self._pools[Space.RECURRENT].release([source.state])
        if known is not None:
            self.touch(known, now)
            known.pins += pinned
        if made is None:
            return known
        made.pins += pinned
        self.evictor.trim()
        if made.alive:
            self.hooks.on_slot(made)
        return made if made.alive else None

    # ---- restoring

    def reserve(self, n_tokens: int, paged_out: PagedOut | None = None) -> Reservation | None:
        """Allocate ids for a prefix from disk, evicting slots if need be; None if there are not enough.

        ``paged_out``: which of its pages get ids in host memory.
        """
        leaving = paged_out.entries if paged_out is not None else ()
        n_device = pages_of(n_tokens) - len(leaving)
        first, needs = self._tree.first_window(n_tokens), {Space.FULL: n_device, Space.RECURRENT: 1}
        needs[Space.WINDOW] = pages_of(n_tokens) - first
        needs = {space: n for space, n in needs.items() if space in self._pools}
        if not self.worth_caching(n_tokens) or not self.evictor.reclaim_host(len(leaving)):
            return None
        if not self.evictor.reclaim_for_slot(needs):
            return None
        ids, hosts = self._pools.allocate(needs), self._pools.host_pages.allocate(len(leaving))
        if ids is None or hosts is None:
            return None
        reservation = Reservation(n_tokens, first, ids, paged_out=paged_out)
        if Space.FULL in ids:
            pool = self._pools[Space.FULL]
            reservation.draft_epoch = pool.epoch
            pool.stamp(ids[Space.FULL], 0)  # until it is known that the file has the drafter's state
            held, out = iter(ids[Space.FULL]), dict(zip(leaving, hosts, strict=True))
            entries = range(pages_of(n_tokens))
            ids[Space.FULL] = [out[entry] if entry in out else next(held) for entry in entries]
        self._reservations.add(reservation)
        return reservation

    def adopt(
        self, tokens: Sequence[int], reservation: Reservation, now: float, *, drafted: bool = False
    ) -> PrefixSlot | None:
        """Publish a prefix whose bytes are complete in its reserved ids; ``tokens`` has the reserved length.

        The slot is pinned, so that the waiting request finds it.  ``drafted``: the bytes include the state of the
        drafter that was attached when they were reserved.  Returns None if the shards lost their state in the
        meantime, or the slot was evicted right away.
        """
        if reservation not in self._reservations:
            return None
        if len(tokens) != reservation.n_tokens:
            raise ValueError(f"{len(tokens)} tokens are adopted into ids reserved for {reservation.n_tokens}")
        self._reservations.remove(reservation)
        if drafted and Space.FULL in reservation.ids:
            for allocator, own in self._pools.tiers(Space.FULL, reservation.ids[Space.FULL]):
                allocator.stamp(own, reservation.draft_epoch)
        out = reservation.paged_out
        source = SlotSource(reservation.n_tokens, reservation.entries, reservation.state, reservation.origin, out)
        reservation.ids.pop(Space.RECURRENT, None)  # the index takes it over
        slot = self.publish(tokens, source, now, pinned=True)
        self._release(reservation)
        self.evictor.trim()
        return slot

    def drafted(self, slot: PrefixSlot) -> bool:
        """Whether the drafter that is attached has the state of all of a slot."""
        if Space.FULL not in self._pools:
            return False
        epoch, tiers = self._pools[Space.FULL].epoch, self._pools.tiers(Space.FULL, slot.pages(Space.FULL))
        return epoch > 0 and all(one.epoch_of(page) == epoch for one, pages in tiers for page in pages)

    def cancel(self, reservation: Reservation) -> None:
        """Release the ids of a reservation.  Does nothing if it was adopted, cancelled or cleared already."""
        if reservation in self._reservations:
            self._reservations.remove(reservation)
            self._release(reservation)

    # ---- pins

    def pin(self, slot: PrefixSlot) -> None:
        """Protect a slot from eviction, once per call."""
        slot.pins += 1

    def unpin(self, slot: PrefixSlot) -> None:
        """Remove a pin; with the last one goes a slot whose eviction was delayed."""
        slot.pins -= 1
        if slot.alive and not slot.pins:
            if slot.evict_on_unpin:
                self._slots.remove(slot)
            self.evictor.trim()

    def drop(self, slot: PrefixSlot) -> bool:
        """Evict a slot without telling the hook; False if it is pinned."""
        if slot.alive and not slot.pins:
            self._slots.remove(slot)
        return not slot.alive

    def clear(self) -> None:
        """Drop everything, pins and reservations included: the shards lost their state."""
        for slot in list(self._slots):
            self._slots.remove(slot)
        for reservation in self._reservations:
            self._release(reservation)
        self._reservations.clear()

    # ---- inside

    def _match(self, nodes: Sequence[Node], position: int, n_known: int, slot: PrefixSlot | None) -> PrefixMatch:
        first, n_pages = self._tree.first_window(position), position // PAGE_TOKENS
        return PrefixMatch(
            position,
            n_known,
            full=tuple(pages_of_path(nodes, Space.FULL, 0, n_pages)),
            first_window=first,
            window=tuple(pages_of_path(nodes, Space.WINDOW, first, n_pages)),
            tail=dict(slot.tail) if slot is not None else {},
            state=slot.state if slot is not None else NO_STATE,
            slot=slot,
            paged_out=slot.paged_out if slot is not None else None,
        )

    def _release(self, reservation: Reservation) -> None:
        for space, ids in reservation.ids.items():
            self._pools.release(space, ids)
