"""Page allocators: the one place that says which page and state ids are in use, and by how many owners.

A page id means the same 64 positions in every shard's pool; the bytes are the daemons' business.  This file knows no
sequences and no positions; of owners it knows one apart, the prefix index, whose ids can be had back.  Invariant: an id
is either free or has at least one owner, never both, and ``n_used + n_free == n_total`` after every call, those that
raise included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes


class PageError(Exception):
    """An id was shared or released that has not so many owners: a defect of the caller, never of a client's input."""


class PageAllocator:
    """Ids ``first .. first + n_total - 1`` with reference counts.

    The lowest free ids are given first, so the same calls give the same ids, and long-lived pages gather at the start
    of the pool.  Costs O(log n) an id.
    """

    def __init__(self, n_total: int, name: str = "pages", first: int = 0) -> None:
        """Start with all ids free.  ``name`` is used in error messages.  Raises ValueError when ``n_total`` is
        negative.
        """
        if n_total < 0:
            raise ValueError(f"{name}: a pool of {n_total} ids cannot be made; give 0 or more")
        self.name = name
        self._first = first
        self._owners = [0] * n_total
        self._kept: set[int] = set()
        self._n_idle = 0
        self._free = list(range(first, first + n_total))
        heapify(self._free)

    @property
    def n_total(self) -> int:
        """Ids of the pool."""
        return len(self._owners)

    @property
    def n_free(self) -> int:
        """Ids that nobody owns."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Ids with at least one owner; a shared id counts once."""
        return len(self._owners) - len(self._free)

    @property
    def n_idle(self) -> int:
        """Ids that the prefix index keeps and nobody else owns: free as soon as it gives them up."""
        return self._n_idle

    def idle(self, page: int) -> bool:
        """Say whether the prefix index alone owns an id."""
        return page in self._kept and self._owners[page - self._first] == 1

    def owners(self, page: int) -> int:
        """Return how many owners an id has, the prefix index included; 0 = free.

        Raises PageError when it is not of this pool.
        """
        first, last = self._first, self._first + len(self._owners) - 1
        if not first <= page <= last:
            raise PageError(f"{self.name}: id {page} is outside {first} to {last}")
        return self._owners[page - first]

    def allocate(self, n: int) -> list[int] | None:
        """Take ``n`` free ids, each with one owner; None, and nothing taken, when fewer are free.

        Raises ValueError when ``n`` is negative.
        """
        if n < 0:
            raise ValueError(f"{self.name}: {n} ids were asked for; ask for 0 or more")
        if n > len(self._free):
            return None
        taken = [heappop(self._free) for _ in range(n)]
        for page in taken:
            self._owners[page - self._first] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add one owner to each id, once for each time it is listed.  Raises PageError, and changes nothing, when one
        is free.
        """
        counted = Counter(pages)
        for page in counted:
            if self.owners(page) == 0:
                raise PageError(f"{self.name}: id {page} is free and cannot be shared")
        for page, n in counted.items():
            self._n_idle -= self.idle(page)
            self._owners[page - self._first] += n

    def keep(self, page: int) -> None:
        """Make the prefix index one of the owners of an id that is in use.  Raises PageError, and changes nothing, when
        it is one or the id is free.
        """
        if page in self._kept:
            raise PageError(f"{self.name}: id {page} is kept already")
        self.share([page])
        self._kept.add(page)

    def give_up(self, page: int) -> None:
        """Take the prefix index from the owners of an id.  Raises PageError when it is not one of them."""
        if page not in self._kept:
            raise PageError(f"{self.name}: id {page} is given up but not kept")
        self._n_idle -= self.idle(page)
        self._kept.remove(page)
        self.release([page])

    def release(self, pages: Iterable[int]) -> None:
        """Take one owner from each id, once for each time it is listed; an id without owners is free.

        Raises PageError naming the id, and changes nothing, when one has fewer owners than that (a double free).
        """
        counted = Counter(pages)
        for page, n in counted.items():
            held = self.owners(page) - (page in self._kept)  # the prefix index gives its own up
            if held < n:
                raise PageError(f"{self.name}: id {page} is released {n} times but has {held} owners (double free)")
        for page, n in counted.items():
            self._owners[page - self._first] -= n
            self._n_idle += self.idle(page)
            if self._owners[page - self._first] == 0:
                heappush(self._free, page)


@dataclass(frozen=True, slots=True)
class PageUse:
    """Ids of one space: in use, all there are, and those in use that only prefix slots hold."""

    used: int
    total: int
    idle: int = 0


class PagePools:
    """The allocators of the spaces a model has: pages of ``full`` and ``window``, states of ``recurrent``.

    ``of_slots`` is from where prefix slots have their ids: the same allocators, but for recurrent states that lie in
    host memory, of which it has all, and these pools none.  Slots and live sequences then take no state from each
    other.
    """

    def __init__(self, spaces: Iterable[Space], pools: PoolSizes) -> None:
        """Make one allocator a space, of the size that ``pools`` (as sent in Load) gives it."""
        sizes = {Space.FULL: pools.full_pages, Space.WINDOW: pools.window_pages, Space.RECURRENT: pools.device_states}
        self._allocators = {space: PageAllocator(sizes[space], f"space {space}") for space in sorted(spaces)}
        self.of_slots = self
        if pools.host_states and Space.RECURRENT in self:
            self.of_slots = copy(self)
            in_host = PageAllocator(pools.host_states, "states in host memory", pools.device_states)
            self.of_slots.of_slots = self.of_slots
            self.of_slots._allocators = {**self._allocators, Space.RECURRENT: in_host}

    @property
    def copies_states(self) -> bool:
        """Whether a live state cannot become a slot's as it is."""
        return self.of_slots is not self

    @property
    def spaces(self) -> Sequence[Space]:
        """The spaces of the model, in a fixed order."""
        return tuple(self._allocators)

    def __contains__(self, space: Space) -> bool:
        return space in self._allocators

    def __getitem__(self, space: Space) -> PageAllocator:
        return self._allocators[space]

    def allocate(self, needs: Mapping[Space, int]) -> dict[Space, list[int]] | None:
        """Take ``needs[space]`` ids of every space named, or None, and nothing taken, when one space has too few."""
        if not self.fits(needs):
            return None
        taken = {space: self._allocators[space].allocate(n) for space, n in needs.items()}
        return {space: ids for space, ids in taken.items() if ids is not None}

    def fits(self, needs: Mapping[Space, int]) -> bool:
        """Say whether ``needs[space]`` ids of every space named are free."""
        return all(n <= self._allocators[space].n_free for space, n in needs.items())

    def use(self) -> dict[Space, PageUse]:
        """Return what is in use, by space, wherever it lies."""
        return {space: _use_of(one, self.of_slots[space]) for space, one in self._allocators.items()}


def _use_of(live: PageAllocator, of_slots: PageAllocator) -> PageUse:
    both = (live,) if live is of_slots else (live, of_slots)
    return PageUse(sum(a.n_used for a in both), sum(a.n_total for a in both), sum(a.n_idle for a in both))
