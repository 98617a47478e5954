"""Pages and recurrent states in one memory: running requests and prefix slots take it in any ratio."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.engine import validation
from lucevisor.engine.request import RequestHandle
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CopyPage
from tests.engine.toy_engine import ToyEngine, attached, check_answers, limits, request

STATE_PAGES = 4
UNITS = {KvGroup.FULL: 1, KvGroup.RECURRENT: STATE_PAGES}


def engine(n_extents: int, *, slots: int = 0, alone: int = 0, n_host: int = 0, **more: Any) -> ToyEngine:
    """An engine over ``n_extents`` extents and pages that no state can take; with ``n_host`` slots keep their states in
    host memory."""
    most = more.pop("max_sequences", 8)
    sizes = PoolSizes(
        n_extents * STATE_PAGES + alone, 0, n_extents + n_host, host_states=n_host, state_pages=STATE_PAGES
    )
    prefix = PrefixSettings(max_slots=slots, memory_bytes=1 << 30, min_tokens=1, unit_bytes=UNITS)
    return attached(
        limits(max_sequences=most, max_context=1024, pools=sizes, prefix=prefix, max_step_tokens=200), **more
    )


def moves_of(toy: ToyEngine) -> list[CopyPage]:
    """The whole pages that were copied."""
    operations = [operation for result in toy.steps for operation in result.step.operations]
    return [one for one in operations if isinstance(one, CopyPage) and one.n_tokens == PAGE_TOKENS]


LONG = [request("a", range(60), n=300), request("b", range(1, 61), n=140), request("c", range(2, 62), n=140)]
LATER = [request(name, n=250) for name in "defgh"]


def scattered(toy: ToyEngine) -> dict[str, RequestHandle]:
    """Three requests take turns to allocate; when two end, the other's pages are on three extents of eight.  Four more
    take the free ones for their states, and pages beside the first one's, so that none is free, though a state's memory
    is."""
    handles = {one.request_id: toy.engine.submit(one) for one in LONG}
    while any(handles[name].finished is None for name in "bc"):
        toy.work(0)
    handles |= {one.request_id: toy.engine.submit(one) for one in LATER}
    while not moves_of(toy):
        assert handles["h"].finished is None
        toy.work(0)
        validation.check(toy.engine.core.scheduler)
    assert handles["a"].finished is None
    return handles


async def test_pages_are_moved_when_no_extent_is_free_though_the_memory_is() -> None:
    toy = engine(8)
    handles = scattered(toy)
    toy.run()
    assert await check_answers(toy, [*LONG, *LATER], handles) == ["length"] * 8


async def test_a_few_long_requests_and_many_short_ones_both_fill_the_memory() -> None:
    """Half as many pages as states, or states as pages, would not do."""
    few = engine(8)
    long = [request("a", range(500), n=600)]
    handles = {one.request_id: few.engine.submit(one) for one in long}
    few.run()
    assert await check_answers(few, long, handles) == ["length"]
    many = engine(8, alone=16)
    short = [request(name, n=30) for name in "abcdefgh"]
    handles = {one.request_id: many.engine.submit(one) for one in short}
    for _ in range(20):
        many.work(0)
    assert many.engine.statistics().running == 8
    many.run()
    assert await check_answers(many, short, handles) == ["length"] * 8


async def test_a_slot_gives_way_for_a_state_where_all_free_pages_lie_beside_the_extents() -> None:
    toy = engine(3, slots=100, alone=7)
    requests = [request(name, (0, 1, 4), n=n) for name, n in (("a", 1), ("b", 20), ("c", 20), ("d", 1))]
    handles = {one.request_id: toy.engine.submit(one) for one in requests}
    toy.run()
    assert await check_answers(toy, requests, handles) == ["length"] * 4


async def test_a_lost_stage_is_rebuilt_after_pages_were_moved() -> None:
    toy = engine(8, n_stages=2, hold_s=30.0, journal_pages=60)
    handles = scattered(toy)
    toy.work(0)
    assert toy.crash_stage(1)
    toy.come_back()
    toy.run()
    assert (toy.n_rebuilt, toy.n_given_up) == (1, 0)
    assert await check_answers(toy, [*LONG, *LATER], handles) == ["length"] * 8


@st.composite
def loads(draw: st.DrawFn) -> tuple[ToyEngine, list[Any]]:
    n_host = draw(st.sampled_from([0, 0, 6]))
    toy = engine(
        draw(st.integers(3, 8)), slots=draw(st.sampled_from([0, 100])), alone=draw(st.integers(0, 9)), n_host=n_host,
        n_stages=draw(st.integers(1, 2)),
    )  # fmt: skip
    room = toy.limits.capacity_tokens
    requests = []
    for i in range(draw(st.integers(2, 9))):
        n_prompt = min(room - 2, draw(st.sampled_from([3, 60, 64, 130, 300, 500])))
        first = draw(st.sampled_from([0, i]))
        prompt = [(first + k * k) % 97 for k in range(n_prompt)]
        requests.append(request(f"r{i}", prompt, draw(st.sampled_from([1, 20, 90, 200]))))
    return toy, requests


@settings(max_examples=120, deadline=None)
@given(loads(), st.lists(st.integers(0, 40), min_size=9, max_size=9))
def test_every_load_is_served_and_no_slot_is_evicted_while_memory_is_free(load: Any, pauses: list[int]) -> None:
    """What a slot has to give way for: a state and the pages of one slice, or of a tail."""
    toy, requests = load
    scheduler = toy.engine.core.scheduler
    pools = toy.engine.core.scheduler.pools
    most = STATE_PAGES + max(len(one.prompt) for one in requests) // PAGE_TOKENS + 5

    def evicted(_: PrefixSlot) -> None:
        no_host_state = pools.copies_states and not pools.slot_pools[KvGroup.RECURRENT].n_free
        assert pools[KvGroup.FULL].n_free < most or no_host_state

    toy.engine.core.scheduler.reuse.index.hooks.on_evict = evicted
    handles = {}
    for one, n in zip(requests, pauses, strict=False):
        handles[one.request_id] = toy.engine.submit(one)
        for _ in range(n):
            toy.work(n)
        if pools.extents is not None and n % 3 == 0:  # whenever it is, pages may be moved
            scheduler._operations += scheduler.running.move_pages(pools.extents)
        validation.check(toy.engine.core.scheduler)
    toy.run()
    validation.check(toy.engine.core.scheduler)
    assert all(handle.finished is not None and handle.finished.error is None for handle in handles.values())
    asyncio.run(check_answers(toy, requests, handles))
    usage = toy.engine.statistics().pages
    assert all(use.used == use.evictable for use in usage.values())
