"""The page allocator against a model that is one dictionary, and its refusals."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lucevisor.kv.page_pool import PageAllocator, PageError, PagePools, PageUse
from lucevisor.model.values import Space, Tier
from lucevisor.protocol.loading import PoolSizes


class AllocatorMachine(RuleBasedStateMachine):
    """References held by imaginary owners, beside an allocator that must agree with them after every call."""

    first: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.n_total = 12
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


class OffsetMachine(AllocatorMachine):
    """The same where the ids do not begin with 0."""

    first = 30


TestOffsetMachine = OffsetMachine.TestCase
TestOffsetMachine.settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@given(st.integers(0, 6), st.integers(0, 6))
def test_pools_take_from_every_space_or_from_none(full: int, window: int) -> None:
    pools = PagePools([Space.WINDOW, Space.FULL], PoolSizes(full_pages=4, window_pages=3, states=0))
    taken = pools.allocate({Space.FULL: full, Space.WINDOW: window})
    fits = full <= 4 and window <= 3
    assert (taken is not None) == fits
    used = (full, window) if fits else (0, 0)
    assert pools.usage() == {Space.FULL: PageUse(used[0], 4), Space.WINDOW: PageUse(used[1], 3)}
    assert Space.RECURRENT not in pools


def test_states_of_slots_in_host_memory_are_ids_behind_those_of_sequences() -> None:
    pools = PagePools([Space.FULL, Space.RECURRENT], PoolSizes(full_pages=4, window_pages=0, states=5, host_states=3))
    assert pools.copies_states
    assert (pools[Space.RECURRENT].tier, pools.slot_pools[Space.RECURRENT].tier) == (Tier.DEVICE, Tier.HOST)
    assert pools.slot_pools[Space.FULL] is pools[Space.FULL]
    assert pools[Space.RECURRENT].allocate(2) == [0, 1]
    assert pools[Space.RECURRENT].allocate(1) is None
    assert pools.slot_pools[Space.RECURRENT].allocate(2) == [2, 3]
    pools.slot_pools[Space.RECURRENT].cache([2])
    pools.slot_pools[Space.RECURRENT].release([2])
    assert pools.usage()[Space.RECURRENT] == PageUse(4, 5, evictable=1)
    with pytest.raises(PageError, match="states in host memory: id 1 is outside 2 to 4"):
        pools.slot_pools[Space.RECURRENT].release([1])
    with pytest.raises(PageError, match="space recurrent: id 2 is outside 0 to 1"):
        pools[Space.RECURRENT].release([2])


def test_both_sides_agree_on_the_tier_of_every_state() -> None:
    sizes = PoolSizes(full_pages=4, window_pages=0, states=5, host_states=3)
    pools = PagePools([Space.FULL, Space.RECURRENT], sizes)
    for one in (pools, pools.slot_pools):
        allocator = one[Space.RECURRENT]
        places = [sizes.place_of_state(state) for state in allocator.ids]
        assert places == [(allocator.tier, i) for i in range(allocator.n_total)]


@pytest.mark.parametrize("spaces", [[Space.FULL], [Space.FULL, Space.RECURRENT]])
def test_without_states_in_host_memory_slots_and_sequences_share_all_pools(spaces: list[Space]) -> None:
    pools = PagePools(spaces, PoolSizes(full_pages=4, window_pages=0, states=5, host_states=5 * (len(spaces) == 1)))
    assert pools.slot_pools is pools
    assert not pools.copies_states


def test_pages_carry_the_draft_epoch_of_their_allocation_and_0_without_a_drafter() -> None:
    pools = PagePools([Space.FULL, Space.RECURRENT], PoolSizes(8, 0, 2, host_states=1))
    full = pools[Space.FULL]
    assert pools.slot_pools[Space.FULL] is full
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


def test_states_after_drafts_have_ids_between_those_of_the_device_and_of_host_memory():
    sizes = PoolSizes(full_pages=4, window_pages=0, states=5, host_states=3, draft_states=4)
    pools = PagePools([Space.FULL, Space.RECURRENT], sizes)
    assert pools[Space.RECURRENT].ids == range(2)
    assert pools.draft_states.ids == range(2, 6)
    assert pools.slot_pools[Space.RECURRENT].ids == range(6, 9)
    assert pools.slot_pools.draft_states is pools.draft_states
    assert pools.draft_states.allocate(2) == [2, 3]
    assert pools.in_use()[Space.RECURRENT] == []
    assert pools.usage()[Space.RECURRENT].total == 5
