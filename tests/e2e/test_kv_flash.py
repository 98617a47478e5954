"""KV Flash from the configuration to the tokens, over two processes."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from lucevisor.kv.residency import Residency
from tests.e2e.service import GOLDEN, generate, running, write_config
from tests.families.golden import opened
from tests.families.paged_texts import Texts, tokens_at
from tests.families.pipeline import How, load_stages


async def test_tokens_are_those_of_the_resident_pages(tmp_path: Path) -> None:
    golden = opened("qwen35")
    prompt = tokens_at(0, 800, golden.spec.vocabulary)
    texts, wanted = Texts(golden.spec, golden.whole, Residency(8)), []
    for start in range(0, 800, 192):
        rows = texts.run(a=prompt[start : start + 192])
    for _ in range(40):
        wanted.append(int(rows[-1].argmax()))
        rows = texts.run(a=wanted[-1:])
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"left": 1, "right": 1}, ["0-4", "4-8"])
    overrides = ["engine.dtype=float32", "engine.max_context=900", "kvflash.pool_tokens=500"]
    async with running(config, tmp_path, overrides) as service:
        assert service.placement is not None
        assert (service.placement.pool_pages, service.placement.prefill_chunk) == (8, 192)
        assert await generate(service, prompt, len(wanted)) == wanted


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
        assert service.placement is not None
        assert service.placement.pools.host_pages == service.placement.max_sequences * (15 - 8)
        assert any("room for" in reason for reason in service.placement.reasons)
        assert await generate(service, prompt, len(wanted)) == wanted


async def test_ranked_pages_come_back_in_both_processes(tmp_path: Path) -> None:
    golden = opened("qwen35")
    prompt = tokens_at(0, 800, golden.spec.vocabulary)
    stages = load_stages(golden.spec, (), How(host_pages=40, rank_pages=True))
    texts, wanted, start = Texts(golden.spec, stages, Residency(8, "qk")), [], 0

    def run(tokens: list[int], *, ranks: bool) -> Tensor:
        nonlocal start
        rows, start = texts.run(a=tokens), start + len(tokens)
        table = texts.tables[ord("a")]
        if ranks and table.ranks_next:
            table.rank(texts.scores[ord("a")])
        return rows

    for stop in (192, 384, 576, 768, 799, 800):
        rows = run(prompt[start:stop], ranks=stop == 799)
    before = texts.tables[ord("a")].n_out
    for _ in range(70):
        wanted.append(int(rows[-1].argmax()))
        rows = run(wanted[-1:], ranks=start % 64 == 0)
    assert before > 0
    config = write_config(tmp_path, GOLDEN / "qwen35" / "model.gguf", {"left": 1, "right": 1}, ["0-4", "4-8"])
    overrides = ["engine.dtype=float32", "engine.max_context=900", "kvflash.pool_tokens=500", "kvflash.policy=qk"]
    async with running(config, tmp_path, overrides) as service:
        assert service.placement is not None
        assert service.placement.pools.host_pages == service.placement.max_sequences * 15
        assert any("attend to most" in reason for reason in service.placement.reasons)
        assert await generate(service, prompt, len(wanted)) == wanted
