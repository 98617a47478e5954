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
from lucevisor.protocol.loading import Load, PoolSizes, Rehearsed, ShardPlan, StagePlan, StageReplay
from lucevisor.protocol.steps import OpenSequence, Operation, Sampling, SetPages, Slice, Step, ZeroState

FEW_ROWS = 128
"""Rows whose kernels are loaded where layers have no room: those of many rows, in little memory."""


def rehearse(load: Load, backend: Backend, files: GgufFiles) -> Rehearsed:
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
    return Rehearsed(time.monotonic() - started, problem)


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
    return _replayed(spec, ShardPlan(shard.device, layers), load, backend, n_sequences)


@torch.inference_mode()
def _load_kernels(spec: ModelSpec, layers: LayerRange, selector: KernelSelector) -> None:
    with launching(selector.device):
        load_kernels(spec, layers, selector, FEW_ROWS)


def some_of_each_kind(spec: ModelSpec, layers: LayerRange) -> LayerRange:
    """The first layers of a shard, until there is one of each of its spaces."""
    spaces = [spec.layers[i].space for i in range(layers.start, layers.stop)]
    return LayerRange(layers.start, layers.start + 1 + max(spaces.index(space) for space in set(spaces)))


def _replayed(spec: ModelSpec, shard: ShardPlan, load: Load, backend: Backend, n_sequences: int) -> str:
    """Replay a chunk of each sequence, and one behind it of the first."""
    length, spaces = load.max_step_tokens, spec.spaces()
    steps = _steps(spaces, n_sequences, length)
    n_pages = (n_sequences + 1) * -(-length // PAGE_TOKENS)
    pools = PoolSizes(
        full_pages=n_pages if Space.FULL in spaces else 0,
        window_pages=n_pages if Space.WINDOW in spaces else 0,
        states=n_sequences if Space.RECURRENT in spaces else 0,
    )
    plan = StagePlan(0, [shard], source=0, target=0, embedding=False, output=False)
    one = replace(
        load, stages=[plan], arenas=[], pools=pools, max_sequences=n_sequences, draft=None, max_drafts=0, score=None,
        attend_host=False, rank_pages=False, replay=[StageReplay(0, steps)],
    )  # fmt: skip
    fd = _zeros((n_sequences + 1) * length * spec.boundary_width * torch_dtype(load.dtype).itemsize)
    replay = layerwise_replays(one, spec, fd)[0]
    stage = LoadedStage.load(spec, plan, one, backend, lambda _: None, replay)
    stage.replayed(replay)
    return replay.problem


def _steps(spaces: Set[Space], n_sequences: int, length: int) -> list[Step]:
    pages = -(-length // PAGE_TOKENS)
    opening: list[Operation] = []
    for i in range(n_sequences):
        first, n = (0, 2 * pages) if i == 0 else ((i + 1) * pages, pages)
        opening += [ZeroState(i)] if Space.RECURRENT in spaces else []
        opening.append(OpenSequence(i, i, Sampling()))
        opening += [SetPages(i, s, 0, list(range(first, first + n))) for s in spaces - {Space.RECURRENT}]
    slices = [Slice(i, 0, [0] * length, sample=False) for i in range(n_sequences)]
    slices.append(Slice(0, length, [0] * length, sample=False))
    return [Step(0, 0, opening), *(Step(i, 0, [], [one]) for i, one in enumerate(slices, 1))]


def _zeros(n_bytes: int) -> int:
    """A file of boundary rows: a hole takes no memory."""
    fd = os.memfd_create("rehearsal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, n_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    return fd
