"""Split-K launches of the gemv kernels: the inner dimension is split over programs until the device is full.

Invariant: splits are summed in order, without atomics, so results are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs

WARPS_PER_PROCESSOR = 36
"""Warps per multiprocessor that splitting aims for: enough to hide memory latency."""
MIN_CHUNKS = 2
"""Fewest chunks in a split."""
FIXED_PROGRAMS = 2048
"""Programs of one tile of rows that :func:`fixed_splits` aims for: four waves of the largest GPUs."""
MAX_SPLIT_ROWS = 64
"""Rows up to which fixed splits run in parallel.  More rows fill a device without, and their parts take memory."""


@triton.jit(do_not_specialize=["n_splits", "size"])
def split_sum_kernel(parts, out, n_splits, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program i: BLOCK numbers of ``out`` [size], the sum of ``parts`` [n_splits, size]."""
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(n_splits):
        total += tl.load(parts + at, mask=at < size, other=0.0)
        parts += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@cache
def n_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 on the cpu, where the interpreter runs."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How a gemv is launched: columns per program, warps, pipeline stages, splits of the inner dimension."""

    columns: int
    n_warps: int
    n_stages: int
    n_splits: int


@dataclass(frozen=True, slots=True)
class GemvTile:
    """A :class:`GemvConfig` without its number of splits."""

    columns: int = 32
    n_warps: int = 2
    n_stages: int = 2


def gemv_config(tile: GemvTile, n_deep: int, n_out: int, n_chunks: int, device: torch.device) -> GemvConfig:
    """The config for ``n_deep`` products of ``n_out`` columns, with as many splits as it takes to fill the device."""
    splits = 1
    n_warps = triton.cdiv(n_out, tile.columns) * n_deep * tile.n_warps
    max_warps = WARPS_PER_PROCESSOR * n_processors(device)
    while n_warps * splits * 2 <= max_warps and n_chunks // (2 * splits) >= MIN_CHUNKS:
        splits *= 2
    return GemvConfig(tile.columns, tile.n_warps, tile.n_stages, splits)


def fixed_splits(n_programs: int, n_chunks: int) -> int:
    """Splits of a matrix whose columns take ``n_programs``: by its shape alone, so that sums have one order."""
    return max(1, min(FIXED_PROGRAMS // n_programs, n_chunks // MIN_CHUNKS))


def rows_per_program(n_rows: int, experts: Tensor | None) -> int:
    """Rows of x per program: a power of two from 8 on, or 1 where each row has its own expert."""
    return 1 if experts is not None else 8 if n_rows <= 8 else triton.next_power_of_2(n_rows)


def split_buffer(out: Tensor, n_splits: int) -> Tensor:
    """Where a kernel writes its splits of ``out`` [T, N]: ``out`` itself for one, else float32 [n_splits, T, N]."""
    return out if n_splits == 1 else torch.empty(n_splits, *out.shape, dtype=torch.float32, device=out.device)


def reduce_splits(parts: Tensor, out: Tensor) -> None:
    """Sum the splits of :func:`split_buffer` into ``out``."""
    if parts is not out:
        split_sum_kernel[(triton.cdiv(out.numel(), 512),)](
            *(parts, out, parts.shape[0], out.numel()), BLOCK=512, num_warps=4, **dependent_launch(out.device)
        )
