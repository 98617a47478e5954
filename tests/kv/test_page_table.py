"""Page tables: a slice finds its pages, and pages that no later slice can see are released."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import Growth, PageTable
from lucevisor.kv.residency import Residency, ResidentPageTable
from lucevisor.model.pages import first_visible_page, max_window_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.loading import PoolSizes


def make(full: int, window: int, window_tokens: int | None) -> tuple[PagePools, PageTable]:
    spaces = [Space.FULL] if window_tokens is None else [Space.FULL, Space.WINDOW]
    pools = PagePools(spaces, PoolSizes(full, window, 0))
    return pools, PageTable(pools, window_tokens)


def test_a_table_with_pages_in_host_memory_names_none() -> None:
    pools = PagePools([Space.FULL], PoolSizes(8, 0, 0, host_pages=8))
    table = ResidentPageTable(pools, None, Residency(6))
    table.grow(0, 6 * PAGE_TOKENS)
    assert table.page(Space.FULL, 5) == 5
    table.grow(6 * PAGE_TOKENS, 7 * PAGE_TOKENS)
    assert table.n_out == 1
    assert table.page(Space.FULL, 5) is None


def test_window_pages_are_released_with_the_last_token_that_sees_them() -> None:
    pools, table = make(8, 8, 64)
    table.grow(0, 128)
    assert table.held(Space.WINDOW) == [0, 1]
    table.grow(126, 127)  # sees 63 .. 126
    assert table.held(Space.WINDOW) == [0, 1]
    table.grow(127, 128)  # sees 64 .. 127: page 0 is older than the window
    assert table.held(Space.WINDOW) == [1]
    assert table.held(Space.FULL) == [0, 1]
    assert pools[Space.WINDOW].n_used == 1
    assert table.grow(128, 129) == [Growth(Space.FULL, 2, [2]), Growth(Space.WINDOW, 2, [0])]


@settings(deadline=None)
@given(
    st.integers(1, 300),
    st.lists(st.integers(1, 150), min_size=1, max_size=30),
)
def test_every_position_a_slice_sees_has_a_page_and_no_more_are_held(window: int, lengths: list[int]) -> None:
    n_pages = pages_of(sum(lengths))
    pools, table = make(n_pages, n_pages, window)
    entries: dict[int, int] = {}
    start = 0
    most = max_window_pages(window, max(lengths), sum(lengths))
    for length in lengths:
        stop = start + length
        growths = table.grow(start, stop)
        assert growths is not None
        for growth in growths:
            if growth.space is Space.WINDOW:
                entries.update(enumerate(growth.pages, start=growth.first))
        seen = range(max(0, start - window + 1) // PAGE_TOKENS, (stop - 1) // PAGE_TOKENS + 1)
        assert table.held(Space.WINDOW) == [entries[i] for i in seen]
        assert len(seen) <= most
        assert seen.start == first_visible_page(start, window)
        start = stop
    table.release()
    assert pools[Space.WINDOW].n_used == pools[Space.FULL].n_used == 0


def test_old_pages_leave_behind_the_first_and_are_taken_again() -> None:
    pools = PagePools([Space.FULL], PoolSizes(7, 0, 0))
    table = ResidentPageTable(pools, None, Residency(6))
    assert table.grow(0, 384) == [Growth(Space.FULL, 0, [0, 1, 2, 3, 4, 5])]
    assert table.surplus(385) == [1]
    assert table.needs(385) == {}
    assert table.grow(384, 385) == [Growth(Space.FULL, 6, [1], (1,))]
    assert table.grow(385, 577) == [Growth(Space.FULL, 7, [2, 3, 4], (2, 3, 4))]
    assert (table.n_out, table.held(Space.FULL)) == (4, [0, 5, 1, 2, 3, 4])
    assert table.growths() == [Growth(Space.FULL, 0, [0]), Growth(Space.FULL, 5, [5, 1, 2, 3, 4], (1, 2, 3, 4))]
    assert table.shrink(449) == 2
    assert table.held(Space.FULL) == [0, 5, 1, 2]
    table.release()
    assert (table.n_out, pools[Space.FULL].n_used) == (0, 0)


def test_shared_pages_leave_the_table_and_stay_with_their_other_owners() -> None:
    pools = PagePools([Space.FULL], PoolSizes(8, 0, 0))
    first, second = (ResidentPageTable(pools, None, Residency(6)) for _ in range(2))
    first.grow(0, 384)
    second.adopt(first.held(Space.FULL), 0, [])
    assert second.needs(385 + 128) == {Space.FULL: 3}
    assert second.grow(384, 385 + 128) is None  # what it pages out would not become free
    assert second.held(Space.FULL) == first.held(Space.FULL)
    assert second.grow(384, 385) == [Growth(Space.FULL, 6, [6], (1,))]
    assert pools[Space.FULL].ref_count(1) == 1


def test_the_draft_epoch_counts_positions_that_are_out() -> None:
    pools = PagePools([Space.FULL], PoolSizes(8, 0, 0))
    table = ResidentPageTable(pools, None, Residency(6))
    table.grow(0, 384)
    pools.begin_draft_epoch()
    table.grow(384, 512)
    assert table.draft_from() == 384
