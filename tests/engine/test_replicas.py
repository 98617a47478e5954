"""Two toy engines behind one router: requests outlive either, with the tokens that they would have got."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from lucevisor.engine.events import EngineState
from lucevisor.engine.replicas import ReplicatedEngine
from lucevisor.engine.request import NotReady, QueueFull
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.values import KvGroup
from lucevisor.protocol.loading import PoolSizes
from tests.engine.toy_engine import LOST, ToyEngine, attached, check_answers, events_of, limits, request, told

CACHE = PrefixSettings(max_slots=20, memory_bytes=1 << 30, min_tokens=1, unit_bytes=dict.fromkeys(KvGroup, 1))


def replicated(*toys: ToyEngine) -> ReplicatedEngine:
    engine = ReplicatedEngine("ab"[: len(toys)])
    for name, toy in zip("ab", toys, strict=False):
        engine.add(name, toy.engine)
    return engine


def pair(*, n_stages: int = 1, hold_s: float = 60.0, **more: object) -> tuple[ToyEngine, ToyEngine, ReplicatedEngine]:
    one, other = (attached(limits(**more), n_stages=n_stages, hold_s=hold_s) for _ in "ab")
    return one, other, replicated(one, other)


async def test_a_prompt_goes_to_the_replica_that_has_its_prefix():
    one, other, engine = pair(prefix=CACHE, pools=PoolSizes(64, 0, 24))
    prompts = [[base + i for i in range(150)] for base in (0, 500)]
    for turn, prompt in enumerate(prompts):
        engine.submit(request(f"first{turn}", prompt))
        one.run()
        other.run()
    assert engine.router.n_routed == {"a": 1, "b": 1}
    cached = []
    for turn in (1, 0, 1, 1, 0):
        handle = engine.submit(request(f"more{len(cached)}", [*prompts[turn], 7, 8, 9]))
        one.run()
        other.run()
        cached.append(told(await events_of(handle))[1].usage.cached_tokens)
    assert engine.router.n_routed == {"a": 3, "b": 4}
    assert all(n >= 128 for n in cached)


def test_tokens_of_lower_tiers_count_three_quarters():
    toy = attached(limits(prefix=CACHE, pools=PoolSizes(64, 0, 24)))
    prompt = [3 + i for i in range(150)]
    toy.engine.submit(request("first", prompt))
    toy.run()
    tokens = TokenBuffer([*prompt, 7, 8, 9])
    n_here = toy.engine.n_cached(tokens)
    assert n_here >= 128
    toy.engine.prefixes.hooks.find = lambda _, n_cached: n_cached + 100
    assert toy.engine.n_cached(tokens) == n_here + 75
    assert attached(limits()).engine.n_cached(tokens) == 0  # no slots


async def test_a_replica_that_lost_all_its_state_gives_its_requests_away_at_once():
    one, other, engine = pair()
    wanted = [request(name, [ord(name)] * 70, n=40) for name in "stuvwxyz"]
    handles = {each.request_id: engine.submit(each) for each in wanted}
    for _ in range(12):
        one.work(0)
        other.work(0)
    assert one.engine.statistics().running
    one.lose()
    assert not one.engine.core.scheduler.unfinished
    assert engine.router.n_moved == {"a": 0, "b": 4}
    other.run()
    await check_answers(other, wanted, handles)


async def test_a_lost_stage_is_rebuilt_in_place_and_what_waits_there_moves():
    one, other = (attached(limits(), n_stages=2, hold_s=60.0, journal_pages=64) for _ in "ab")
    engine = replicated(one, other)
    wanted = [request(f"{i}", [i] * 70, n=30) for i in range(12)]  # two more than run, at each
    handles = {each.request_id: engine.submit(each) for each in wanted}
    for _ in range(20):
        one.work(0)
        other.work(0)
    n_running = one.engine.statistics().running
    one.crash_stage(1)
    assert one.engine.statistics().running == n_running
    assert one.engine.statistics().queued == 0
    assert engine.router.n_moved["b"] == 2
    one.come_back()
    one.run()
    other.run()
    assert one.n_rebuilt == 1
    await check_answers(one, wanted, handles)


async def test_requests_wait_where_they_are_while_no_replica_serves_and_go_to_the_first_that_does():
    one, other, engine = pair()
    wanted = [request(name, n=20) for name in "wxyz"]
    handles = {each.request_id: engine.submit(each) for each in wanted}
    one.work(0)
    one.lose()
    other.lose()
    late = request("late", n=5)
    handles["late"] = engine.submit(late)
    assert not any(handle.finished for handle in handles.values())
    other.attach()
    other.run()
    await check_answers(other, [*wanted, late], handles)
    assert engine.router.n_moved["a"] == 0


async def test_without_a_hold_running_requests_end_with_the_loss_and_waiting_ones_move():
    one, other, engine = pair(hold_s=0.0, max_sequences=1, pools=PoolSizes(16, 0, 1))
    handles = [engine.submit(request(name)) for name in "wxyz"]
    one.work(0)
    one.lose()
    other.run()
    ends = [told(await events_of(handle))[1] for handle in handles]
    assert [end.error for end in ends] == [LOST, None, None, None]


async def test_a_given_up_replica_loses_no_request():
    one, other = (attached(limits(), n_stages=2, hold_s=60.0, journal_pages=64) for _ in "ab")
    engine = replicated(one, other)
    wanted = [request(name, [ord(name)] * 70, n=30) for name in "wxyz"]
    handles = {each.request_id: engine.submit(each) for each in wanted}
    for _ in range(8):
        one.work(0)
    one.crash_stage(0)  # it waits for the stage
    one.engine.detach(LOST)
    one.engine.detach(LOST, permanent=True)
    other.run()
    await check_answers(other, wanted, handles)


async def test_a_drain_moves_what_does_not_end_in_time_and_requests_go_elsewhere_meanwhile():
    one, other, engine = pair(prefix=CACHE, pools=PoolSizes(64, 0, 24))
    wanted = [request(name, [ord(name)] * 70, n=50) for name in "wxyz"]
    handles = {each.request_id: engine.submit(each) for each in wanted}
    for _ in range(5):
        one.work(0)
        other.work(0)

    draining = asyncio.create_task(engine.drain("a", 0.0, 5.0))
    await one.engine.changes.wait_for(lambda: one.engine.core.state is EngineState.DRAINING)
    one.run()
    assert await draining
    assert not await engine.drain("b", 0.0, 5.0)  # the last one
    assert not one.engine.core.scheduler.unfinished
    one.run()  # a step that closes their sequences
    late = request("late", n=5)
    handles["late"] = engine.submit(late)
    assert one.engine.core.scheduler.idle
    other.run()
    one.run()
    await check_answers(other, [*wanted, late], handles)
    engine.end_drain("a")
    engine.submit(request("next"))
    assert one.engine.core.scheduler.unfinished


@pytest.mark.parametrize("freeze_s", [0.0, 5.0], ids=["takes too long", "is cancelled"])
async def test_a_drain_that_does_not_come_to_its_end_leaves_requests_running(freeze_s):
    one, other, engine = pair()
    wanted = [request(name, [ord(name)] * 70, n=50) for name in "wxyz"]
    handles = {each.request_id: engine.submit(each) for each in wanted}
    one.work(0)
    draining = asyncio.create_task(engine.drain("a", 0.0, freeze_s))
    await one.engine.changes.wait_for(lambda: one.engine.core.state is EngineState.DRAINING)
    if freeze_s:
        draining.cancel()  # as when an operator's command is interrupted
    await asyncio.wait({draining})
    engine.end_drain("a")
    for _ in range(60):
        one.run()
        other.run()
    assert one.engine.ready
    await asyncio.wait_for(check_answers(one, wanted, handles), 10)


async def test_a_request_that_no_other_replica_can_take_waits_where_it_is():
    one = attached(limits(), hold_s=60.0)
    other = attached(limits(max_context=100), hold_s=60.0)
    engine = replicated(one, other)
    long = request("long", [5] * 200, n=5)
    handle = engine.submit(long)
    one.work(0)
    one.lose()
    assert handle.finished is None
    assert one.engine.core.scheduler.unfinished
    one.attach()
    one.run()
    await check_answers(one, [long], {"long": handle})


async def test_a_replica_that_computes_no_numbers_gets_no_request_for_a_while():
    one, other, engine = pair()
    handle = engine.submit(request("w", n=5))
    [daemon] = one.daemons
    result, payload = daemon.run_one()
    one.engine.receive(structs.replace(result, invalid=[0]), payload)
    assert told(await events_of(handle))[1].error.code == "invalid_logits"  # type: ignore[union-attr]
    for name in "xy":
        engine.submit(request(name))
    assert (len(one.engine.core.scheduler.unfinished), len(other.engine.core.scheduler.unfinished)) == (0, 2)
    one.now = other.now = 11.0
    engine.submit(request("z"))
    assert one.engine.core.scheduler.unfinished


def test_a_full_replica_is_not_the_end_and_the_first_refusal_is_told():
    toys = [attached(limits(max_sequences=1, pools=PoolSizes(16, 0, 1)), max_queue=1) for _ in "ab"]
    engine = replicated(*toys)
    for i in range(4):
        engine.submit(request(f"{i}", n=200))
    with pytest.raises(QueueFull):
        engine.submit(request("more", n=200))


def test_before_any_engine_is_there_requests_are_refused():
    with pytest.raises(NotReady, match="being loaded"):
        ReplicatedEngine("ab").submit(request("x"))
    with pytest.raises(NotReady, match="being loaded"):
        replicated(ToyEngine(limits()), ToyEngine(limits())).submit(request("x"))


async def test_a_moved_request_is_cancelled_where_it_is():
    one, other, engine = pair()
    handle = engine.submit(request("w", n=40))
    one.work(0)
    one.lose()
    handle.cancel()
    assert handle.finished is not None
    assert handle.finished.reason == "cancelled"
    assert not other.engine.core.scheduler.unfinished


@given(st.integers(0, 2**32), st.integers(1, 2))
async def test_whatever_is_lost_when_every_request_gets_its_tokens(seed, n_stages):
    rng = random.Random(seed)
    toys = [
        attached(
            limits(prefix=CACHE, pools=PoolSizes(40, 0, 24)), n_stages=n_stages, hold_s=600.0, journal_pages=64,
            max_losses=1000,
        )
        for _ in "ab"
    ]  # fmt: skip
    engine = replicated(*toys)
    wanted, handles = [], {}
    for i in range(40):
        for toy in toys:
            if toy.daemons and rng.random() < 0.8:
                toy.work(rng.randrange(3))
        if rng.random() < 0.4:
            shared = [rng.randrange(3)] * rng.choice((0, 70, 130))
            each = request(f"{i}", [*shared, *(rng.randrange(50) for _ in range(rng.randrange(1, 90)))], n=12)
            wanted.append(each)
            handles[each.request_id] = engine.submit(each)
        if rng.random() < 0.15:
            toy = rng.choice(toys)
            if toy.pipeline is None:
                toy.attach()
            elif not toy.pipeline.lost:
                toy.lose()
    for toy in toys:
        if toy.pipeline is None:
            toy.attach()
    for toy in toys:
        toy.run()
    await check_answers(toys[0], wanted, handles)
