"""What is reserved for prefix slots: states and window pages as cache.memory allows, and never at the price of a
start."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import pytest
import torch

from daemons.kv.pools import Pools
from lucevisor.config import CacheConfig, Config
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype, KvGroup, LayerRange
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.planner import plan
from lucevisor.placement.report import plan_json, plan_text
from lucevisor.placement.result import Placement
from tests.model.qwen35_file import QWEN36_27B
from tests.placement.made import GIB, MIB, bare_spec, configure, cpu, gpu, placed

MATRICES_27B = 150_994_944
STATE_27B = MATRICES_27B + 3 * QWEN36_27B.channels * 4 * 48
ON_DEVICE = STATE_27B + (16 * 128 + 48 * 128 + 48) * 4 * 48
"""With what one token does to it."""


def cached(
    config: Config, n_slots: int = 32, memory: int = GIB, states: Literal["device", "host"] = "device"
) -> Config:
    return dataclasses.replace(config, cache=CacheConfig(prefix_slots=n_slots, memory=memory, states=states))


def on_gpu(spec: ModelSpec, config: Config, gib: float) -> Placement:
    return placed(spec, config, {"cuda": [gpu(0, gib)]})


def test_states_are_as_many_as_the_memory_holds_and_no_more_than_slots(big, tmp_path):
    config = configure(tmp_path, ["cuda:0"], max_sequences=4, pages=1000, max_context=64000)
    assert GIB // STATE_27B == 6
    p = on_gpu(big, cached(config), 40)
    assert p.pools.states == 4 + 1 + 6
    assert any(
        "recurrent states 11: of 4 sequences and prefix slots, in memory that they share with pages" in r
        for r in p.reasons
    )
    assert on_gpu(big, cached(config, n_slots=2), 40).pools.states == 4 + 1 + 2
    assert on_gpu(big, cached(config, n_slots=0), 40).pools.states == 4 + 1
    assert on_gpu(big, cached(config, memory=100 * MIB), 40).pools.states == 4 + 1


def test_pages_make_room_only_for_what_shares_no_memory(big, tmp_path):
    config = configure(tmp_path, ["cuda:0"], max_sequences=4, max_context=32768, prefill_chunk=512)
    without, with_slots = (on_gpu(big, c, 24) for c in (config, cached(config)))
    assert with_slots.pools.states == without.pools.states + 6
    fewer = without.pools.full_pages - with_slots.pools.full_pages
    assert (with_slots.pools.state_pages * 64 * 65_536, fewer * 64 * 65_536) == (
        MATRICES_27B,
        pytest.approx(6 * (ON_DEVICE - MATRICES_27B), abs=2 * 64 * 65_536),
    )
    assert sum(d.needed_bytes for d in with_slots.devices) <= 24 * GIB


def test_slots_give_way_before_the_model_does_not_fit(big, tmp_path):
    """Where a shard has no recurrent layers, so that pages and states share no memory."""
    sizes = {"max_sequences": 1, "pages": 300, "max_context": 19200, "prefill_chunk": 512}
    config = configure(tmp_path, ["cuda:0", "cuda:1"], ["0-62", "62-64"], **sizes)
    first, _ = placed(big, config, {"cuda": [gpu(0, 40), gpu(1, 40)]}).devices
    state_bytes = ON_DEVICE * 46 // 48
    least = first.needed_bytes + 3.5 * state_bytes
    p = next(
        found
        for gib in (least / GIB + extra / 100 for extra in range(200))
        if isinstance(found := plan(big, cached(config), {"cuda": [gpu(0, gib), gpu(1, 40)]}), Placement)
        and found.pools.states >= 1 + 1 + 3
    )
    assert (p.pools.states, p.pools.state_pages) == (1 + 1 + 3, 0)
    assert any("memory is reserved for 3; 6, as cache.memory allows, do not fit" in reason for reason in p.reasons)


def test_pages_are_at_most_doubled_for_slots(tmp_path, monkeypatch):
    for function in ("non_layer_layouts", "layer_layouts"):
        monkeypatch.setattr(f"lucevisor.placement.cost.{function}", lambda *_, **__: [])
    spec = bare_spec(12)
    config = configure(tmp_path, ["left:0"], max_sequences=3, max_context=640, dtype="float32")
    page = spec.unit_bytes(KvGroup.FULL, LayerRange(0, 12), Dtype.FLOAT32)
    for memory, n_pages in ((0, 30), (5 * page, 35), (1000 * page, 60)):
        p = placed(spec, cached(config, memory=memory), {"left": [cpu()]})
        assert p.pools.full_pages == n_pages
        assert (p.pools.window_pages, p.pools.states) == (0, 0)
    fixed = configure(tmp_path, ["left:0"], max_sequences=3, max_context=640, dtype="float32", pages=100)
    for memory, notices in ((69 * page, 1), (70 * page, 0)):
        p = placed(spec, cached(fixed, memory=memory), {"left": [cpu()]})
        assert len(p.notices) == notices


def test_in_host_memory_the_devices_hold_the_states_of_sequences_only(big, tmp_path):
    config = configure(tmp_path, ["cuda:0"], max_sequences=4, pages=1000, max_context=64000)
    on_device, in_host, without = (
        on_gpu(big, c, 40) for c in (cached(config), cached(config, states="host"), cached(config, n_slots=0))
    )
    assert (in_host.pools.states, in_host.pools.host_states) == (on_device.pools.states, 6 + 1)
    assert in_host.pools.device_states == 4
    [here], [there], [none] = on_device.devices, in_host.devices, without.devices
    assert there.host_state_bytes == 7 * STATE_27B
    beside = ON_DEVICE - MATRICES_27B  # what shares no memory with pages
    assert here.state_bytes - there.state_bytes == here.needed_bytes - there.needed_bytes == 7 * beside
    assert none.state_bytes - there.state_bytes == beside  # not even a spare one
    assert in_host.host_state_bytes == 7 * STATE_27B
    what = "of 4 sequences, in memory that they share with pages; in host memory 7 for prefix slots"
    assert f"recurrent states 11: {what}" in in_host.reasons
    shown = plan_text(in_host)
    assert "11 recurrent states (each in the memory of 36 pages; 7 of them in host memory); steps" in shown
    assert f"{format_bytes(7 * STATE_27B)}  cache.states, kvflash.host" in shown
    told = json.loads(json.dumps(plan_json(in_host)))
    pools = {"owner": "pools", "limit_bytes": 7 * STATE_27B, "key": "cache.states, kvflash.host"}
    assert (told["pages"]["host_states"], told["host_memory"][3]) == (7, pools)
    assert told["devices"][0]["host_state_bytes"] == 7 * STATE_27B


@pytest.mark.parametrize("devices", [["left:0"], ["cuda:0", "left:0"]])
def test_host_memory_that_is_known_is_not_promised_twice(devices, big, tmp_path):
    """Checkpoints of every shard count where the host's free memory is known, and give way before a start does."""
    config = configure(tmp_path, devices, max_sequences=1, pages=300, max_context=19200, prefill_chunk=512)
    found = {"cuda": [gpu(0, 80)], "left": [cpu(200)]}
    wanted = cached(config, memory=8 * GIB, states="host")
    roomy = placed(big, wanted, found)
    on_host = sum(d.needed_bytes for d in roomy.devices if d.memory == "host")
    assert roomy.pools.host_states == 32 + 1
    need = on_host + sum(d.host_state_bytes for d in roomy.devices) + roomy.arena_bytes
    split = [f"{d.layers.start}-{d.layers.stop}" for d in roomy.devices]
    fixed = configure(tmp_path, devices, split, max_sequences=1, pages=300, max_context=19200, prefill_chunk=512)
    wanted = cached(fixed, memory=8 * GIB, states="host")
    tight = (need - 2.5 * STATE_27B) / 0.9 / GIB  # a tenth is left alone
    less = placed(big, wanted, {**found, "left": [cpu(tight)]})
    assert (less.pools.device_states, less.pools.host_states) == (1, 32 + 1 - 3)
    what = "memory is reserved for 29; 32, as cache.memory allows, do not fit"
    assert any(what in reason for reason in less.reasons)
    least = (on_host + roomy.arena_bytes + 9 * MIB) / 0.9 / GIB
    none = placed(big, wanted, {**found, "left": [cpu(least)]})
    assert (none.pools.states, none.pools.host_states) == (1, 0)
    assert "recurrent states 1: one for each of 1 sequences, and 0 spare" in none.reasons


@pytest.mark.parametrize("split", ["auto", ["0-4", "4-8"], ["0-6", "6-8"]])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "q8_0"])
def test_the_plan_counts_the_bytes_of_one_memory(demo, tmp_path, split, kv_dtype):
    """As the daemon allocates them; without an attention layer for every three recurrent ones there are two."""
    config = cached(configure(tmp_path, ["cuda:0", "cuda:1"], split, kv_dtype=kv_dtype, max_sequences=2, pages=40), 3)
    p = placed(demo, config, {"cuda": [gpu(0, 1), gpu(1, 1)]})
    assert bool(p.pools.state_pages) == (split != ["0-6", "6-8"])
    for device in p.devices:
        pools = Pools(demo, device.layers, torch.device("cpu"), Dtype(kv_dtype), p.pools)
        assert pools.nbytes == device.state_bytes


def test_one_memory_holds_three_times_the_pages_of_a_27b(big, tmp_path):
    """The automatic sizes reserved two thirds of an H200 for states."""
    p = on_gpu(big, automatic(configure(tmp_path, ["cuda:0"])), 139)
    assert p.pools.full_pages > 28_000
    assert p.pools.device_states * p.pools.state_pages <= p.pools.full_pages
    assert p.max_context == big.context_tokens


def automatic(config: Config) -> Config:
    engine = dataclasses.replace(config.engine, max_sequences="auto")
    return dataclasses.replace(config, engine=engine, cache=CacheConfig())


@pytest.mark.parametrize("gib", [20, 34, 60, 139])
def test_automatic_capacity_takes_what_a_gpu_has_and_no_context(big, tmp_path, gib):
    config = configure(tmp_path, ["cuda:0"])
    few = on_gpu(big, cached(config), gib)
    p = on_gpu(big, automatic(config), gib)
    assert p.prefill_chunk == few.prefill_chunk
    assert p.max_context >= 0.95 * few.max_context
    assert p.max_sequences in (8, 16, 32, 64, 128)
    assert p.cache_bytes >= few.cache_bytes
    if gib == 139:
        assert (p.max_sequences, p.prefix_slots) == (128, 512)
        assert p.cache_bytes > 100 * GIB
        assert p.pools.states > 128 + p.cache_bytes // (2 * STATE_27B)
    state_bytes = sum(device.state_bytes for device in p.devices)
    assert p.cache_bytes <= max(GIB, state_bytes)


def test_automatic_capacity_of_a_cpu_or_unknown_memory_is_small(big, demo, tmp_path):
    for spec, devices, inventory in ((demo, ["left:0"], {"left": [cpu(16)]}), (big, ["cuda:0"], None)):
        p = placed(spec, automatic(configure(tmp_path, devices)), inventory)
        assert (p.max_sequences, p.prefix_slots, p.cache_bytes) == (8, 32, GIB)


def test_automatic_slots_are_many_on_a_gpu_whatever_else_is_configured(big, tmp_path):
    config = dataclasses.replace(configure(tmp_path, ["cuda:0"]), cache=CacheConfig(memory=48 * GIB))
    p = on_gpu(big, config, 139)
    assert (p.max_sequences, p.prefix_slots, p.cache_bytes) == (8, 512, 48 * GIB)
    assert p.pools.states > 250


def test_configured_capacity_stays(big, tmp_path):
    p = on_gpu(big, cached(configure(tmp_path, ["cuda:0"], max_sequences=5), 7, 3 * GIB), 139)
    assert (p.max_sequences, p.prefix_slots, p.cache_bytes) == (5, 7, 3 * GIB)
