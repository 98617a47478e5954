"""How products of few rows are launched: rows of a matrix are split over programs until the device is full.

Parts of a row are added in order: the same numbers each time, no atomic adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS_PER_PROCESSOR = 36
"""Warps a multiprocessor is given at most by splitting rows: they hide each other's waiting for memory."""
MIN_CHUNKS = 2
"""Chunks of a part of a row at least."""


@triton.jit(do_not_specialize=["n_splits", "size"])
def split_sum_kernel(parts, out, n_splits, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(n_splits):
        total += tl.load(parts + at, mask=at < size, other=0.0)
        parts += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@cache
def n_processors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 for the interpreter's cpu."""
    return 1 if device.type == "cpu" else int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True, slots=True)
class GemvConfig:
    """How a product is launched: columns of a program, its warps, stages of its loop, parts of a row."""

    columns: int
    n_warps: int
    n_stages: int
    n_splits: int


@dataclass(frozen=True, slots=True)
class GemvTile:
    """One program's part of a launch: the first three fields of :class:`GemvConfig`."""

    columns: int = 32
    n_warps: int = 2
    n_stages: int = 2


def gemv_config(tile: GemvTile, n_programs_deep: int, n_out: int, n_chunks: int, device: torch.device) -> GemvConfig:
    """The launch for a product of ``n_out`` columns, ``n_programs_deep`` of them side by side.

    Rows are split until the device is full.
    """
    splits = 1
    n_warps = triton.cdiv(n_out, tile.columns) * n_programs_deep * tile.n_warps
    room = WARPS_PER_PROCESSOR * n_processors(device)
    while n_warps * splits * 2 <= room and n_chunks // (2 * splits) >= MIN_CHUNKS:
        splits *= 2
    return GemvConfig(tile.columns, tile.n_warps, tile.n_stages, splits)


def rows_per_program(n_rows: int, experts: Tensor | None) -> int:
    """Rows that a program multiplies at a time: one where each row has its own expert."""
    return 1 if experts is not None else 8 if n_rows <= 8 else triton.next_power_of_2(n_rows)


def split_buffer(out: Tensor, n_splits: int) -> Tensor:
    """Where ``n_splits`` parts of the product ``out`` [T, N] go: itself for one, float32 [n_splits, T, N] for more."""
    return out if n_splits == 1 else torch.empty(n_splits, *out.shape, dtype=torch.float32, device=out.device)


def reduce_splits(parts: Tensor, out: Tensor) -> None:
    """The sum of :func:`split_buffer` to ``out``."""
    if parts is not out:
        split_sum_kernel[(triton.cdiv(out.numel(), 512),)](parts, out, parts.shape[0], out.numel(), 512, num_warps=4)
