"""The page table of one sequence: which page holds its positions ``[64 i, 64 i + 64)``, in each paged space.

``full`` pages live as long as the sequence; ``window`` pages are released once no later token can see them.  Knows
positions and page ids, not tokens, requests or messages.
Invariant: entries below ``first_held`` were released or never allocated, this table owns all others exactly once, and
only pages that it allocated itself are written through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lucevisor.kv.page_pool import PagePools
from lucevisor.model.pages import first_visible_page, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space

PAGED = (Space.FULL, Space.WINDOW)


@dataclass(frozen=True, slots=True)
class Growth:
    """New entries of a table: ``table[space][first : first + len(pages)] = pages``."""

    space: Space
    first: int
    pages: list[int]


@dataclass(slots=True)
class _Entries:
    first_held: int = 0  # entries below were released
    pages: list[int] = field(default_factory=list)  # pages[i] is entry first_held + i
    slid: list[int] = field(default_factory=list)  # those released, which steps in flight may still see

    @property
    def stop(self) -> int:
        return self.first_held + len(self.pages)


class PageTable:
    """The pages of one sequence: grown before a slice is planned, released at the end."""

    def __init__(self, pools: PagePools, window_tokens: int | None) -> None:
        """``window_tokens``: positions a sliding layer sees, the token itself included; None without such layers."""
        self._pools = pools
        self._window_tokens = window_tokens
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

    def entries(self, space: Space, start: int, stop: int) -> list[int]:
        """Return the pages of entries ``[start, stop)``; those that it does not hold are left out."""
        entries = self._entries[space]
        return entries.pages[max(0, start - entries.first_held) : max(0, stop - entries.first_held)]

    def missing(self, n_tokens: int, n_ahead: int = 0) -> dict[Space, int]:
        """Return the pages that positions ``0 .. n_tokens - 1`` need beyond those held; only spaces that need some.

        ``n_ahead``: positions behind those that need pages of ``full`` alone, for drafts.
        """
        needs = {space: pages_of(n_tokens) - entries.stop for space, entries in self._entries.items()}
        if n_ahead:
            needs[Space.FULL] = pages_of(n_tokens + n_ahead) - self._entries[Space.FULL].stop
        return {space: n for space, n in needs.items() if n > 0}

    def draft_from(self) -> int:
        """Return the first position from which all ``full`` pages are of the current draft epoch."""
        pages, pool = self._entries[Space.FULL].pages, self._pools[Space.FULL]
        n_old = len(pages)
        while n_old and pool.epoch_of(pages[n_old - 1]) == pool.epoch:
            n_old -= 1
        return n_old * PAGE_TOKENS

    def grow(self, start: int, stop: int, n_ahead: int = 0) -> list[Growth] | None:
        """Allocate pages for a slice ``[start, stop)``, after releasing the window pages that it cannot see, and pages
        of ``full`` for ``n_ahead`` positions more.

        Released pages are invisible to this slice and all later ones, so another sequence may get them in the same
        step.  Returns None, allocating nothing, if a space has too few free pages.
        """
        self._slide(start)
        needs = self.missing(stop, n_ahead)
        if not needs:  # 63 of 64 decodes
            return []
        taken = self._pools.allocate(needs)
        if taken is None:
            return None
        growths = []
        for space, pages in taken.items():
            entries = self._entries[space]
            growths.append(Growth(space, entries.stop, pages))
            entries.pages += pages
        return growths

    def shrink(self, n_tokens: int) -> int:
        """Release the pages behind positions ``0 .. n_tokens - 1``; return how many."""
        n_released = 0
        for space, entries in self._entries.items():
            n_kept = max(0, pages_of(n_tokens) - entries.first_held)
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
        return [Growth(space, e.first_held, list(e.pages)) for space, e in self._entries.items() if e.pages]

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
