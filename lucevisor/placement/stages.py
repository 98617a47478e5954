"""Groups shards into stages, and makes the arenas and the Load message of each group.  Pure.

Invariant: neighbouring stages belong to different groups (consecutive shards of one group form one stage), and exactly
one arena lies between two stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from lucevisor.config import DeviceRef
from lucevisor.model.values import Backend, Dtype, FileIdentity, LayerRange, dtype_bytes
from lucevisor.placement.result import Placement, Shard, Stage
from lucevisor.protocol.loading import ArenaPlan, Load, ShardPlan, StagePlan, arena_regions


def shards_of(
    devices: Sequence[DeviceRef], backends: Sequence[Backend], ranges: Sequence[LayerRange]
) -> tuple[Shard, ...]:
    """Return one shard per device, in layer order."""
    last = len(devices) - 1
    rows = enumerate(zip(devices, backends, ranges, strict=True))
    return tuple(Shard(device, backend, layers, i == 0, i == last) for i, (device, backend, layers) in rows)


def stages_of(shards: Sequence[Shard]) -> tuple[Stage, ...]:
    """Merge consecutive shards of one group into stages; a group that appears again later gets another stage."""
    merged: list[list[Shard]] = []
    for shard in shards:
        if merged and merged[-1][-1].device.group == shard.device.group:
            merged[-1].append(shard)
        else:
            merged.append([shard])
    return tuple(Stage(i, part[0].device.group, tuple(part)) for i, part in enumerate(merged))


def arenas_of(n_stages: int, max_step_tokens: int, boundary_width: int, dtype: Dtype) -> tuple[ArenaPlan, ...]:
    """Return one arena per boundary, with one region per step in flight; a region holds the rows of one step."""
    region_bytes = max_step_tokens * dtype_bytes(dtype, boundary_width)
    return tuple(ArenaPlan(boundary, region_bytes, arena_regions(n_stages)) for boundary in range(n_stages - 1))


def load_message(
    placement: Placement, group: str, files: Sequence[str], threads: int = 0, identities: Sequence[FileIdentity] = ()
) -> Load:
    """Return the Load message for the daemon of ``group``.

    ``files``: absolute paths of all parts of the model; ``identities``: the expected state of each file, or none.
    ``Load.arenas`` are those at either end of the group's stages, each once, in pipeline order: send one descriptor
    for each, in this order.  Raises KeyError when the group has no stage.
    """
    own = placement.stages_of(group)
    if not own:
        raise KeyError(f"the group {group} has no stage in this placement")
    n_boundaries = len(placement.arenas)
    touched = sorted({b for stage in own for b in (stage.index - 1, stage.index) if 0 <= b < n_boundaries})
    place = {boundary: i for i, boundary in enumerate(touched)}
    return Load(
        files=list(files),
        dtype=placement.dtype,
        kv_dtype=placement.kv_dtype,
        stages=[
            StagePlan(
                stage=stage.index,
                shards=[ShardPlan(shard.device.index, shard.layers) for shard in stage.shards],
                source=place.get(stage.index - 1),
                target=place.get(stage.index),
                embedding=stage.shards[0].first,
                output=stage.shards[-1].last,
            )
            for stage in own
        ],
        arenas=[placement.arenas[b] for b in touched],
        pools=placement.pools,
        max_sequences=placement.max_sequences,
        max_step_tokens=placement.max_step_tokens,
        threads=threads,
        options=dict(placement.options),
        identities=list(identities),
    )
