"""GEMV with packed weights: products of up to MAX_GEMV_ROWS rows, of one matrix or of (token, expert) pairs.

Codes go to the matrix units as exact small floats and scales act on the float32 sum of each group, so no weight is
rounded.  Codes sit in the mantissa of code + BIAS, so a group's sum starts at -BIAS times its sum of x, which
:func:`group_sums_kernel` computes.  docs/kernels.md has the details.

Q4_K and Q5_K in half precision have a faster kernel, ``gemv_float16``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.codes import (
    biased_codes,
    code_bias,
    code_values,
    codebook_scale,
    column_mask,
    fifth_bits,
    load_d_dmin,
    low_float16,
    split_codes,
    spread_bits,
    upper_bits,
)
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from daemons.ops.triton.gemv_float16 import FLOAT16_KINDS, packed_gemv_float16
from daemons.ops.triton.split_k import GemvConfig, GemvTile, gemv_config, reduce_splits, rows_per_program, split_buffer
from daemons.weights.packed import PackedWeights, tile_bytes
from lucevisor.model.quant_types import CHUNK, CODEBOOK

MAX_GEMV_ROWS = 64
"""Rows that :func:`packed_gemv` takes at most."""
SUM_BLOCK = 16
"""Groups per program of :func:`group_sums_kernel`."""
UNBIASED = CODEBOOK | {"Q8_0"}
"""Types whose codes are multiplied as the numbers that they stand for."""


@triton.jit
def _group_dot(numbers, x_at, total, row_mask, x, OFFSET: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """[BN, BM]: sum_k (number - BIAS - OFFSET) x, for numbers [BN, L] and ``total`` [BM], the group's sums of x."""
    first = tl.zeros([BN, BM], tl.float32) - (code_bias(x) + OFFSET) * total[None, :]
    return tl.dot(numbers, tl.load(x_at, mask=row_mask[None, :], other=0.0), first, input_precision="ieee")


@triton.jit
def _add_chunk_q8_0(
    acc, x, x_at, codes, steps, tile, row, row_mask, chunk, width, TILE: tl.constexpr, PADDED: tl.constexpr
):
    """``acc`` plus one chunk of Q8_0.  ``tile``, ``row`` [BN]: where each row of the matrix lies."""
    code_at = (codes + tile * TILE + row * 32)[:, None] + tl.arange(0, 32)[None, :]
    step_at = steps + tile * (TILE // 2) + row * 8
    for j in tl.static_range(8):
        code = tl.load(code_at + 512 * j).to(x.dtype.element_ty)
        scale = tl.load(step_at + j).to(tl.float32)
        mask = column_mask(row_mask, chunk * 256 + 32 * j, width, PADDED)
        part = tl.dot(code, tl.load(x_at + 32 * j, mask=mask[None, :], other=0.0), input_precision="ieee")
        acc += scale[:, None] * part
    return acc


@triton.jit
def _add_chunk_codebook(
    acc, x, x_at, codes, scales, steps, tile, row, row_mask, chunk, width,
    KIND: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """``acc`` plus one chunk of a type with a codebook, whose values are exact in 16 bits."""
    word_at = (tile * (TILE // 4) + row * 16)[:, None] + tl.arange(0, 16)[None, :]
    for h in tl.static_range(2):
        words = tl.load(codes + word_at + 256 * h)
        for i in tl.static_range(4):
            code = split_codes((words >> (4 * i)) & 0x000F000F, BN, 32)
            number = code_values(code, KIND).to(tl.float32).to(x.dtype.element_ty)
            mask = column_mask(row_mask, chunk * 256 + 128 * h + 32 * i, width, PADDED)
            at = x_at + 128 * h + 32 * i
            part = tl.dot(number, tl.load(at, mask=mask[None, :], other=0.0), input_precision="ieee")
            acc += codebook_scale(scales, steps, tile, row, 4 * h + i, KIND, TILE)[:, None] * part
    return acc


@triton.jit
def _add_chunk_q6_k(
    acc, x, x_at, sums, codes, high, scales, steps, tile, row, row_mask,
    TILE: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """``acc`` plus one chunk of Q6_K.  ``sums``: the chunk's group sums of x, WIDTH apart."""
    word_at = (tile * (TILE // 4) + row * 8)[:, None] + tl.arange(0, 8)[None, :]
    scale_at = scales + tile * (TILE // 4) + row * 4
    inner = tl.zeros([BN, BM], tl.float32)
    for g in tl.static_range(2):
        bits = tl.load(high + word_at + 128 * g)
        for i in tl.static_range(8):
            if i % 4 == 0:
                words = tl.load(codes + word_at + 256 * g + 32 * i)
                four = tl.load(scale_at + 2 * g + i // 4)
            code = ((words >> (4 * (i % 4))) & 0x000F000F) | upper_bits(bits, i)
            total = tl.load(sums + (8 * g + i) * WIDTH)
            numbers = biased_codes(code, x, BN, 16)
            part = _group_dot(numbers, x_at + 128 * g + 16 * i, total, row_mask, x, 32.0, BN, BM)
            inner += ((four << (24 - 8 * (i % 4))) >> 24).to(tl.float32)[:, None] * part
    return acc + tl.load(steps + tile * (TILE // 2) + row).to(tl.float32)[:, None] * inner


@triton.jit
def _add_chunk_q4(
    acc, x, x_at, sums, codes, high, scales, steps, tile, row, row_mask, chunk, width,
    KIND: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """``acc`` plus one chunk of a type with 4 or 5-bit codes.  ``sums`` as in :func:`_add_chunk_q6_k`."""
    OFFSET: tl.constexpr = 16.0 if KIND == "Q5_0" else 8.0 if KIND == "Q4_0" else 0.0
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    K_QUANT: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    pair = tl.arange(0, 16)[None, :]
    inner, mins = tl.zeros([BN, BM], tl.float32), tl.zeros([BN, BM], tl.float32)
    if HAS_FIFTH_BIT:
        bits = spread_bits(tl.load(high + (tile * (TILE // 2) + row * 16)[:, None] + pair))
    if K_QUANT:
        scale_at = scales + tile * (TILE // 4) + row * 4
        d_dmin = load_d_dmin(scale_at)
    elif KIND == "Q4_1" or KIND == "Q5_1":
        step_at = steps + tile * (TILE // 4) + row * 8
    else:
        step_at = steps + tile * (TILE // 2) + row * 8
    for h in tl.static_range(2):
        words = tl.load(codes + (tile * (TILE // 4) + row * 16)[:, None] + 256 * h + pair)
        for i in tl.static_range(4):
            code = (words >> (4 * i)) & 0x000F000F
            if HAS_FIFTH_BIT:
                code |= fifth_bits(bits, 4 * h + i)
            total = tl.load(sums + (4 * h + i) * WIDTH)
            mask = column_mask(row_mask, chunk * 256 + 128 * h + 32 * i, width, PADDED)
            numbers = biased_codes(code, x, BN, 32)
            part = _group_dot(numbers, x_at + 128 * h + 32 * i, total, mask, x, OFFSET, BN, BM)
            if K_QUANT:
                word = tl.load(scale_at + 2 * h + i // 2) >> (16 * (i % 2))
                inner += (word & 63).to(tl.float32)[:, None] * part
                mins += ((word >> 6) & 63).to(tl.float32)[:, None] * total[None, :]
            elif KIND == "Q4_1" or KIND == "Q5_1":
                step = tl.load(step_at + 4 * h + i)
                inner += low_float16(step)[:, None] * part + low_float16(step >> 16)[:, None] * total[None, :]
            else:
                inner += tl.load(step_at + 4 * h + i).to(tl.float32)[:, None] * part
    if K_QUANT:
        return acc + (low_float16(d_dmin)[:, None] * inner - low_float16(d_dmin >> 16)[:, None] * mins)
    else:
        return acc + inner


@triton.jit(do_not_specialize=["n_rows", "n_splits", "pairs_per_row"])
def gemv_kernel(
    x, sums, codes, high, scales, steps, experts, out, n_rows, n_out, n_chunks, width, n_splits, pairs_per_row,
    KIND: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s, z): BN columns of the product, split s of the chunks, all rows.  ``out`` [n_splits, rows, n_out].

    TILE: bytes of a tile.  With ``experts`` [pairs], row z of the result is row z // pairs_per_row of x times matrix
    experts[z].
    """
    wait_for_inputs(PDL)
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    GROUPS: tl.constexpr = 256 // L
    WIDTH: tl.constexpr = BM if experts is None else 1
    CODEBOOK: tl.constexpr = KIND == "IQ4_NL" or KIND == "IQ4_XS" or KIND == "MXFP4"
    split = tl.program_id(1)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(columns, n_out - 1)
    first_tile, tile_row = (weight_row // 16).to(tl.int64), weight_row % 16
    m = tl.arange(0, BM)
    if experts is None:
        row_mask, row, sum_row, out_row = m < n_rows, m, m, m
    else:
        z = tl.program_id(2)
        row_mask, row, sum_row, out_row = m == 0, z // pairs_per_row + m * 0, m * 0, z + m * 0
        if KIND != "Q8_0" and not CODEBOOK:
            sums += (z // pairs_per_row) * n_chunks * GROUPS
        first_tile += tl.load(experts + z) * tl.cdiv(n_out, 16)
    x_at = x + row[None, :].to(tl.int64) * width + tl.arange(0, L)[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for chunk in range(split * n_chunks // n_splits, (split + 1) * n_chunks // n_splits):
        tile = first_tile * n_chunks + chunk
        chunk_x = x_at + chunk * 256
        if KIND == "Q8_0":
            acc = _add_chunk_q8_0(acc, x, chunk_x, codes, steps, tile, tile_row, row_mask, chunk, width, TILE, PADDED)
        elif CODEBOOK:
            acc = _add_chunk_codebook(
                acc, x, chunk_x, codes, scales, steps, tile, tile_row, row_mask, chunk, width, KIND, TILE, BN, PADDED
            )
        else:
            chunk_sums = sums + chunk * (GROUPS * WIDTH) + sum_row
            if KIND == "Q6_K":
                acc = _add_chunk_q6_k(
                    acc, x, chunk_x, chunk_sums, codes, high, scales, steps, tile, tile_row, row_mask,
                    TILE, WIDTH, BN, BM,
                )  # fmt: skip
            else:
                acc = _add_chunk_q4(
                    acc, x, chunk_x, chunk_sums, codes, high, scales, steps, tile, tile_row, row_mask, chunk, width,
                    KIND, TILE, WIDTH, BN, BM, PADDED,
                )  # fmt: skip
    to_row = split * n_rows + out_row.to(tl.int64)
    inside = (columns < n_out)[:, None] & row_mask[None, :]
    tl.store(out + to_row[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def group_sums_kernel(
    x, sums, n_rows, n_groups, width, L: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (i, z): sums of x over BLOCK groups, for BM rows.  ``sums`` [z, n_groups, BM]; zero outside x."""
    wait_for_inputs(PDL)
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    at = row[None, :].to(tl.int64) * width + group[:, None] * L
    inside = (row < n_rows)[None, :] & (group * L < width)[:, None]
    numbers = tl.load(x + at[:, :, None] + tl.arange(0, L)[None, None, :], mask=inside[:, :, None], other=0.0)
    to = (tl.program_id(1) * n_groups + group[:, None]) * BM + tl.arange(0, BM)[None, :]
    tl.store(sums + to, tl.sum(numbers.to(tl.float32), axis=2), mask=(group < n_groups)[:, None] & (row >= 0)[None, :])


def packed_gemv(
    packed: PackedWeights,
    x: Tensor,
    experts: Tensor | None = None,
    pairs_per_row: int = 1,
    config: GemvConfig | None = None,
) -> Tensor:
    """``x [T, K] W'`` -> [T, N] of x's dtype, for T up to MAX_GEMV_ROWS; accumulates in float32.

    With ``experts`` int64 [P], ``packed`` holds matrices [X, N, *], and row p of the result [P, N] is row
    p // pairs_per_row of x times matrix experts[p]; T and P are not limited then.
    """
    n_rows, width = x.shape
    kind, n_out, n_chunks = packed.kind.name, packed.n_rows, packed.n_chunks
    assert x.is_contiguous()
    assert experts is not None or n_rows <= MAX_GEMV_ROWS
    if kind in FLOAT16_KINDS and x.dtype != torch.float32:
        return packed_gemv_float16(packed, x, experts, pairs_per_row, config)
    size = 16 if kind == "Q6_K" else 32
    block_rows = rows_per_program(n_rows, experts)
    n_results, n_deep = (n_rows, 1) if experts is None else (experts.shape[0], experts.shape[0])
    sums = None
    if kind not in UNBIASED:
        n_groups, blocks = n_chunks * CHUNK // size, triton.cdiv(n_rows, block_rows)
        sums = torch.empty(blocks, n_groups, block_rows, dtype=torch.float32, device=x.device)
        grid = (triton.cdiv(n_groups, SUM_BLOCK), blocks)
        group_sums_kernel[grid](
            *(x, sums, n_rows, n_groups, width),
            L=size,
            BM=block_rows,
            BLOCK=SUM_BLOCK,
            num_warps=4,
            **dependent_launch(x.device),
        )
    config = config or gemv_config(GemvTile(), n_deep, n_out, n_chunks, x.device)
    out = x.new_empty(n_results, n_out)
    parts = split_buffer(out, config.n_splits)
    gemv_kernel[(triton.cdiv(n_out, config.columns), config.n_splits, n_deep)](
        x, sums, packed.codes, packed.high, packed.scales, packed.steps, experts, parts,
        n_results, n_out, n_chunks, width, config.n_splits, pairs_per_row,
        KIND=kind, TILE=tile_bytes(kind), BM=max(block_rows, 8), BN=config.columns, PADDED=width % CHUNK != 0,
        num_warps=config.n_warps, num_stages=config.n_stages, **dependent_launch(x.device),
    )  # fmt: skip
    reduce_splits(parts, out)
    return out
