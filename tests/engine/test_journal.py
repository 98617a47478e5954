"""The journal: what is filed is found for the same page in the same life, and nothing else; memory is bounded."""

from __future__ import annotations

from lucevisor.engine.journal import (
    CopyRows,
    FileRows,
    Journal,
    PlaceRows,
    RowInstruction,
    pages_between,
)
from lucevisor.engine.sequence import LiveSequence
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import PageTable
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CopyPage, Slice, Step
from tests.engine.toy_pipeline import ToyRows


class Bench:
    """A journal over one boundary; rows are numbers."""

    def __init__(self, n_blocks: int, n_pages: int = 8) -> None:
        self.pools = PagePools({KvGroup.FULL}, PoolSizes(n_pages, 0, 0))
        self.rows = ToyRows()
        self.out: list[RowInstruction] = []
        self.journal = Journal(self.out, self.rows.has_rows, self.pools[KvGroup.FULL], n_blocks)
        self.n_steps = 0

    def sequence(self, n_tokens: int) -> LiveSequence:
        live = LiveSequence(0, -1, PageTable(self.pools, None))
        assert live.table.grow(0, n_tokens) is not None
        return live

    def file(
        self, live: LiveSequence, start: int, values: list[int], *operations: CopyPage, arrives: bool = True
    ) -> None:
        self.n_steps += 1
        slices = [Slice(live.sequence, start, values, sample=False)] if values else []
        self.journal.on_step_planned(Step(self.n_steps, 0, [*operations], slices), {live.sequence: live})
        if arrives:
            self.rows.regions[0, 0] = (self.n_steps, values)
        self.journal.on_stage_answered(self.n_steps, 0)
        self.journal.on_step_finished(self.n_steps)
        self.carry_out()

    def carry_out(self) -> None:
        for instruction in self.out:
            match instruction:
                case FileRows(boundary, region, copies):
                    self.rows.file(boundary, region, copies)
                case PlaceRows(boundary, step, copies):
                    self.rows.place(boundary, step, copies)
                case CopyRows(source, target, n_rows):
                    self.rows.copy(source, target, n_rows)
        self.out.clear()

    def read(self, live: LiveSequence, start: int, stop: int) -> list[int] | None:
        copies = self.journal.find_rows(0, pages_between(live, start, stop), start, stop)
        if copies is None:
            return None
        self.journal.place(0, Step(0, 1), copies)
        self.carry_out()
        return self.rows.regions[0, 1][1]


def test_rows_are_found_across_pages_and_the_last_ones_count() -> None:
    bench = Bench(8)
    live = bench.sequence(150)
    bench.file(live, 0, [*range(100)])
    assert bench.read(live, 0, 101) is None
    bench.file(live, 90, [*range(1090, 1150)])  # what was drafted there was wrong
    assert bench.read(live, 0, 150) == [*range(90), *range(1090, 1150)]
    assert bench.read(live, 60, 70) == [*range(60, 70)]


def test_rows_that_were_lost_with_their_stage_leave_nothing_of_drafts_at_their_place() -> None:
    bench = Bench(8)
    live = bench.sequence(100)
    bench.file(live, 0, [*range(60)])  # the last of which were drafted
    bench.file(live, 50, [*range(1050, 1055)], arrives=False)
    assert bench.read(live, 0, 50) == [*range(50)]
    assert bench.read(live, 0, 51) is None
    bench.file(live, 55, [7] * 5)
    assert bench.read(live, 50, 60) is None


def test_a_copied_page_has_the_rows_that_were_copied() -> None:
    bench = Bench(8)
    first, second = bench.sequence(40), bench.sequence(60)
    bench.file(first, 0, [*range(40)])
    [source], [target] = first.table.held(KvGroup.FULL), second.table.held(KvGroup.FULL)
    bench.file(second, 20, [5] * 3, CopyPage(KvGroup.FULL, source, target, 20))
    assert bench.read(second, 0, 23) == [*range(20), 5, 5, 5]
    assert bench.read(second, 0, 24) is None


def test_memory_is_bounded_and_pages_without_owners_give_theirs() -> None:
    bench = Bench(2)
    old, live = bench.sequence(128), bench.sequence(128)
    bench.file(old, 0, [1] * 128)
    bench.file(live, 0, [2] * 128)
    assert bench.journal.n_used == 2
    assert bench.read(live, 0, 1) is None
    old.table.release()
    for _ in range(70):  # it looks for room now and then
        bench.file(live, 0, [2] * 128)
    assert bench.read(live, 0, 128) == [2] * 128
    assert bench.journal.n_used == 2
