"""The journal: boundary activations of what running sequences have computed, in host memory, by page and generation.

A lost shard is rebuilt from the rows that its stage was given. Pure: emits the instructions that copy rows. Invariants:
what is read for a position is what was computed last for it, in the page's present generation, or nothing; the journal
never holds more than ``n_blocks`` pages of rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from lucevisor.engine.sequence import LiveSequence
from lucevisor.kv.page_pool import PageAllocator, PagePools
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.steps import CopyPage, Step


class RowCopy(NamedTuple):
    """``n`` rows of a step, from its row ``row`` on, and of a block, from its row ``offset`` on."""

    block: int
    offset: int
    row: int
    n: int


class FileRows(msgspec.Struct, frozen=True, gc=False):
    """Instruction: copy rows of a step from its region of a boundary."""

    boundary: int
    region: int
    copies: Sequence[RowCopy]


class PlaceRows(msgspec.Struct, frozen=True, gc=False):
    """Instruction: copy rows into the region of a step, and tell its reader."""

    boundary: int
    step: Step
    copies: Sequence[RowCopy]


class CopyRows(msgspec.Struct, frozen=True, gc=False):
    """Instruction: copy the first rows of a block to another."""

    source: int
    target: int
    n_rows: int


RowInstruction = FileRows | PlaceRows | CopyRows

HasRows = Callable[[int, Step], bool]
"""Whether the rows of a step are in its region of a boundary, in this process."""


@dataclass(slots=True)
class _PageRows:
    """``n_rows``: of the page's first positions, how many have rows."""

    index: int
    generation: int
    n_rows: int = 0


class _PageRun(msgspec.Struct, gc=False):  # quicker to make than a tuple with names: a decode has one
    """Consecutive positions of one sequence in one page: ``n`` rows of a step from ``row`` on, and of the page from
    ``offset`` on."""

    sequence: int
    page: int
    generation: int
    offset: int
    row: int
    n: int


@dataclass(frozen=True, slots=True)
class _Filing:
    """Journal entries of a step: copies of pages (source, target, rows), then its rows.  A page is (id, generation)."""

    step: Step
    copied: list[tuple[tuple[int, int], tuple[int, int], int]]
    parts: list[_PageRun] = field(default_factory=list)


class Journal:
    """Rows by boundary and page.  ``out`` takes the instructions.  ``pages``: the allocator of KV group ``full``."""

    def __init__(self, out: MutableSequence[Any], has_rows: HasRows, pages: PageAllocator, n_blocks: int) -> None:
        self._out, self._has_rows, self._pages = out, has_rows, pages
        self._free = list(range(n_blocks - 1, -1, -1))
        self._blocks: dict[tuple[int, int], _PageRows] = {}  # by boundary and page, oldest first
        self._filings: dict[int, _Filing] = {}  # by step
        self._n_refused = 0

    @property
    def n_used(self) -> int:
        return len(self._blocks)

    def on_step_planned(self, step: Step, live_sequences: Mapping[int, LiveSequence]) -> None:
        """Note what a step will have computed; ``live_sequences``: the sequences of its slices."""
        copied = [
            (self._key(operation.source), self._key(operation.target), operation.n_tokens)
            for operation in step.operations
            if isinstance(operation, CopyPage) and operation.kv_group is KvGroup.FULL
        ]
        filing, row = _Filing(step, copied), 0
        parts, generation_of = filing.parts, self._pages.generation_of
        for slice_ in step.slices:
            sequence, start, n, live = (
                slice_.sequence,
                slice_.start,
                len(slice_.tokens),
                live_sequences[slice_.sequence],
            )
            page = live.table.page(KvGroup.FULL, start // PAGE_TOKENS) if n == 1 else None
            if page is not None:  # a decode, of which a step may have many
                parts.append(_PageRun(sequence, page, generation_of(page), start % PAGE_TOKENS, row, 1))
            else:
                parts.extend(self._runs(sequence, pages_between(live, start, start + n), start, start + n, row))
            row += n
        if copied or row:
            self._filings[step.step_id] = filing

    def remove_slices(self, step_id: int, sequences: Collection[int]) -> None:
        filing = self._filings.get(step_id)
        if filing is None:
            return
        row, remaining = 0, []
        for part in filing.parts:
            if part.sequence not in sequences:
                part.row = row
                remaining.append(part)
                row += part.n
        filing.parts[:] = remaining

    def on_stage_answered(self, step_id: int, boundary: int) -> None:
        """File the rows of a step that a stage has written to a boundary. Behind those of drafts that were not made
        lies what the region had before: the next step's rows take their places."""
        filing = self._filings.get(step_id)
        if filing is None:
            return
        for source, target, n_rows in filing.copied:
            known = self._find(boundary, *source)
            n = 0 if known is None else min(known.n_rows, n_rows)  # of a page that is moved all are copied
            if known is not None and n and (block := self._block_for(boundary, *target)) is not None:
                self._out.append(CopyRows(known.index, block.index, n))
                block.n_rows = n
        copies, blocks = [], self._blocks
        has_rows = self._has_rows(boundary, filing.step)  # else its stage was lost before it sent them here
        for part in filing.parts:
            block, offset = blocks.get((boundary, part.page)), part.offset
            if block is None or block.generation != part.generation:
                block = self._block_for(boundary, part.page, part.generation)
            if block is None or block.n_rows < offset:
                continue  # no room, or a gap before it
            if not has_rows:
                block.n_rows = offset  # what was drafted there counts no more
                continue
            stop = offset + part.n
            copies.append(RowCopy(block.index, offset, part.row, part.n))
            if stop > block.n_rows:
                block.n_rows = stop
        if copies:
            self._out.append(FileRows(boundary, filing.step.region, copies))

    def on_step_finished(self, step_id: int) -> None:
        """Drop a step that the last stage has answered."""
        self._filings.pop(step_id, None)

    def clear(self) -> None:
        """Drop everything: the shards lost their sequences."""
        self._filings.clear()
        self._free += [block.index for block in self._blocks.values()]
        self._blocks.clear()

    def find_rows(
        self, boundary: int, pages: Sequence[int], start: int, stop: int, row: int = 0
    ) -> list[RowCopy] | None:
        """Return where the rows of positions on these ``pages`` lie, to be placed from ``row`` on; None if one is
        missing."""
        copies = []
        for part in self._runs(0, pages, start, stop, row):
            block = self._find(boundary, part.page, part.generation)
            if block is None or block.n_rows < part.offset + part.n:
                return None
            copies.append(RowCopy(block.index, part.offset, part.row, part.n))
        return copies

    def place(self, boundary: int, step: Step, copies: Sequence[RowCopy]) -> None:
        """Write the rows of a step to where the next stage reads them."""
        self._out.append(PlaceRows(boundary, step, copies))

    # ---- inside

    def _key(self, page: int) -> tuple[int, int]:
        return page, self._pages.generation_of(page)

    def _runs(self, sequence: int, pages: Sequence[int], start: int, stop: int, row: int) -> list[_PageRun]:
        runs, generation_of = [], self._pages.generation_of
        for page in pages:
            offset = start % PAGE_TOKENS
            n = min(PAGE_TOKENS - offset, stop - start)
            runs.append(_PageRun(sequence, page, generation_of(page), offset, row, n))
            start += n
            row += n
        return runs

    def _find(self, boundary: int, page: int, generation: int) -> _PageRows | None:
        block = self._blocks.get((boundary, page))
        return block if block is not None and block.generation == generation else None

    def _block_for(self, boundary: int, page: int, generation: int) -> _PageRows | None:
        """Return the block of a page; None if there is no room for it, or it has a later generation already."""
        block = self._blocks.get((boundary, page))
        if block is None:
            if not self._free and not self._sweep():
                return None
            block = self._blocks[boundary, page] = _PageRows(self._free.pop(), generation)
        elif block.generation != generation:
            if block.generation > generation:
                return None
            block.generation, block.n_rows = generation, 0
        return block

    def _sweep(self) -> bool:
        """Free the blocks of pages that have no owner, then those that prefix slots alone own, oldest first."""
        self._n_refused += 1
        if self._n_refused % 64 != 1:  # of the rows that find no block
            return False
        pages = self._pages
        unused = [
            place
            for place, block in self._blocks.items()
            if pages.ref_count(place[1]) == 0 or pages.generation_of(place[1]) != block.generation
        ]
        if not unused:
            cached = [place for place in self._blocks if pages.evictable(place[1])]
            unused = cached[: -(-len(cached) // 2)]
        for place in unused:
            self._free.append(self._blocks.pop(place).index)
        if unused:
            self._n_refused = 0
        return bool(unused)


def pages_between(live: LiveSequence, start: int, stop: int) -> list[int]:
    """Return the pages of KV group ``full`` with some positions of a sequence, in order."""
    return live.table.entries(KvGroup.FULL, start // PAGE_TOKENS, -(-stop // PAGE_TOKENS))


def make_journal(out: MutableSequence[Any], has_rows: HasRows, pools: PagePools, n_blocks: int) -> Journal | None:
    """Return a journal of ``n_blocks`` pages; None without any, or for a model without KV group ``full``."""
    if n_blocks < 1 or KvGroup.FULL not in pools:
        return None
    return Journal(out, has_rows, pools[KvGroup.FULL], n_blocks)
