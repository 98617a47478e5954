"""The page pools (KV block manager): which page and state ids are in use, and how often.

A page id means the same 64 positions in every shard's pool; the daemons own the bytes.  Invariant: an id is free or has
an owner, also after a call that raises; ids that the prefix index alone owns are evictable.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lucevisor.model.values import KvGroup, Tier
from lucevisor.protocol.loading import PoolSizes


class PageError(Exception):
    """Fewer owners than a retain or release needs: a bug in the caller, never client input."""


class PageAllocator:
    """Reference-counted ids ``first .. first + n_total - 1``; the lowest free ones are taken first, O(log n) per id."""

    def __init__(self, n_total: int, name: str = "pages", first: int = 0, tier: Tier = Tier.DEVICE) -> None:
        """``tier``: the memory of all its ids.  ``name``: for error messages."""
        self.name = name
        self.tier = tier
        self._first = first
        self.epoch = 0  # stamped on ids that are allocated
        self._epochs = [0] * n_total
        self._generations = [0] * n_total
        self._ref_counts = [0] * n_total
        self._cached: set[int] = set()
        self.n_evictable = 0
        self._n_used = 0
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
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Ids with at least one owner; a shared id counts once."""
        return self._n_used

    def evictable(self, page: int) -> bool:
        return page in self._cached and self._ref_counts[page - self._first] == 1

    def in_use(self) -> list[int]:
        return [page for page, n in enumerate(self._ref_counts, self._first) if n]

    def ref_count(self, page: int) -> int:
        """Number of owners, prefix index included.  Raises PageError if the id is not of this pool."""
        self._check([page])
        return self._ref_counts[page - self._first]

    def allocate(self, n: int) -> list[int] | None:
        """Take ``n`` free ids with one owner each, or None, taking nothing, if fewer are free."""
        if n > self.n_free:
            return None
        taken = self._take(n)
        self._n_used += n
        for page in taken:
            self._ref_counts[page - self._first] = 1
            self._generations[page - self._first] += 1
        self.stamp(taken, self.epoch)
        return taken

    def stamp(self, pages: Iterable[int], epoch: int) -> None:
        """Set the draft epoch of ids: in which they were written, if not by whoever allocated them."""
        for page in pages:
            self._epochs[page - self._first] = epoch

    def epoch_of(self, page: int) -> int:
        """Return the draft epoch in which an id was allocated; 0: without a drafter."""
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
        """Remove an owner from each id, once per occurrence.  Raises PageError, changing nothing, on a double free."""
        counted, ref_counts, first, cached = Counter(pages), self._ref_counts, self._first, self._cached
        self._check(counted)
        for page, n in counted.items():
            if ref_counts[page - first] < n + (page in cached):  # the index's own goes through uncache
                held = ref_counts[page - first] - (page in cached)
                raise PageError(f"{self.name}: id {page} is released {n} times but has {held} owners (double free)")
        for page, n in counted.items():
            left = ref_counts[page - first] = ref_counts[page - first] - n
            if left == 0:
                self._n_used -= 1
                self._put(page)
            elif left == 1 and page in cached:
                self.n_evictable += 1

    def cache(self, pages: Collection[int]) -> None:
        """Make the prefix index an owner of ids in use.  Raises PageError, changing nothing, if it is one or an id is
        free."""
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
        """Say where free list and counts disagree; ``cached``: what the prefix index owns."""
        free = [page for page in self.ids if self.ref_count(page) == 0 and not self._is_lent(page)]
        evictable = [page for page in cached if self.evictable(page)]
        problems = []
        if (listed := sorted(self._free_ids())) != free:
            problems.append(f"the free list is {listed}, ids without owners are {free}")
        if self._n_used != sum(n > 0 for n in self._ref_counts):
            problems.append(f"{self._n_used} ids count as used, {sum(n > 0 for n in self._ref_counts)} have owners")
        if self._cached != set(cached):
            problems.append(f"ids {sorted(self._cached)} count as cached, the prefix index has {sorted(cached)}")
        if self.n_evictable != len(evictable):
            problems.append(f"{self.n_evictable} ids count as evictable, the prefix index alone has {evictable}")
        return problems

    def move(self, source: int, target: int) -> None:
        """Give the owners of ``source`` to ``target``, just allocated; the caller copies the content, also in a
        drafter."""
        at, to = source - self._first, target - self._first
        self._ref_counts[to], self._epochs[to] = self._ref_counts[at], self._epochs[at] if self.epoch else 0
        if source in self._cached:
            self._cached.remove(source)
            self._cached.add(target)
        self._ref_counts[at] = 0
        self._n_used -= 1
        self._put(source)

    # ---- the free list

    def _take(self, n: int) -> list[int]:
        return [heappop(self._free) for _ in range(n)]

    def _put(self, page: int) -> None:
        heappush(self._free, page)

    def _free_ids(self) -> Iterable[int]:
        return self._free

    def _is_lent(self, page: int) -> bool:
        """Return whether the memory of an id is used by what it is shared with."""
        return False

    def _check(self, pages: Iterable[int]) -> None:
        first, last = self._first, self._first + len(self._ref_counts) - 1
        for page in pages:
            if not first <= page <= last:
                raise PageError(f"{self.name}: id {page} is outside {first} to {last}")


class Extents:
    """Memory that holds either a recurrent state or pages of KV group full (:mod:`lucevisor.model.extents`).

    Pages fill extents that others use already, those with the highest ids first; states take the lowest free one.
    """

    def __init__(self, n: int, n_pages: int) -> None:
        """``n`` extents of ``n_pages`` pages each."""
        self.n_pages = n_pages
        self.n_free_pages = n * n_pages
        self.free = list(range(n))  # ascending, as all lists here
        self._free_pages = [list(range(i * n_pages, (i + 1) * n_pages)) for i in range(n)]
        self._partial: list[int] = []  # with used and with free pages
        self._states: set[int] = set()

    def __len__(self) -> int:
        return len(self._free_pages)

    def __contains__(self, page: int) -> bool:
        return page < len(self._free_pages) * self.n_pages

    def holds_state(self, extent: int) -> bool:
        return extent in self._states

    def take_state(self) -> int:
        extent = self.free.pop(0)
        self._states.add(extent)
        self.n_free_pages -= self.n_pages
        return extent

    def put_state(self, extent: int) -> None:
        self._states.remove(extent)
        insort(self.free, extent)
        self.n_free_pages += self.n_pages

    def take_page(self) -> int:
        if not self._partial:
            self._partial.append(self.free.pop())
        extent = self._partial[-1]
        page = heappop(self._free_pages[extent])
        if not self._free_pages[extent]:
            self._partial.pop()
        self.n_free_pages -= 1
        return page

    def put_page(self, page: int) -> None:
        extent, free = page // self.n_pages, self._free_pages[page // self.n_pages]
        heappush(free, page)
        self.n_free_pages += 1
        if len(free) == 1:
            insort(self._partial, extent)
        if len(free) == self.n_pages:
            del self._partial[bisect_left(self._partial, extent)]
            insort(self.free, extent)

    def free_pages(self) -> list[int]:
        """Return the free pages, without those in the memory of states."""
        return [page for i, pages in enumerate(self._free_pages) if i not in self._states for page in pages]

    @property
    def n_without_state(self) -> int:
        """Extents that are free, or would be if their pages were moved."""
        return len(self) - len(self._states)

    def by_use(self) -> list[int]:
        """Return the extents with used pages, those with the fewest first."""
        held = self._states.union(self.free)
        return sorted(held.symmetric_difference(range(len(self))), key=lambda extent: -len(self._free_pages[extent]))

    def used_pages(self, extent: int) -> list[int]:
        free = set(self._free_pages[extent])
        return [page for page in range(extent * self.n_pages, (extent + 1) * self.n_pages) if page not in free]

    def close(self, extent: int) -> None:
        """Give out no page of an extent with used pages, until ``reopen``."""
        if self._free_pages[extent]:
            del self._partial[bisect_left(self._partial, extent)]
            self.n_free_pages -= len(self._free_pages[extent])

    def reopen(self, extent: int) -> None:
        if self._free_pages[extent]:
            insort(self._partial, extent)
            self.n_free_pages += len(self._free_pages[extent])


class ExtentPages(PageAllocator):
    """Pages of KV group full, of which the first share their memory with states.  The others are given out first."""

    def __init__(self, n_total: int, extents: Extents) -> None:
        super().__init__(n_total, f"KV group {KvGroup.FULL}")
        self._extents = extents
        self._free = [page for page in self._free if page not in extents]

    @property
    def n_free(self) -> int:
        return len(self._free) + self._extents.n_free_pages

    def _take(self, n: int) -> list[int]:
        alone = super()._take(min(n, len(self._free)))
        return alone + [self._extents.take_page() for _ in range(n - len(alone))]

    def _put(self, page: int) -> None:
        if page in self._extents:
            self._extents.put_page(page)
        else:
            super()._put(page)

    def _free_ids(self) -> Iterable[int]:
        return [*self._extents.free_pages(), *self._free]

    def _is_lent(self, page: int) -> bool:
        return page in self._extents and self._extents.holds_state(page // self._extents.n_pages)


class ExtentStates(PageAllocator):
    """Recurrent states that share their memory with pages."""

    def __init__(self, extents: Extents) -> None:
        super().__init__(len(extents), f"KV group {KvGroup.RECURRENT}")
        self._extents = extents

    @property
    def n_free(self) -> int:
        return len(self._extents.free)

    def _take(self, n: int) -> list[int]:
        return [self._extents.take_state() for _ in range(n)]

    def _put(self, page: int) -> None:
        self._extents.put_state(page)

    def _free_ids(self) -> Iterable[int]:
        return self._extents.free

    def _is_lent(self, page: int) -> bool:
        return bool(self._extents.used_pages(page))


@dataclass(frozen=True, slots=True)
class PageUse:
    """Ids of a KV group.  ``evictable``: used by prefix slots alone; ``lent``: another group uses their memory."""

    used: int
    total: int
    evictable: int = 0
    lent: int = 0

    @property
    def free(self) -> int:
        return self.total - self.used - self.lent


class PagePools:
    """One allocator per KV group of the model.  A drafter's keys and values have the ids of ``full`` pages.

    ``slot_pools``: where prefix slots allocate, the same unless recurrent checkpoints live in host memory: then slots
    get all host states, and these pools all device states.  ``host_pages``: of KV group full, paged out by KV Flash.
    ``draft_states``: after verified drafts.  ``extents``: memory that pages and states share, if they do.
    """

    def __init__(self, kv_groups: Iterable[KvGroup], pools: PoolSizes) -> None:
        """``pools``: sizes as sent in Load."""
        sizes = {
            KvGroup.FULL: pools.full_pages,
            KvGroup.WINDOW: pools.window_pages,
            KvGroup.RECURRENT: pools.device_states,
        }
        self._allocators = {
            kv_group: PageAllocator(sizes[kv_group], f"KV group {kv_group}") for kv_group in sorted(kv_groups)
        }
        self.extents: Extents | None = None
        if pools.state_pages:
            self.extents = extents = Extents(pools.device_states, pools.state_pages)
            self._allocators[KvGroup.FULL] = ExtentPages(pools.full_pages, extents)
            self._allocators[KvGroup.RECURRENT] = ExtentStates(extents)
        self.host_pages = PageAllocator(pools.host_pages, "pages in host memory", pools.full_pages, Tier.HOST)
        self.draft_states = PageAllocator(pools.draft_states, "states after drafts", pools.device_states)
        self._n_epochs = 0
        self.slot_pools = self
        if pools.host_states and KvGroup.RECURRENT in self:
            self.slot_pools = copy(self)
            in_host = PageAllocator(pools.host_states, "states in host memory", pools.device_rows, Tier.HOST)
            self.slot_pools.slot_pools = self.slot_pools
            self.slot_pools._allocators = {**self._allocators, KvGroup.RECURRENT: in_host}

    @property
    def copies_states(self) -> bool:
        """True if a slot needs a copy of a live state instead of taking it over."""
        return KvGroup.RECURRENT in self and self.slot_pools[KvGroup.RECURRENT].tier is not self[KvGroup.RECURRENT].tier

    @property
    def kv_groups(self) -> Sequence[KvGroup]:
        return tuple(self._allocators)

    def __contains__(self, kv_group: KvGroup) -> bool:
        return kv_group in self._allocators

    def __getitem__(self, kv_group: KvGroup) -> PageAllocator:
        return self._allocators[kv_group]

    def tiers(self, kv_group: KvGroup, ids: Iterable[int]) -> list[tuple[PageAllocator, list[int]]]:
        """Return ids of a KV group by allocator: pages of KV group full may lie in host memory."""
        device, in_host = self._allocators[kv_group], self.host_pages
        if kv_group is not KvGroup.FULL or not in_host.n_total:
            return [(device, [*ids])]
        by_tier: tuple[list[int], list[int]] = [], []
        host_ids = in_host.ids
        for page in ids:
            by_tier[page in host_ids].append(page)
        return [(device, by_tier[0]), (in_host, by_tier[1])]

    def allocator_of(self, kv_group: KvGroup, unit: int) -> PageAllocator:
        in_host = kv_group is KvGroup.FULL and unit in self.host_pages.ids
        return self.host_pages if in_host else self._allocators[kv_group]

    def epoch_of(self, kv_group: KvGroup, unit: int) -> int:
        return self.allocator_of(kv_group, unit).epoch_of(unit)

    def retain(self, kv_group: KvGroup, ids: Iterable[int]) -> None:
        for allocator, tier_ids in self.tiers(kv_group, ids):
            allocator.retain(tier_ids)

    def release(self, kv_group: KvGroup, ids: Iterable[int]) -> None:
        for allocator, tier_ids in self.tiers(kv_group, ids):
            allocator.release(tier_ids)

    def allocate(self, needs: Mapping[KvGroup, int]) -> dict[KvGroup, list[int]] | None:
        """Take ``needs[kv_group]`` ids per KV group, or None, taking nothing, if any has too few."""
        if not self.fits(needs):
            return None
        # States first: those of one memory need whole extents.
        states_first = sorted(needs.items(), key=lambda need: need[0] is not KvGroup.RECURRENT)
        taken = {kv_group: self._allocators[kv_group].allocate(n) for kv_group, n in states_first}
        return {kv_group: ids for kv_group, ids in taken.items() if ids is not None}

    def fits(self, needs: Mapping[KvGroup, int]) -> bool:
        if any(n > self._allocators[kv_group].n_free for kv_group, n in needs.items()):
            return False
        return not self.shares(needs) or self.shared_pages(needs) <= self._allocators[KvGroup.FULL].n_free

    def fits_elsewhere(self, needs: Mapping[KvGroup, int]) -> bool:
        """Return whether all that is missing is a free extent: the memory for it is free, in several."""
        if not self.shares(needs) or self.shared_pages(needs) > self._allocators[KvGroup.FULL].n_free:
            return False
        if self.extents is not None and needs.get(KvGroup.RECURRENT, 0) > self.extents.n_without_state:
            return False  # free pages beside the extents hold no state
        others = {kv_group: n for kv_group, n in needs.items() if not self.shares([kv_group])}
        return self.fits(others) and needs.get(KvGroup.RECURRENT, 0) > self._allocators[KvGroup.RECURRENT].n_free

    def shares(self, kv_groups: Collection[KvGroup]) -> bool:
        """Return whether one of some KV groups shares its memory with another one here."""
        states = self._allocators.get(KvGroup.RECURRENT)
        return isinstance(states, ExtentStates) and not {KvGroup.FULL, KvGroup.RECURRENT}.isdisjoint(kv_groups)

    def shared_pages(self, needs: Mapping[KvGroup, int]) -> int:
        """Return the pages whose memory takes what is needed of the KV groups that share theirs."""
        n_pages = self.extents.n_pages if self.extents is not None else 0
        return needs.get(KvGroup.FULL, 0) + n_pages * needs.get(KvGroup.RECURRENT, 0)

    def memory_of(self, kv_groups: Collection[KvGroup]) -> list[KvGroup]:
        """Return some KV groups, and those with which they share their memory."""
        return [*kv_groups] if not self.shares(kv_groups) else [*{*kv_groups, KvGroup.FULL, KvGroup.RECURRENT}]

    def begin_draft_epoch(self) -> None:
        """A drafter is attached, without state of what was computed before."""
        self._n_epochs += 1
        self[KvGroup.FULL].epoch = self._n_epochs

    def resume_draft_epoch(self) -> None:
        """The same drafter is attached again, and nothing was computed in between."""
        self[KvGroup.FULL].epoch = self._n_epochs

    def end_draft_epoch(self) -> None:
        self[KvGroup.FULL].epoch = 0

    def in_use(self) -> dict[KvGroup, list[int]]:
        units = {kv_group: allocator.in_use() for kv_group, allocator in self._allocators.items()}
        for kv_group, cached in self.slot_pools._allocators.items():
            if cached is not self._allocators[kv_group]:
                units[kv_group] += cached.in_use()
        if KvGroup.FULL in units:
            units[KvGroup.FULL] += self.host_pages.in_use()
        return units

    def usage(self) -> dict[KvGroup, PageUse]:
        return {
            kv_group: _use_of(allocator, self.slot_pools[kv_group]) for kv_group, allocator in self._allocators.items()
        }


def _use_of(live: PageAllocator, cached: PageAllocator) -> PageUse:
    both = (live,) if live is cached else (live, cached)
    lent = sum(a.n_total - a.n_used - a.n_free for a in both)
    return PageUse(sum(a.n_used for a in both), sum(a.n_total for a in both), sum(a.n_evictable for a in both), lent)
