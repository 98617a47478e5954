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
    bias_of,
    fifth_of,
    half_of,
    inside_of,
    load_ends,
    numbers_of,
    of_nested,
    of_q6,
    of_simple,
    spread,
    upper_of,
)
from daemons.ops.triton.launch import Shape, Tile, add_up, lanes_of, parts_of, shape
from daemons.ops.triton.nested import NESTED_KINDS, multiply_nested
from daemons.weights.packed import PackedWeights
from lucevisor.model.quant_types import CHUNK, GgmlType, padded_columns

MAX_ROWS = 64
"""Rows that :func:`multiply` takes at most."""
SUMMED = 16
"""Groups that one program sums up."""


@triton.jit
def _group(numbers, x_at, total, here, x, OFFSET: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, BM]: sum_k (number - BIAS - OFFSET) x, for numbers [BN, L] and ``total`` [BM], the sums of x."""
    first = tl.zeros([BN, BM], tl.float32) - (bias_of(x) + OFFSET) * total[None, :]
    return tl.dot(numbers, tl.load(x_at, mask=here[None, :], other=0.0), first, input_precision="ieee")


@triton.jit(do_not_specialize=["n_rows", "n_splits", "share"])
def _multiply(
    x, sums, codes, high, scales, steps, experts, out, n_rows, n_out, n_chunks, width, n_splits, share,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Program (i, s, z): BN columns of the product, part s of the chunks, all rows.  ``out`` [n_splits, rows, n_out].

    With ``experts`` [pairs]: row z is the product of row z // share of x with the matrix of expert z.
    """
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    GROUPS: tl.constexpr = 256 // L
    WIDTH: tl.constexpr = BM if experts is None else 1
    OFFSET: tl.constexpr = 32.0 if KIND == "Q6_K" else 16.0 if KIND == "Q5_0" else 8.0 if KIND == "Q4_0" else 0.0
    FIFTH: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    NESTED: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"  # scales of scales
    MINIMA: tl.constexpr = KIND == "Q4_1" or KIND == "Q5_1"
    split = tl.program_id(1)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = tl.minimum(columns, n_out - 1).to(tl.int64)
    m = tl.arange(0, BM)
    if experts is None:
        here, row, lane, to = m < n_rows, m, m, m
    else:
        z = tl.program_id(2)
        here, row, lane, to = m == 0, z // share + m * 0, m * 0, z + m * 0
        if KIND != "Q8_0":
            sums += (z // share) * n_chunks * GROUPS
        kept += tl.load(experts + z) * n_out
    x_at = x + row[None, :].to(tl.int64) * width + tl.arange(0, L)[:, None]
    pair = tl.arange(0, L // 2)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for chunk in range(split * n_chunks // n_splits, (split + 1) * n_chunks // n_splits):
        at = kept * n_chunks + chunk
        xs = x_at + chunk * 256
        if KIND != "Q8_0":
            ts = sums + chunk * (GROUPS * WIDTH) + lane
        inner = tl.zeros([BN, BM], tl.float32)
        if KIND == "Q8_0":
            for j in tl.static_range(8):
                code = tl.load(codes + at[:, None] * 256 + 32 * j + tl.arange(0, 32)[None, :]).to(x.dtype.element_ty)
                scale = tl.load(steps + at * 8 + j).to(tl.float32)
                there = inside_of(here, chunk * 256 + 32 * j, width, FILLED)
                part = tl.dot(code, tl.load(xs + 32 * j, mask=there[None, :], other=0.0), input_precision="ieee")
                acc += scale[:, None] * part
        elif KIND == "Q6_K":
            for g in tl.static_range(2):
                bits = tl.load(high + at[:, None] * 16 + 8 * g + pair)
                for i in tl.static_range(8):
                    if i % 4 == 0:
                        words = tl.load(codes + at[:, None] * 32 + 16 * g + 2 * i + pair)
                        four = tl.load(scales + at * 4 + 2 * g + i // 4)
                    code = ((words >> (4 * (i % 4))) & 0x000F000F) | upper_of(bits, i)
                    total = tl.load(ts + (8 * g + i) * WIDTH)
                    part = _group(numbers_of(code, x, BN, L), xs + 128 * g + 16 * i, total, here, x, OFFSET, BN, BM)
                    inner += ((four << (24 - 8 * (i % 4))) >> 24).to(tl.float32)[:, None] * part
            acc += tl.load(steps + at).to(tl.float32)[:, None] * inner
        else:
            low = tl.zeros([BN, BM], tl.float32)
            if FIFTH:
                bits = spread(tl.load(high + at[:, None] * 16 + pair))
            if NESTED:
                ends = load_ends(scales + at * 4)
            for h in tl.static_range(2):
                words = tl.load(codes + at[:, None] * 32 + 16 * h + pair)
                for i in tl.static_range(4):
                    code = (words >> (4 * i)) & 0x000F000F
                    if FIFTH:
                        code |= fifth_of(bits, 4 * h + i)
                    total = tl.load(ts + (4 * h + i) * WIDTH)
                    there = inside_of(here, chunk * 256 + 128 * h + 32 * i, width, FILLED)
                    part = _group(numbers_of(code, x, BN, L), xs + 128 * h + 32 * i, total, there, x, OFFSET, BN, BM)
                    if NESTED:
                        word = tl.load(scales + at * 4 + 2 * h + i // 2) >> (16 * (i % 2))
                        inner += (word & 63).to(tl.float32)[:, None] * part
                        low += ((word >> 6) & 63).to(tl.float32)[:, None] * total[None, :]
                    elif MINIMA:
                        step = tl.load(steps + at * 8 + 4 * h + i)
                        inner += half_of(step)[:, None] * part + half_of(step >> 16)[:, None] * total[None, :]
                    else:
                        inner += tl.load(steps + at * 8 + 4 * h + i).to(tl.float32)[:, None] * part
            if NESTED:
                acc += half_of(ends)[:, None] * inner - half_of(ends >> 16)[:, None] * low
            else:
                acc += inner
    to_row = split * n_rows + to.to(tl.int64)
    inside = (columns < n_out)[:, None] & here[None, :]
    tl.store(out + to_row[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _group_sums(x, sums, n_rows, n_groups, width, L: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr):
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
def _expand(codes, high, scales, steps, out, first_row, n_rows, n_chunks, KIND: tl.constexpr, BN: tl.constexpr):
    """Program (i, chunk): BN rows from ``first_row`` on, 256 columns."""
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    FIFTH: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    NESTED: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    chunk = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = tl.minimum(row, n_rows - 1).to(tl.int64)
    at = (first_row + kept) * n_chunks + chunk
    element = tl.arange(0, L)[None, :]
    pair = tl.arange(0, L // 2)[None, :]
    to = out + (kept * n_chunks + chunk)[:, None] * 256 + element
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
                number = of_q6(((words >> (4 * (i % 4))) & 0x000F000F) | upper_of(bits, i), four, d, i, BN)
                tl.store(to + 128 * g + 16 * i, number.to(kind), mask=inside)
    else:
        if FIFTH:
            bits = spread(tl.load(high + at[:, None] * 16 + pair))
        if NESTED:
            ends = load_ends(scales + at * 4)
        for j in tl.static_range(8):
            if j % 4 == 0:
                words = tl.load(codes + at[:, None] * 32 + 4 * j + pair)
            both = (words >> (4 * (j % 4))) & 0x000F000F
            if FIFTH:
                both |= fifth_of(bits, j)
            if NESTED:
                number = of_nested(both, tl.load(scales + at * 4 + j // 2), ends, j, BN)
            else:
                number = of_simple(both, tl.load(steps + at * 8 + j), KIND, BN)
            tl.store(to + 32 * j, number.to(kind), mask=inside)


# ---- launches


def multiply(
    kind: GgmlType,
    packed: PackedWeights,
    x: Tensor,
    experts: Tensor | None = None,
    share: int = 1,
    how: Shape | None = None,
) -> Tensor:
    """``x [T, K] W'`` -> [T, N] of x's dtype, for T up to MAX_ROWS; accumulates in float32.

    ``experts`` int64 [P]: ``packed`` holds matrices [X, N, *], and row p of the result [P, N] is row p // share of x
    times matrix experts[p]; any P.
    """
    n_rows, width = x.shape
    n_out, n_chunks = packed.codes.shape[-2], padded_columns(width) // CHUNK
    assert x.is_contiguous()
    assert experts is not None or n_rows <= MAX_ROWS
    if kind.name in NESTED_KINDS and x.dtype != torch.float32:
        return multiply_nested(kind, packed, x, experts, share, how)
    size = 16 if kind.name == "Q6_K" else 32
    lanes = lanes_of(n_rows, experts)
    n_results, depth = (n_rows, 1) if experts is None else (experts.shape[0], experts.shape[0])
    sums = None
    if kind.name != "Q8_0":
        n_groups, blocks = n_chunks * CHUNK // size, triton.cdiv(n_rows, lanes)
        sums = torch.empty(blocks, n_groups, lanes, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(n_groups, SUMMED), blocks)
        _group_sums[grid](x, sums, n_rows, n_groups, width, size, lanes, SUMMED, num_warps=4)
    how = how or shape(Tile(), depth, n_out, n_chunks, x.device)
    out = x.new_empty(n_results, n_out)
    parts = parts_of(out, how.n_splits)
    _multiply[(triton.cdiv(n_out, how.columns), how.n_splits, depth)](
        x, sums, packed.codes, packed.high, packed.scales, packed.steps, experts, parts,
        n_results, n_out, n_chunks, width, how.n_splits, share,
        KIND=kind.name, BM=max(lanes, 8), BN=how.columns, FILLED=width % CHUNK != 0,
        num_warps=how.n_warps, num_stages=how.n_stages,
    )  # fmt: skip
    add_up(parts, out)
    return out


def expand(
    kind: GgmlType, packed: PackedWeights, dtype: torch.dtype, first_row: int = 0, n_rows: int | None = None
) -> Tensor:
    """Rows of a matrix ``[N, K]``, filled up to whole chunks, as numbers: bits of ``weights.dequant.dequantise``."""
    n_rows = packed.codes.shape[0] if n_rows is None else n_rows
    n_chunks = packed.codes.shape[1] // (CHUNK if kind.name == "Q8_0" else CHUNK // 8)
    out = torch.empty(n_rows, n_chunks * CHUNK, dtype=dtype, device=packed.codes.device)
    _expand[(triton.cdiv(n_rows, 8), n_chunks)](
        packed.codes, packed.high, packed.scales, packed.steps, out, first_row, n_rows, n_chunks,
        KIND=kind.name, BN=8, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
