"""Stages, arenas and the Load of each group: the ends of every boundary meet, whatever the order of the devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from lucevisor.config import DeviceRef
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.placement.result import PlacedDrafter, Placement
from lucevisor.placement.stages import LoadFiles, arenas_of, load_message, shards_of, stages_of
from lucevisor.protocol.loading import ArenaPlan, CaptureSource, DraftKind, Load, PoolSizes


def placement(devices: list[str], draft: str = "", captures: Sequence[int] = ()) -> Placement:
    """One layer a device, and a drafter of two layers on ``draft``."""
    refs = [DeviceRef(name.split(":")[0], int(name.split(":")[1])) for name in devices]
    shards = shards_of(refs, [Backend.CPU] * len(refs), [LayerRange(i, i + 1) for i in range(len(refs))])
    stages = stages_of(shards)
    drafter = None
    if draft:
        device = DeviceRef(draft.split(":")[0], int(draft.split(":")[1]))
        drafter = PlacedDrafter(device, Backend.CPU, len(stages), DraftKind.DFLASH, LayerRange(0, 2), tuple(captures))
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
        kv_groups=frozenset(),
        window_tokens=None,
        devices=(),
        stages=stages,
        arenas=arenas_of(stages, 64, 10, 8, Dtype.BFLOAT16, drafter, max_sequences=4),
        draft=drafter,
        options={"a": "b"},
    )


def test_sampled_tokens_have_an_arena_between_the_last_daemon_and_the_first():
    p = placement(["a:0", "b:0", "c:0"])
    assert p.arenas[-1] == ArenaPlan(2, 8 * (2 + 2 * 4), 6, tokens=True)
    first, middle, last = (load_message(p, group, LoadFiles(["/m.gguf"])) for group in "abc")
    assert [load.arenas[-1].tokens for load in (first, middle, last)] == [True, False, True]
    assert [load.stages[0].tokens for load in (first, middle, last)] == [1, None, 1]
    assert last.stages[0].target is None


# ---- the draft stage

FILES = LoadFiles(["/m.gguf"])
DRAFT_FILES = LoadFiles(["/d.gguf"])


def test_a_drafter_alone_in_a_group_gets_all_captures_and_no_stage():
    p = placement(["left:0", "right:0", "right:1"], "third:3", [2, 1])
    assert p.groups == ("left", "right", "third")
    assert [(a.boundary, a.capture, a.region_bytes) for a in p.arenas] == [
        (0, False, 64 * 10 * 2),
        (1, True, 64 * 2 * 8 * 2),
        (1, False, 8 * (2 + 2 * 4)),
    ]
    right, third = load_message(p, "right", FILES), load_message(p, "third", FILES, draft_files=DRAFT_FILES)
    assert (right.stages[0].captures, right.stages[0].capture_target) == ([2, 1], 1)
    assert (third.stages, third.files, third.arenas) == ([], ["/m.gguf"], [p.arenas[1]])
    assert third.draft is not None
    assert third.draft.sources == [CaptureSource(1, [2, 1], 0)]
    assert third.draft.device == 3
    assert load_message(p, "left", FILES).stages[0].captures == []


@given(
    groups=st.lists(st.sampled_from("abcd"), min_size=1, max_size=8),
    drafter=st.sampled_from("abcde"),
    chosen=st.sets(st.integers(0, 7)),
)
def test_every_capture_reaches_the_draft_stage_once(groups, drafter, chosen):
    counts: dict[str, int] = {}
    devices = []
    for group in groups:
        devices.append(f"{group}:{counts.get(group, 0)}")
        counts[group] = counts.get(group, 0) + 1
    captures = sorted(layer for layer in chosen if layer < len(groups))
    p = placement(devices, f"{drafter}:0", captures)
    loads = {group: load_message(p, group, FILES, draft_files=DRAFT_FILES) for group in p.groups}
    (plan,) = [load.draft for load in loads.values() if load.draft is not None]
    assert [layer for source in plan.sources for layer in source.layers] == captures
    for source in plan.sources:
        group = p.stages[source.stage].group
        (stage,) = [stage for stage in loads[group].stages if stage.stage == source.stage]
        assert stage.captures == source.layers
        if group == drafter:
            assert (source.arena, stage.capture_target) == (None, None)
        else:
            read, written = loads[drafter].arenas[source.arena], loads[group].arenas[stage.capture_target]
            assert read == written
            assert read.capture
            assert read.boundary == source.stage
            assert read.region_bytes == 64 * len(source.layers) * 8 * 2
    used = [arena for arena in p.arenas if arena.capture]
    assert len(used) == sum(p.stages[source.stage].group != drafter for source in plan.sources)


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
    loads: list[Load] = [load_message(p, group, LoadFiles([])) for group in p.groups]
    ends = {}
    for load in loads:
        assert len({a.boundary for a in load.arenas}) == len(load.arenas)
        ends_of_stages = {i for s in load.stages for i in (s.source, s.target, s.tokens)}
        assert ends_of_stages - {None} == set(range(len(load.arenas)))
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
