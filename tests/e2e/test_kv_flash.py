"""KV Flash from the configuration to the tokens, over two processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from lucevisor.app.extra_models import make_page_scorer
from lucevisor.kv.residency import Residency
from lucevisor.model.families import open_spec
from tests.combinations import slow
from tests.e2e.service import DEMO, GOLDEN, generate, generate_all, running, snapshots_of, told_of, write_config
from tests.e2e.test_pflash import DEMO_FOLDER, TEXTS, text_of
from tests.families.golden import opened
from tests.families.paged_texts import Texts, tokens_at
from tests.families.pipeline import How, load_stages
from tests.waiting import until


async def test_exact_draws_the_tokens_of_the_whole_context(tmp_path: Path) -> None:
    golden = opened("laguna")
    prompt = tokens_at(0, 800, golden.spec.vocabulary)
    texts, wanted = Texts(golden.spec, golden.whole, None), []
    rows = [texts.run(a=prompt[start : start + 256]) for start in range(0, 800, 256)][-1]
    for _ in range(40):
        wanted.append(int(rows[-1].argmax()))
        rows = texts.run(a=wanted[-1:])
    config = write_config(tmp_path, GOLDEN / "laguna" / "model.gguf", {"left": 1, "right": 1}, ["0-2", "2-5"])
    overrides = ["engine.dtype=float32", "engine.max_context=900", "model.yarn_attn_factor=file"]
    overrides += ["kvflash.pool_tokens=500", "kvflash.policy=exact"]
    async with running(config, tmp_path, overrides) as service:
        assert service.only.placement is not None
        assert service.only.placement.pools.host_pages == service.only.placement.max_sequences * (15 - 8)
        assert any("room for" in reason for reason in service.only.placement.reasons)
        assert await generate(service, prompt, len(wanted)) == wanted


@pytest.mark.parametrize(("policy", "pools"), [("exact", [500, 800]), slow("qk", [500, 500])])
async def test_a_paged_conversation_goes_on_after_a_restart(policy: str, pools: list[int], tmp_path: Path) -> None:
    """From its file, in a pool of any size under ``exact``; ``pools[0]``: of the service that computed it."""
    golden = opened("qwen35")
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"left": 1, "right": 1}, ["0-4", "4-8"])
    overrides = ["engine.dtype=float32", "engine.max_context=1000", f"kvflash.policy={policy}", "draft.kind=off"]
    overrides += [f"cache.dir={tmp_path / 'cache'}", "cache.min_tokens=64"]
    prompt, found = tokens_at(0, 700, golden.spec.vocabulary), []
    for i, pool in enumerate(pools):
        async with running(config, tmp_path, [*overrides, f"kvflash.pool_tokens={pool}"]) as service:
            if i == 0:
                prompt += await generate(service, prompt, 70)
                await snapshots_of(service).save_all(60.0)
                files = snapshots_of(service).store
                await until(lambda files=files: any(one.n_tokens == 769 for one in files.entries))
                prompt += tokens_at(3, 20, golden.spec.vocabulary)
            tokens, finished = await generate_all(service, prompt, 70)
            found.append((tokens, finished.usage.cached_tokens))
            assert told_of(service)["failed"] == 0
            assert told_of(service)["restored"] == (i > 0)
    assert found == found[:1] * len(pools)
    assert found[0][1] == 769


SCORED = """
[pflash]
path = "{folder}/demo-scorer-q8_0.gguf"
device = "right:0"
[kvflash]
pool_tokens = 512
policy = "drafter"
[engine]
dtype = "float32"
max_context = 900
[draft]
kind = "off"
"""


async def test_a_small_model_chooses_the_pages_of_a_prompt(tmp_path: Path) -> None:
    """The demo with its scoring model: the pages that it finds relevant are resident for the last token and behind."""
    extra = SCORED.format(folder=DEMO_FOLDER)
    config = write_config(tmp_path, DEMO, {"left": 1, "right": 1}, ["0-4", "4-8"], extra)
    fact = "The secret number of the harbor is"
    text = f"{text_of(60, 1)}. {fact} 73935. {text_of(400, 2)} {fact} "
    prompt, said = [*TEXTS.encode(text)[:796], *TEXTS.encode(fact)[-4:]], list[list[float]]()
    async with running(config, tmp_path) as service:
        assert service.only.engine is not None
        score = make_page_scorer(service.only, TEXTS)
        assert score is not None

        async def scored(tokens: Sequence[int]) -> Sequence[float]:
            said.append([*await score(tokens)])
            return said[-1]

        service.only.engine.relevance.score = scored
        found = await generate(service, prompt, 30)
        assert service.only.placement is not None
        assert any("finds relevant" in reason for reason in service.only.placement.reasons)
    spec = open_spec(DEMO)
    texts = Texts(spec, load_stages(spec, (), How(host_pages=40, rank_pages=True)), Residency(8, "drafter"))
    for start, stop in pairwise((0, 192, 384, 576, 768, len(prompt) - 1, len(prompt))):
        if stop == len(prompt):
            texts.tables[ord("a")].rank(said[0])
            out = set(texts.tables[ord("a")].paged_out().entries)  # type: ignore[union-attr]
        rows = texts.run(a=prompt[start:stop])
    assert out - set(texts.tables[ord("a")].paged_out().entries)  # type: ignore[union-attr]
    wanted = []
    for _ in range(30):
        wanted.append(int(rows[-1].argmax()))
        rows = texts.run(a=wanted[-1:])
    assert (found, len(said)) == (wanted, 1)
