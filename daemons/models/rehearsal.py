"""What a spare does before it is needed: the model's header is parsed, and some layers are loaded and replayed.

A process that loads for the first time takes most of a second for that, for kernels, libraries, and page-locked buffers
that weights are read into.  Clients wait for it where a lost shard comes back.  Nothing of the layers is kept.
Invariant: a device that others use keeps three quarters of the memory that is free.
"""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Set

import torch
from msgspec.structs import replace

from daemons.device import launching, memory_free, torch_device, torch_dtype
from daemons.errors import DaemonError, describe
from daemons.models.replay import MAX_STEPS_AT_ONCE, WORK_BYTES, layerwise_replays
from daemons.models.replay_kernels import load_kernels
from daemons.models.stage import LoadedStage
from daemons.ops.selection import KernelSelector
from lucevisor.model.families import read_spec
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, LayerRange, Space
from lucevisor.model.weight_layout import shard_layouts
from lucevisor.protocol.loading import Load, PoolSizes, ShardPlan, StagePlan, StageReplay, WarmedUp
from lucevisor.protocol.steps import OpenSequence, Operation, Sampling, SetPages, Slice, Step, ZeroState

FEW_ROWS = 128
"""Rows whose kernels are loaded where layers have no room: those of many rows, in little memory."""

BEHIND = (1023, 778, 502, 301, 131, 47, 21, 6)
"""Tokens of the slices behind the chunks of sequences, at most a chunk: each length is computed by itself."""


def rehearse(load: Load, backend: Backend, files: GgufFiles) -> WarmedUp:
    """Load some layers of each shard of ``load`` on its device from the open ``files``, replay zeros, and forget them.

    On a cpu only kernels are loaded.  What fails is told and left to the Load, which does it anyway.
    """
    started, problem = time.monotonic(), ""
    try:
        spec = read_spec(files, load.options)
        for plan in load.stages:
            for shard in plan.shards:
                problem = _rehearse_shard(spec, shard, load, backend) or problem
    except (DaemonError, RuntimeError, OSError, MemoryError) as error:  # torch's lack of memory is a RuntimeError
        problem = describe(error)
    finally:
        gc.collect()
        if backend is not Backend.CPU:
            torch.cuda.empty_cache()
    return WarmedUp(time.monotonic() - started, problem)


def _rehearse_shard(spec: ModelSpec, shard: ShardPlan, load: Load, backend: Backend) -> str:
    """Return what was left out, and why."""
    device = torch_device(backend, shard.device)
    selector = KernelSelector(device, torch_dtype(load.dtype))
    if backend is Backend.CPU:
        return ""
    layers = some_of_each_kind(spec, shard.layers)
    layouts = shard_layouts(spec, layers, embedding=False, output=False, backend=backend, dtype=load.dtype)
    weights, free = sum(layout.n_bytes for layout in layouts), memory_free(device)
    n_sequences = min(MAX_STEPS_AT_ONCE, (free // 4 - weights) // WORK_BYTES)
    if n_sequences < 1:
        if free >= WORK_BYTES:
            _load_kernels(spec, layers, selector)
        needed = weights + WORK_BYTES
        return f"layers {layers} take {needed} bytes, a quarter of the {free} that are free on {device} is less"
    problem = _replayed(spec, ShardPlan(shard.device, layers), load, backend, n_sequences)
    for layer in of_other_types(spec, shard.layers, layers):
        plan, one = _alone(ShardPlan(shard.device, layer), load, _pools(spec, 1, 1))
        LoadedStage.load(spec, plan, one, backend, lambda _: None)
    return problem


@torch.inference_mode()
def _load_kernels(spec: ModelSpec, layers: LayerRange, selector: KernelSelector) -> None:
    with launching(selector.device):
        load_kernels(spec, layers, selector, FEW_ROWS)


def some_of_each_kind(spec: ModelSpec, layers: LayerRange) -> LayerRange:
    """The first layers of a shard, until there is one of each of its spaces."""
    spaces = [spec.layers[i].space for i in range(layers.start, layers.stop)]
    return LayerRange(layers.start, layers.start + 1 + max(spaces.index(space) for space in set(spaces)))


def of_other_types(spec: ModelSpec, layers: LayerRange, rehearsed: LayerRange) -> list[LayerRange]:
    """One layer of each kind that has matrices of other types or shapes than those rehearsed: other kernels."""
    assert spec.files is not None
    tensors, found = spec.files.tensors, []
    seen: set[tuple[Space, tuple[tuple[str, tuple[int, ...]], ...]]] = set()
    for i in [*range(rehearsed.start, rehearsed.stop), *range(layers.start, layers.stop)]:
        own = [tensors[name] for name in spec.layers[i].tensors if name in tensors]
        kind = spec.layers[i].space, tuple(sorted((one.kind.name, one.shape) for one in own))
        if kind not in seen and i not in rehearsed and spec.layers[i].shares_with is None:
            found.append(LayerRange(i, i + 1))
        seen.add(kind)
    return found


def _alone(shard: ShardPlan, load: Load, pools: PoolSizes) -> tuple[StagePlan, Load]:
    """A stage of one shard, and a load of nothing else."""
    plan = StagePlan(0, [shard], source=0, target=0, embedding=False, output=False)
    return plan, replace(
        load, stages=[plan], arenas=[], pools=pools, draft=None, max_drafts=0, score=None, attend_host=False,
        rank_pages=False, replay=[],
    )  # fmt: skip


def _replayed(spec: ModelSpec, shard: ShardPlan, load: Load, backend: Backend, n_sequences: int) -> str:
    """Replay chunks of some sequences, what follows them, and a token of each."""
    length = load.max_step_tokens
    steps = _steps(spec.spaces(), n_sequences, length)
    pools = _pools(spec, n_sequences * _n_pages(length), n_sequences)
    plan, one = _alone(shard, load, pools)
    one = replace(one, max_sequences=n_sequences, replay=[StageReplay(0, steps)])
    fd = _zeros(sum(step.n_tokens for step in steps) * spec.boundary_width * torch_dtype(load.dtype).itemsize)
    replay = layerwise_replays(one, spec, fd)[0]
    replay.whole = True
    stage = LoadedStage.load(spec, plan, one, backend, lambda _: None, replay)
    stage.replayed(replay)
    return replay.problem


def _pools(spec: ModelSpec, n_pages: int, n_states: int) -> PoolSizes:
    spaces = spec.spaces()
    return PoolSizes(
        full_pages=n_pages if Space.FULL in spaces else 0,
        window_pages=n_pages if Space.WINDOW in spaces else 0,
        states=n_states if Space.RECURRENT in spaces else 0,
    )


def _n_pages(length: int) -> int:
    """Pages of a sequence."""
    return -(-(2 * length + max(BEHIND) + 1) // PAGE_TOKENS)


def _steps(spaces: Set[Space], n_sequences: int, length: int) -> list[Step]:
    """Two chunks of each sequence, slices of different lengths behind them, and a decode of all."""
    n_pages = _n_pages(length)
    opening: list[Operation] = []
    for i in range(n_sequences):
        opening += [ZeroState(i)] if Space.RECURRENT in spaces else []
        opening.append(OpenSequence(i, i, Sampling()))
        pages = list(range(i * n_pages, (i + 1) * n_pages))
        opening += [SetPages(i, s, 0, pages) for s in spaces - {Space.RECURRENT}]
    behind = [min(length, n) for n in BEHIND[:n_sequences]]
    slices = [Slice(i, at, [0] * length, sample=False) for at in (0, length) for i in range(n_sequences)]
    slices += [Slice(i, 2 * length, [0] * n, sample=False) for i, n in enumerate(behind)]
    decodes = [Slice(i, 2 * length + n, [0], sample=True) for i, n in enumerate(behind)]
    parts = [[], *([one] for one in slices), decodes]
    return [Step(i, 0, opening if i == 0 else [], part) for i, part in enumerate(parts)]


def _zeros(n_bytes: int) -> int:
    """A file of boundary rows: a hole takes no memory."""
    fd = os.memfd_create("rehearsal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, n_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd
