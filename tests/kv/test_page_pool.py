"""The page allocator against a model that is one dictionary, and its refusals."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lucevisor.kv.page_pool import PageAllocator, PageError, PagePools, PageUse
from lucevisor.kv.page_table import Growth, PageTable
from lucevisor.kv.residency import Residency, ResidentPageTable
from lucevisor.model.pages import first_visible_page, max_window_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup, Tier
from lucevisor.protocol.loading import PoolSizes


class AllocatorMachine(RuleBasedStateMachine):
    """References held by imaginary owners, beside an allocator that must agree with them after every call."""

    def __init__(self) -> None:
        super().__init__()
        self.n_total = 12
        self.first = 30
        self.allocator = PageAllocator(self.n_total, first=self.first)
        self.ids = range(self.first, self.first + self.n_total)
        self.owners: Counter[int] = Counter()

    @rule(n=st.integers(0, 14))
    def allocate(self, n: int) -> None:
        free = [page for page in self.ids if not self.owners[page]]
        pages = self.allocator.allocate(n)
        if n > len(free):
            assert pages is None
        else:
            assert pages == free[:n]
            self.owners.update(pages)

    @rule(numbers=st.lists(st.integers(-1, 12), max_size=5))
    def share(self, numbers: list[int]) -> None:
        pages = [self.first + n for n in numbers]
        if all(self.owners[page] for page in pages):
            self.allocator.retain(pages)
            self.owners.update(pages)
        else:
            with pytest.raises(PageError):
                self.allocator.retain(pages)

    @rule(numbers=st.lists(st.integers(-1, 12), max_size=5))
    def release(self, numbers: list[int]) -> None:
        pages = [self.first + n for n in numbers]
        if all(n <= self.owners[page] for page, n in Counter(pages).items()):
            self.allocator.release(pages)
            self.owners.subtract(pages)
        else:
            with pytest.raises(PageError):
                self.allocator.release(pages)

    @invariant()
    def agrees(self) -> None:
        used = {page for page, n in self.owners.items() if n > 0}
        assert self.allocator.n_used == len(used)
        assert self.allocator.n_free == self.n_total - len(used)
        assert [self.allocator.ref_count(page) for page in self.ids] == [self.owners[page] for page in self.ids]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.integers(0, 6), st.integers(0, 6))
def test_pools_take_from_every_space_or_from_none(full: int, window: int) -> None:
    pools = PagePools([KvGroup.WINDOW, KvGroup.FULL], PoolSizes(full_pages=4, window_pages=3, states=0))
    taken = pools.allocate({KvGroup.FULL: full, KvGroup.WINDOW: window})
    fits = full <= 4 and window <= 3
    assert (taken is not None) == fits
    used = (full, window) if fits else (0, 0)
    assert pools.usage() == {KvGroup.FULL: PageUse(used[0], 4), KvGroup.WINDOW: PageUse(used[1], 3)}
    assert KvGroup.RECURRENT not in pools


def test_states_of_slots_in_host_memory_are_ids_behind_those_of_sequences() -> None:
    pools = PagePools(
        [KvGroup.FULL, KvGroup.RECURRENT], PoolSizes(full_pages=4, window_pages=0, states=5, host_states=3)
    )
    assert pools.copies_states
    assert (pools[KvGroup.RECURRENT].tier, pools.slot_pools[KvGroup.RECURRENT].tier) == (Tier.DEVICE, Tier.HOST)
    assert pools.slot_pools[KvGroup.FULL] is pools[KvGroup.FULL]
    assert pools[KvGroup.RECURRENT].allocate(2) == [0, 1]
    assert pools[KvGroup.RECURRENT].allocate(1) is None
    assert pools.slot_pools[KvGroup.RECURRENT].allocate(2) == [2, 3]
    pools.slot_pools[KvGroup.RECURRENT].cache([2])
    pools.slot_pools[KvGroup.RECURRENT].release([2])
    assert pools.usage()[KvGroup.RECURRENT] == PageUse(4, 5, evictable=1)
    with pytest.raises(PageError, match="states in host memory: id 1 is outside 2 to 4"):
        pools.slot_pools[KvGroup.RECURRENT].release([1])
    with pytest.raises(PageError, match="KV group recurrent: id 2 is outside 0 to 1"):
        pools[KvGroup.RECURRENT].release([2])


def test_pages_carry_the_draft_epoch_of_their_allocation_and_0_without_a_drafter() -> None:
    pools = PagePools([KvGroup.FULL, KvGroup.RECURRENT], PoolSizes(8, 0, 2, host_states=1))
    full = pools[KvGroup.FULL]
    assert pools.slot_pools[KvGroup.FULL] is full
    pages = []
    for change in (lambda: None, pools.begin_draft_epoch, pools.end_draft_epoch, pools.begin_draft_epoch):
        change()
        pages += full.allocate(1) or []
    assert [full.epoch_of(page) for page in pages] == [0, 1, 0, 2]
    full.release([pages[0]])
    assert full.allocate(1) == [pages[0]]
    assert full.epoch_of(pages[0]) == 2
    pools.end_draft_epoch()
    pools.resume_draft_epoch()
    assert [full.epoch_of(page) for page in full.allocate(1) or []] == [2], "a drafter that has the state of the last"


# ---- page tables


def make(full: int, window: int, window_tokens: int | None) -> tuple[PagePools, PageTable]:
    kv_groups = [KvGroup.FULL] if window_tokens is None else [KvGroup.FULL, KvGroup.WINDOW]
    pools = PagePools(kv_groups, PoolSizes(full, window, 0))
    return pools, PageTable(pools, window_tokens)


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
            if growth.kv_group is KvGroup.WINDOW:
                entries.update(enumerate(growth.pages, start=growth.first))
        seen = range(max(0, start - window + 1) // PAGE_TOKENS, (stop - 1) // PAGE_TOKENS + 1)
        assert table.held(KvGroup.WINDOW) == [entries[i] for i in seen]
        assert len(seen) <= most
        assert seen.start == first_visible_page(start, window)
        start = stop
    table.release()
    assert pools[KvGroup.WINDOW].n_used == pools[KvGroup.FULL].n_used == 0


def test_shared_pages_leave_the_table_and_stay_with_their_other_owners() -> None:
    pools = PagePools([KvGroup.FULL], PoolSizes(8, 0, 0))
    first, second = (ResidentPageTable(pools, None, Residency(6)) for _ in range(2))
    first.grow(0, 384)
    second.adopt(first.held(KvGroup.FULL), 0, [])
    assert second.needs(385 + 128) == {KvGroup.FULL: 3}
    assert second.grow(384, 385 + 128) is None  # what it pages out would not become free
    assert second.held(KvGroup.FULL) == first.held(KvGroup.FULL)
    assert second.grow(384, 385) == [Growth(KvGroup.FULL, 6, [6], (1,))]
    assert pools[KvGroup.FULL].ref_count(1) == 1


def test_the_draft_epoch_counts_positions_that_are_out() -> None:
    pools = PagePools([KvGroup.FULL], PoolSizes(8, 0, 0))
    table = ResidentPageTable(pools, None, Residency(6))
    table.grow(0, 384)
    pools.begin_draft_epoch()
    table.grow(384, 512)
    assert table.draft_from() == 384
