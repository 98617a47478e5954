"""The page table (block table) of one sequence: its pages in order of position, in each paged space.

``full`` pages live as long as the sequence, or with KV Flash until they are paged out; ``window`` pages are released
once no later token can see them.  Knows positions and page ids, not tokens, requests or messages.
Invariant: entries below ``first_held`` were released or never allocated, those paged out have no device page, this
table owns the pages of all others exactly once, and only pages that it allocated itself are written through it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.residency import PagedOut, Residency, remembered, with_neighbours
from lucevisor.model.pages import first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space

PAGED = (Space.FULL, Space.WINDOW)


@dataclass(frozen=True, slots=True)
class Growth:
    """New entries of a table: ``table[space][first : first + len(pages)] = pages``.

    ``paged_out``: entries that leave the table before that, ``hosts``: their pages in host memory, if they have some.
    """

    space: Space
    first: int
    pages: list[int]
    paged_out: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Swap:
    """Entries that leave a table, for ``hosts`` in host memory, and entries that come back to ``pages``."""

    out: list[int]
    hosts: list[int]
    back: list[int]
    pages: list[int]


MakeRoom = Callable[[int, int], object]
"""Free so many pages on the devices and in host memory, if possible."""


class NoRoom(Exception):
    """Too few pages are free for now."""


class HostMemoryFull(Exception):
    """``n_pages`` of a sequence must leave the devices, and fewer are free in host memory."""

    def __init__(self, n_pages: int, reason: str) -> None:
        super().__init__(reason)
        self.n_pages = n_pages


@dataclass(slots=True)
class _Entries:
    first_held: int = 0  # entries below were released
    pages: list[int] = field(default_factory=list)  # entries first_held, ..., without those paged out
    out: list[int] = field(default_factory=list)  # entries paged out, ascending
    hosts: list[int] = field(default_factory=list)  # their pages in host memory; empty: they were dropped
    slid: list[int] = field(default_factory=list)  # those released, which steps in flight may still see

    @property
    def stop(self) -> int:
        return self.first_held + len(self.out) + len(self.pages)

    def entry_of(self, place: int) -> int:
        """Return the entry of a page of ``pages``."""
        n_before = bisect_right(range(len(self.out)), place, key=lambda i: self.out[i] - i)
        return self.first_held + place + n_before

    def resident(self) -> list[int]:
        """Return the entries of ``pages``."""
        out = set(self.out)
        return [entry for entry in range(self.first_held, self.stop) if entry not in out]

    def runs(self) -> list[Growth]:
        """Return all entries as if they were new: those resident, and before them those that are out."""
        found, place, at = [], 0, 0
        while place < len(self.pages):
            first = self.entry_of(place)
            n_out = bisect_left(self.out, first)
            stop = self.out[n_out] if n_out < len(self.out) else self.stop
            left = slice(at, n_out)
            pages = self.pages[place : place + stop - first]
            found.append(Growth(Space.FULL, first, pages, tuple(self.out[left]), tuple(self.hosts[left])))
            place, at = place + len(pages), n_out
        if at < len(self.out):  # behind all pages
            found.append(Growth(Space.FULL, self.stop, [], tuple(self.out[at:]), tuple(self.hosts[at:])))
        return found


class PageTable:
    """The pages of one sequence: grown before a slice is planned, released at the end."""

    def __init__(self, pools: PagePools, window_tokens: int | None, residency: Residency | None = None) -> None:
        """``window_tokens``: positions a sliding layer sees, the token itself included; None without such layers.
        ``residency``: of KV Flash; None: all ``full`` pages stay.
        """
        self._pools = pools
        self._window_tokens = window_tokens
        self._residency = residency
        self._entries = {space: _Entries() for space in PAGED if space in pools}
        self._scores: Sequence[float] = ()  # of the first entries of full, as they were ranked last
        self._is_ranked = False  # since the last swap

    def adopt(self, full: Sequence[int], first_window: int, window: Sequence[int]) -> None:
        """Start an empty table with whole shared pages, becoming one of their owners.

        ``full`` are the entries from 0 on, on the devices or in host memory, ``window`` those from ``first_window`` on,
        up to the same position.
        """
        shared = {Space.FULL: (0, full), Space.WINDOW: (first_window, window)}
        for space, entries in self._entries.items():
            first, pages = shared[space]
            self._pools.retain(space, pages)
            in_host = self._pools.host_pages.ids if space is Space.FULL else ()
            entries.out = [entry for entry, page in enumerate(pages, first) if page in in_host]
            entries.hosts = [page for page in pages if page in in_host]
            entries.first_held, entries.pages = first, [page for page in pages if page not in in_host]

    def arrange(self, paged_out: PagedOut | None, make_room: MakeRoom) -> Swap | None:
        """After ``adopt``: page out and in what differs from ``paged_out``, if it has the same bound, or page out what
        exceeds the bound.  Returns None if nothing does.  Raises NoRoom, changing nothing, if too few pages are free.
        """
        entries, bound = self._entries.get(Space.FULL), self._residency
        if entries is None or bound is None or not bound.keeps_host:
            return None
        if paged_out is not None and paged_out.pool_pages == bound.pool_pages:
            self._scores = paged_out.scores if bound.ranks_pages else ()
            wanted = {entry for entry in paged_out.entries if entry < entries.stop}
            out = [entry for entry in entries.resident() if entry in wanted]
            back = [entry for entry in entries.out if entry not in wanted]
        else:
            out, back = [entries.entry_of(place) for place in self.surplus(entries.stop * PAGE_TOKENS + 1)], []
        if not out and not back:
            return None
        swap = self._exchange(out, back, make_room)
        if swap is None:
            raise NoRoom(f"{len(out)} pages leave the devices and {len(back)} come back: too few are free")
        return swap

    def paged_out(self) -> PagedOut | None:
        """Return which pages lie in host memory, for a prefix slot; None if none does."""
        if not self.hosts or self._residency is None:
            return None
        bound, entries = self._residency, self._entries[Space.FULL]
        return PagedOut(bound.policy, bound.pool_pages, tuple(entries.out), tuple(self._scores))

    @property
    def n_out(self) -> int:
        """Pages of ``full`` that were paged out."""
        return len(self._entries[Space.FULL].out) if Space.FULL in self._entries else 0

    @property
    def hosts(self) -> list[int]:
        """Pages in host memory that it owns."""
        return list(self._entries[Space.FULL].hosts) if Space.FULL in self._entries else []

    def entries(self, space: Space, start: int, stop: int) -> list[int]:
        """Return the pages of entries ``[start, stop)``, on the devices or in host memory; those that it does not hold
        are left out.
        """
        entries = self._entries[space]
        if not entries.out:
            return entries.pages[max(0, start - entries.first_held) : max(0, stop - entries.first_held)]
        n_out, n_left = bisect_left(entries.out, start), bisect_left(entries.out, stop)
        first = entries.first_held + n_out
        resident = entries.pages[max(0, start - first) : max(0, stop - first - (n_left - n_out))]
        if n_out == n_left or not entries.hosts:
            return resident
        left, pages = dict(zip(entries.out[n_out:n_left], entries.hosts[n_out:n_left], strict=True)), iter(resident)
        return [left[entry] if entry in left else next(pages) for entry in range(start, min(stop, entries.stop))]

    def page(self, space: Space, entry: int) -> int | None:
        """Return the page of an entry; None if it does not hold it, or some are paged out (``entries`` knows those)."""
        entries = self._entries[space]
        place = entry - entries.first_held
        return entries.pages[place] if not entries.out and 0 <= place < len(entries.pages) else None

    def missing(self, n_tokens: int, n_ahead: int = 0) -> dict[Space, int]:
        """Return the pages that positions ``0 .. n_tokens - 1`` need beyond those held; only spaces that need some.

        ``n_ahead``: positions behind those that need pages of ``full`` alone, for drafts.
        """
        needs = {space: pages_of(n_tokens) - entries.stop for space, entries in self._entries.items()}
        if n_ahead:
            needs[Space.FULL] = pages_of(n_tokens + n_ahead) - self._entries[Space.FULL].stop
        return {space: n for space, n in needs.items() if n > 0}

    def surplus(self, n_tokens: int) -> list[int]:
        """Return the resident pages of ``full``, by their place, that positions ``0 .. n_tokens - 1`` push out."""
        if self._residency is None or Space.FULL not in self._entries:
            return []
        n_new, entries = self.missing(n_tokens).get(Space.FULL, 0), self._entries[Space.FULL]
        if len(entries.pages) + n_new <= self._residency.pool_pages:
            return []
        return self._residency.surplus(entries.resident(), n_new, self._scores)

    def rank(self, scores: Sequence[float]) -> None:
        """Note how much the last queries attend to the first entries of ``full``."""
        self._scores, self._is_ranked = remembered(self._scores, with_neighbours(scores)), True

    @property
    def swaps_next(self) -> bool:
        """Whether pages were ranked and not exchanged since."""
        return self._is_ranked

    @property
    def ranks_next(self) -> bool:
        """Whether a slice should rank the pages, if it is one that does: some are out."""
        return self._residency is not None and self._residency.ranks_pages and self.n_out > 0

    def ranks_at(self, position: int) -> bool:
        """Whether a decode at ``position`` ranks the pages."""
        return self.ranks_next and self._residency is not None and self._residency.ranks_at(position)

    def draft_room(self, stop: int) -> int | None:
        """Return how many drafts a decode that ends at ``stop`` may have, so that each ranking has the query of its
        own token; None: any number.
        """
        if not self.ranks_next or self._residency is None or not self._residency.ranks_decodes:
            return None
        return 0 if self.ranks_at(stop - 1) else -stop % self._residency.tau

    def swap(self, make_room: MakeRoom = lambda n_device, n_host: None) -> Swap | None:
        """Bring the best pages back, once after each ranking.  None if nothing changes, or too few pages are free."""
        if not self._is_ranked or self._residency is None:
            return None
        self._is_ranked = False
        entries = self._entries[Space.FULL]
        out, back = self._residency.swap(entries.resident(), entries.out, self._scores)
        return self._exchange(out, back, make_room) if out else None

    def _exchange(self, out: list[int], back: list[int], make_room: MakeRoom) -> Swap | None:
        """Move resident entries ``out`` to host memory and ``back`` from there; None if too few pages are free."""
        entries, full, hosts = self._entries[Space.FULL], self._pools[Space.FULL], self._pools.host_pages
        held = dict(zip(entries.resident(), entries.pages, strict=True))
        left = dict(zip(entries.out, entries.hosts, strict=True))
        leaving, coming = [held.pop(entry) for entry in out], [left.pop(entry) for entry in back]
        n_device = len(back) - sum(full.ref_count(page) == 1 for page in leaving)
        if n_device > full.n_free or len(out) > hosts.n_free:
            make_room(max(0, n_device), len(out))
            if n_device > full.n_free or len(out) > hosts.n_free:
                return None
        taken = hosts.allocate(len(out)) or []
        self._stamp_hosts(leaving, taken)
        full.release(leaving)
        pages = full.allocate(len(back)) or []
        for page, host in zip(pages, coming, strict=True):
            full.stamp([page], hosts.epoch_of(host))
        hosts.release(coming)
        held |= dict(zip(back, pages, strict=True))
        left |= dict(zip(out, taken, strict=True))
        entries.out = sorted(left)
        entries.hosts = [left[entry] for entry in entries.out]
        entries.pages = [held[entry] for entry in sorted(held)]
        return Swap(out, taken, back, pages)

    def _stamp_hosts(self, pages: Iterable[int], hosts: Iterable[int]) -> None:
        """What leaves keeps its draft epoch where drafters page theirs out, too."""
        full = self._pools[Space.FULL]
        if self._residency is not None and self._residency.ranks_pages:
            for page, host in zip(pages, hosts, strict=False):
                self._pools.host_pages.stamp([host], full.epoch_of(page))

    def needs(self, n_tokens: int) -> dict[Space, int]:
        """Return ``missing``, less the pages that become free when the surplus is paged out."""
        needs, surplus = self.missing(n_tokens), self.surplus(n_tokens)
        if Space.FULL in needs and surplus:
            pool, held = self._pools[Space.FULL], self._entries[Space.FULL].pages
            pages = [held[place] for place in surplus]
            needs[Space.FULL] -= sum(pool.ref_count(page) == 1 for page in pages)
        return {space: n for space, n in needs.items() if n > 0}

    def draft_from(self) -> int:
        """Return the first position from which all ``full`` pages are of the current draft epoch."""
        pages, pool = self._entries[Space.FULL].pages, self._pools[Space.FULL]
        n_old = len(pages)
        while n_old and pool.epoch_of(pages[n_old - 1]) == pool.epoch:
            n_old -= 1
        return (self._entries[Space.FULL].entry_of(n_old - 1) + 1) * PAGE_TOKENS if n_old else 0

    def covers(self, stop: int) -> bool:
        """Whether a slice up to ``stop`` takes no page, and surely neither releases nor swaps any: 63 of 64 decodes."""
        return self._residency is None and self._window_tokens is None and self._holds(stop)

    def _holds(self, stop: int) -> bool:
        """Whether all spaces have the pages of positions before ``stop``, or had them."""
        for entries in self._entries.values():  # without a call for each
            if (entries.first_held + len(entries.out) + len(entries.pages)) * PAGE_TOKENS < stop:
                return False
        return True

    def grow(self, start: int, stop: int, n_ahead: int = 0) -> list[Growth] | None:
        """Allocate pages for a slice ``[start, stop)``, after releasing the window pages that it cannot see and those
        that it pushes out, and pages of ``full`` for ``n_ahead`` positions more.

        Released pages are invisible to this slice and all later ones, so another sequence may get them in the same
        step.  Returns None, allocating nothing, if a space has too few free pages.  Raises HostMemoryFull, changing
        nothing, if host memory has too few for those that leave.
        """
        self.slide(start)
        if self._holds(stop + n_ahead) or not (needs := self.missing(stop, n_ahead)):
            return []
        surplus = self.surplus(stop) if Space.FULL in needs else []
        if surplus and not self._pools.fits(self.needs(stop)):
            return None
        out, hosts = self._page_out(surplus)
        taken = self._pools.allocate(needs)
        if taken is None:
            return None
        growths = []
        for space, pages in taken.items():
            entries = self._entries[space]
            leaving = (out, hosts) if space is Space.FULL else ()
            growths.append(Growth(space, entries.stop, pages, *leaving))
            entries.pages += pages
        return growths

    def slide(self, start: int) -> None:
        """Release the window pages that no token at ``start`` or later sees."""
        entries = self._entries.get(Space.WINDOW)
        if entries is None or self._window_tokens is None:
            return
        n_old = min(len(entries.pages), first_visible_page(start, self._window_tokens) - entries.first_held)
        if n_old > 0:
            self._pools[Space.WINDOW].release(entries.pages[:n_old])
            entries.slid += entries.pages[:n_old]
            del entries.pages[:n_old]
            entries.first_held += n_old

    def _page_out(self, surplus: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Release resident pages; return their entries, and their pages in host memory if they are kept there."""
        if not surplus or self._residency is None:
            return (), ()
        entries, hosts = self._entries[Space.FULL], list[int]()
        if self._residency.keeps_host:
            taken = self._pools.host_pages.allocate(len(surplus))
            if taken is None:
                free, total = self._pools.host_pages.n_free, self._pools.host_pages.n_total
                reason = f"{len(surplus)} pages leave the devices, {free} of {total} are free"
                raise HostMemoryFull(len(surplus), reason)
            hosts = taken
        left, full = [entries.entry_of(place) for place in surplus], self._pools[Space.FULL]
        pages = [entries.pages[place] for place in surplus]
        self._stamp_hosts(pages, hosts)
        full.release(pages)
        for place in reversed(surplus):
            del entries.pages[place]
        if hosts:
            kept = dict(zip(entries.out, entries.hosts, strict=True)) | dict(zip(left, hosts, strict=True))
            entries.hosts = [kept[entry] for entry in sorted(kept)]
        entries.out = sorted([*entries.out, *left])
        return tuple(left), tuple(hosts)

    def shrink(self, n_tokens: int) -> int:
        """Release the pages behind positions ``0 .. n_tokens - 1``; return how many."""
        n_released = 0
        for space, entries in self._entries.items():
            n_kept = max(0, pages_of(n_tokens) - entries.first_held - len(entries.out))
            self._pools[space].release(entries.pages[n_kept:])
            n_released += len(entries.pages) - min(n_kept, len(entries.pages))
            del entries.pages[n_kept:]
        return n_released

    def held(self, space: Space) -> list[int]:
        """Return the pages owned in a space, oldest first."""
        return list(self._entries[space].pages) if space in self._entries else []

    def known(self, space: Space) -> Growth:
        """Return all entries there ever were, as one growth.  Pages that left the window belong to others now."""
        e = self._entries[space]
        return Growth(space, e.first_held - len(e.slid), [*e.slid, *e.pages])

    def growths(self) -> list[Growth]:
        """Return all entries held, as if they were new."""
        found = []
        for space, e in self._entries.items():
            if e.out:
                found += e.runs()
            elif e.pages:
                found.append(Growth(space, e.first_held, list(e.pages)))
        return found

    def release(self) -> None:
        """Release all pages; the table is empty afterwards."""
        for space, entries in self._entries.items():
            self._pools[space].release(entries.pages)
            self._pools.host_pages.release(entries.hosts)
            self._entries[space] = _Entries()
