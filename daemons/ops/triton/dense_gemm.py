"""Rows times plain matrices with one tile for any number of rows: a row's bits depend on that row alone.

A library chooses tiles, and how it splits the sums, by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs

ROWS, COLUMNS, DEPTH = 32, 64, 64
"""Rows of x, rows of the matrix, and columns of both, of a tile."""


@triton.jit(do_not_specialize=["n_rows"])
def dense_gemm_kernel(
    x, weight, out, n_rows, n_out, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s): BN columns of the product of BM rows of x [n_rows, width] with ``weight`` [n_out, width].

    PADDED: the width is no multiple of BK.
    """
    wait_for_inputs(PDL)
    row, column = tl.program_id(1) * BM + tl.arange(0, BM), tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * width + depth[None, :]
    weight_at = weight + tl.minimum(column, n_out - 1).to(tl.int64)[None, :] * width + depth[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for at in range(0, width, BK):
        inside = depth < width - at if PADDED else depth >= 0
        a = tl.load(x_at + at, mask=(row < n_rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight_at + at, mask=inside[:, None] & (column >= 0)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    to = out + row.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < n_rows)[:, None] & (column < n_out)[None, :])


def dense_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, K] weight'`` -> [T, N], all of one dtype; sums are float32."""
    x, (n_rows, width), n_out = x.contiguous(), x.shape, weight.shape[0]
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    out = torch.empty(n_rows, n_out, dtype=x.dtype, device=x.device)
    dense_gemm_kernel[(triton.cdiv(n_out, COLUMNS), triton.cdiv(n_rows, ROWS))](
        *(x, weight, out, n_rows, n_out, width),
        BM=ROWS,
        BN=COLUMNS,
        BK=DEPTH,
        PADDED=width % DEPTH != 0,
        num_warps=4,
        num_stages=3,
        **dependent_launch(x.device),
    )
    return out
