"""Grouped GEMM of MoE: many rows by the packed matrices (``daemons.weights.packed``) of their experts.

Pairs of row and expert are sorted by expert, and some programs are started for each expert, which find its pairs on the
device: nobody waits for it.  A matrix is expanded group by group on the way to the matrix units, with the arithmetic
and the rounding of ``daemons.weights.dequant``.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.triton.codes import (
    column_mask,
    dequantise_q4,
    dequantise_q4_k,
    dequantise_q6_k,
    fifth_bits,
    load_d_dmin,
    spread_bits,
    upper_bits,
)
from daemons.weights.packed import PackedWeights
from lucevisor.model.quant_types import CHUNK, GgmlType, padded_columns


@triton.jit(do_not_specialize=["pairs_per_row"])
def grouped_gemm_kernel(
    x, codes, high, scales, steps, sorted_pairs, offsets, out, n_out, n_chunks, width, pairs_per_row,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (i, e, s): BN columns of the products of expert e with its pairs s BM .., in strides of all s.

    ``out`` [pairs, n_out], in the order of the pairs.
    """
    expert = tl.program_id(1).to(tl.int64)
    stop = tl.load(offsets + expert + 1)
    place = tl.load(offsets + expert) + tl.program_id(2) * BM
    while place < stop:
        _gemm_tile(
            x, codes, high, scales, steps, sorted_pairs, out,
            n_out, n_chunks, width, pairs_per_row, expert, place, stop, KIND, BM, BN, PADDED,
        )  # fmt: skip
        place += tl.num_programs(2) * BM


@triton.jit
def _gemm_tile(
    x, codes, high, scales, steps, sorted_pairs, out, n_out, n_chunks, width, pairs_per_row, expert, place, stop,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """The products of up to BM pairs from ``place`` on, before ``stop``."""
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    HAS_SUPER_MIN: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(columns, n_out - 1).to(tl.int64) + expert * n_out
    places = place + tl.arange(0, BM)
    row_mask = places < stop
    to = tl.load(sorted_pairs + places, mask=row_mask, other=0)
    x_at = x + (to // pairs_per_row)[None, :] * width + tl.arange(0, L)[:, None]
    element = tl.arange(0, L)[None, :]
    pair = tl.arange(0, L // 2)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for chunk in range(n_chunks):
        at = weight_row * n_chunks + chunk
        if KIND == "Q6_K":
            d = tl.load(steps + at).to(tl.float32)
        elif KIND != "Q8_0":
            if HAS_FIFTH_BIT:
                bits = spread_bits(tl.load(high + at[:, None] * 16 + pair))
            if HAS_SUPER_MIN:
                d_dmin = load_d_dmin(scales + at * 4)
        for j in tl.static_range(256 // L):
            if KIND == "Q8_0":
                code = tl.load(codes + at[:, None] * 256 + 32 * j + element).to(tl.float32)
                number = tl.load(steps + at * 8 + j).to(tl.float32)[:, None] * code
            elif KIND == "Q6_K":
                if j % 8 == 0:
                    bits = tl.load(high + at[:, None] * 16 + j + pair)
                if j % 4 == 0:
                    words = tl.load(codes + at[:, None] * 32 + 2 * j + pair)
                    four = tl.load(scales + at * 4 + j // 4)
                number = dequantise_q6_k(
                    ((words >> (4 * (j % 4))) & 0x000F000F) | upper_bits(bits, j % 8), four, d, j, BN
                )
            else:
                if j % 4 == 0:
                    words = tl.load(codes + at[:, None] * 32 + 4 * j + pair)
                both = (words >> (4 * (j % 4))) & 0x000F000F
                if HAS_FIFTH_BIT:
                    both |= fifth_bits(bits, j)
                if HAS_SUPER_MIN:
                    number = dequantise_q4_k(both, tl.load(scales + at * 4 + j // 2), d_dmin, j, BN)
                else:
                    number = dequantise_q4(both, tl.load(steps + at * 8 + j), KIND, BN)
            mask = column_mask(row_mask, chunk * 256 + L * j, width, PADDED)
            part = tl.load(x_at + chunk * 256 + L * j, mask=mask[None, :], other=0.0)
            acc = tl.dot(number.to(x.dtype.element_ty), part, acc, input_precision="ieee")
    inside = (columns < n_out)[:, None] & row_mask[None, :]
    tl.store(out + to[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """How :func:`packed_grouped_gemm` is launched: tile rows and columns, warps, pipeline stages, and the number of
    programs that share an expert's rows.
    """

    rows: int
    columns: int
    n_warps: int
    n_stages: int
    n_sharing: int


def grouped_gemm_config(n_pairs: int, n_experts: int) -> GroupedGemmConfig:
    """The launch for so many pairs: twice the rows that an expert has on average, or 64 (bench/results)."""
    rows = next((rows for rows in (16, 32) if 2 * n_pairs <= rows * n_experts), 64)
    return GroupedGemmConfig(rows, 64, 4, 2, 2)


def packed_grouped_gemm(
    kind: GgmlType,
    packed: PackedWeights,
    x: Tensor,
    routes: ExpertPairs,
    pairs_per_row: int,
    config: GroupedGemmConfig | None = None,
) -> Tensor:
    """``[P, N]`` of x's dtype: row p // share of x [T, K] times the matrix of pair p's expert; ``packed`` [X, N, *]."""
    assert x.is_contiguous()
    n_experts, n_out = packed.codes.shape[:2]
    width = x.shape[1]
    config = config or grouped_gemm_config(len(routes), n_experts)
    out = x.new_empty(len(routes), n_out)
    sorted_pairs, offsets = routes.sorted
    grouped_gemm_kernel[(triton.cdiv(n_out, config.columns), n_experts, config.n_sharing)](
        x, packed.codes, packed.high, packed.scales, packed.steps, sorted_pairs, offsets, out,
        n_out, padded_columns(width) // CHUNK, width, pairs_per_row,
        KIND=kind.name, BM=config.rows, BN=config.columns, PADDED=width % CHUNK != 0,
        num_warps=config.n_warps, num_stages=config.n_stages,
    )  # fmt: skip
    return out
