"""Eviction order, pins and hooks of the prefix index; test_prefix_model.py has the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lucevisor.kv.page_pool import PageError, PagePools, PageUse
from lucevisor.kv.page_table import PageTable
from lucevisor.kv.prefix_cache import PrefixIndex, PrefixSettings
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot, SlotSource
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes

UNIT_BYTES = {Space.FULL: 10, Space.WINDOW: 10, Space.RECURRENT: 100}


class Maker:
    """Publishes slots as if a sequence had computed them and ended."""

    def __init__(self, *, window: int | None = None, recurrent: bool = False, **settings: int) -> None:
        spaces = {Space.FULL} | ({Space.WINDOW} if window else set()) | ({Space.RECURRENT} if recurrent else set())
        self.pools = PagePools(spaces, PoolSizes(100, 100, 8))
        self.window = window
        limits = {"max_slots": 10, "memory_bytes": 10_000, "min_tokens": 1, **settings}
        self.index = PrefixIndex(self.pools, PrefixSettings(unit_bytes=UNIT_BYTES, **limits), window)
        self.made: list[PrefixSlot] = []
        self.evicted: list[PrefixSlot] = []
        self.index.hooks.on_slot = self.made.append
        self.index.hooks.on_evict = self.evicted.append

    def slot(self, tokens: Sequence[int], *, uses: int = 1) -> PrefixSlot | None:
        """``uses``: prompts that come after it."""
        table = PageTable(self.pools, self.window)
        table.grow(0, len(tokens))
        state = NO_STATE
        if self.index.recurrent:
            taken = self.index.allocate_state(self.index.n_saved(tokens, len(tokens)))
            if taken is None:
                table.release()
                return None
            state = taken
        slot = self.index.publish(tokens, SlotSource(len(tokens), table.entries, state, "turn"), 0.0)
        table.release()
        self.index.trim()
        for _ in range(uses):
            self.index.record_use(self.index.match([10**9]), 0.0)
        return slot if slot is not None and slot.alive else None

    def use(self, slot: PrefixSlot) -> None:
        match = self.index.match([*slot.tokens, 10**9])
        assert match.slot is slot
        self.index.record_use(match, 5.0)


def text(number: int, n: int) -> list[int]:
    return [1000 * number + i for i in range(n)]


def test_equal_slots_are_evicted_least_recently_used_first() -> None:
    maker = Maker(max_slots=3)
    slots = [maker.slot(text(i, 100)) for i in range(3)]
    maker.use(slots[0])
    maker.slot(text(3, 100))
    assert maker.evicted == [slots[1]]
    assert (slots[0].n_uses, slots[0].used_at) == (1, 5.0)


def test_a_slot_that_costs_more_to_recompute_stays_longer() -> None:
    maker = Maker(max_slots=3)
    long = maker.slot(text(0, 1000))
    for i in range(1, 7):
        maker.slot(text(i, 100))
    assert long.alive
    assert [len(slot.tokens) for slot in maker.evicted] == [100] * 4
    for i in range(7, 40):  # but not for ever
        maker.slot(text(i, 100))
    assert not long.alive


def test_a_slot_is_worth_what_no_other_slot_saves() -> None:
    """A long slot of which nearly all is also in another one costs little."""
    for recurrent in (False, True):
        maker = Maker(max_slots=3, recurrent=recurrent)
        first, second = maker.slot(text(0, 1000)), maker.slot([*text(0, 1000), *text(5, 20)])
        assert second.parent is first
        other = maker.slot(text(1, 300))
        maker.slot(text(2, 300))
        assert maker.evicted == [second] if recurrent else maker.evicted[0] in (first, second)
        assert other.alive


def test_a_slot_that_frees_a_needed_id_is_evicted_first() -> None:
    maker = Maker(recurrent=True)
    live = PageTable(maker.pools, None)
    live.grow(0, 100)
    [state] = maker.pools[Space.RECURRENT].allocate(1) or []
    old = maker.index.publish(text(0, 100), SlotSource(100, live.entries, state, "turn"), 0.0)
    for _ in range(50):
        maker.index.record_use(maker.index.match([10**9]), 0.0)
    young = maker.slot(text(1, 64))
    one_more = {Space.FULL: maker.pools[Space.FULL].n_free + 1}
    assert maker.index.can_reclaim(one_more, {})
    assert maker.index.reclaim(one_more)
    assert maker.evicted == [young]  # the pages of the other are a sequence's as well
    assert not maker.index.can_reclaim({Space.FULL: 99}, {})
    assert not maker.index.reclaim({Space.FULL: 99})
    assert maker.evicted == [young, old]
    live.release()
    assert maker.pools.usage() == {Space.FULL: PageUse(0, 100), Space.RECURRENT: PageUse(0, 8)}


def test_memory_limits_slots_and_a_larger_state_disables_them() -> None:
    maker = Maker(recurrent=True, memory_bytes=250)
    for i in range(5):
        maker.slot(text(i, 64))
    assert [slot.tokens[0] for slot in maker.index.slots] == [3000, 4000]
    assert maker.index.n_bytes == 220
    assert not Maker(recurrent=True, memory_bytes=99).index.enabled
    assert Maker(memory_bytes=99).index.enabled
    assert not Maker(max_slots=0).index.enabled


def test_a_checkpoint_evicts_only_a_slot_worth_less() -> None:
    maker = Maker(recurrent=True)
    for i in range(8):
        maker.slot(text(i, 500), uses=0)
    assert maker.slot(text(9, 100)) is None
    assert maker.evicted == []
    assert maker.slot(text(9, 501)) is not None
    assert [slot.tokens[0] for slot in maker.evicted] == [0]


def test_a_slot_pinned_by_the_hook_is_evicted_on_unpin_unless_used_again() -> None:
    for again in (False, True):
        maker = Maker(max_slots=1)
        slot = maker.slot(text(0, 100))
        maker.index.hooks.on_evict = maker.index.pin
        other = maker.slot(text(1, 200))
        maker.index.hooks.on_evict = maker.evicted.append
        assert slot.alive
        assert slot.evict_on_unpin
        maker.index.unpin(other)
        assert not other.alive
        if again:
            maker.use(slot)
        maker.index.unpin(slot)
        assert slot.alive == again
        assert maker.evicted == []


def test_a_prefix_without_its_window_is_not_cached() -> None:
    maker = Maker(window=64)
    table = PageTable(maker.pools, 64)
    table.grow(0, 200)
    table.grow(300, 301)
    assert maker.index.publish(text(0, 200), SlotSource(200, table.entries, NO_STATE, "turn"), 0.0) is None
    assert maker.index.publish(text(0, 301), SlotSource(301, table.entries, NO_STATE, "turn"), 0.0) is not None
    table.release()
    assert maker.pools.usage()[Space.WINDOW] == PageUse(2, 100, evictable=2)  # positions 238 and later
    assert maker.index.match(text(0, 300)).position == 256  # sees 193 and later, and page 3 is held
    assert maker.index.match(text(0, 256)).position == 0


def test_adopting_twice_or_something_else_is_refused() -> None:
    maker = Maker(recurrent=True)
    reservation = maker.index.reserve(100)
    with pytest.raises(ValueError, match="99 tokens are adopted into ids reserved for 100"):
        maker.index.adopt(text(0, 99), reservation, 0.0)
    assert maker.index.adopt(text(0, 100), reservation, 0.0) is not None
    assert maker.index.adopt(text(0, 100), reservation, 0.0) is None
    maker.index.cancel(reservation)
    assert maker.pools.usage() == {
        Space.FULL: PageUse(2, 100, evictable=2),
        Space.RECURRENT: PageUse(1, 8, evictable=1),
    }
    assert maker.index.match([*text(0, 100), 10**9]).from_disk


def test_cache_and_uncache_check_ownership() -> None:
    pools = PagePools([Space.FULL], PoolSizes(2, 0, 0))
    allocator = pools[Space.FULL]
    for wrong in (allocator.cache, allocator.uncache):
        with pytest.raises(PageError, match="id 0 is "):
            wrong([0])
    allocator.allocate(1)
    allocator.cache([0])
    with pytest.raises(PageError, match="cached already"):
        allocator.cache([0])
    allocator.release([0])
    assert (allocator.n_used, allocator.n_evictable) == (1, 1)
    with pytest.raises(PageError, match="has 0 owners"):
        allocator.release([0])  # the index alone owns it
    allocator.retain([0])
    assert allocator.n_evictable == 0
    allocator.uncache([0])
    allocator.release([0])
    assert (allocator.n_used, allocator.n_evictable) == (0, 0)
