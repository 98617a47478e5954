"""Packed weights to plain numbers, bit for bit those of ``daemons.weights.dequant``: the operand of a library gemm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.codes import (
    dequantise_q4,
    dequantise_q4_k,
    dequantise_q6_k,
    fifth_bits,
    load_d_dmin,
    spread_bits,
    upper_bits,
)
from daemons.weights.packed import PackedWeights
from lucevisor.model.quant_types import CHUNK, GgmlType


@triton.jit(do_not_specialize=["first_row", "n_rows"])
def dequantise_kernel(
    codes, high, scales, steps, out, first_row, n_rows, n_chunks, KIND: tl.constexpr, BN: tl.constexpr
):
    """Program (i, chunk): BN rows from ``first_row`` on, one chunk of 256 columns.  ``out`` [n_rows, n_chunks 256]."""
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    K_QUANT: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    chunk = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(row, n_rows - 1).to(tl.int64)
    at = (first_row + weight_row) * n_chunks + chunk
    element = tl.arange(0, L)[None, :]
    pair = tl.arange(0, L // 2)[None, :]
    to = out + (weight_row * n_chunks + chunk)[:, None] * 256 + element
    inside = (row < n_rows)[:, None] & (element >= 0)
    kind = out.dtype.element_ty
    if KIND == "Q8_0":
        for j in tl.static_range(8):
            code = tl.load(codes + at[:, None] * 256 + 32 * j + element).to(tl.float32)
            scale = tl.load(steps + at * 8 + j).to(tl.float32)
            tl.store(to + 32 * j, (scale[:, None] * code).to(kind), mask=inside)
    elif KIND == "Q6_K":
        d = tl.load(steps + at).to(tl.float32)
        for g in tl.static_range(2):
            bits = tl.load(high + at[:, None] * 16 + 8 * g + pair)
            for i in tl.static_range(8):
                if i % 4 == 0:
                    words = tl.load(codes + at[:, None] * 32 + 16 * g + 2 * i + pair)
                    four = tl.load(scales + at * 4 + 2 * g + i // 4)
                number = dequantise_q6_k(((words >> (4 * (i % 4))) & 0x000F000F) | upper_bits(bits, i), four, d, i, BN)
                tl.store(to + 128 * g + 16 * i, number.to(kind), mask=inside)
    else:
        if HAS_FIFTH_BIT:
            bits = spread_bits(tl.load(high + at[:, None] * 16 + pair))
        if K_QUANT:
            d_dmin = load_d_dmin(scales + at * 4)
        for j in tl.static_range(8):
            if j % 4 == 0:
                words = tl.load(codes + at[:, None] * 32 + 4 * j + pair)
            both = (words >> (4 * (j % 4))) & 0x000F000F
            if HAS_FIFTH_BIT:
                both |= fifth_bits(bits, j)
            if K_QUANT:
                number = dequantise_q4_k(both, tl.load(scales + at * 4 + j // 2), d_dmin, j, BN)
            else:
                number = dequantise_q4(both, tl.load(steps + at * 8 + j), KIND, BN)
            tl.store(to + 32 * j, number.to(kind), mask=inside)


def dequantise_packed(
    kind: GgmlType, packed: PackedWeights, dtype: torch.dtype, first_row: int = 0, n_rows: int | None = None
) -> Tensor:
    """``n_rows`` rows of a packed matrix, ``[n_rows, K]`` from ``first_row`` on; K is padded to whole chunks of 256."""
    n_rows = packed.codes.shape[0] if n_rows is None else n_rows
    n_chunks = packed.codes.shape[1] // (CHUNK if kind.name == "Q8_0" else CHUNK // 8)
    out = torch.empty(n_rows, n_chunks * CHUNK, dtype=dtype, device=packed.codes.device)
    dequantise_kernel[(triton.cdiv(n_rows, 8), n_chunks)](
        packed.codes, packed.high, packed.scales, packed.steps, out, first_row, n_rows, n_chunks,
        KIND=kind.name, BN=8, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
