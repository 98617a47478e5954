"""KV Flash: prefix slots whose pages are partly in host memory, in memory and on disk."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lucevisor.engine.limits import EngineLimits
from lucevisor.kv.page_table import PagedOut
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import pages_of
from lucevisor.model.values import Space
from lucevisor.protocol.messages import SlotPlace
from tests.engine.test_residency import EXACT, PLAIN, RANKED, SLIDING, bounds
from tests.engine.toy_engine import HYBRID, ToyEngine, events_of, request, told
from tests.engine.toy_pipeline import ToyStage

SPACES = [PLAIN, SLIDING, HYBRID]


def stages(toy: ToyEngine) -> list[ToyStage]:
    return [stage for daemon in toy.daemons for stage in daemon.stages.values()]


def pages(stage: ToyStage, space: Space, ids: list[int]) -> list[list[tuple[int, int]]]:
    """Where a stage has pages, on the device or in host memory."""
    return [
        stage.host_pages[i] if space is Space.FULL and i in stage.host_pages else stage.pages[space][i] for i in ids
    ]


def moved(source: list[ToyStage], place: SlotPlace, target: list[ToyStage], to: SlotPlace) -> None:
    """What Save and Restore do."""
    for one, other in zip(source, target, strict=True):
        for space, ids, new in ((Space.FULL, place.full, to.full), (Space.WINDOW, place.window, to.window)):
            for page, into in zip(pages(one, space, ids), pages(other, space, new), strict=True):
                into[:] = page
        if place.state >= 0:
            other.states[to.state] = one.states[place.state]


async def talk(toy: ToyEngine, name: str, prompt: list[int], n: int) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt's were cached."""
    handle = toy.engine.submit(request(name, prompt, n))
    toy.run()
    tokens, finished = told(await events_of(handle))
    assert finished.reason == "length"
    return tokens, finished.usage.cached_tokens


async def through_disk(toy: ToyEngine, n_tokens: int, bound: EngineLimits) -> tuple[ToyEngine, PagedOut | None]:
    """Another engine whose one slot is that of ``n_tokens``."""
    [slot] = [one for one in toy.engine.prefixes.slots if one.n_tokens == n_tokens]
    exporting = asyncio.ensure_future(toy.engine.slots.export(slot))
    await asyncio.sleep(0)
    await toy.play()
    place = await exporting
    assert place is not None
    other = ToyEngine(bound, n_stages=toy.model.n_stages)
    other.attach()
    reserving = asyncio.ensure_future(other.engine.slots.reserve(n_tokens, slot.paged_out))
    await asyncio.sleep(0)
    await other.play()
    reservation = await reserving
    assert reservation is not None
    ids = reservation.ids
    to = SlotPlace(n_tokens, ids[Space.FULL], ids.get(Space.WINDOW, []), reservation.first_window, reservation.state)
    moved(stages(toy), place, stages(other), to)
    toy.engine.slots.release(slot)
    restored = other.engine.slots.adopt(slot.tokens, reservation)
    assert restored is not None
    other.engine.slots.release(restored)
    return other, restored.paged_out


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(SPACES),
    st.integers(1, 2),
    st.sampled_from([12, 14, 30]),
    st.sampled_from([14, 40]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 150), st.integers(1, 70)), min_size=2, max_size=7),
)
def test_exact_goes_on_from_any_slot(spaces, n_stages, full_pages, host_pages, turns) -> None:
    bound = bounds(spaces, full_pages=full_pages, host_pages=host_pages, slots=6)
    toy = ToyEngine(bound, n_stages=n_stages)
    toy.attach()
    texts = [[(i * k) % 89 for k in range(330)] for i in range(3)]
    for turn, (who, n_more, n_answer) in enumerate(turns):
        text = texts[who]
        if len(text) + n_more + n_answer > 880:
            continue
        text += [(7 * i + who) % 97 for i in range(n_more)]
        tokens, n_cached = asyncio.run(talk(toy, str(turn), text, n_answer))
        assert tokens == toy.alone(request(str(turn), text, n_answer))
        event(f"cached beyond the pool: {n_cached > 6 * 64}")
        text += tokens
    held = toy.engine.statistics().host_pages.used
    toy.engine.prefixes.clear()
    event(f"slots in host memory: {held > 0}")
    assert toy.engine.statistics().host_pages.used == 0


@pytest.mark.parametrize("residency", [EXACT, RANKED])
@pytest.mark.parametrize("spaces", SPACES)
async def test_after_a_restart_tokens_are_those_of_before(spaces: frozenset[Space], residency: Residency) -> None:
    bound = bounds(spaces, full_pages=30, host_pages=60, slots=6, residency=residency)
    toy = ToyEngine(bound, n_stages=2)
    toy.attach()
    text = [(k * k) % 89 for k in range(560)]
    tokens, _ = await talk(toy, "a", text, 40)
    text += tokens
    other, paged_out = await through_disk(toy, len(text) - 1, bound)
    assert paged_out is not None
    assert paged_out.pool_pages == 6
    asked = [*text, *range(50)]
    found, n_cached = await talk(other, "b", asked, 60)
    assert n_cached == len(text) - 1
    assert (found, n_cached) == await talk(toy, "b", asked, 60)
    if residency.attends_host:
        assert found == toy.alone(request("b", asked, 60))


@pytest.mark.parametrize("pool", [6, 7, 9, 14])
@pytest.mark.parametrize("saved", [6, 9, 14])
async def test_a_file_is_restored_into_any_pool(saved: int, pool: int) -> None:
    def bound(n: int) -> EngineLimits:
        return bounds(HYBRID, full_pages=40, host_pages=40, slots=6, residency=Residency(n, "exact"))

    toy = ToyEngine(bound(saved))
    toy.attach()
    text = [(k * k) % 89 for k in range(700)]
    text += (await talk(toy, "a", text, 20))[0]
    other, paged_out = await through_disk(toy, len(text) - 1, bound(pool))
    n_out = max(0, pages_of(len(text)) - pool)
    assert len(paged_out.entries if paged_out is not None else ()) == n_out
    asked = [*text, *range(20)]
    found, n_cached = await talk(other, "b", asked, 70)
    assert n_cached == len(text) - 1
    assert found == toy.alone(request("b", asked, 70))
    assert not any(len(one.tables[Space.FULL]) > 99 for stage in stages(other) for one in stage.sequences.values())


async def test_sequences_take_host_memory_back_from_slots() -> None:
    toy = ToyEngine(bounds(full_pages=12, host_pages=8, slots=6))
    toy.attach()
    first = [k % 7 for k in range(700)]
    await talk(toy, "a", first, 5)
    assert toy.engine.statistics().host_pages.used > 0
    other = [k % 11 for k in range(800)]
    tokens, n_cached = await talk(toy, "b", other, 5)
    assert n_cached == 0
    assert tokens == toy.alone(request("b", other, 5))


async def test_what_follows_dropped_pages_is_not_shared_beyond_the_pool() -> None:
    toy = ToyEngine(bounds(full_pages=30, host_pages=60, slots=6, residency=RANKED))
    toy.attach()
    text = [(k * k) % 89 for k in range(600)]
    await talk(toy, "a", text, 5)
    _, n_cached = await talk(toy, "b", [*text[:550], 1, 2, 3], 5)
    assert n_cached == 5 * 64  # of the slot of 604 tokens only what was computed with all before it resident
