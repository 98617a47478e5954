"""What is set aside for prefix slots: states and window pages as cache.memory allows, and never at the price of a
start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lucevisor.config import CacheConfig, Config
from lucevisor.placement.planner import plan
from lucevisor.placement.result import Placement
from lucevisor.wire.families import open_spec
from lucevisor.wire.model_spec import ModelSpec
from lucevisor.wire.values import Dtype, LayerRange, Space
from tests.placement.made import DEMO, GIB, MIB, bare_spec, configure, cpu, gpu
from tests.wire.qwen35_file import QWEN36_27B, write

STATE_27B = 150_994_944 + 3 * QWEN36_27B.channels * 4 * 48


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> ModelSpec:
    """The 27B shape in Q4_K_M."""
    return open_spec(write(tmp_path_factory.mktemp("gguf") / "27b.gguf", QWEN36_27B))


def cached(config: Config, n_slots: int = 32, memory: int = GIB) -> Config:
    return dataclasses.replace(config, cache=CacheConfig(prefix_slots=n_slots, memory=memory))


def placed(spec: ModelSpec, config: Config, gib: float) -> Placement:
    result = plan(spec, config, {"cuda": [gpu(0, gib)]})
    assert isinstance(result, Placement), result.message
    return result


def test_states_are_as_many_as_the_memory_holds_and_no_more_than_slots(big, tmp_path):
    config = configure(tmp_path, ["cuda:0"], max_sequences=4, pages=1000, max_context=64000)
    assert GIB // STATE_27B == 6
    p = placed(big, cached(config), 40)
    assert p.pools.states == 4 + 1 + 6
    assert any(
        "recurrent states 11: one for each of 4 sequences, 6 for prefix slots, and 1 spare" in r for r in p.reasons
    )
    assert placed(big, cached(config, n_slots=2), 40).pools.states == 4 + 1 + 2
    assert placed(big, cached(config, n_slots=0), 40).pools.states == 4 + 1
    assert placed(big, cached(config, memory=100 * MIB), 40).pools.states == 4 + 1


def test_automatic_pages_leave_room_for_them(big, tmp_path):
    config = configure(tmp_path, ["cuda:0"], max_sequences=4, max_context=32768)
    without, with_slots = (placed(big, c, 24) for c in (config, cached(config)))
    assert with_slots.pools.states == without.pools.states + 6
    fewer = without.pools.full_pages - with_slots.pools.full_pages
    assert fewer * 64 * 65_536 == pytest.approx(6 * STATE_27B, rel=0.02)
    assert sum(d.needed_bytes for d in with_slots.devices) <= 24 * GIB


def test_they_give_way_before_the_model_does_not_fit(big, tmp_path):
    config = configure(tmp_path, ["cuda:0"], max_sequences=1, pages=300, max_context=19200)
    [device] = placed(big, config, 40).devices
    least = device.needed_bytes + 3.5 * STATE_27B
    p = next(
        found
        for gib in (least / GIB + extra / 100 for extra in range(200))
        if isinstance(found := plan(big, cached(config), {"cuda": [gpu(0, gib)]}), Placement)
        and found.pools.states >= 1 + 1 + 3
    )
    assert p.pools.states == 1 + 1 + 3
    assert any("memory is set aside for 3; 6, as cache.memory allows, do not fit" in reason for reason in p.reasons)


def test_sliding_models_get_window_pages_for_slots(tmp_path, monkeypatch):
    for function in ("end_residents", "layer_residents"):
        monkeypatch.setattr(f"lucevisor.placement.cost.{function}", lambda *_, **__: [])
    spec = bare_spec(12, window=100)
    config = configure(tmp_path, ["left:0"], max_sequences=3, prefill_chunk=128, dtype="float32")
    page = spec.unit_bytes(Space.WINDOW, LayerRange(0, 12), Dtype.FLOAT32)
    p = plan(spec, cached(config, memory=10 * 3 * page), {"left": [cpu()]})
    assert isinstance(p, Placement)
    assert p.pools.window_pages == 3 * (5 + 1) + 10 * 3  # 99 positions begin inside a page: they touch 3


def test_pages_are_at_most_doubled_for_slots(tmp_path, monkeypatch):
    for function in ("end_residents", "layer_residents"):
        monkeypatch.setattr(f"lucevisor.placement.cost.{function}", lambda *_, **__: [])
    spec = bare_spec(12)
    config = configure(tmp_path, ["left:0"], max_sequences=3, max_context=640, dtype="float32")
    page = spec.unit_bytes(Space.FULL, LayerRange(0, 12), Dtype.FLOAT32)
    for memory, n_pages in ((0, 30), (5 * page, 35), (1000 * page, 60)):
        p = plan(spec, cached(config, memory=memory), {"left": [cpu()]})
        assert isinstance(p, Placement)
        assert p.pools.full_pages == n_pages
        assert (p.pools.window_pages, p.pools.states) == (0, 0)
    fixed = configure(tmp_path, ["left:0"], max_sequences=3, max_context=640, dtype="float32", pages=100)
    for memory, notices in ((69 * page, 1), (70 * page, 0)):
        p = plan(spec, cached(fixed, memory=memory), {"left": [cpu()]})
        assert isinstance(p, Placement)
        assert len(p.notices) == notices


def test_the_demo_has_a_state_for_every_slot(tmp_path: Path):
    p = plan(open_spec(DEMO), cached(configure(tmp_path, ["left:0"], max_sequences=2)), {"left": [cpu()]})
    assert isinstance(p, Placement)
    assert p.pools.states == 2 + 1 + 32
