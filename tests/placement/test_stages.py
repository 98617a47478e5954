"""Stages, arenas and the Load of each group: the ends of every boundary meet, whatever the order of the devices."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.config import DeviceRef
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.placement.result import Placement
from lucevisor.placement.stages import arenas_of, load_message, shards_of, stages_of
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan


def placement(devices: list[str]) -> Placement:
    """One layer a device."""
    refs = [DeviceRef(name.split(":")[0], int(name.split(":")[1])) for name in devices]
    shards = shards_of(refs, [Backend.CPU] * len(refs), [LayerRange(i, i + 1) for i in range(len(refs))])
    stages = stages_of(shards)
    return Placement(
        model="m",
        architecture="any",
        quant="F32",
        n_layers=len(refs),
        dtype=Dtype.BFLOAT16,
        kv_dtype=Dtype.FLOAT16,
        max_context=128,
        max_sequences=4,
        prefill_chunk=60,
        max_step_tokens=64,
        pools=PoolSizes(8, 0, 5),
        spaces=frozenset(),
        window_tokens=None,
        devices=(),
        stages=stages,
        arenas=arenas_of(len(stages), 64, 10, Dtype.BFLOAT16),
        options={"a": "b"},
    )


def test_a_group_that_comes_again_gets_another_stage():
    p = placement(["cuda:0", "hip:0", "cuda:1"])
    assert [(s.index, s.group, str(s.layers)) for s in p.stages] == [
        (0, "cuda", "[0,1)"),
        (1, "hip", "[1,2)"),
        (2, "cuda", "[2,3)"),
    ]
    cuda, hip = load_message(p, "cuda", ["/m.gguf"], 3), load_message(p, "hip", ["/m.gguf"])
    assert [(s.stage, s.source, s.target) for s in cuda.stages] == [(0, None, 0), (2, 1, None)]
    assert [a.boundary for a in cuda.arenas] == [0, 1]
    assert [(s.stage, s.source, s.target) for s in hip.stages] == [(1, 0, 1)]
    assert [(s.embedding, s.output) for s in (*cuda.stages, *hip.stages)] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert [s.shards for s in cuda.stages] == [[ShardPlan(0, LayerRange(0, 1))], [ShardPlan(1, LayerRange(2, 3))]]
    assert (cuda.threads, hip.threads) == (3, 0)


def test_consecutive_shards_of_a_group_are_one_stage():
    p = placement(["cuda:0", "hip:0", "hip:1"])
    assert [[str(shard.device) for shard in s.shards] for s in p.stages] == [["cuda:0"], ["hip:0", "hip:1"]]
    assert len(p.arenas) == 1
    assert p.groups == ("cuda", "hip")
    hip = load_message(p, "hip", ["/m.gguf"])
    assert hip.stages[0].shards == [ShardPlan(0, LayerRange(1, 2)), ShardPlan(1, LayerRange(2, 3))]


def test_one_device_needs_no_arena():
    load = load_message(placement(["left:0"]), "left", ["/m.gguf"])
    assert load.arenas == []
    assert (load.stages[0].source, load.stages[0].target) == (None, None)
    assert (load.stages[0].embedding, load.stages[0].output) == (True, True)


def test_the_size_of_an_arena():
    p = placement(["left:0", "right:0", "left:1"])
    assert [(a.boundary, a.region_bytes, a.n_regions) for a in p.arenas] == [(0, 64 * 10 * 2, 4), (1, 64 * 10 * 2, 4)]
    assert arenas_of(2, 64, 10, Dtype.FLOAT32)[0].region_bytes == 64 * 10 * 4
    assert p.arena_bytes == 2 * 4 * 1280


def test_everything_the_daemon_needs_is_in_its_load():
    load = load_message(placement(["left:0", "right:0"]), "right", ["/a.gguf", "/b.gguf"])
    assert load.files == ["/a.gguf", "/b.gguf"]
    assert (load.dtype, load.kv_dtype) == (Dtype.BFLOAT16, Dtype.FLOAT16)
    assert (load.max_sequences, load.max_step_tokens, load.pools) == (4, 64, PoolSizes(8, 0, 5))
    assert load.options == {"a": "b"}


def test_a_group_without_a_stage_has_no_load():
    with pytest.raises(KeyError, match="third"):
        load_message(placement(["left:0"]), "third", [])


@given(groups=st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_every_boundary_is_the_target_of_one_stage_and_the_source_of_the_next(groups):
    counts: dict[str, int] = {}
    devices = []
    for group in groups:
        devices.append(f"{group}:{counts.get(group, 0)}")
        counts[group] = counts.get(group, 0) + 1
    p = placement(devices)
    assert all(a.group != b.group for a, b in pairwise(p.stages))
    assert [str(shard.device) for stage in p.stages for shard in stage.shards] == devices
    loads: list[Load] = [load_message(p, group, []) for group in p.groups]
    ends = {}
    for load in loads:
        assert len({a.boundary for a in load.arenas}) == len(load.arenas)
        assert {i for s in load.stages for i in (s.source, s.target)} - {None} == set(range(len(load.arenas)))
        for stage in load.stages:
            ends[stage.stage] = SimpleNamespace(
                source=None if stage.source is None else load.arenas[stage.source].boundary,
                target=None if stage.target is None else load.arenas[stage.target].boundary,
            )
    n = len(p.stages)
    assert sorted(ends) == list(range(n))
    for i in range(n):
        assert ends[i].source == (None if i == 0 else i - 1)
        assert ends[i].target == (None if i == n - 1 else i)
