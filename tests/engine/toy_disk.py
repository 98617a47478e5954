"""Prefix slots that go to disk and back between toy engines: the bytes are moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lucevisor.engine.limits import EngineLimits
from lucevisor.kv.page_table import PagedOut
from lucevisor.model.values import Space
from lucevisor.protocol.messages import SlotPlace
from tests.engine.toy_engine import ToyEngine, attached, events_of, request, told
from tests.engine.toy_pipeline import ToyStage


def toy_stages(toy: ToyEngine) -> list[ToyStage]:
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


async def talk(toy: ToyEngine, name: str, prompt: Sequence[int], n: int, **more: object) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt's were cached."""
    handle = toy.engine.submit(request(name, prompt, n, **more))
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
    other = attached(bound, n_stages=toy.model.n_stages)
    reserving = asyncio.ensure_future(other.engine.slots.reserve(n_tokens, slot.paged_out))
    await asyncio.sleep(0)
    await other.play()
    reservation = await reserving
    assert reservation is not None
    ids = reservation.ids
    to = SlotPlace(n_tokens, ids[Space.FULL], ids.get(Space.WINDOW, []), reservation.first_window, reservation.state)
    moved(toy_stages(toy), place, toy_stages(other), to)
    toy.engine.slots.release(slot)
    restored = other.engine.slots.adopt(slot.tokens, reservation)
    assert restored is not None
    assert other.engine.slots.adopt(slot.tokens, reservation) is None  # once
    other.engine.slots.release(restored)
    return other, restored.paged_out
