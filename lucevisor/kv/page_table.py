"""The page table of one sequence: which page holds its positions ``[64 i, 64 i + 64)``, in each paged space.

``full`` pages live as long as the sequence, or with KV Flash until they are paged out; ``window`` pages are released
once no later token can see them.  Knows positions and page ids, not tokens, requests or messages.
Invariant: entries below ``first_held`` were released or never allocated, those paged out are one range behind the head,
this table owns all others exactly once, and only pages that it allocated itself are written through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import HEAD_PAGES, first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space

PAGED = (Space.FULL, Space.WINDOW)


@dataclass(frozen=True, slots=True)
class Growth:
    """New entries of a table: ``table[space][first : first + len(pages)] = pages``.

    ``paged_out``: entries that leave the table before that.
    """

    space: Space
    first: int
    pages: list[int]
    paged_out: range = range(0)


@dataclass(slots=True)
class _Entries:
    first_held: int = 0  # entries below were released
    pages: list[int] = field(default_factory=list)  # entries first_held, ..., without those paged out
    n_out: int = 0  # entries paged out, from HEAD_PAGES on
    slid: list[int] = field(default_factory=list)  # those released, which steps in flight may still see

    @property
    def stop(self) -> int:
        return self.first_held + self.n_out + len(self.pages)


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

    def adopt(self, full: Sequence[int], first_window: int, window: Sequence[int]) -> None:
        """Start an empty table with whole shared pages, becoming one of their owners.

        ``full`` are the entries from 0 on, ``window`` those from ``first_window`` on, up to the same position.
        """
        shared = {Space.FULL: (0, full), Space.WINDOW: (first_window, window)}
        for space, entries in self._entries.items():
            first, pages = shared[space]
            self._pools[space].retain(pages)
            entries.first_held, entries.pages = first, list(pages)

    @property
    def n_out(self) -> int:
        """Pages of ``full`` that were paged out."""
        return self._entries[Space.FULL].n_out if Space.FULL in self._entries else 0

    def entries(self, space: Space, start: int, stop: int) -> list[int]:
        """Return the pages of entries ``[start, stop)``, all of them before or behind those paged out; those that it
        does not hold are left out.
        """
        entries = self._entries[space]
        first = entries.first_held + (entries.n_out if start >= HEAD_PAGES else 0)
        assert not entries.n_out or stop <= HEAD_PAGES or start >= HEAD_PAGES + entries.n_out
        return entries.pages[max(0, start - first) : max(0, stop - first)]

    def missing(self, n_tokens: int, n_ahead: int = 0) -> dict[Space, int]:
        """Return the pages that positions ``0 .. n_tokens - 1`` need beyond those held; only spaces that need some.

        ``n_ahead``: positions behind those that need pages of ``full`` alone, for drafts.
        """
        needs = {space: pages_of(n_tokens) - entries.stop for space, entries in self._entries.items()}
        if n_ahead:
            needs[Space.FULL] = pages_of(n_tokens + n_ahead) - self._entries[Space.FULL].stop
        return {space: n for space, n in needs.items() if n > 0}

    def surplus(self, n_tokens: int) -> range:
        """Return the resident pages of ``full``, by their place, that positions ``0 .. n_tokens - 1`` push out."""
        if self._residency is None:
            return range(0)
        n_new = self.missing(n_tokens).get(Space.FULL, 0)
        return self._residency.surplus(len(self._entries[Space.FULL].pages), n_new)

    def needs(self, n_tokens: int) -> dict[Space, int]:
        """Return ``missing``, less the pages that become free when the surplus is paged out."""
        needs, surplus = self.missing(n_tokens), self.surplus(n_tokens)
        if Space.FULL in needs and surplus:
            pool, pages = self._pools[Space.FULL], self._entries[Space.FULL].pages[surplus.start : surplus.stop]
            needs[Space.FULL] -= sum(pool.ref_count(page) == 1 for page in pages)
        return {space: n for space, n in needs.items() if n > 0}

    def draft_from(self) -> int:
        """Return the first position from which all ``full`` pages are of the current draft epoch."""
        pages, pool = self._entries[Space.FULL].pages, self._pools[Space.FULL]
        n_old = len(pages)
        while n_old and pool.epoch_of(pages[n_old - 1]) == pool.epoch:
            n_old -= 1
        return (n_old + self.n_out * (n_old > HEAD_PAGES)) * PAGE_TOKENS

    def grow(self, start: int, stop: int, n_ahead: int = 0) -> list[Growth] | None:
        """Allocate pages for a slice ``[start, stop)``, after releasing the window pages that it cannot see and those
        that it pushes out, and pages of ``full`` for ``n_ahead`` positions more.

        Released pages are invisible to this slice and all later ones, so another sequence may get them in the same
        step.  Returns None, allocating nothing, if a space has too few free pages.
        """
        self._slide(start)
        needs = self.missing(stop, n_ahead)
        if not needs:  # 63 of 64 decodes
            return []
        surplus = self.surplus(stop) if Space.FULL in needs else range(0)
        if surplus and not self._pools.fits(self.needs(stop)):
            return None
        paged_out = self._page_out(surplus)
        taken = self._pools.allocate(needs)
        if taken is None:
            return None
        growths = []
        for space, pages in taken.items():
            entries = self._entries[space]
            growths.append(Growth(space, entries.stop, pages, paged_out if space is Space.FULL else range(0)))
            entries.pages += pages
        return growths

    def _page_out(self, surplus: range) -> range:
        """Release resident pages; return their entries."""
        if not surplus:
            return surplus
        entries = self._entries[Space.FULL]
        self._pools[Space.FULL].release(entries.pages[surplus.start : surplus.stop])
        del entries.pages[surplus.start : surplus.stop]
        left = range(surplus.start + entries.n_out, surplus.stop + entries.n_out)
        entries.n_out += len(surplus)
        return left

    def shrink(self, n_tokens: int) -> int:
        """Release the pages behind positions ``0 .. n_tokens - 1``; return how many."""
        n_released = 0
        for space, entries in self._entries.items():
            n_kept = max(0, pages_of(n_tokens) - entries.first_held - entries.n_out)
            self._pools[space].release(entries.pages[n_kept:])
            n_released += len(entries.pages) - min(n_kept, len(entries.pages))
            del entries.pages[n_kept:]
        return n_released

    def held(self, space: Space) -> list[int]:
        """Return the pages owned in a space, oldest first."""
        return list(self._entries[space].pages) if space in self._entries else []

    def known(self, space: Space) -> Growth:
        """Return all entries there ever were, as one growth: those that slid out of the window belong to others now."""
        e = self._entries[space]
        return Growth(space, e.first_held - len(e.slid), [*e.slid, *e.pages])

    def growths(self) -> list[Growth]:
        """Return all entries held, as if they were new."""
        found = []
        for space, e in self._entries.items():
            if e.n_out:
                out = range(HEAD_PAGES, HEAD_PAGES + e.n_out)
                found.append(Growth(space, 0, e.pages[:HEAD_PAGES]))
                found.append(Growth(space, out.stop, e.pages[HEAD_PAGES:], out))
            elif e.pages:
                found.append(Growth(space, e.first_held, list(e.pages)))
        return found

    def release(self) -> None:
        """Release all pages; the table is empty afterwards."""
        for space, entries in self._entries.items():
            self._pools[space].release(entries.pages)
            self._entries[space] = _Entries()

    def _slide(self, start: int) -> None:
        entries = self._entries.get(Space.WINDOW)
        if entries is None or self._window_tokens is None:
            return
        n_old = min(len(entries.pages), first_visible_page(start, self._window_tokens) - entries.first_held)
        if n_old > 0:
            self._pools[Space.WINDOW].release(entries.pages[:n_old])
            entries.slid += entries.pages[:n_old]
            del entries.pages[:n_old]
            entries.first_held += n_old
