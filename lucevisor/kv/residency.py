"""KV Flash, KV cache offloading and eviction: which ``full`` pages of a sequence stay on the devices, and its table.

The first pages of a sequence (attention sinks) and its last ones always stay.  Policy ``lru`` drops what leaves, the
oldest first; ``exact`` keeps it in host memory, where attention reads it; ``qk`` swaps pages so that the last queries'
most attended ones are resident, ``drafter`` those that a small model finds relevant to the end of a prompt. Invariant:
what is resident depends on the slices of a sequence alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import Entries, Growth, HostMemoryFull, MakeRoom, NoRoom, PagedOut, PageSwap, PageTable
from lucevisor.model.pages import HEAD_PAGES, TAIL_PAGES, ResidencyPolicy, max_host_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup


@dataclass(frozen=True, slots=True)
class Residency:
    """The most pages of a sequence on the devices.  ``tau``: tokens between two rankings, if pages are ranked."""

    pool_pages: int
    policy: ResidencyPolicy = "lru"
    tau: int = 64

    @property
    def keeps_host(self) -> bool:
        return self.policy != "lru"

    @property
    def attends_host(self) -> bool:
        return self.policy == "exact"

    @property
    def ranks_pages(self) -> bool:
        return self.policy in ("qk", "drafter")

    @property
    def ranks_decodes(self) -> bool:
        return self.policy == "qk"

    def ranks_at(self, position: int) -> bool:
        return self.ranks_decodes and position % self.tau == 0

    def host_pages(self, n_pages: int) -> int:
        return max_host_pages(n_pages, self.pool_pages, self.policy)

    def leaving(self, n_tokens: int, paged_out: PagedOut | None) -> tuple[int, ...]:
        """Return the entries of a restored prefix that lie in host memory: ``paged_out`` with the same bound, else the
        worst."""
        n_pages = pages_of(n_tokens)
        if paged_out is not None and paged_out.pool_pages == self.pool_pages and paged_out.entries[-1] < n_pages - 1:
            return paged_out.entries
        scores = paged_out.scores if paged_out is not None else ()
        return tuple(self.surplus(range(n_pages), pages_of(n_tokens + 1) - n_pages, scores))

    def surplus(self, entries: Sequence[int], n_new: int, scores: Sequence[float]) -> list[int]:
        """Return the places of resident ``entries`` that leave before ``n_new`` are added, ascending; ``scores``: last
        ranking."""
        n = max(0, len(entries) + n_new - self.pool_pages)
        if not scores:
            return list(range(HEAD_PAGES, HEAD_PAGES + n))
        places = range(HEAD_PAGES, len(entries) - TAIL_PAGES)
        least = sorted(places, key=lambda place: (_score(scores, entries[place]), place))[:n]
        return sorted(least + list(range(places.stop, places.stop + n - len(least))))

    def swap(self, entries: Sequence[int], out: Sequence[int], scores: Sequence[float]) -> tuple[list[int], list[int]]:
        """Return which resident ``entries`` leave and which ``out`` come back, equally many, both ascending."""
        movable = [entry for entry in entries[HEAD_PAGES : len(entries) - TAIL_PAGES] if entry < len(scores)]
        ranked = sorted([*movable, *out], key=lambda entry: (-_score(scores, entry), -entry))
        best = set(ranked[: len(movable)])
        return [entry for entry in movable if entry not in best], [entry for entry in out if entry in best]


def with_neighbours(scores: Sequence[float]) -> list[float]:
    """Return the scores of pages, each at least half of its neighbours': what begins on one may end on the next."""
    around = [0.0, *scores, 0.0]
    return [max(score, a / 2, b / 2) for a, score, b in zip(around, scores, around[2:], strict=False)]


def remembered(before: Sequence[float], now: Sequence[float]) -> list[float]:
    """Return scores with a fading share of earlier rankings, so that one decode does not undo what a question asked."""
    n = min(len(before), len(now))
    return [max(new, 0.8 * old) for old, new in zip(before, now, strict=False)] + [*now[n:], *before[n:]]


def _score(scores: Sequence[float], entry: int) -> float:
    return scores[entry] if entry < len(scores) else float("inf")  # not there when pages were ranked: the newest


# ---- the table


@dataclass(slots=True)
class _FullEntries(Entries):
    out: list[int] = field(default_factory=list)  # entries paged out, ascending
    hosts: list[int] = field(default_factory=list)  # their pages in host memory; empty: they were dropped

    @property
    def stop(self) -> int:
        return self.first_held + len(self.out) + len(self.pages)

    def entry_of(self, place: int) -> int:
        n_before = bisect_right(range(len(self.out)), place, key=lambda i: self.out[i] - i)
        return self.first_held + place + n_before

    def resident(self) -> list[int]:
        out = set(self.out)
        return [entry for entry in range(self.first_held, self.stop) if entry not in out]

    def runs(self) -> list[Growth]:
        """Return all entries as if they were new, before resident ones those that are out."""
        growths, place, at = [], 0, 0
        while place < len(self.pages):
            first = self.entry_of(place)
            n_out = bisect_left(self.out, first)
            stop = self.out[n_out] if n_out < len(self.out) else self.stop
            left = slice(at, n_out)
            pages = self.pages[place : place + stop - first]
            growths.append(Growth(KvGroup.FULL, first, pages, tuple(self.out[left]), tuple(self.hosts[left])))
            place, at = place + len(pages), n_out
        if at < len(self.out):  # after all pages
            growths.append(Growth(KvGroup.FULL, self.stop, [], tuple(self.out[at:]), tuple(self.hosts[at:])))
        return growths


class ResidentPageTable(PageTable):
    """A page table with at most ``residency.pool_pages`` pages of ``full`` on the devices."""

    def __init__(self, pools: PagePools, window_tokens: int | None, residency: Residency) -> None:
        super().__init__(pools, window_tokens)
        self._bound = residency
        self._full = _FullEntries()
        self._entries[KvGroup.FULL] = self._full
        self._scores: Sequence[float] = ()  # of the first entries of full, as they were ranked last
        self._is_ranked = False  # since the last swap

    def adopt(self, full: Sequence[int], first_window: int, window: Sequence[int]) -> None:
        """Start an empty table with shared pages; those of ``full`` may lie in host memory."""
        super().adopt(full, first_window, window)
        in_host = self._pools.host_pages.ids
        self._full.out = [entry for entry, page in enumerate(full) if page in in_host]
        self._full.hosts = [page for page in full if page in in_host]
        self._full.pages = [page for page in full if page not in in_host]

    def arrange(self, paged_out: PagedOut | None, make_room: MakeRoom) -> PageSwap | None:
        entries, bound = self._full, self._bound
        if not bound.keeps_host:
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
        if not self._full.hosts:
            return None
        return PagedOut(self._bound.policy, self._bound.pool_pages, tuple(self._full.out), tuple(self._scores))

    @property
    def n_out(self) -> int:
        return len(self._full.out)

    @property
    def hosts(self) -> list[int]:
        return list(self._full.hosts)

    def entries(self, kv_group: KvGroup, start: int, stop: int) -> list[int]:
        entries = self._full
        if kv_group is not KvGroup.FULL or not entries.out:
            return super().entries(kv_group, start, stop)
        n_out, n_left = bisect_left(entries.out, start), bisect_left(entries.out, stop)
        first = entries.first_held + n_out
        resident = entries.pages[max(0, start - first) : max(0, stop - first - (n_left - n_out))]
        if n_out == n_left or not entries.hosts:
            return resident
        left, pages = dict(zip(entries.out[n_out:n_left], entries.hosts[n_out:n_left], strict=True)), iter(resident)
        return [left[entry] if entry in left else next(pages) for entry in range(start, min(stop, entries.stop))]

    def page(self, kv_group: KvGroup, entry: int) -> int | None:
        return None if kv_group is KvGroup.FULL and self._full.out else super().page(kv_group, entry)

    def surplus(self, n_tokens: int) -> list[int]:
        n_new = self.missing(n_tokens).get(KvGroup.FULL, 0)
        if len(self._full.pages) + n_new <= self._bound.pool_pages:
            return []
        return self._bound.surplus(self._full.resident(), n_new, self._scores)

    def rank(self, scores: Sequence[float]) -> None:
        self._scores, self._is_ranked = remembered(self._scores, with_neighbours(scores)), True

    @property
    def swaps_next(self) -> bool:
        return self._is_ranked

    @property
    def ranks_next(self) -> bool:
        return self._bound.ranks_pages and self.n_out > 0

    def ranks_at(self, position: int) -> bool:
        return self.ranks_next and self._bound.ranks_at(position)

    def draft_room(self, stop: int) -> int | None:
        if not self.ranks_next or not self._bound.ranks_decodes:
            return None
        return 0 if self.ranks_at(stop - 1) else -stop % self._bound.tau

    def swap(self, make_room: MakeRoom = lambda n_device, n_host: None) -> PageSwap | None:
        if not self._is_ranked:
            return None
        self._is_ranked = False
        out, back = self._bound.swap(self._full.resident(), self._full.out, self._scores)
        return self._exchange(out, back, make_room) if out else None

    def _exchange(self, out: list[int], back: list[int], make_room: MakeRoom) -> PageSwap | None:
        """Move resident entries ``out`` to host memory and ``back`` from there; None if too few pages are free."""
        entries, full, hosts = self._full, self._pools[KvGroup.FULL], self._pools.host_pages
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
        return PageSwap(out, taken, back, pages)

    def _stamp_hosts(self, pages: Iterable[int], hosts: Iterable[int]) -> None:
        """Keep the draft epoch of what leaves where drafters page theirs out, too."""
        full = self._pools[KvGroup.FULL]
        if self._bound.ranks_pages:
            for page, host in zip(pages, hosts, strict=False):
                self._pools.host_pages.stamp([host], full.epoch_of(page))

    def needs(self, n_tokens: int) -> dict[KvGroup, int]:
        needs, surplus = self.missing(n_tokens), self.surplus(n_tokens)
        if KvGroup.FULL in needs and surplus:
            pool = self._pools[KvGroup.FULL]
            needs[KvGroup.FULL] -= sum(pool.ref_count(self._full.pages[place]) == 1 for place in surplus)
        return {kv_group: n for kv_group, n in needs.items() if n > 0}

    def draft_from(self) -> int:
        n_old = self._n_old_pages()
        return (self._full.entry_of(n_old - 1) + 1) * PAGE_TOKENS if n_old else 0

    def covers(self, stop: int) -> bool:
        return False

    def _page_out(self, n_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        surplus = self.surplus(n_tokens)
        if not surplus:
            return (), ()
        if not self._pools.fits(self.needs(n_tokens)):
            return None
        entries, hosts = self._full, list[int]()
        if self._bound.keeps_host:
            taken = self._pools.host_pages.allocate(len(surplus))
            if taken is None:
                free, total = self._pools.host_pages.n_free, self._pools.host_pages.n_total
                reason = f"{len(surplus)} pages leave the devices, {free} of {total} are free"
                raise HostMemoryFull(len(surplus), reason)
            hosts = taken
        left, full = [entries.entry_of(place) for place in surplus], self._pools[KvGroup.FULL]
        pages = [entries.pages[place] for place in surplus]
        self._stamp_hosts(pages, hosts)
        full.release(pages)
        for place in reversed(surplus):
            del entries.pages[place]
        if hosts:
            host_of = dict(zip(entries.out, entries.hosts, strict=True)) | dict(zip(left, hosts, strict=True))
            entries.hosts = [host_of[entry] for entry in sorted(host_of)]
        entries.out = sorted([*entries.out, *left])
        return tuple(left), tuple(hosts)

    def growths(self) -> list[Growth]:
        if not self._full.out:
            return super().growths()
        return self._full.runs() + [growth for growth in super().growths() if growth.kv_group is not KvGroup.FULL]

    def release(self) -> None:
        self._pools.host_pages.release(self._full.hosts)
        super().release()
        self._full = _FullEntries()
        self._entries[KvGroup.FULL] = self._full


def page_table(pools: PagePools, window_tokens: int | None, residency: Residency | None) -> PageTable:
    if residency is None or KvGroup.FULL not in pools:
        return PageTable(pools, window_tokens)
    return ResidentPageTable(pools, window_tokens, residency)
