"""Grouped GEMM of MoE: (token, expert) pairs with packed expert weights.

Pairs are sorted by expert.  A fixed number of programs per expert find its pairs on the device, so routing never
synchronises with the host.  Weights are dequantised in registers, with the arithmetic and rounding of
``daemons.weights.dequant``.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.triton.codes import (
    column_mask,
    dequantise_codebook,
    dequantise_q4,
    dequantise_q4_k,
    dequantise_q6_k,
    fifth_bits,
    load_d_dmin,
    spread_bits,
    upper_bits,
)
from daemons.ops.triton.dense_gemm import dense_gemm
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from daemons.ops.triton.dequant import dequantise_packed
from daemons.ops.triton.split_k import MAX_SPLIT_ROWS, fixed_splits, reduce_splits, split_buffer
from daemons.weights.packed import PackedWeights, tile_bytes
from lucevisor.model.quant_types import CHUNK
from lucevisor.model.workspace import DEQUANT_ELEMENTS

MAX_PACKED_ROWS = 128
"""Rows above which a matrix is dequantised once instead of for each tile of rows."""


@triton.jit(do_not_specialize=["pairs_per_row"])
def grouped_gemm_kernel(
    x, codes, high, scales, steps, sorted_pairs, offsets, out, n_out, n_chunks, width, pairs_per_row,
    KIND: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (i, e, s): BN columns for every n-th tile of BM pairs of expert e, from tile s on.

    ``sorted_pairs`` [P]: pair ids by expert; ``offsets`` [X + 1]: where each expert's begin.  ``out`` [P, n_out], in
    pair order.
    """
    expert = tl.program_id(1).to(tl.int64)
    stop = tl.load(offsets + expert + 1)
    place = tl.load(offsets + expert) + tl.program_id(2) * BM
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    while place < stop:
        places = place + tl.arange(0, BM)
        row_mask = places < stop
        pair_ids = tl.load(sorted_pairs + places, mask=row_mask, other=0)
        acc = _multiply(
            x, codes, high, scales, steps, expert, columns, pair_ids // pairs_per_row, row_mask,
            0, n_chunks, n_chunks, n_out, width, KIND, TILE, BM, BN, PADDED,
        )  # fmt: skip
        inside = (columns < n_out)[:, None] & row_mask[None, :]
        tl.store(out + pair_ids[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)
        place += tl.num_programs(2) * BM


@triton.jit
def _multiply(
    x, codes, high, scales, steps, matrix, columns, rows, row_mask, begin, end, n_chunks, n_out, width,
    KIND: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """``columns`` [BN] of ``matrix`` times ``rows`` int64 [BM] of x, over chunks ``begin`` .. ``end`` - 1: [BN, BM]."""
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    K_QUANT: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    CODEBOOK: tl.constexpr = KIND == "IQ4_NL" or KIND == "IQ4_XS" or KIND == "MXFP4"
    weight_row = tl.minimum(columns, n_out - 1)
    first_tile, tile_row = matrix * tl.cdiv(n_out, 16) + (weight_row // 16).to(tl.int64), weight_row % 16
    x_at = x + rows[None, :] * width + tl.arange(0, L)[:, None]
    element = tl.arange(0, L)[None, :]
    word = tl.arange(0, L // 2)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for chunk in range(begin, end):
        tile = first_tile * n_chunks + chunk
        words_at, halves_at = tile * (TILE // 4), tile * (TILE // 2)
        if KIND == "Q6_K":
            d = tl.load(steps + halves_at + tile_row).to(tl.float32)
        elif KIND != "Q8_0":
            if HAS_FIFTH_BIT:
                bits = spread_bits(tl.load(high + (halves_at + tile_row * 16)[:, None] + word))
            if K_QUANT:
                d_dmin = load_d_dmin(scales + words_at + tile_row * 4)
        for j in tl.static_range(256 // L):
            if KIND == "Q8_0":
                code = tl.load(codes + (tile * TILE + tile_row * 32)[:, None] + 512 * j + element).to(tl.float32)
                number = tl.load(steps + halves_at + tile_row * 8 + j).to(tl.float32)[:, None] * code
            elif KIND == "Q6_K":
                if j % 8 == 0:
                    bits = tl.load(high + (words_at + tile_row * 8)[:, None] + 16 * j + word)
                if j % 4 == 0:
                    words = tl.load(codes + (words_at + tile_row * 8)[:, None] + 32 * j + word)
                    four = tl.load(scales + words_at + tile_row * 4 + j // 4)
                number = dequantise_q6_k(
                    ((words >> (4 * (j % 4))) & 0x000F000F) | upper_bits(bits, j % 8), four, d, j, BN
                )
            else:
                if j % 4 == 0:
                    words = tl.load(codes + (words_at + tile_row * 16)[:, None] + 64 * j + word)
                both = (words >> (4 * (j % 4))) & 0x000F000F
                if HAS_FIFTH_BIT:
                    both |= fifth_bits(bits, j)
                if K_QUANT:
                    number = dequantise_q4_k(both, tl.load(scales + words_at + tile_row * 4 + j // 2), d_dmin, j, BN)
                elif CODEBOOK:
                    number = dequantise_codebook(both, scales, steps, tile, tile_row, j, KIND, TILE, BN)
                else:
                    step_at = words_at if KIND == "Q4_1" or KIND == "Q5_1" else halves_at
                    number = dequantise_q4(both, tl.load(steps + step_at + tile_row * 8 + j), KIND, BN)
            mask = column_mask(row_mask, chunk * 256 + L * j, width, PADDED)
            part = tl.load(x_at + chunk * 256 + L * j, mask=mask[None, :], other=0.0)
            acc = tl.dot(number.to(x.dtype.element_ty), part, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["n_rows", "n_splits", "splits_each"])
def packed_gemm_kernel(
    x, codes, high, scales, steps, out, n_rows, n_out, n_chunks, n_splits, splits_each, width,
    KIND: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, s, k): BN columns of the product of BM rows of x with one matrix, in ``splits_each`` of the splits of
    its chunks, summed in order, to ``out`` [n_splits / splits_each, n_rows, n_out].
    """
    wait_for_inputs(PDL)
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    row_mask = rows < n_rows
    inside = (columns < n_out)[:, None] & row_mask[None, :]
    total = tl.zeros([BN, BM], tl.float32)
    for split in range(tl.program_id(2) * splits_each, (tl.program_id(2) + 1) * splits_each):
        begin, end = split * n_chunks // n_splits, (split + 1) * n_chunks // n_splits
        total += _multiply(
            x, codes, high, scales, steps, 0, columns, rows, row_mask, begin, end, n_chunks, n_out, width,
            KIND, TILE, BM, BN, PADDED,
        )  # fmt: skip
    out += tl.program_id(2).to(tl.int64) * n_rows * n_out
    tl.store(out + rows[None, :] * n_out + columns[:, None], total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """How :func:`packed_grouped_gemm` is launched: tile rows and columns, warps, pipeline stages, and the number of
    programs that share an expert's rows.
    """

    rows: int
    columns: int
    n_warps: int
    n_stages: int
    programs_per_expert: int


def grouped_gemm_config(n_pairs: int, n_experts: int) -> GroupedGemmConfig:
    """The fastest tile on an H200 (bench/results/grouped-h200.txt): twice an expert's average rows, at most 64."""
    rows = next((rows for rows in (16, 32) if 2 * n_pairs <= rows * n_experts), 64)
    return GroupedGemmConfig(rows, 64, 4, 2, 2)


def packed_grouped_gemm(
    packed: PackedWeights,
    x: Tensor,
    pairs: ExpertPairs,
    pairs_per_row: int,
    config: GroupedGemmConfig | None = None,
) -> Tensor:
    """Row p // pairs_per_row of x [T, K] times the matrix of pair p's expert, for all pairs: [P, N] of x's dtype.

    ``packed``: matrices [X, N, *].
    """
    assert x.is_contiguous()
    kind, n_experts, n_out = packed.kind.name, packed.tiles.shape[0], packed.n_rows
    width = x.shape[1]
    config = config or grouped_gemm_config(len(pairs), n_experts)
    out = x.new_empty(len(pairs), n_out)
    sorted_pairs, offsets = pairs.sorted_by_expert
    grouped_gemm_kernel[(triton.cdiv(n_out, config.columns), n_experts, config.programs_per_expert)](
        x, packed.codes, packed.high, packed.scales, packed.steps, sorted_pairs, offsets, out,
        n_out, packed.n_chunks, width, pairs_per_row,
        KIND=kind, TILE=tile_bytes(kind), BM=config.rows, BN=config.columns, PADDED=width % CHUNK != 0,
        num_warps=config.n_warps, num_stages=config.n_stages,
    )  # fmt: skip
    return out


def packed_gemm(packed: PackedWeights, x: Tensor, config: GroupedGemmConfig) -> Tensor:
    """``x [T, K] W'`` -> [T, N] of x's dtype, for any T; with one ``config`` a row's bits depend on that row alone.

    The splits of the inner dimension depend on the matrix alone.  Few rows compute them in parallel, many in turn; for
    these, tiles of dequantised rows have the same sums.
    """
    assert x.is_contiguous()
    kind, n_out, (n_rows, width) = packed.kind.name, packed.n_rows, x.shape
    out = x.new_empty(n_rows, n_out)
    n_columns = triton.cdiv(n_out, config.columns)
    n_splits = fixed_splits(n_columns, packed.n_chunks)
    if n_rows > MAX_PACKED_ROWS:
        step = max(config.columns, DEQUANT_ELEMENTS // (packed.n_chunks * CHUNK) // config.columns * config.columns)
        for at in range(0, n_out, step):
            weight = dequantise_packed(packed, x.dtype, at, min(step, n_out - at)).narrow(1, 0, width)
            dense_gemm(x, weight, out[:, at : at + step], n_splits=n_splits)
        return out
    splits_each = 1 if n_rows <= MAX_SPLIT_ROWS else n_splits
    parts = split_buffer(out, n_splits // splits_each)
    packed_gemm_kernel[(n_columns, triton.cdiv(n_rows, config.rows), n_splits // splits_each)](
        x, packed.codes, packed.high, packed.scales, packed.steps, parts,
        n_rows, n_out, packed.n_chunks, n_splits, splits_each, width,
        KIND=kind, TILE=tile_bytes(kind), BM=config.rows, BN=config.columns, PADDED=width % CHUNK != 0,
        num_warps=config.n_warps, num_stages=config.n_stages, **dependent_launch(x.device),
    )  # fmt: skip
    reduce_splits(parts, out)
    return out
