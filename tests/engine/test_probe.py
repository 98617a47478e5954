"""Questions of our own about a place in memory: what comes behind it, asked before all others and counted nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lucevisor.engine.limits import EngineLimits
from lucevisor.kv.prefix_records import PrefixSettings
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import Sampling
from tests.engine.toy_engine import ALL_SPACES, HYBRID, ToyEngine, limits, request

FULL = frozenset({Space.FULL})
ON = PrefixSettings(
    max_slots=100,
    memory_bytes=10**9,
    min_tokens=64,
    checkpoint_pages=1,
    unit_bytes={Space.FULL: 1000, Space.WINDOW: 1000, Space.RECURRENT: 5000},
)
GREEDY = Sampling(temperature=0.0, n_top_logprobs=2)


def warm(**changes: object) -> EngineLimits:
    return limits(**{"prefix": ON, "pools": PoolSizes(64, 64, 12), **changes})


async def with_slot(toy: ToyEngine, n: int = 140) -> PrefixSlot:
    """Compute a prompt and return the slot at its first n tokens, pinned."""
    toy.attach()
    toy.engine.submit(request("first", range(n + 10), n=1, turn_boundaries=(n,)))
    await toy.play()
    [slot] = [slot for slot in toy.engine.prefixes.slots if slot.n_tokens == n]
    toy.engine.prefixes.pin(slot)
    return slot


def asked(toy: ToyEngine, slot: PrefixSlot, token: int = 9) -> asyncio.Task[object]:
    return asyncio.ensure_future(toy.engine.slots.next_token(slot, slot.tokens, token, 2))


def expected(toy: ToyEngine, tokens: Sequence[int]) -> int:
    return toy.model.alone(tokens, GREEDY, 1, frozenset())[0]


@pytest.mark.parametrize("spaces", [FULL, HYBRID, ALL_SPACES])
@pytest.mark.parametrize("n", [128, 140])
async def test_a_probe_tells_what_comes_after_a_slot_and_counts_nowhere(spaces: frozenset[Space], n: int) -> None:
    window = 100 if Space.WINDOW in spaces else None
    toy = ToyEngine(warm(spaces=spaces, window_tokens=window), n_stages=2)
    slot = await with_slot(toy, n)
    before = toy.engine.statistics()
    n_steps = before.steps.n_steps
    asking = asked(toy, slot)
    await asyncio.sleep(0)
    await toy.play()
    found = await asking
    assert found is not None
    assert found.token == expected(toy, [*slot.tokens, 9])  # type: ignore[attr-defined]
    after = toy.engine.statistics()
    assert after.generated_tokens == before.generated_tokens
    assert after.cache == before.cache
    assert after.pages == before.pages
    assert after.steps.n_steps == n_steps + 1
    assert after.steps.n_tokens == before.steps.n_tokens + 1


async def test_a_probe_goes_before_waiting_requests_and_needs_no_admission() -> None:
    toy = ToyEngine(warm(max_sequences=1))
    slot = await with_slot(toy)
    running = toy.engine.submit(request("running", [5], n=3))
    waiting = toy.engine.submit(request("waiting", [6], n=3))
    asking = asked(toy, slot)
    quiet = asyncio.ensure_future(toy.engine.freezer.quiesce(60.0))
    await asyncio.sleep(0)
    await toy.play()
    assert running.finished is not None
    assert (await asking) is not None
    assert waiting.finished is None
    assert await quiet


async def test_a_probe_ends_with_the_pipeline_whether_it_runs_or_waits() -> None:
    for max_sequences in (1, 2):
        toy = ToyEngine(warm(max_sequences=max_sequences))
        slot = await with_slot(toy)
        toy.engine.submit(request("running", [5], n=30))
        asking = asked(toy, slot)
        await asyncio.sleep(0)
        toy.lose()
        assert await asking is None
        assert await toy.engine.slots.next_token(slot, slot.tokens, 9, 2) is None  # no pipeline
        toy.engine.slots.release(slot)
        toy.attach()
        await toy.play()
        assert {use.used for use in toy.engine.statistics().pages.values()} == {0}


async def test_a_probe_gives_way_when_the_only_running_request_needs_its_pages() -> None:
    toy = ToyEngine(warm(spaces=FULL, max_sequences=1, pools=PoolSizes(5, 0, 0)))
    slot = await with_slot(toy, 128)
    running = toy.engine.submit(request("running", range(900, 1060), n=60))  # 3 pages, and a fourth while it decodes
    asking = asked(toy, slot)
    await asyncio.sleep(0)
    await toy.play()
    assert await asking is None
    assert running.finished is None  # the pin keeps two pages
    toy.engine.slots.release(slot)
    await toy.play()
    assert running.finished is not None
    assert toy.engine.statistics().preemptions == 0


async def test_a_context_that_is_full_cannot_be_asked() -> None:
    toy = ToyEngine(warm(max_context=151))
    slot = await with_slot(toy)
    end = toy.engine.prefixes.slots[-1]
    assert end.n_tokens == 150
    toy.engine.prefixes.pin(end)
    assert await toy.engine.slots.next_token(end, end.tokens, 9, 2) is None
    assert slot.alive
