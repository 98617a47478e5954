"""Rows times plain matrices with one tile for any number of rows: a row's bits depend on that row alone.

A library chooses tiles, and how it splits the sums, by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from daemons.ops.triton.split_k import MAX_SPLIT_ROWS, fixed_splits, reduce_splits, split_buffer

ROWS, COLUMNS, DEPTH = 32, 64, 64
"""Rows of x, rows of the matrix, and columns of both, of a tile."""
SPLIT_DEPTH = 128
"""Half the columns of the shortest split."""


@triton.jit(do_not_specialize=["n_rows", "n_splits", "splits_each"])
def dense_gemm_kernel(
    x, weight, out, n_rows, n_out, n_splits, splits_each, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s, k): BN columns of the product of BM rows of x [n_rows, width] with ``weight`` [n_out, width], in
    ``splits_each`` of the splits of the width, summed in order, to ``out`` [n_splits / splits_each, n_rows, n_out].

    PADDED: the width is no multiple of BK.
    """
    wait_for_inputs(PDL)
    row, column = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * width + depth[None, :]
    weight_at = weight + tl.minimum(column, n_out - 1).to(tl.int64)[None, :] * width + depth[:, None]
    row_mask, n_blocks = row < n_rows, tl.cdiv(width, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for split in range(tl.program_id(2) * splits_each, (tl.program_id(2) + 1) * splits_each):
        acc = tl.zeros([BM, BN], tl.float32)
        for block in range(split * n_blocks // n_splits, (split + 1) * n_blocks // n_splits):
            at = block * BK
            inside = depth < width - at if PADDED else depth >= 0
            a = tl.load(x_at + at, mask=row_mask[:, None] & inside[None, :], other=0.0)
            b = tl.load(weight_at + at, mask=inside[:, None] & (column >= 0)[None, :], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        total += acc
    to = out + (tl.program_id(2).to(tl.int64) * n_rows + row)[:, None] * n_out + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=row_mask[:, None] & (column < n_out)[None, :])


def dense_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, K] weight'`` -> [T, N], all of one dtype; sums are float32, in splits that depend on the matrix alone."""
    x, (n_rows, width), n_out = x.contiguous(), x.shape, weight.shape[0]
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    out = torch.empty(n_rows, n_out, dtype=x.dtype, device=x.device)
    n_columns = triton.cdiv(n_out, COLUMNS)
    n_splits = fixed_splits(n_columns, triton.cdiv(width, SPLIT_DEPTH))
    splits_each = 1 if n_rows <= MAX_SPLIT_ROWS else n_splits
    parts = split_buffer(out, n_splits // splits_each)
    dense_gemm_kernel[(n_columns, triton.cdiv(n_rows, ROWS), n_splits // splits_each)](
        *(x, weight, parts, n_rows, n_out, n_splits, splits_each, width),
        BM=ROWS,
        BN=COLUMNS,
        BK=DEPTH,
        PADDED=width % DEPTH != 0,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x.device),
    )
    reduce_splits(parts, out)
    return out
