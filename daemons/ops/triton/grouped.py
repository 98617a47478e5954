"""Products of many rows with the matrices of the experts they are routed to, packed (``daemons.weights.packed``).

Pairs of row and expert are sorted by expert, and some programs are started for each expert, which find its pairs on the
device: nobody waits for it.  A matrix is expanded group by group on the way to the matrix units, with the arithmetic
and the rounding of ``daemons.weights.dequant``.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.routes import Routes
from daemons.ops.triton.codes import fifth_of, inside_of, load_ends, of_nested, of_q6, of_simple, spread, upper_of
from daemons.weights.packed import PackedWeights
from lucevisor.model.quant_types import CHUNK, GgmlType, padded_columns


@triton.jit(do_not_specialize=["share"])
def _grouped(
    x, codes, high, scales, steps, order, bounds, out, n_out, n_chunks, width, share,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """Program (i, e, s): BN columns of the products of expert e with its pairs s BM .., in strides of all s.

    ``out`` [pairs, n_out], in the order of the pairs.
    """
    expert = tl.program_id(1).to(tl.int64)
    stop = tl.load(bounds + expert + 1)
    place = tl.load(bounds + expert) + tl.program_id(2) * BM
    while place < stop:
        _tile(
            x, codes, high, scales, steps, order, out, n_out, n_chunks, width, share, expert, place, stop,
            KIND, BM, BN, FILLED,
        )  # fmt: skip
        place += tl.num_programs(2) * BM


@triton.jit
def _tile(
    x, codes, high, scales, steps, order, out, n_out, n_chunks, width, share, expert, place, stop,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    """The products of up to BM pairs from ``place`` on, before ``stop``."""
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    FIFTH: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    NESTED: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    kept = tl.minimum(columns, n_out - 1).to(tl.int64) + expert * n_out
    places = place + tl.arange(0, BM)
    here = places < stop
    to = tl.load(order + places, mask=here, other=0)
    x_at = x + (to // share)[None, :] * width + tl.arange(0, L)[:, None]
    element = tl.arange(0, L)[None, :]
    pair = tl.arange(0, L // 2)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for chunk in range(n_chunks):
        at = kept * n_chunks + chunk
        if KIND == "Q6_K":
            d = tl.load(steps + at).to(tl.float32)
        elif KIND != "Q8_0":
            if FIFTH:
                bits = spread(tl.load(high + at[:, None] * 16 + pair))
            if NESTED:
                ends = load_ends(scales + at * 4)
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
                number = of_q6(((words >> (4 * (j % 4))) & 0x000F000F) | upper_of(bits, j % 8), four, d, j, BN)
            else:
                if j % 4 == 0:
                    words = tl.load(codes + at[:, None] * 32 + 4 * j + pair)
                both = (words >> (4 * (j % 4))) & 0x000F000F
                if FIFTH:
                    both |= fifth_of(bits, j)
                if NESTED:
                    number = of_nested(both, tl.load(scales + at * 4 + j // 2), ends, j, BN)
                else:
                    number = of_simple(both, tl.load(steps + at * 8 + j), KIND, BN)
            there = inside_of(here, chunk * 256 + L * j, width, FILLED)
            part = tl.load(x_at + chunk * 256 + L * j, mask=there[None, :], other=0.0)
            acc = tl.dot(number.to(x.dtype.element_ty), part, acc, input_precision="ieee")
    inside = (columns < n_out)[:, None] & here[None, :]
    tl.store(out + to[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class GroupedShape:
    """How :func:`grouped` is launched: rows and columns of a product, its warps, stages of its loop, and programs that
    share the rows of an expert.
    """

    rows: int
    columns: int
    n_warps: int
    n_stages: int
    n_sharing: int


def grouped_shape(n_pairs: int, n_experts: int) -> GroupedShape:
    """The launch for so many pairs: twice the rows that an expert has on average, or 64 (bench/results)."""
    rows = next((rows for rows in (16, 32) if 2 * n_pairs <= rows * n_experts), 64)
    return GroupedShape(rows, 64, 4, 2, 2)


def grouped(
    kind: GgmlType, packed: PackedWeights, x: Tensor, routes: Routes, share: int, how: GroupedShape | None = None
) -> Tensor:
    """``[P, N]`` of x's dtype: row p // share of x [T, K] times the matrix of pair p's expert; ``packed`` [X, N, *]."""
    assert x.is_contiguous()
    n_experts, n_out = packed.codes.shape[:2]
    width = x.shape[1]
    how = how or grouped_shape(len(routes), n_experts)
    out = x.new_empty(len(routes), n_out)
    order, bounds = routes.sorted
    _grouped[(triton.cdiv(n_out, how.columns), n_experts, how.n_sharing)](
        x, packed.codes, packed.high, packed.scales, packed.steps, order, bounds, out,
        n_out, padded_columns(width) // CHUNK, width, share,
        KIND=kind.name, BM=how.rows, BN=how.columns, FILLED=width % CHUNK != 0,
        num_warps=how.n_warps, num_stages=how.n_stages,
    )  # fmt: skip
    return out
