"""The page table (block table) of one sequence: its pages in order of position, in each paged KV group.

``full`` pages live as long as the sequence, ``window`` pages until no later token sees them.  KV Flash pages some out:
residency.py.  Invariant: the table owns each page from ``first_held`` on once, and writes only those it allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lucevisor.kv.page_pool import PagePools
from lucevisor.model.pages import ResidencyPolicy, first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup

PAGED = (KvGroup.FULL, KvGroup.WINDOW)


@dataclass(frozen=True, slots=True)
class Growth:
    """New entries: ``table[kv_group][first : first + len(pages)] = pages``.

    ``paged_out``: entries that leave before that, ``hosts``: their pages in host memory, if they have some.
    """

    kv_group: KvGroup
    first: int
    pages: list[int]
    paged_out: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PageSwap:
    """Entries that leave a table, for ``hosts`` in host memory, and entries that come back to ``pages``."""

    out: list[int]
    hosts: list[int]
    back: list[int]
    pages: list[int]


@dataclass(frozen=True, slots=True)
class PagedOut:
    """Entries of a sequence in host memory, ascending, with policy and bound, and the last ranking of the first
    entries."""

    policy: ResidencyPolicy
    pool_pages: int
    entries: tuple[int, ...]
    scores: tuple[float, ...] = ()

    @property
    def approximate(self) -> bool:
        """True if pages were computed by queries that did not see all that was before them."""
        return self.policy != "exact"

    @property
    def n_exact(self) -> int:
        return self.pool_pages * PAGE_TOKENS


MakeRoom = Callable[[int, int], object]
"""Free so many pages on the devices and in host memory, if possible."""


class NoRoom(Exception):
    """Too few pages are free for now."""


class HostMemoryFull(Exception):
    """``n_pages`` must leave the devices, and fewer are free in host memory."""

    def __init__(self, n_pages: int, reason: str) -> None:
        super().__init__(reason)
        self.n_pages = n_pages


@dataclass(slots=True)
class Entries:
    """The entries of a table in one KV group."""

    first_held: int = 0  # entries below were released
    pages: list[int] = field(default_factory=list)  # entries first_held, ..., without those paged out
    slid: list[int] = field(default_factory=list)  # those released, which steps in flight may still see

    @property
    def stop(self) -> int:
        return self.first_held + len(self.pages)


class PageTable:
    """The pages of one sequence: grown before a slice is planned, released at the end."""

    def __init__(self, pools: PagePools, window_tokens: int | None) -> None:
        """``window_tokens``: positions that a sliding layer attends to, the token's own included; None without such
        layers."""
        self._pools = pools
        self._window_tokens = window_tokens
        self._entries: dict[KvGroup, Entries] = {kv_group: Entries() for kv_group in PAGED if kv_group in pools}

    def adopt(self, full: Sequence[int], first_window: int, window: Sequence[int]) -> None:
        """Start with whole shared pages: ``full`` from entry 0 on, ``window`` from ``first_window`` on."""
        shared = {KvGroup.FULL: (0, full), KvGroup.WINDOW: (first_window, window)}
        for kv_group, entries in self._entries.items():
            first, pages = shared[kv_group]
            self._pools.retain(kv_group, pages)
            entries.first_held, entries.pages = first, [*pages]

    def entries(self, kv_group: KvGroup, start: int, stop: int) -> list[int]:
        """Return the pages of entries ``[start, stop)`` that it holds, on the devices or in host memory."""
        entries = self._entries[kv_group]
        return entries.pages[max(0, start - entries.first_held) : max(0, stop - entries.first_held)]

    def page(self, kv_group: KvGroup, entry: int) -> int | None:
        """Return the page of an entry; None if it does not hold it, or some are paged out (see ``entries``)."""
        entries = self._entries[kv_group]
        place = entry - entries.first_held
        return entries.pages[place] if 0 <= place < len(entries.pages) else None

    def missing(self, n_tokens: int, n_ahead: int = 0) -> dict[KvGroup, int]:
        """Return how many pages ``n_tokens`` positions lack, by KV group; ``n_ahead`` drafts need ``full`` alone."""
        needs = {kv_group: pages_of(n_tokens) - entries.stop for kv_group, entries in self._entries.items()}
        if n_ahead:
            needs[KvGroup.FULL] = pages_of(n_tokens + n_ahead) - self._entries[KvGroup.FULL].stop
        return {kv_group: n for kv_group, n in needs.items() if n > 0}

    def draft_from(self) -> int:
        """Return the first position from which all ``full`` pages are of the current draft epoch."""
        return self._n_old_pages() * PAGE_TOKENS

    def _n_old_pages(self) -> int:
        """Return how many of the first resident pages of ``full`` have another draft epoch."""
        pages, pool = self._entries[KvGroup.FULL].pages, self._pools[KvGroup.FULL]
        n_old = len(pages)
        while n_old and pool.epoch_of(pages[n_old - 1]) == pool.epoch:
            n_old -= 1
        return n_old

    def covers(self, stop: int) -> bool:
        """Return whether a slice up to ``stop`` changes no page, as 63 of 64 decodes."""
        return self._window_tokens is None and self._holds(stop)

    def _holds(self, stop: int) -> bool:
        """Return whether all KV groups have the pages of positions before ``stop``, or had them."""
        return all(entries.stop * PAGE_TOKENS >= stop for entries in self._entries.values())

    def grow(self, start: int, stop: int, n_ahead: int = 0) -> list[Growth] | None:
        """Allocate pages for a slice ``[start, stop)`` and ``n_ahead`` drafts; window pages that it cannot see are
        released.

        Another sequence may get those in the same step.  Returns None, allocating nothing, if a KV group has too few
        pages. Raises HostMemoryFull, changing nothing, if host memory lacks room for those that KV Flash pages out.
        """
        self.slide(start)
        if self._holds(stop + n_ahead) or not (needs := self.missing(stop, n_ahead)):
            return []
        leaving = self._page_out(stop) if KvGroup.FULL in needs else ((), ())
        taken = self._pools.allocate(needs) if leaving is not None else None
        if taken is None:
            return None
        growths = []
        for kv_group, pages in taken.items():
            entries = self._entries[kv_group]
            growths.append(Growth(kv_group, entries.stop, pages, *(leaving or ()) if kv_group is KvGroup.FULL else ()))
            entries.pages += pages
        return growths

    def slide(self, start: int) -> None:
        """Release the window pages that no token from ``start`` on attends to."""
        entries = self._entries.get(KvGroup.WINDOW)
        if entries is None or self._window_tokens is None:
            return
        n_old = min(len(entries.pages), first_visible_page(start, self._window_tokens) - entries.first_held)
        if n_old > 0:
            self._pools[KvGroup.WINDOW].release(entries.pages[:n_old])
            entries.slid += entries.pages[:n_old]
            del entries.pages[:n_old]
            entries.first_held += n_old

    def shrink(self, n_tokens: int) -> int:
        """Release the pages behind ``n_tokens`` positions; return how many."""
        n_released = 0
        for kv_group, entries in self._entries.items():
            n_surplus = max(0, min(len(entries.pages), entries.stop - pages_of(n_tokens)))
            at = len(entries.pages) - n_surplus
            self._pools[kv_group].release(entries.pages[at:])
            del entries.pages[at:]
            n_released += n_surplus
        return n_released

    def held(self, kv_group: KvGroup) -> list[int]:
        return list(self._entries[kv_group].pages) if kv_group in self._entries else []

    def known(self, kv_group: KvGroup) -> Growth:
        """Return all entries there ever were; pages that left the window belong to others now."""
        e = self._entries[kv_group]
        return Growth(kv_group, e.first_held - len(e.slid), [*e.slid, *e.pages])

    def move_pages(self, moves: Mapping[int, int]) -> list[Growth]:
        """Own other pages of KV group full with the same content; return the entries that changed."""
        entries = self._entries[KvGroup.FULL]
        changed = [at for at, page in enumerate(entries.pages) if page in moves]
        for at in changed:
            entries.pages[at] = moves[entries.pages[at]]
        return [Growth(KvGroup.FULL, entries.first_held + at, [entries.pages[at]]) for at in changed]

    def growths(self) -> list[Growth]:
        return [Growth(kv_group, e.first_held, list(e.pages)) for kv_group, e in self._entries.items() if e.pages]

    def release(self) -> None:
        for kv_group, entries in self._entries.items():
            self._pools[kv_group].release(entries.pages)
            self._entries[kv_group] = type(entries)()

    # ---- only pages that KV Flash pages out

    @property
    def n_out(self) -> int:
        return 0

    @property
    def hosts(self) -> list[int]:
        return []

    def paged_out(self) -> PagedOut | None:
        """Return which pages lie in host memory; None if none does."""
        return None

    def arrange(self, paged_out: PagedOut | None, make_room: MakeRoom) -> PageSwap | None:
        """After ``adopt``: page out and in until it is as ``paged_out``, or within the bound.  Raises NoRoom."""
        return None

    def surplus(self, n_tokens: int) -> list[int]:
        """Return the places of resident ``full`` pages that ``n_tokens`` positions push out."""
        return []

    def needs(self, n_tokens: int) -> dict[KvGroup, int]:
        """Return ``missing``, less the pages that become free when the surplus is paged out."""
        return self.missing(n_tokens)

    def _page_out(self, n_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Release the surplus; return its entries and their host pages, None if too few pages are free."""
        return (), ()

    def rank(self, scores: Sequence[float]) -> None:
        """Note how much the last queries attend to the first entries of ``full``."""

    @property
    def ranks_next(self) -> bool:
        """True if a slice should rank the pages, if it is one that does: some are out."""
        return False

    def ranks_at(self, position: int) -> bool:
        """Return whether a decode at ``position`` ranks the pages."""
        return False

    def draft_room(self, stop: int) -> int | None:
        """Return how many drafts a decode that ends at ``stop`` may have, for rankings of its own token; None: any
        number."""
        return None

    @property
    def swaps_next(self) -> bool:
        """True if pages were ranked and not exchanged since."""
        return False

    def swap(self, make_room: MakeRoom = lambda n_device, n_host: None) -> PageSwap | None:
        """Bring the best pages back, once after each ranking.  None if nothing changes, or too few pages are free."""
        return None
