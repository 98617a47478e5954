"""The page pools (KV block manager): the only place that decides which page and state ids are in use, and how often.

A page id means the same 64 positions in every shard's pool; the daemons own the bytes.  Owners are counted, not named,
except for the prefix index: ids that it alone holds are evictable.  Invariant: an id is either free or has at least one
owner, and ``n_used + n_free == n_total`` after every call, even one that raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lucevisor.model.values import Space, Tier
from lucevisor.protocol.loading import PoolSizes


class PageError(Exception):
    """An id was retained or released with fewer owners than that needs: a bug in the caller, never client input."""


class PageAllocator:
    """Reference-counted ids ``first .. first + n_total - 1``.

    Always hands out the lowest free ids, so equal call sequences give equal ids and long-lived pages gather at the
    start of the pool.  O(log n) per id.
    """

    def __init__(self, n_total: int, name: str = "pages", first: int = 0, tier: Tier = Tier.DEVICE) -> None:
        """Start with every id free.  ``tier``: the memory of all its ids.  ``name`` appears in error messages."""
        self.name = name
        self.tier = tier
        self._first = first
        self.epoch = 0  # stamped on ids that are allocated
        self._epochs = [0] * n_total
        self._generations = [0] * n_total
        self._ref_counts = [0] * n_total
        self._cached: set[int] = set()
        self.n_evictable = 0
        self._free = list(range(first, first + n_total))
        heapify(self._free)

    @property
    def ids(self) -> range:
        return range(self._first, self._first + len(self._ref_counts))

    @property
    def n_total(self) -> int:
        return len(self._ref_counts)

    @property
    def n_free(self) -> int:
        """Ids without an owner."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Ids with at least one owner; a shared id counts once."""
        return len(self._ref_counts) - len(self._free)

    def evictable(self, page: int) -> bool:
        """Return whether the prefix index is the only owner of an id."""
        return page in self._cached and self._ref_counts[page - self._first] == 1

    def in_use(self) -> list[int]:
        """Return the ids with at least one owner, in order."""
        return [page for page, n in enumerate(self._ref_counts, self._first) if n]

    def ref_count(self, page: int) -> int:
        """Number of owners, prefix index included; 0 means free.  Raises PageError if the id is not of this pool."""
        self._check([page])
        return self._ref_counts[page - self._first]

    def allocate(self, n: int) -> list[int] | None:
        """Take ``n`` free ids with one owner each, or None, taking nothing, if fewer are free."""
        if n > len(self._free):
            return None
        taken = [heappop(self._free) for _ in range(n)]
        for page in taken:
            self._ref_counts[page - self._first] = 1
            self._generations[page - self._first] += 1
        self.stamp(taken, self.epoch)
        return taken

    def stamp(self, pages: Iterable[int], epoch: int) -> None:
        """Set the draft epoch of ids: where they were written, if not by whoever allocated them."""
        for page in pages:
            self._epochs[page - self._first] = epoch

    def epoch_of(self, page: int) -> int:
        """Return the draft epoch of an id in use: while which drafter it was allocated; 0: none was attached."""
        return self._epochs[page - self._first]

    def n_evictable_of(self, ids: Iterable[int]) -> int:
        """Return how many of the ids, those of other allocators left out, the prefix index alone holds."""
        known = self.ids
        return sum(self.evictable(page) for page in ids if page in known)

    def generation_of(self, page: int) -> int:
        """Return how often an id was allocated: what is filed under an earlier generation is not its content."""
        return self._generations[page - self._first]

    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to each id, once per occurrence.  Raises PageError, changing nothing, if one is free."""
        counted, ref_counts, first = Counter(pages), self._ref_counts, self._first
        self._check(counted)
        for page in counted:
            if ref_counts[page - first] == 0:
                raise PageError(f"{self.name}: id {page} is free and cannot be shared")
        for page, n in counted.items():
            if ref_counts[page - first] == 1 and page in self._cached:
                self.n_evictable -= 1
            ref_counts[page - first] += n

    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner from each id, once per occurrence; ids without owners become free.

        Raises PageError naming the id, changing nothing, if it has too few owners (a double free).
        """
        counted, ref_counts, first, cached = Counter(pages), self._ref_counts, self._first, self._cached
        self._check(counted)
        for page, n in counted.items():
            if ref_counts[page - first] < n + (page in cached):  # the index's own goes through uncache
                held = ref_counts[page - first] - (page in cached)
                raise PageError(f"{self.name}: id {page} is released {n} times but has {held} owners (double free)")
        for page, n in counted.items():
            left = ref_counts[page - first] = ref_counts[page - first] - n
            if left == 0:
                heappush(self._free, page)
            elif left == 1 and page in cached:
                self.n_evictable += 1

    def cache(self, pages: Collection[int]) -> None:
        """Make the prefix index an owner of ids in use.  Raises PageError, changing nothing, if it is one already or an
        id is free.
        """
        for page in pages:
            if page in self._cached:
                raise PageError(f"{self.name}: id {page} is cached already")
        self.retain(pages)
        self._cached.update(pages)

    def uncache(self, pages: Collection[int]) -> None:
        """Remove the prefix index from the owners of ids.  Raises PageError, changing nothing, if it is not one."""
        for page in pages:
            if page not in self._cached:
                raise PageError(f"{self.name}: id {page} is not cached")
        ref_counts, first = self._ref_counts, self._first
        self.n_evictable -= sum(ref_counts[page - first] == 1 for page in pages)
        self._cached.difference_update(pages)
        self.release(pages)

    def problems(self, cached: Collection[int]) -> list[str]:
        """Say where free list and counts disagree with the owners; ``cached``: what the prefix index owns."""
        free = [page for page in self.ids if self.ref_count(page) == 0]
        evictable = [page for page in cached if self.evictable(page)]
        problems = []
        if sorted(self._free) != free:
            problems.append(f"the free list is {sorted(self._free)}, ids without owners are {free}")
        if self._cached != set(cached):
            problems.append(f"ids {sorted(self._cached)} count as cached, the prefix index has {sorted(cached)}")
        if self.n_evictable != len(evictable):
            problems.append(f"{self.n_evictable} ids count as evictable, the prefix index alone has {evictable}")
        return problems

    def _check(self, pages: Iterable[int]) -> None:
        first, last = self._first, self._first + len(self._ref_counts) - 1
        for page in pages:
            if not first <= page <= last:
                raise PageError(f"{self.name}: id {page} is outside {first} to {last}")


@dataclass(frozen=True, slots=True)
class PageUse:
    """Id counts of one space; ``evictable`` of the used ones belong to prefix slots alone."""

    used: int
    total: int
    evictable: int = 0


class PagePools:
    """One allocator per space of the model: pages of ``full`` and ``window``, states of ``recurrent``.

    A drafter keeps its keys and values under the ids of ``full`` pages: each carries the draft epoch of its allocation.
    ``slot_pools`` is where prefix slots allocate: the same allocators, unless recurrent checkpoints live in host
    memory.  Then slots get all host states and these pools all device states, so neither takes from the other.
    ``host_pages``: those of space full that KV Flash paged out.  ``draft_states``: those after verified drafts.
    """

    def __init__(self, spaces: Iterable[Space], pools: PoolSizes) -> None:
        """``pools``: sizes as sent in Load."""
        sizes = {Space.FULL: pools.full_pages, Space.WINDOW: pools.window_pages, Space.RECURRENT: pools.device_states}
        self._allocators = {space: PageAllocator(sizes[space], f"space {space}") for space in sorted(spaces)}
        self.host_pages = PageAllocator(pools.host_pages, "pages in host memory", pools.full_pages, Tier.HOST)
        self.draft_states = PageAllocator(pools.draft_states, "states after drafts", pools.device_states)
        self._n_epochs = 0
        self.slot_pools = self
        if pools.host_states and Space.RECURRENT in self:
            self.slot_pools = copy(self)
            in_host = PageAllocator(pools.host_states, "states in host memory", pools.device_rows, Tier.HOST)
            self.slot_pools.slot_pools = self.slot_pools
            self.slot_pools._allocators = {**self._allocators, Space.RECURRENT: in_host}

    @property
    def copies_states(self) -> bool:
        """True if a slot needs a copy of a live state instead of taking it over."""
        return Space.RECURRENT in self and self.slot_pools[Space.RECURRENT].tier is not self[Space.RECURRENT].tier

    @property
    def spaces(self) -> Sequence[Space]:
        """Spaces of the model, in a fixed order."""
        return tuple(self._allocators)

    def __contains__(self, space: Space) -> bool:
        return space in self._allocators

    def __getitem__(self, space: Space) -> PageAllocator:
        return self._allocators[space]

    def tiers(self, space: Space, ids: Iterable[int]) -> list[tuple[PageAllocator, list[int]]]:
        """Return ids of a space by allocator: pages of space full may lie in host memory."""
        device, in_host = self._allocators[space], self.host_pages
        if space is not Space.FULL or not in_host.n_total:
            return [(device, [*ids])]
        by_tier: tuple[list[int], list[int]] = [], []
        host_ids = in_host.ids
        for page in ids:
            by_tier[page in host_ids].append(page)
        return [(device, by_tier[0]), (in_host, by_tier[1])]

    def allocator_of(self, space: Space, unit: int) -> PageAllocator:
        in_host = space is Space.FULL and unit in self.host_pages.ids
        return self.host_pages if in_host else self._allocators[space]

    def epoch_of(self, space: Space, unit: int) -> int:
        """``PageAllocator.epoch_of`` for an id of any tier."""
        return self.allocator_of(space, unit).epoch_of(unit)

    def retain(self, space: Space, ids: Iterable[int]) -> None:
        """``PageAllocator.retain`` for ids of any tier."""
        for allocator, tier_ids in self.tiers(space, ids):
            allocator.retain(tier_ids)

    def release(self, space: Space, ids: Iterable[int]) -> None:
        """``PageAllocator.release`` for ids of any tier."""
        for allocator, tier_ids in self.tiers(space, ids):
            allocator.release(tier_ids)

    def allocate(self, needs: Mapping[Space, int]) -> dict[Space, list[int]] | None:
        """Take ``needs[space]`` ids per space, or None, taking nothing, if any space has too few."""
        if not self.fits(needs):
            return None
        taken = {space: self._allocators[space].allocate(n) for space, n in needs.items()}
        return {space: ids for space, ids in taken.items() if ids is not None}

    def fits(self, needs: Mapping[Space, int]) -> bool:
        return all(n <= self._allocators[space].n_free for space, n in needs.items())

    def begin_draft_epoch(self) -> None:
        """A drafter is attached: it has no state of what was computed before."""
        self._n_epochs += 1
        self[Space.FULL].epoch = self._n_epochs

    def resume_draft_epoch(self) -> None:
        """A drafter is attached that has the state of the last one, and nothing was computed in between."""
        self[Space.FULL].epoch = self._n_epochs

    def end_draft_epoch(self) -> None:
        """The drafter is detached: nothing allocated from now on has its state."""
        self[Space.FULL].epoch = 0

    def in_use(self) -> dict[Space, list[int]]:
        """Return the ids in use by space, device and host together, without states after drafts."""
        units = {space: allocator.in_use() for space, allocator in self._allocators.items()}
        for space, cached in self.slot_pools._allocators.items():
            if cached is not self._allocators[space]:
                units[space] += cached.in_use()
        if Space.FULL in units:
            units[Space.FULL] += self.host_pages.in_use()
        return units

    def usage(self) -> dict[Space, PageUse]:
        """Ids in use by space, device and host together, states after drafts left out."""
        return {space: _use_of(allocator, self.slot_pools[space]) for space, allocator in self._allocators.items()}


def _use_of(live: PageAllocator, cached: PageAllocator) -> PageUse:
    both = (live,) if live is cached else (live, cached)
    return PageUse(sum(a.n_used for a in both), sum(a.n_total for a in both), sum(a.n_evictable for a in both))
