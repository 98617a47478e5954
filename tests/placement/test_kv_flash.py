"""The planner with KV Flash: pages for resident tokens only, whatever the context."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from lucevisor.config import Config, KvFlashConfig
from lucevisor.model.pages import HEAD_PAGES, TAIL_PAGES, ResidencyPolicy, max_resident_chunk, pages_of, pool_pages
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import LayerRange, Space
from lucevisor.placement.report import plan_json, plan_text
from tests.placement.made import configure, cpu, gpu, placed, wrong


def flash(config: Config, pool_tokens: int | Literal["auto"]) -> Config:
    return dataclasses.replace(config, kvflash=KvFlashConfig(pool_tokens=pool_tokens))


def test_a_context_that_did_not_fit_does(big: ModelSpec, tmp_path) -> None:
    inventory = {"cuda": [gpu(0, 24)]}
    config = configure(tmp_path, ["cuda:0"], max_sequences=2)
    without, bounded = placed(big, config, inventory), placed(big, flash(config, 8192), inventory)
    assert without.max_context < bounded.max_context == big.context_tokens
    assert bounded.pools.full_pages == 2 * 128
    assert bounded.pool_pages == 128
    assert "at most 128 pages each on the devices" in plan_text(bounded)
    assert plan_json(bounded)["pages"]["resident"] == 128
    assert any("kvflash: 128 pages of a sequence stay" in reason for reason in bounded.reasons)


@pytest.mark.parametrize(("wanted", "pages"), [(1, 8), (512, 8), (513, 9), (8192, 128)])
def test_a_pool_is_whole_pages_and_leaves_room(demo: ModelSpec, tmp_path, wanted: int, pages: int) -> None:
    p = placed(demo, flash(configure(tmp_path, ["left:0"], prefill_chunk=2048), wanted), {"left": [cpu()]})
    assert p.pool_pages == pool_pages(wanted) == pages
    assert any(f"rounded to {64 * pages}" in notice for notice in p.notices) == (wanted != 64 * pages)
    assert p.prefill_chunk == min(2048, max_resident_chunk(pages))
    assert any("engine.prefill_chunk = 2048 is cut" in notice for notice in p.notices) == (p.prefill_chunk < 2048)
    assert pages_of(p.prefill_chunk) + HEAD_PAGES + TAIL_PAGES <= pages


def test_pages_for_less_than_one_pool_are_refused(demo: ModelSpec, tmp_path) -> None:
    config = configure(tmp_path, ["left:0"], pages=10, max_context=4096)
    error = wrong(demo, flash(config, 1024), {"left": [cpu()]})
    assert error.key == "engine.pages"
    assert "less than kvflash.pool_tokens of one sequence" in str(error)
    assert placed(demo, flash(config, 512), {"left": [cpu()]}).max_context == 4096


def test_a_pool_that_holds_the_context_says_so(demo: ModelSpec, tmp_path) -> None:
    config = configure(tmp_path, ["left:0"], max_context=1024)
    p = placed(demo, flash(config, 4096), {"left": [cpu()]})
    assert any("hold the whole context" in reason for reason in p.reasons)


def test_an_automatic_pool_gives_every_sequence_one(big: ModelSpec, tmp_path) -> None:
    pools = []
    for n, gib in ((1, 24), (8, 24), (32, 24), (8, 40)):
        config = flash(configure(tmp_path, ["cuda:0"], max_sequences=n), "auto")
        p = placed(big, config, {"cuda": [gpu(0, gib)]})
        assert p.pool_pages is not None
        assert p.pools.full_pages >= n * p.pool_pages
        assert p.max_context == big.context_tokens
        assert p.prefill_chunk <= max_resident_chunk(p.pool_pages)
        assert any(f"{n} sequences, up to 256: {p.pool_pages} pages" in reason for reason in p.reasons)
        pools.append(p.pool_pages)
    assert pools[0] == pools[3] == 256
    assert 256 > pools[2] >= 8


@pytest.mark.parametrize("policy", ["exact", "qk"])
def test_host_memory_for_what_is_paged_out_is_planned(big: ModelSpec, tmp_path, policy: ResidencyPolicy) -> None:
    config = configure(tmp_path, ["cuda:0", "cuda:1"], max_sequences=2, max_context=65536)
    flash_config = KvFlashConfig(pool_tokens=8192, policy=policy, host=64 << 30)
    gpus = {"cuda": [gpu(0, 24), gpu(1, 24)]}
    lru = placed(big, flash(config, 8192), gpus)
    p = placed(big, dataclasses.replace(config, kvflash=flash_config), gpus)
    assert p.pools.host_pages == 2 * (1024 - (128 if policy == "exact" else 0))
    every = LayerRange(0, big.n_layers)
    paged = sum(p.host_state_bytes.values()) - sum(lru.host_state_bytes.values())
    assert paged == p.pools.host_pages * big.unit_bytes(Space.FULL, every, p.kv_dtype)
    assert p.residency_policy == policy
    assert all(a.workspace_bytes > b.workspace_bytes for a, b in zip(p.devices, lru.devices, strict=True))
    few = placed(big, dataclasses.replace(config, kvflash=dataclasses.replace(flash_config, host=1 << 30)), gpus)
    assert few.pools.host_pages == (1 << 30) // big.unit_bytes(Space.FULL, every, p.kv_dtype)


def test_an_automatic_context_is_no_longer_than_pool_and_host_memory_hold(big: ModelSpec, tmp_path) -> None:
    config = configure(tmp_path, ["cuda:0"], max_sequences=1)
    kvflash = KvFlashConfig(pool_tokens=8192, policy="exact", host=1 << 30)
    p = placed(big, dataclasses.replace(config, kvflash=kvflash), {"cuda": [gpu(0, 40)]})
    assert pages_of(p.max_context) == 128 + p.pools.host_pages
    assert p.max_context < big.context_tokens
