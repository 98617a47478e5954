"""The engine's accounts: a planted leak of every kind is found and named, and a sound engine is never accused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lucevisor.engine import validation
from lucevisor.engine.scheduler import Scheduler
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.validation import AccountingError
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import ALL_KV_GROUPS, ToyEngine, attached, limits, request

CACHE = PrefixSettings(
    max_slots=20,
    memory_bytes=1000,
    min_tokens=10,
    checkpoint_pages=1,
    unit_bytes={KvGroup.FULL: 1, KvGroup.WINDOW: 1, KvGroup.RECURRENT: 1},
)


def used() -> ToyEngine:
    """An idle engine with prefix slots."""
    bounds = limits(kv_groups=ALL_KV_GROUPS, window_tokens=80, prefix=CACHE, pools=PoolSizes(32, 16, 12))
    toy = attached(bounds, n_stages=2)
    for name, n in (("a", 150), ("b", 200), ("c", 90)):
        toy.engine.submit(request(name, range(n), n=3))
        toy.run()
    assert toy.engine.prefixes.slots
    return toy


def leak_a_page(scheduler: Scheduler) -> None:
    scheduler.pools[KvGroup.FULL].allocate(1)


def leak_a_sequence(scheduler: Scheduler) -> None:
    scheduler.running.sequence_ids.allocate(1)


def share_a_page_once_more(scheduler: Scheduler) -> None:
    scheduler.pools[KvGroup.FULL].retain([scheduler.reuse.index.slots[0].pages(KvGroup.FULL)[0]])


def forget_that_a_page_is_cached(scheduler: Scheduler) -> None:
    scheduler.pools[KvGroup.FULL].uncache([scheduler.reuse.index.slots[0].pages(KvGroup.FULL)[0]])


def count_a_slot_twice(scheduler: Scheduler) -> None:
    scheduler.reuse.index.slots[0].node.n_slots += 1


def lose_a_slot(scheduler: Scheduler) -> None:
    slot = scheduler.reuse.index.slots[0]
    del slot.node.slots[slot.remainder]


def lose_a_reservation(scheduler: Scheduler) -> None:
    index = scheduler.reuse.index
    reservation = index.reserve(100)
    assert reservation is not None
    index.reservations.remove(reservation)


def free_a_page_twice(scheduler: Scheduler) -> None:
    scheduler.pools[KvGroup.FULL]._free.append(scheduler.pools[KvGroup.FULL]._free[-1])


@pytest.mark.parametrize(
    ("leak", "words"),
    [
        (leak_a_page, r"KV group full: id \d+ counts 1 owners, known are 0 \(none\)"),
        (leak_a_sequence, "sequences: id 0 counts 1 owners, known are 0"),
        (share_a_page_once_more, r"KV group full: id \d+ counts 2 owners, known are 1 \(the prefix index\)"),
        (forget_that_a_page_is_cached, r"counts 0 owners, known are 1 \(the prefix index\)"),
        (count_a_slot_twice, r"slots lead through, \d+ are counted"),
        (lose_a_slot, "are in the tree, .* in the index"),
        (lose_a_reservation, r"KV group full: id \d+ counts 1 owners, known are 0"),
        (free_a_page_twice, "KV group full: the free list is"),
    ],
)
def test_a_planted_leak_is_found_when_the_engine_is_idle_next(leak: Callable[[Scheduler], None], words: str) -> None:
    toy = used()
    validation.check(toy.engine.core.scheduler)
    leak(toy.engine.core.scheduler)
    with pytest.raises(AccountingError, match=words):
        toy.engine.tick()
