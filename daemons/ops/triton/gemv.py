"""Products with packed weights (see ``daemons.weights.packed``), and their expansion.

For few rows codes go to the matrix units as they are, small whole numbers that every float format holds exactly, and
scales act on the float32 sums of each group: weights are never rounded.  Codes are put into the mantissa of a number
BIAS (a shift, a mask and an or for two of them), so a group's sum starts at -BIAS times the sum of x over the group.
Q4_K and Q5_K in half precision have a product of their own, ``nested``.  For many rows a matrix is expanded, with the
arithmetic of ``daemons.weights.dequant``, for the library's product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.codes import (
    biased_codes,
    code_bias,
    column_mask,
    dequantise_q4,
    dequantise_q4_k,
    dequantise_q6_k,
    fifth_bits,
    load_d_dmin,
    low_float16,
    spread_bits,
    upper_bits,
)
from daemons.ops.triton.gemv_float16 import FLOAT16_KINDS, packed_gemv_float16
from daemons.ops.triton.split_k import GemvConfig, GemvTile, gemv_config, reduce_splits, rows_per_program, split_buffer
from daemons.weights.packed import PackedWeights
from lucevisor.model.quant_types import CHUNK, GgmlType, padded_columns

MAX_GEMV_ROWS = 64
"""Rows that :func:`packed_gemv` takes at most."""
SUM_BLOCK = 16
"""Groups that one program sums up."""


@triton.jit
def _group_dot(numbers, x_at, total, row_mask, x, OFFSET: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, BM]: sum_k (number - BIAS - OFFSET) x, for numbers [BN, L] and ``total`` [BM], the sums of x."""
    first = tl.zeros([BN, BM], tl.float32) - (code_bias(x) + OFFSET) * total[None, :]
    return tl.dot(numbers, tl.load(x_at, mask=row_mask[None, :], other=0.0), first, input_precision="ieee")


@triton.jit(do_not_specialize=["n_rows", "n_splits", "share"])
def gemv_kernel(
    x, sums, codes, high, scales, steps, experts, out, n_rows, n_out, n_chunks, width, n_splits, pairs_per_row,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (i, s, z): BN columns of the product, part s of the chunks, all rows.  ``out`` [n_splits, rows, n_out].

    With ``experts`` [pairs]: row z is the product of row z // share of x with the matrix of expert z.
    """
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    GROUPS: tl.constexpr = 256 // L
    WIDTH: tl.constexpr = BM if experts is None else 1
    OFFSET: tl.constexpr = 32.0 if KIND == "Q6_K" else 16.0 if KIND == "Q5_0" else 8.0 if KIND == "Q4_0" else 0.0
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    HAS_SUPER_MIN: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"  # scales of scales
    HAS_MIN: tl.constexpr = KIND == "Q4_1" or KIND == "Q5_1"
    split = tl.program_id(1)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(columns, n_out - 1).to(tl.int64)
    m = tl.arange(0, BM)
    if experts is None:
        row_mask, row, lane, to = m < n_rows, m, m, m
    else:
        z = tl.program_id(2)
        row_mask, row, lane, to = m == 0, z // pairs_per_row + m * 0, m * 0, z + m * 0
        if KIND != "Q8_0":
            sums += (z // pairs_per_row) * n_chunks * GROUPS
        weight_row += tl.load(experts + z) * n_out
    x_at = x + row[None, :].to(tl.int64) * width + tl.arange(0, L)[:, None]
    pair = tl.arange(0, L // 2)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for chunk in range(split * n_chunks // n_splits, (split + 1) * n_chunks // n_splits):
        at = weight_row * n_chunks + chunk
        xs = x_at + chunk * 256
        if KIND != "Q8_0":
            ts = sums + chunk * (GROUPS * WIDTH) + lane
        inner = tl.zeros([BN, BM], tl.float32)
        if KIND == "Q8_0":
            for j in tl.static_range(8):
                code = tl.load(codes + at[:, None] * 256 + 32 * j + tl.arange(0, 32)[None, :]).to(x.dtype.element_ty)
                scale = tl.load(steps + at * 8 + j).to(tl.float32)
                mask = column_mask(row_mask, chunk * 256 + 32 * j, width, PADDED)
                part = tl.dot(code, tl.load(xs + 32 * j, mask=mask[None, :], other=0.0), input_precision="ieee")
                acc += scale[:, None] * part
        elif KIND == "Q6_K":
            for g in tl.static_range(2):
                bits = tl.load(high + at[:, None] * 16 + 8 * g + pair)
                for i in tl.static_range(8):
                    if i % 4 == 0:
                        words = tl.load(codes + at[:, None] * 32 + 16 * g + 2 * i + pair)
                        four = tl.load(scales + at * 4 + 2 * g + i // 4)
                    code = ((words >> (4 * (i % 4))) & 0x000F000F) | upper_bits(bits, i)
                    total = tl.load(ts + (8 * g + i) * WIDTH)
                    part = _group_dot(
                        biased_codes(code, x, BN, L), xs + 128 * g + 16 * i, total, row_mask, x, OFFSET, BN, BM
                    )
                    inner += ((four << (24 - 8 * (i % 4))) >> 24).to(tl.float32)[:, None] * part
            acc += tl.load(steps + at).to(tl.float32)[:, None] * inner
        else:
            low = tl.zeros([BN, BM], tl.float32)
            if HAS_FIFTH_BIT:
                bits = spread_bits(tl.load(high + at[:, None] * 16 + pair))
            if HAS_SUPER_MIN:
                d_dmin = load_d_dmin(scales + at * 4)
            for h in tl.static_range(2):
                words = tl.load(codes + at[:, None] * 32 + 16 * h + pair)
                for i in tl.static_range(4):
                    code = (words >> (4 * i)) & 0x000F000F
                    if HAS_FIFTH_BIT:
                        code |= fifth_bits(bits, 4 * h + i)
                    total = tl.load(ts + (4 * h + i) * WIDTH)
                    mask = column_mask(row_mask, chunk * 256 + 128 * h + 32 * i, width, PADDED)
                    part = _group_dot(
                        biased_codes(code, x, BN, L), xs + 128 * h + 32 * i, total, mask, x, OFFSET, BN, BM
                    )
                    if HAS_SUPER_MIN:
                        word = tl.load(scales + at * 4 + 2 * h + i // 2) >> (16 * (i % 2))
                        inner += (word & 63).to(tl.float32)[:, None] * part
                        low += ((word >> 6) & 63).to(tl.float32)[:, None] * total[None, :]
                    elif HAS_MIN:
                        step = tl.load(steps + at * 8 + 4 * h + i)
                        inner += low_float16(step)[:, None] * part + low_float16(step >> 16)[:, None] * total[None, :]
                    else:
                        inner += tl.load(steps + at * 8 + 4 * h + i).to(tl.float32)[:, None] * part
            if HAS_SUPER_MIN:
                acc += low_float16(d_dmin)[:, None] * inner - low_float16(d_dmin >> 16)[:, None] * low
            else:
                acc += inner
    to_row = split * n_rows + to.to(tl.int64)
    inside = (columns < n_out)[:, None] & row_mask[None, :]
    tl.store(out + to_row[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def group_sums_kernel(x, sums, n_rows, n_groups, width, L: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, z): sums of x over BLOCK groups, for BM rows.  ``sums`` [z, n_groups, BM], zeros beyond the rows and
    the width."""
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    at = row[None, :].to(tl.int64) * width + group[:, None] * L
    inside = (row < n_rows)[None, :] & (group * L < width)[:, None]
    numbers = tl.load(x + at[:, :, None] + tl.arange(0, L)[None, None, :], mask=inside[:, :, None], other=0.0)
    to = (tl.program_id(1) * n_groups + group[:, None]) * BM + tl.arange(0, BM)[None, :]
    tl.store(sums + to, tl.sum(numbers.to(tl.float32), axis=2), mask=(group < n_groups)[:, None] & (row >= 0)[None, :])


@triton.jit(do_not_specialize=["first_row", "n_rows"])
def dequantise_kernel(
    codes, high, scales, steps, out, first_row, n_rows, n_chunks, KIND: tl.constexpr, BN: tl.constexpr
):
    """Program (i, chunk): BN rows from ``first_row`` on, 256 columns."""
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    HAS_SUPER_MIN: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
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
        if HAS_SUPER_MIN:
            d_dmin = load_d_dmin(scales + at * 4)
        for j in tl.static_range(8):
            if j % 4 == 0:
                words = tl.load(codes + at[:, None] * 32 + 4 * j + pair)
            both = (words >> (4 * (j % 4))) & 0x000F000F
            if HAS_FIFTH_BIT:
                both |= fifth_bits(bits, j)
            if HAS_SUPER_MIN:
                number = dequantise_q4_k(both, tl.load(scales + at * 4 + j // 2), d_dmin, j, BN)
            else:
                number = dequantise_q4(both, tl.load(steps + at * 8 + j), KIND, BN)
            tl.store(to + 32 * j, number.to(kind), mask=inside)


# ---- launches


def packed_gemv(
    kind: GgmlType,
    packed: PackedWeights,
    x: Tensor,
    experts: Tensor | None = None,
    pairs_per_row: int = 1,
    config: GemvConfig | None = None,
) -> Tensor:
    """``x [T, K] W'`` -> [T, N] of x's dtype, for T up to MAX_GEMV_ROWS; accumulates in float32.

    ``experts`` int64 [P]: ``packed`` holds matrices [X, N, *], and row p of the result [P, N] is row p // share of x
    times matrix experts[p]; any P.
    """
    n_rows, width = x.shape
    n_out, n_chunks = packed.codes.shape[-2], padded_columns(width) // CHUNK
    assert x.is_contiguous()
    assert experts is not None or n_rows <= MAX_GEMV_ROWS
    if kind.name in FLOAT16_KINDS and x.dtype != torch.float32:
        return packed_gemv_float16(kind, packed, x, experts, pairs_per_row, config)
    size = 16 if kind.name == "Q6_K" else 32
    block_rows = rows_per_program(n_rows, experts)
    n_results, depth = (n_rows, 1) if experts is None else (experts.shape[0], experts.shape[0])
    sums = None
    if kind.name != "Q8_0":
        n_groups, blocks = n_chunks * CHUNK // size, triton.cdiv(n_rows, block_rows)
        sums = torch.empty(blocks, n_groups, block_rows, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(n_groups, SUM_BLOCK), blocks)
        group_sums_kernel[grid](x, sums, n_rows, n_groups, width, size, block_rows, SUM_BLOCK, num_warps=4)
    config = config or gemv_config(GemvTile(), depth, n_out, n_chunks, x.device)
    out = x.new_empty(n_results, n_out)
    parts = split_buffer(out, config.n_splits)
    gemv_kernel[(triton.cdiv(n_out, config.columns), config.n_splits, depth)](
        x, sums, packed.codes, packed.high, packed.scales, packed.steps, experts, parts,
        n_results, n_out, n_chunks, width, config.n_splits, pairs_per_row,
        KIND=kind.name, BM=max(block_rows, 8), BN=config.columns, PADDED=width % CHUNK != 0,
        num_warps=config.n_warps, num_stages=config.n_stages,
    )  # fmt: skip
    reduce_splits(parts, out)
    return out


def dequantise_packed(
    kind: GgmlType, packed: PackedWeights, dtype: torch.dtype, first_row: int = 0, n_rows: int | None = None
) -> Tensor:
    """Rows of a matrix ``[N, K]``, filled up to whole chunks, as numbers: bits of ``weights.dequant.dequantise``."""
    n_rows = packed.codes.shape[0] if n_rows is None else n_rows
    n_chunks = packed.codes.shape[1] // (CHUNK if kind.name == "Q8_0" else CHUNK // 8)
    out = torch.empty(n_rows, n_chunks * CHUNK, dtype=dtype, device=packed.codes.device)
    dequantise_kernel[(triton.cdiv(n_rows, 8), n_chunks)](
        packed.codes, packed.high, packed.scales, packed.steps, out, first_row, n_rows, n_chunks,
        KIND=kind.name, BN=8, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
