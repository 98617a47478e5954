"""Prefix slots that go to disk and back; the test moves the bytes by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.values import Space
from lucevisor.protocol.loading import PoolSizes
from tests.engine.scheduler_steps import FULL, ON, warm
from tests.engine.toy_engine import ALL_SPACES, HYBRID, ToyEngine, events_of, request, told
from tests.engine.toy_pipeline import ToyStage


def read(stage: ToyStage, place: object) -> dict[str, object]:
    """What Save would write of a stage."""
    pages = {Space.FULL: place.full, Space.WINDOW: place.window}  # type: ignore[attr-defined]
    state = place.state  # type: ignore[attr-defined]
    return {
        "pages": {space: [list(stage.pages[space][p]) for p in ids] for space, ids in pages.items()},
        "state": stage.states[state] if state >= 0 else None,
    }


@pytest.mark.parametrize("spaces", [FULL, HYBRID, ALL_SPACES])
async def test_a_slot_goes_to_disk_and_back_after_the_shards_lost_it(spaces: frozenset[Space]) -> None:
    bounds = warm(
        spaces=spaces,
        pools=PoolSizes(24, 24 if Space.WINDOW in spaces else 0, 8),
        window_tokens=100 if Space.WINDOW in spaces else None,
    )
    toy = ToyEngine(bounds, n_stages=2)
    toy.attach()
    first = toy.engine.submit(request("a", range(150), n=1, turn_boundaries=(140,)))
    await toy.play()
    assert first.finished is not None
    [slot] = [s for s in toy.engine.prefixes.slots if s.n_tokens == 140]
    exporting = asyncio.ensure_future(toy.engine.slots.export(slot))
    await asyncio.sleep(0)
    assert not exporting.done() or spaces == FULL  # the checkpoint is copied by a step that is still to come
    await toy.play()
    place = await exporting
    assert place is not None
    tokens = slot.tokens
    stages = {index: stage for d in toy.daemons for index, stage in d.stages.items()}
    saved = {index: read(stage, place) for index, stage in stages.items()}
    assert not toy.engine.prefixes.drop(slot)
    toy.engine.slots.release(slot)

    toy.lose()
    toy.attach()
    assert toy.engine.prefixes.slots == []
    busy = toy.engine.submit(request("busy", range(300, 330), n=9))
    reserving = asyncio.ensure_future(toy.engine.slots.reserve(140))
    await toy.play()
    reservation = await reserving
    assert reservation is not None
    for d in toy.daemons:
        for index, stage in d.stages.items():
            for space, pages in saved[index]["pages"].items():  # type: ignore[attr-defined]
                for i, page in enumerate(pages, place.first_window if space is Space.WINDOW else 0):
                    [target] = reservation.entries(space, i, i + 1)
                    stage.pages[space][target] = list(page)
            if reservation.state >= 0:
                stage.states[reservation.state] = saved[index]["state"]
    restored = toy.engine.slots.adopt(tokens, reservation)
    assert restored is not None
    assert restored.origin == "disk"
    assert restored.pins == 1
    toy.engine.slots.release(restored)
    assert toy.engine.slots.adopt(tokens, reservation) is None  # once
    one = request("b", [*range(140), 5, 5, 5], n=20)
    again = toy.engine.submit(one)
    await toy.play()
    ids, finished = told(await events_of(again))
    assert ids == toy.alone(one)
    assert finished.usage.cached_tokens == 140
    assert toy.engine.statistics().cache.tokens == {"memory": 0, "disk": 140}
    assert busy.finished is not None
    third = toy.engine.submit(replace(one, request_id="c"))
    await toy.play()
    assert third.finished is not None
    assert toy.engine.statistics().cache.tokens == {"memory": 140, "disk": 140}


async def test_a_held_request_waits_for_what_is_restored_and_others_pass() -> None:
    toy = ToyEngine(warm())
    toy.attach()
    toy.engine.on_submit = lambda asked: asked.request_id in ("a", "c")
    held = toy.engine.submit(request("a", range(150), n=1))
    cancelled = toy.engine.submit(request("c", range(150), n=1))
    other = toy.engine.submit(request("b", range(500, 510), n=1))
    await toy.play()
    assert other.finished is not None
    assert held.finished is None
    cancelled.cancel()
    toy.engine.resume("c")  # over already
    toy.engine.resume("a")
    await toy.play()
    ids, _ = told(await events_of(held))
    assert ids == toy.alone(request("a", range(150), n=1))


async def test_an_export_ends_when_the_pipeline_breaks_and_holds_nothing() -> None:
    toy = ToyEngine(warm(), n_stages=2)
    toy.attach()
    toy.engine.submit(request("a", range(150), n=5, turn_boundaries=(140,)))
    while not toy.engine.prefixes.slots:
        toy.work(0)
    [slot] = toy.engine.prefixes.slots[:1]
    exporting = asyncio.ensure_future(toy.engine.slots.export(slot))
    reserving = asyncio.ensure_future(toy.engine.slots.reserve(100))
    await asyncio.sleep(0)
    toy.lose()
    assert await exporting is None
    assert await reserving is None
    toy.attach()
    assert {use.used for use in toy.engine.statistics().pages.values()} == {0}


async def test_a_slot_pinned_while_it_is_given_up_goes_afterwards() -> None:
    toy = ToyEngine(warm(prefix=replace(ON, max_slots=1)))
    toy.attach()
    evicted: list[PrefixSlot] = []

    def save(slot: PrefixSlot) -> None:
        evicted.append(slot)
        if slot is old:
            toy.engine.prefixes.pin(slot)

    toy.engine.submit(request("a", range(100), n=1))
    toy.run()
    [old] = toy.engine.prefixes.slots
    toy.engine.prefixes.hooks.on_evict = save
    toy.engine.submit(request("b", range(500, 600), n=1))
    toy.run()
    assert evicted[0] is old
    assert toy.engine.prefixes.slots == [old]
    toy.engine.slots.release(old)
    assert toy.engine.prefixes.slots == []
