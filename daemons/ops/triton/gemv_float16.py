"""GEMV in float16 for Q4_K and Q5_K.  Their group scales are integers, so code x scale is exact in float16.

The matrix units therefore sum a whole chunk of 256 at once.  One fused multiply-add turns the float16 1024 + code (or
1024 + 16 code, which saves a shift) into code x scale; minima are a second product, with group sums of x.  x is scaled
to float16 by a power of two per chunk and row: exact except for numbers 2^25 times smaller than the chunk's largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.codes import bitcast_float16, d_dmin_of, fifth_bits, low_float16, spread_bits
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from daemons.ops.triton.split_k import GemvConfig, GemvTile, gemv_config, reduce_splits, rows_per_program, split_buffer
from daemons.weights.packed import PackedWeights, tile_bytes
from lucevisor.model.quant_types import CHUNK

FLOAT16_KINDS = frozenset({"Q4_K", "Q5_K"})
"""Quant types with integer group scales and minima."""
PREPARE_ROWS = 8
"""Rows per program of :func:`gemv_float16_prepare_kernel`."""


@triton.jit
def _half(word):
    """The float16 in the low half of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _fma_half2(a, b, c, HALF: tl.constexpr, FMA: tl.constexpr):
    """``a b + c`` of the float16 numbers in both halves of words, rounded once.

    HALF: 0 or 1 uses that half of b and c for both, 2 each half its own.  FMA: see :func:`fma_backend`.
    """
    if FMA == "ptx":  # from halves as two tensors the compiler makes the same fma, and two swaps
        picked: tl.constexpr = (
            "{.reg .b16 l, h, m, i; .reg .b32 s, t; mov.b32 {l, h}, $2; mov.b32 {m, i}, $3; "
            + ("mov.b32 s, {l, l}; mov.b32 t, {m, m};" if HALF == 0 else "mov.b32 s, {h, h}; mov.b32 t, {i, i};")
            + " fma.rn.f16x2 $0, $1, s, t;}"
        )
        asm: tl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if HALF == 2 else picked
        return tl.inline_asm_elementwise(asm, "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1)
    else:
        b0 = _half(b >> 16 if HALF == 1 else b)
        c0 = _half(c >> 16 if HALF == 1 else c)
        b1 = _half(b if HALF == 0 else b >> 16)
        c1 = _half(c if HALF == 0 else c >> 16)
        if FMA == "llvm":
            low = tl.fma(_half(a), b0, c0)
            high = tl.fma(_half(a >> 16), b1, c1)
        else:
            low = (_half(a).to(tl.float32) * b0.to(tl.float32) + c0.to(tl.float32)).to(tl.float16)
            high = (_half(a >> 16).to(tl.float32) * b1.to(tl.float32) + c1.to(tl.float32)).to(tl.float16)
        return (low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) | (
            high.to(tl.int16, bitcast=True).to(tl.int32) << 16
        )


@triton.jit
def _group_scales(word, BN: tl.constexpr, FMA: tl.constexpr):
    """A word's two group scales as float16 [BN], the odd one over 16, and their products with the codes' bias -1024."""
    both = (word & 0x003F003F) | 0x64006400  # 1024 + scale
    one = tl.full([BN], 0x2C003C00, tl.int32)  # 1 and 1/16
    scale = _fma_half2(both, one, tl.full([BN], -0x2BFF1C00, tl.int32), 2, FMA)
    less = tl.full([BN], -0x1BFF1C00, tl.int32)  # -1024 twice
    return scale, _fma_half2(scale, less, tl.zeros([BN], tl.int32), 2, FMA)


@triton.jit
def _dot_minima(scale_at, total, BN: tl.constexpr, FMA: tl.constexpr):
    """[BN, BM]: a chunk's eight minima times ``total`` [16, BM], the group sums of x and their rounding errors."""
    eight = (tl.arange(0, 8) % 4)[None, :]
    minima = ((tl.load(scale_at[:, None] + eight) >> 6) & 0x003F003F) | 0x64006400
    unit = tl.full([BN, 8], 0x3C003C00, tl.int32)
    minima = _fma_half2(minima, unit, tl.full([BN, 8], -0x1BFF1C00, tl.int32), 2, FMA)
    return tl.dot(bitcast_float16(minima, BN, 16), total)


@triton.jit(do_not_specialize=["n_rows", "n_splits", "pairs_per_row"])
def gemv_float16_kernel(
    x, factors, totals, codes, high, scales, experts, out, n_rows, n_out, n_chunks, n_splits, pairs_per_row,
    KIND: tl.constexpr, TILE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As ``gemv_kernel``, for ``x``, ``factors`` and ``totals`` from :func:`gemv_float16_prepare_kernel`."""
    wait_for_inputs(PDL)
    WIDTH: tl.constexpr = BM if experts is None else 1
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = tl.minimum(columns, n_out - 1)
    first_tile, tile_row = (weight_row // 16).to(tl.int64), weight_row % 16
    m = tl.arange(0, BM)
    if experts is None:
        row_mask, row, sum_row, out_row = m < n_rows, m, m, m
    else:
        z = tl.program_id(2)
        row_mask, row, sum_row, out_row = m == 0, z // pairs_per_row + m * 0, m * 0, z + m * 0
        factors += (z // pairs_per_row) * n_chunks
        totals += (z // pairs_per_row) * n_chunks * 16
        first_tile += tl.load(experts + z) * tl.cdiv(n_out, 16)
    x_at = x + row[None, :].to(tl.int64) * (n_chunks * 256) + tl.arange(0, 32)[:, None]
    total_at = totals + tl.arange(0, 16)[:, None] + sum_row[None, :] * 16
    pair = tl.arange(0, 16)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    split = tl.program_id(1)
    for chunk in range(split * n_chunks // n_splits, (split + 1) * n_chunks // n_splits):
        tile = first_tile * n_chunks + chunk
        scale_at = scales + tile * (TILE // 4) + tile_row * 4
        xs = x_at + chunk * 256
        inner = tl.zeros([BN, BM], tl.float32)
        first = tl.load(scale_at)
        second = tl.load(scale_at + 1)
        third = tl.load(scale_at + 2)
        fourth = tl.load(scale_at + 3)
        if KIND == "Q5_K":
            bits = spread_bits(tl.load(high + (tile * (TILE // 2) + tile_row * 16)[:, None] + pair))
        for h in tl.static_range(2):
            words = tl.load(codes + (tile * (TILE // 4) + tile_row * 16)[:, None] + 256 * h + pair)
            for i in tl.static_range(4):
                if i % 2 == 0:
                    word = (first if i == 0 else second) if h == 0 else third if i == 0 else fourth
                    scale, base = _group_scales(word, BN, FMA)
                    code = ((words >> (4 * i)) & 0x000F000F) | 0x64006400
                else:
                    code = ((words >> (4 * i - 4)) & 0x00F000F0) | 0x64006400
                if KIND == "Q5_K":
                    code |= fifth_bits(bits, 4 * h + i, 4 if i % 2 == 0 else 8)
                scaled = _fma_half2(
                    code, scale[:, None].broadcast_to([BN, 16]), base[:, None].broadcast_to([BN, 16]), i % 2, FMA
                )
                mask = tl.load(xs + 128 * h + 32 * i, mask=row_mask[None, :], other=0.0)
                inner = tl.dot(bitcast_float16(scaled, BN, 32), mask, inner)
        total = tl.load(total_at + chunk * (16 * WIDTH), mask=row_mask[None, :], other=0.0)
        low = _dot_minima(scale_at, total, BN, FMA)
        d_dmin = d_dmin_of(first, second, third, fourth)
        factor = tl.load(factors + chunk * WIDTH + sum_row, mask=row_mask, other=0.0)
        acc += factor[None, :] * (low_float16(d_dmin)[:, None] * inner - low_float16(d_dmin >> 16)[:, None] * low)
    to_row = split * n_rows + out_row.to(tl.int64)
    inside = (columns < n_out)[:, None] & row_mask[None, :]
    tl.store(out + to_row[None, :] * n_out + columns[:, None], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def gemv_float16_prepare_kernel(
    x, numbers, factors, totals, n_rows, n_chunks, width, BM: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr
):
    """Program (c, r): scale chunk c of ROWS rows of x [T, width] to float16.

    Writes ``numbers`` float16 [T, n_chunks 256], x over its factor; and for blocks of BM rows ``factors`` float32
    [blocks, n_chunks, BM], powers of two, and ``totals`` float16 [blocks, n_chunks, BM, 16]: sums of numbers over the
    eight groups of 32, then their rounding errors.
    """
    wait_for_inputs(PDL)
    chunk = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 256)[None, :]
    mask = (row < n_rows)[:, None]
    inside = mask & (chunk * 256 + column < width)
    value = tl.load(x + row[:, None].to(tl.int64) * width + chunk * 256 + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=1)
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 10), 254)
    value *= ((263 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # the largest is in [512, 1024) now
    tl.store(
        numbers + row[:, None].to(tl.int64) * (n_chunks * 256) + chunk * 256 + column, value.to(tl.float16), mask=mask
    )
    place = (row // BM * n_chunks + chunk) * BM
    tl.store(factors + place + row % BM, ((exponent - 9) << 23).to(tl.float32, bitcast=True), mask=row < n_rows)
    total = tl.sum(value.reshape([ROWS, 8, 32]), axis=2)
    rounded = total.to(tl.float16)
    at = (place + row % BM)[:, None] * 16 + tl.arange(0, 8)[None, :]
    tl.store(totals + at, rounded, mask=mask)
    tl.store(totals + at + 8, (total - rounded.to(tl.float32)).to(tl.float16), mask=mask)


def fma_backend(device: torch.device) -> str:
    """How a device fuses two float16 multiply-adds: "ptx", "llvm", or "" in the interpreter, which has none."""
    return "" if device.type == "cpu" else "llvm" if torch.version.hip else "ptx"


def float16_tile(block_rows: int) -> GemvTile:
    """The fastest tile measured on an H200, by rows of x per program."""
    if block_rows == 1:
        return GemvTile(32, 1, 2)
    return GemvTile(64, 2, 2) if block_rows <= 16 else GemvTile(128, 4, 3)


def packed_gemv_float16(
    packed: PackedWeights,
    x: Tensor,
    experts: Tensor | None,
    pairs_per_row: int,
    config: GemvConfig | None,
) -> Tensor:
    """See :func:`daemons.ops.triton.gemv.packed_gemv`; x is float16 or bfloat16."""
    n_rows, width = x.shape
    kind, n_out, n_chunks = packed.kind.name, packed.n_rows, packed.n_chunks
    block_rows = rows_per_program(n_rows, experts)
    blocks = triton.cdiv(n_rows, block_rows)
    numbers = torch.empty(n_rows, n_chunks * CHUNK, dtype=torch.float16, device=x.device)
    factors = torch.empty(blocks, n_chunks, block_rows, dtype=torch.float32, device=x.device)
    totals = torch.empty(blocks, n_chunks, block_rows, 16, dtype=torch.float16, device=x.device)
    gemv_float16_prepare_kernel[(n_chunks, triton.cdiv(n_rows, PREPARE_ROWS))](
        *(x, numbers, factors, totals, n_rows, n_chunks, width),
        BM=block_rows,
        ROWS=PREPARE_ROWS,
        num_warps=4,
        **dependent_launch(x.device),
    )
    n_deep = 1 if experts is None else experts.shape[0]
    n_results = n_rows if experts is None else n_deep
    config = config or gemv_config(float16_tile(block_rows), n_deep, n_out, n_chunks, x.device)
    out = x.new_empty(n_results, n_out)
    parts = split_buffer(out, config.n_splits)
    gemv_float16_kernel[(triton.cdiv(n_out, config.columns), config.n_splits, n_deep)](
        numbers, factors, totals, packed.codes, packed.high, packed.scales, experts, parts,
        n_results, n_out, n_chunks, config.n_splits, pairs_per_row,
        KIND=kind, TILE=tile_bytes(kind), BM=max(block_rows, 8), BN=config.columns, FMA=fma_backend(x.device),
        num_warps=config.n_warps, num_stages=config.n_stages, **dependent_launch(x.device),
    )  # fmt: skip
    reduce_splits(parts, out)
    return out
