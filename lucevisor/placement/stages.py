"""Pipeline stages from shards, and the arenas and the Load message of each group.

One arena lies between two stages, which are of different groups, and between captures and a draft stage elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lucevisor.config import DeviceRef
from lucevisor.model.values import Backend, Dtype, FileIdentity, LayerRange, dtype_bytes
from lucevisor.placement.result import PlacedDrafter, Placement, Shard, Stage
from lucevisor.protocol.loading import (
    ArenaPlan,
    CaptureSource,
    DraftPlan,
    Load,
    ScorePlan,
    ShardPlan,
    StagePlan,
    VisionPlan,
    arena_regions,
    token_region_bytes,
)


def shards_of(
    devices: Sequence[DeviceRef], backends: Sequence[Backend], ranges: Sequence[LayerRange]
) -> tuple[Shard, ...]:
    last = len(devices) - 1
    rows = enumerate(zip(devices, backends, ranges, strict=True))
    return tuple(Shard(device, backend, layers, i == 0, i == last) for i, (device, backend, layers) in rows)


def stages_of(shards: Sequence[Shard]) -> tuple[Stage, ...]:
    merged: list[list[Shard]] = []
    for shard in shards:
        if merged and merged[-1][-1].device.group == shard.device.group:
            merged[-1].append(shard)
        else:
            merged.append([shard])
    return tuple(Stage(i, shards_[0].device.group, tuple(shards_)) for i, shards_ in enumerate(merged))


def arenas_of(
    stages: Sequence[Stage],
    max_step_tokens: int,
    boundary_width: int,
    hidden_size: int,
    dtype: Dtype,
    draft: PlacedDrafter | None = None,
    *,
    max_sequences: int,
    max_drafts: int = 0,
) -> tuple[ArenaPlan, ...]:
    """Return one arena per boundary, then one from each capturing stage to a draft stage in another group, then one for
    tokens if each of several stages has a group of its own.  Each has a region per step in flight."""
    n_regions = arena_regions(len(stages) + (draft is not None))
    boundary_bytes = max_step_tokens * dtype_bytes(dtype, boundary_width)
    arenas = [ArenaPlan(boundary, boundary_bytes, n_regions) for boundary in range(len(stages) - 1)]
    for stage in stages:
        captures = captures_of(stage, draft)
        if draft is not None and captures and stage.group != draft.group:
            capture_bytes = max_step_tokens * dtype_bytes(dtype, len(captures) * hidden_size)
            arenas.append(ArenaPlan(stage.index, capture_bytes, n_regions, capture=True))
    if 1 < len(stages) == len({stage.group for stage in stages}):
        region_bytes = token_region_bytes(max_sequences, max_drafts)
        arenas.append(ArenaPlan(len(stages) - 1, region_bytes, n_regions, tokens=True))
    return tuple(arenas)


def captures_of(stage: Stage, draft: PlacedDrafter | None) -> list[int]:
    return [] if draft is None else [layer for layer in draft.captures if layer in stage.layers]


@dataclass(frozen=True, slots=True)
class LoadFiles:
    """Absolute paths of all parts of a model, and the expected state of each; () = not compared."""

    paths: Sequence[str]
    identities: Sequence[FileIdentity] = ()


def load_message(
    placement: Placement,
    group: str,
    files: LoadFiles,
    threads: int = 0,
    draft_files: LoadFiles | None = None,
    score_files: Sequence[str] = (),
    vision_files: Sequence[str] = (),
    spin_s: float = 0.0,
) -> Load:
    """Return the Load message for the daemon of ``group``.

    ``draft_files``: for the group of the draft stage; None: without the drafter.  ``Load.arenas`` are those at either
    end of the group's stages, in the order of ``placement.arenas``, which is that of their descriptors.
    """
    stages, draft = placement.stages_of(group), None
    if placement.draft is not None and placement.draft.group == group:
        if draft_files is None:
            placement = replace(placement, draft=None)
        draft = placement.draft
    scorer = placement.scorer if placement.scorer is not None and placement.scorer.group == group else None
    encoder = placement.encoder if placement.encoder is not None and placement.encoder.group == group else None
    arenas = [arena for arena in placement.arenas if group in arena_ends(placement, arena)]
    place = {arena.key: i for i, arena in enumerate(arenas)}
    return Load(
        files=list(files.paths),
        dtype=placement.dtype,
        kv_dtype=placement.kv_dtype,
        stages=[_stage_plan(placement, stage, arenas) for stage in stages],
        arenas=arenas,
        pools=placement.pools,
        max_sequences=placement.max_sequences,
        max_step_tokens=placement.max_step_tokens,
        threads=threads,
        options=dict(placement.options),
        max_drafts=placement.drafting.max_drafts,
        max_lookup=placement.drafting.max_lookup,
        identities=list(files.identities),
        draft=None if draft is None or draft_files is None else _draft_plan(placement, draft, place, draft_files),
        attend_host=placement.pools.host_pages > 0 and placement.residency_policy == "exact",
        rank_pages=placement.pools.host_pages > 0 and placement.residency_policy == "qk",
        deterministic=placement.deterministic,
        spin_s=spin_s,
        max_attended=placement.max_attended,
        score=None
        if scorer is None
        else ScorePlan(list(score_files), scorer.device.index, scorer.window_tokens, scorer.step_tokens),
        vision=None
        if encoder is None
        else VisionPlan(list(vision_files), encoder.device.index, encoder.max_tokens, placement.dtype),
    )


def _stage_plan(placement: Placement, stage: Stage, arenas: Sequence[ArenaPlan]) -> StagePlan:
    place = {(arena.capture, arena.tokens, arena.boundary): i for i, arena in enumerate(arenas)}
    first, last = stage.shards[0].first, stage.shards[-1].last
    return StagePlan(
        stage=stage.index,
        shards=[ShardPlan(shard.device.index, shard.layers) for shard in stage.shards],
        source=place.get((False, False, stage.index - 1)),
        target=place.get((False, False, stage.index)),
        embedding=first,
        output=last,
        captures=captures_of(stage, placement.draft),
        capture_target=place.get((True, False, stage.index)),
        tokens=place.get((False, True, len(placement.stages) - 1)) if first or last else None,
    )


def arena_ends(placement: Placement, arena: ArenaPlan) -> tuple[str, str]:
    """Return the groups that write and read an arena; empty without a drafter."""
    writer = placement.stages[arena.boundary].group
    if arena.tokens:
        return writer, placement.stages[0].group
    if arena.capture:
        return ("", "") if placement.draft is None else (writer, placement.draft.group)
    return writer, placement.stages[arena.boundary + 1].group


def _draft_plan(
    placement: Placement, draft: PlacedDrafter, place: Mapping[tuple[bool, int], int], files: LoadFiles
) -> DraftPlan:
    captures = [(stage.index, captures_of(stage, draft)) for stage in placement.stages]
    return DraftPlan(
        stage=draft.index,
        kind=draft.kind,
        files=list(files.paths),
        device=draft.device.index,
        layers=draft.layers,
        sources=[CaptureSource(stage, layers, place.get((True, stage))) for stage, layers in captures if layers],
        identities=list(files.identities),
    )
