"""Open sequences of a daemon: page tables (block tables) and live states, as the supervisor's operations set them.

Tables exist twice: as lists on the host, for the slots that a step writes, and on each device for gathering; only
changed entries are uploaded.
Invariant: an operation that contradicts the tables raises StateError and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import Final, Literal

import torch
from torch import Tensor

from daemons.errors import StateError
from daemons.kv.images import check_images
from daemons.kv.pools import Pools
from daemons.ops.lora import NO_ADAPTER
from lucevisor.model.values import PAGE_TOKENS, KvGroup, Tier
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    ImageSpan,
    OpenSequence,
    Operation,
    PageIn,
    PageOut,
    SetPages,
    Slice,
    UseState,
    ZeroState,
)

HOST: Final = "host"
"""Key of the table of a sequence's rows in host memory, where attention reads them in place."""
Tables = dict[KvGroup | Literal["host"], Tensor]
"""Page tables on a device, int32 [max_sequences, entries]."""
NO_PAGE = -1
"""A skipped table entry: a sliding sequence may start past its first window."""
MIN_ENTRIES, MAX_FIRST_ENTRIES = 1024, 1 << 16
"""Bounds of the initial entries of a device's table: as many as its pool has pages, because a table that grows moves,
and then the CUDA graphs that read it are captured again.
"""
MAX_ENTRIES = 1 << 20
"""Longest page table: 64 Mi positions.  A larger index is a broken plan, not a long text."""


@dataclass(slots=True)
class OpenedSequence:
    """One sequence.  ``row``: its row in the device tables.

    ``breaks[kv_group]``: first entry whose page id is not the previous one plus 1; the table's length if there is none.
    ``out``: entries of the ``full`` table that were paged out, ascending: those behind them moved up.  ``host_rows``:
    where those that are attended to lie in host memory, ascending, as order means nothing to attention.  ``updates``:
    states after tokens of its last slice that are not made yet, in order; ``state`` is from before them.
    ``adapter``: the number of its LoRA adapter.
    """

    id: int
    row: int
    state: int
    adapter: int = NO_ADAPTER
    pages: dict[KvGroup, list[int]] = field(default_factory=dict)
    breaks: dict[KvGroup, int] = field(default_factory=dict)
    out: list[int] = field(default_factory=list)
    hosts: dict[int, int] = field(default_factory=dict)  # where those that were kept lie in host memory, by entry
    host_rows: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    images: tuple[ImageSpan, ...] = ()

    def table(self, kv_group: KvGroup) -> list[int]:
        return self.pages.setdefault(kv_group, [])

    @property
    def out_tokens(self) -> int:
        """Number of paged-out positions, by which later ones moved up in the ``full`` table."""
        return len(self.out) * PAGE_TOKENS

    def place(self, position: int) -> int:
        """Return where ``position``, or the first resident one behind it, lies in the ``full`` table."""
        entry = position // PAGE_TOKENS
        n_out = bisect_left(self.out, entry)
        if n_out < len(self.out) and self.out[n_out] == entry:
            return (entry - n_out) * PAGE_TOKENS
        return position - n_out * PAGE_TOKENS


class Sequences:
    """Tables of all sequences over the pools of a daemon's shards."""

    def __init__(
        self,
        pools: Sequence[Pools],
        sizes: PoolSizes,
        max_sequences: int,
        *,
        attend_host: bool = False,
        in_place: bool = False,
        forgets: bool = False,
        adapters: Sequence[str] | None = None,
    ) -> None:
        """``attend_host``: attention reads what was paged out in host memory; ``in_place``: by tables of its rows.
        ``forgets``: what was paged out is kept by the target alone; a page that comes back holds nothing here.
        ``adapters``: the names that sequences may have; None: it does not matter here.
        """
        self.forgets = forgets
        self.pools, self.attend_host, self.adapters = list(pools), attend_host, adapters
        self.reads_in_place = attend_host and in_place
        n_states = sizes.n_state_ids
        self.units = {KvGroup.FULL: sizes.full_pages, KvGroup.WINDOW: sizes.window_pages, KvGroup.RECURRENT: n_states}
        self.sizes = sizes
        self._page_rows = {KvGroup.FULL: self.pools[0].page_rows if self.pools else 1, KvGroup.WINDOW: 1}
        self.state_rows = self.pools[0].state_rows if self.pools else 1  # the same in all shards
        self._n_device_states = sizes.device_states, sizes.device_rows  # whole ones, and with those of drafts
        self.max_sequences = max_sequences
        n_pages = max(sizes.full_pages, sizes.window_pages, sizes.host_pages)
        self._first_entries = min(max(n_pages, MIN_ENTRIES), MAX_FIRST_ENTRIES)
        self.by_id: dict[int, OpenedSequence] = {}
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._tables: dict[torch.device, Tables] = {p.device: {} for p in self.pools}
        self._changed: dict[KvGroup | Literal["host"], dict[tuple[int, int], int]] = {
            KvGroup.FULL: {},
            KvGroup.WINDOW: {},
            HOST: {},
        }

    def reset(self) -> None:
        """Drop every sequence; pools keep their bytes."""
        self.by_id.clear()
        self._free_rows = list(range(self.max_sequences - 1, -1, -1))
        for changed in self._changed.values():
            changed.clear()

    def get(self, sequence: int, what: str) -> OpenedSequence:
        """Return the open sequence of an id.  Raises StateError naming ``what`` refers to it."""
        found = self.by_id.get(sequence)
        if found is None:
            raise StateError(what, f"sequence {sequence} is not open")
        return found

    def apply(self, operation: Operation) -> None:
        """Apply one operation.  Raises StateError naming it and what is wrong."""
        match operation:
            case SetPages():
                self._set_pages(operation)
            case OpenSequence():
                self._open(operation)
            case CloseSequence(sequence):
                closed = self.get(sequence, "CloseSequence")
                self._commit_state(closed, closed.state)
                self._free_rows.append(closed.row)
                del self.by_id[sequence]
            case CopyPage(kv_group, source, target, n_tokens):
                where = f"CopyPage of KV group {kv_group.value}"
                self._check_unit(where, kv_group, source)
                self._check_unit(where, kv_group, target)
                if kv_group is KvGroup.RECURRENT or not 0 <= n_tokens <= PAGE_TOKENS:
                    raise StateError(where, f"{n_tokens} tokens of a page of {PAGE_TOKENS}")
                for pool in self.pools:
                    pool.copy_page(kv_group, source, target, n_tokens)
            case CopyState(source, target):
                self._check_whole("CopyState", source)
                self._check_whole("CopyState", target)
                if self._tier(source) is self._tier(target) is Tier.HOST:
                    raise StateError("CopyState", f"states {source} and {target} both lie in host memory")
                self._materialise_state(source)
                for pool in self.pools:
                    pool.copy_state(source, target)
            case ZeroState(state):
                self.check_live("ZeroState", state)
                for pool in self.pools:
                    pool.zero_state(state)
            case PageOut():
                self._page_out(operation)
            case PageIn():
                self._page_in(operation)
            case UseState(sequence, state):
                is_draft = self.check_device("UseState", state)
                opened = self.get(sequence, "UseState")
                if is_draft and opened.updates and state not in opened.updates:
                    raise StateError("UseState", f"the last slice of sequence {sequence} left no state {state}")
                if not is_draft:
                    self._take_states([state])
                self._commit_state(opened, state)
                opened.state = opened.state if is_draft else state

    def record_updates(self, slices: Sequence[Slice]) -> None:
        """Record the slices of a step that ran: several tokens that each have a state id left state updates."""
        for s in slices:
            if (opened := self.by_id.get(s.sequence)) is not None:
                opened.updates = s.states if len(s.states) == len(s.tokens) > 1 else []
                if self.sizes.state_pages and s.states:
                    self._take_states(s.states)

    def commit_states(self, slices: Sequence[Slice]) -> None:
        """Apply pending state updates of sequences without a ``UseState``, before a step of these slices."""
        for s in slices:
            if (opened := self.by_id.get(s.sequence)) is not None and opened.updates:
                self._commit_state(opened, opened.state)

    def _commit_state(self, opened: OpenedSequence, state: int) -> None:
        """Compute ``state`` from the updates of the last slice, if it is one of its states; drop the other updates.

        A draft's state replaces the live one, whose id the sequence keeps.
        """
        if state in opened.updates:
            rows, is_draft = opened.updates[: opened.updates.index(state) + 1], self.sizes.is_draft_state(state)
            for pool in self.pools:
                if is_draft:
                    pool.updates.apply(opened.state, rows, opened.state, state)
                else:
                    pool.updates.apply(opened.state, rows, state)
        opened.updates = []

    def _materialise_state(self, state: int) -> None:
        """Compute a state that is copied before its sequence has chosen the state to continue from.

        The live state is the first of a slice, as its token is always accepted; the others are computed from it.
        """
        for opened in self.by_id.values():
            if state in opened.updates:
                n, live = opened.updates.index(state) + 1, opened.state
                firsts = range(1, n) if state == live else ()  # whole ones before it, which no supervisor plans
                for i in (*firsts, n):
                    for pool in self.pools:
                        pool.updates.apply(live, opened.updates[:i], opened.updates[i - 1])
                opened.updates = opened.updates[n:] if state == live else opened.updates

    def _take_states(self, states: Sequence[int]) -> None:
        for pool in self.pools if self.sizes.state_pages else ():
            for state in states:
                pool.take_state(state)

    def _check_unit(self, where: str, kv_group: KvGroup, unit: int) -> None:
        if not 0 <= unit < self.units[kv_group]:
            kind = "state" if kv_group is KvGroup.RECURRENT else f"page of KV group {kv_group.value}"
            raise StateError(where, f"{kind} {unit} is outside the pool of {self.units[kv_group]}")

    def _check_whole(self, where: str, state: int) -> None:
        self._check_unit(where, KvGroup.RECURRENT, state)
        if self.sizes.is_draft_state(state):
            raise StateError(where, f"state {state} is a draft's: only a verify slice and its UseState may name it")

    def check_live(self, where: str, state: int) -> None:
        """Raise StateError unless ``state`` may be a live recurrent state."""
        self._check_whole(where, state)
        self.check_device(where, state)

    def check_device(self, where: str, state: int) -> bool:
        """Raise StateError unless a slice may leave ``state``; return whether it is a draft's."""
        if not 0 <= state < self._n_device_states[1]:
            self._check_unit(where, KvGroup.RECURRENT, state)
            raise StateError(where, f"state {state} lies in host memory, where checkpoints are; a live one cannot")
        return state >= self._n_device_states[0]

    def _tier(self, state: int) -> Tier:
        return self.sizes.place_of_state(state).tier

    def _open(self, operation: OpenSequence) -> None:
        where = f"OpenSequence {operation.sequence}"
        if operation.sequence in self.by_id:
            raise StateError(where, "the sequence is open already")
        if not self._free_rows:
            raise StateError(where, f"{self.max_sequences} sequences are open, the most this daemon was loaded for")
        check_images(operation.images, where)
        adapter = NO_ADAPTER
        if operation.adapter and self.adapters is not None:
            if operation.adapter not in self.adapters:
                raise StateError(where, f"the adapter {operation.adapter!r} is not loaded")
            adapter = self.adapters.index(operation.adapter)
        if self.units[KvGroup.RECURRENT]:
            self.check_live(where, operation.state)
            self._take_states([operation.state])
        opened = OpenedSequence(operation.sequence, self._free_rows.pop(), operation.state, images=operation.images)
        opened.adapter = adapter
        self.by_id[operation.sequence] = opened

    def _set_pages(self, operation: SetPages) -> None:
        where = f"SetPages of sequence {operation.sequence}, KV group {operation.kv_group.value}"
        sequence = self.get(operation.sequence, where)
        if operation.kv_group is KvGroup.RECURRENT:
            raise StateError(where, "recurrent states have no page table")
        for page in operation.pages:
            self._check_unit(where, operation.kv_group, page)
        table, first = sequence.table(operation.kv_group), operation.first
        if sequence.out and operation.kv_group is KvGroup.FULL:
            if first <= sequence.out[-1]:
                raise StateError(where, f"entry {first} lies before those that were paged out, or among them")
            first -= len(sequence.out)
        if not 0 <= first <= MAX_ENTRIES - len(operation.pages):
            raise StateError(where, f"entry {first} is outside a table of at most {MAX_ENTRIES}")
        if operation.kv_group is KvGroup.FULL and first > len(table):
            raise StateError(where, f"entry {first} leaves a gap behind the {len(table)} entries there are")
        pages = self._rows_of(operation.kv_group, operation.pages)
        table += [NO_PAGE] * (first - len(table))
        table[first : first + len(pages)] = pages
        changed = self._changed[operation.kv_group]
        for i, page in enumerate(pages, first):
            changed[sequence.row, i] = page
        self._find_break(sequence, operation.kv_group, first)

    def _rows_of(self, kv_group: KvGroup, pages: list[int]) -> list[int]:
        """Return the rows of pages that come into use: what tables hold."""
        if not self.sizes.state_pages or kv_group is not KvGroup.FULL:
            return pages
        for pool in self.pools:
            pool.take_pages(pages)
        return [page * self._page_rows[kv_group] for page in pages]

    def _page_out(self, operation: PageOut) -> None:
        where = f"PageOut of sequence {operation.sequence}"
        sequence = self.get(operation.sequence, where)
        table, entries, hosts = sequence.table(KvGroup.FULL), operation.entries, operation.hosts
        places = self._entry_places(where, sequence, entries)
        if hosts and len(hosts) != len(entries):
            raise StateError(where, f"{len(hosts)} pages in host memory for {len(entries)} entries")
        rows = [self._host_row(where, host) for host in hosts] if self.sizes.host_pages else []
        if places and rows:
            for pool in self.pools:
                pool.page_out([table[place] for place in places], rows[: len(places)])
        for place in reversed(places):
            del table[place]
        sequence.out = sorted([*sequence.out, *entries])
        sequence.hosts.update(zip(entries, rows, strict=False))
        self._moved(sequence, min(places, default=len(table)))

    def _moved(self, sequence: OpenedSequence, first: int) -> None:
        """Pages came into the ``full`` table or left it, from place ``first`` on."""
        table, changed = sequence.pages[KvGroup.FULL], self._changed[KvGroup.FULL]
        if self.attend_host:
            before, sequence.host_rows = sequence.host_rows, sorted(sequence.hosts.values())
            if self.reads_in_place:
                same = sum(
                    1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, sequence.host_rows, strict=False))
                )
                rows = enumerate(sequence.host_rows[same:], same)
                self._changed[HOST].update({(sequence.row, i): row for i, row in rows})
        for i, page in enumerate(table[first:], first):
            changed[sequence.row, i] = page
        self._find_break(sequence, KvGroup.FULL, first)

    def _page_in(self, operation: PageIn) -> None:
        where = f"PageIn of sequence {operation.sequence}"
        sequence, entries, pages = self.get(operation.sequence, where), operation.entries, operation.pages
        if not entries or len(entries) != len(pages) or not all(a < b for a, b in pairwise(entries)):
            raise StateError(where, f"{len(pages)} pages for entries {', '.join(map(str, entries)) or 'none'}")
        kept = sequence.out if self.forgets else sequence.hosts
        if missing := [entry for entry in entries if entry not in kept]:
            raise StateError(where, f"entry {missing[0]} is not in host memory")
        for page in pages:
            self._check_unit(where, KvGroup.FULL, page)
        if not self.forgets:
            rows = [sequence.hosts.pop(entry) for entry in entries]
            for pool in self.pools:
                pool.page_in(rows, pages)
        back, table = set(entries), sequence.table(KvGroup.FULL)
        sequence.out = [entry for entry in sequence.out if entry not in back]
        for entry, page in zip(entries, pages, strict=True):
            table.insert(entry - bisect_left(sequence.out, entry), page)
        self._moved(sequence, entries[0] - bisect_left(sequence.out, entries[0]))

    @staticmethod
    def _entry_places(where: str, sequence: OpenedSequence, entries: Sequence[int]) -> list[int]:
        """The places of entries in the ``full`` table; those right behind it were never there."""
        out, n_places = sequence.out, len(sequence.table(KvGroup.FULL))
        stop = n_places + len(out)
        ascending = bool(entries) and entries[0] >= 0 and all(a < b for a, b in pairwise(entries))
        known = [entry for entry in entries if entry < stop]
        behind = list(range(stop, stop + len(entries) - len(known)))
        if not ascending or entries[len(known) :] != behind or not set(known).isdisjoint(out):
            listed = f"entries {', '.join(map(str, entries)) or 'none'} of {stop}"
            raise StateError(where, f"{listed}; {len(out)} are out already")
        return [entry - bisect_left(out, entry) for entry in known]

    def _host_row(self, where: str, page: int) -> int:
        row = page - self.sizes.full_pages
        if not 0 <= row < self.sizes.host_pages:
            raise StateError(where, f"page {page} is outside the {self.sizes.host_pages} pages in host memory")
        return row

    @staticmethod
    def _find_break(sequence: OpenedSequence, kv_group: KvGroup, first: int) -> None:
        """Update where the run of consecutive pages from entry 0 ends; entries before ``first`` are unchanged."""
        table = sequence.pages[kv_group]
        at = min(sequence.breaks.get(kv_group, 0), first)
        at = max(at, 1)
        while at < len(table) and table[at] == table[at - 1] + 1:
            at += 1
        sequence.breaks[kv_group] = at

    def tables(self, device: torch.device) -> Tables:
        """Page tables on ``device``.  Call :meth:`flush` first."""
        return self._tables[device]

    def flush(self) -> None:
        """Upload the entries that changed since the last call: one copy per KV group and device."""
        for kv_group, changed in self._changed.items():
            if not changed:
                continue
            rows, columns = zip(*changed, strict=True)
            entries = torch.tensor([rows, columns, tuple(changed.values())], dtype=torch.int64)
            for device, tables in self._tables.items():
                table = self._grown(tables, kv_group, device, max(columns) + 1)
                row, column, page = (entries.pin_memory() if device.type != "cpu" else entries).to(
                    device, non_blocking=True
                )
                table.index_put_((row, column), page.to(torch.int32))
            changed.clear()

    def _grown(self, tables: Tables, kv_group: KvGroup | Literal["host"], device: torch.device, entries: int) -> Tensor:
        table = tables.get(kv_group)
        have = 0 if table is None else table.shape[1]
        if table is None or have < entries:
            grown = torch.zeros(
                self.max_sequences, max(entries, 2 * have, self._first_entries), dtype=torch.int32, device=device
            )
            if table is not None:
                grown[:, :have] = table
            tables[kv_group] = table = grown
        return table
