"""Rows times plain matrices, in an order of summation that depends on the matrix alone: a row's bits depend on that
row alone.

A library chooses tiles, and how it splits the sums, by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from daemons.ops.triton.paged_attention import device_limits
from daemons.ops.triton.split_k import MAX_SPLIT_ROWS, fixed_splits, reduce_splits, split_buffer
from lucevisor.model.quant_types import CHUNK


@dataclass(frozen=True, slots=True)
class DenseTile:
    """Rows of x, rows of the matrix and columns of both in a tile; warps and pipeline stages."""

    rows: int
    columns: int
    depth: int
    n_warps: int
    n_stages: int


FEW, MANY = DenseTile(32, 64, 64, 4, 4), DenseTile(128, 128, 64, 8, 4)
"""Matrix units add up 16 columns at a time in either."""


@triton.jit(do_not_specialize=["n_rows", "n_splits", "splits_each"])
def dense_gemm_kernel(
    x, weight, out, n_rows, n_out, n_splits, splits_each, width, weight_stride, out_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s, k): BN columns of the product of BM rows of x [n_rows, width] with ``weight`` [n_out, width], in
    ``splits_each`` of the splits of its chunks of SIZE columns, summed in order, to ``out`` [n_splits / splits_each,
    n_rows, n_out].

    PADDED: the width is no multiple of SIZE.
    """
    wait_for_inputs(PDL)
    row = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    row_mask, n_chunks = row < n_rows, tl.cdiv(width, SIZE)
    x_at = x + row[None, :] * width + depth[:, None]
    weight_at = weight + tl.minimum(column, n_out - 1).to(tl.int64)[:, None] * weight_stride + depth[None, :]
    total = tl.zeros([BN, BM], tl.float32)
    for split in range(tl.program_id(2) * splits_each, (tl.program_id(2) + 1) * splits_each):
        acc = tl.zeros([BN, BM], tl.float32)
        for at in range(split * n_chunks // n_splits * SIZE, (split + 1) * n_chunks // n_splits * SIZE, BK):
            inside = depth < width - at if PADDED else depth >= 0
            w = tl.load(weight_at + at, mask=inside[None, :], other=0.0)
            part = tl.load(x_at + at, mask=inside[:, None] & row_mask[None, :], other=0.0)
            acc = tl.dot(w, part, acc, input_precision="ieee")
        total += acc
    to = out + (tl.program_id(2).to(tl.int64) * n_rows + row)[None, :] * out_stride + column[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=row_mask[None, :] & (column < n_out)[:, None])


def dense_gemm(x: Tensor, weight: Tensor, out: Tensor | None = None, *, n_splits: int = 0) -> Tensor:
    """``x [T, K] weight'`` -> [T, N], all of one dtype; sums are float32, in splits that depend on the matrix alone.

    Rows of ``weight`` may be strided.  ``out``: where to, for many rows; its rows may be strided.  ``n_splits``: those
    of the matrix that ``weight`` is a part of.
    """
    x, (n_rows, width), n_out = x.contiguous(), x.shape, weight.shape[0]
    assert weight.stride(1) == 1
    assert x.dtype == weight.dtype
    tile = FEW if n_rows <= MAX_SPLIT_ROWS or x.dtype == torch.float32 else MANY
    stage_bytes = (tile.rows + tile.columns) * tile.depth * x.element_size()
    n_splits = n_splits or fixed_splits(triton.cdiv(n_out, FEW.columns), triton.cdiv(width, CHUNK))
    splits_each = 1 if n_rows <= MAX_SPLIT_ROWS else n_splits
    if out is None:
        out = torch.empty(n_rows, n_out, dtype=x.dtype, device=x.device)
    parts = split_buffer(out, n_splits // splits_each)
    grid = (triton.cdiv(n_out, tile.columns), triton.cdiv(n_rows, tile.rows), n_splits // splits_each)
    dense_gemm_kernel[grid](
        *(x, weight, parts, n_rows, n_out, n_splits, splits_each, width, weight.stride(0), parts.stride(-2)),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        PADDED=width % CHUNK != 0,
        SIZE=CHUNK,
        num_warps=tile.n_warps,
        num_stages=max(1, min(tile.n_stages, device_limits(x.device).shared_bytes // stage_bytes)),
        **dependent_launch(x.device),
    )
    reduce_splits(parts, out)
    return out
