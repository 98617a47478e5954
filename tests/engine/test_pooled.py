"""Requests for pooled hidden states: beside others, over several stages, with stages that are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lucevisor.engine.request import ContextOverflow, FinishedEvent
from tests.engine.toy_engine import ToyEngine, attached, events_of, limits, request
from tests.engine.toy_pipeline import toy_row


def text(name: str, n_tokens: int):
    return replace(request(name, [(len(name) * at) % 90 for at in range(n_tokens)], n=1), pooled=True)


def expected(toy: ToyEngine, asked) -> list[float]:
    rows: list[int] = []
    toy.model.alone(asked.prompt, asked.sampling, 1, frozenset(), rows=rows)
    return toy_row(rows[len(asked.prompt) - 1], 2)


@pytest.mark.parametrize("n_stages", [1, 2, 3])
async def test_texts_of_any_length_beside_a_chat(n_stages):
    toy = attached(limits(), n_stages=n_stages)
    texts = [text(f"t{'x' * i}", n) for i, n in enumerate([1, 7, 64, 65, 200, 3, 130])]
    chat = toy.engine.submit(request("chat", range(50), n=30))
    handles = [toy.engine.submit(one) for one in texts]
    toy.run()
    for one, handle in zip(texts, handles, strict=True):
        [end] = await events_of(handle)
        assert isinstance(end, FinishedEvent)
        assert (end.reason, end.usage.prompt_tokens, end.usage.generated_tokens) == ("stop", len(one.prompt), 0)
        assert end.pooled is not None
        assert end.pooled.tolist() == expected(toy, one)
    assert len(await events_of(chat)) == 31
    assert not toy.engine.prefixes.slots or all(slot.n_tokens > 40 for slot in toy.engine.prefixes.slots)


async def test_a_text_as_long_as_the_context():
    toy = attached(limits(max_context=256))
    handle = toy.engine.submit(text("whole", 256))
    with pytest.raises(ContextOverflow, match=r"the text has 257 tokens, but .* at most 256"):
        toy.engine.submit(text("longer", 257))
    toy.run()
    assert (await events_of(handle))[0].pooled.tolist() == expected(toy, text("whole", 256))


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_stage_is_lost_meanwhile(lost):
    toy = attached(limits(), n_stages=3, hold_s=60.0, journal_pages=64)
    texts = [text(f"t{'x' * i}", 40 * i + 3) for i in range(5)]
    handles = [toy.engine.submit(one) for one in texts]
    for _ in range(4):
        toy.work(0)
    toy.crash_stage(lost)
    toy.come_back()
    toy.run()
    for one, handle in zip(texts, handles, strict=True):
        assert (await events_of(handle))[0].pooled.tolist() == expected(toy, one)


async def test_it_is_cancelled():
    toy = attached(limits())
    handle = toy.engine.submit(text("gone", 100))
    handle.cancel()
    toy.run()
    [end] = await events_of(handle)
    assert (end.reason, end.pooled) == ("cancelled", None)
