"""Packed weights to plain numbers, bit for bit those of ``daemons.weights.dequant``: the operand of a library gemm, or
rows of a table by their ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.triton.codes import (
    dequantise_codebook,
    dequantise_q4,
    dequantise_q4_k,
    dequantise_q6_k,
    fifth_bits,
    load_d_dmin,
    spread_bits,
    upper_bits,
)
from daemons.weights.packed import PackedWeights, tile_bytes
from lucevisor.model.quant_types import CHUNK


@triton.jit(do_not_specialize=["first_row", "n_rows"])
def dequantise_kernel(
    codes, high, scales, steps, ids, out, first_row, n_rows, n_chunks,
    KIND: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (i, chunk): BN rows from ``first_row`` on, one chunk of 256 columns.  ``out`` [n_rows, n_chunks 256].

    With ``ids`` [n_rows] the rows that these name, instead of those from ``first_row`` on.
    """
    L: tl.constexpr = 16 if KIND == "Q6_K" else 32
    HAS_FIFTH_BIT: tl.constexpr = KIND == "Q5_K" or KIND == "Q5_0" or KIND == "Q5_1"
    K_QUANT: tl.constexpr = KIND == "Q4_K" or KIND == "Q5_K"
    CODEBOOK: tl.constexpr = KIND == "IQ4_NL" or KIND == "IQ4_XS" or KIND == "MXFP4"
    chunk = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    out_row = tl.minimum(row, n_rows - 1).to(tl.int64)
    weight_row = first_row + out_row if ids is None else tl.load(ids + out_row)
    tile = weight_row // 16 * n_chunks + chunk
    tile_row = weight_row % 16
    words_at, halves_at = tile * (TILE // 4), tile * (TILE // 2)
    element = tl.arange(0, L)[None, :]
    pair = tl.arange(0, L // 2)[None, :]
    to = out + (out_row * n_chunks + chunk)[:, None] * 256 + element
    inside = (row < n_rows)[:, None] & (element >= 0)
    kind = out.dtype.element_ty
    if KIND == "Q8_0":
        for j in tl.static_range(8):
            code = tl.load(codes + (tile * TILE + tile_row * 32)[:, None] + 512 * j + element).to(tl.float32)
            scale = tl.load(steps + halves_at + tile_row * 8 + j).to(tl.float32)
            tl.store(to + 32 * j, (scale[:, None] * code).to(kind), mask=inside)
    elif KIND == "Q6_K":
        d = tl.load(steps + halves_at + tile_row).to(tl.float32)
        word_at = (words_at + tile_row * 8)[:, None] + pair
        for g in tl.static_range(2):
            bits = tl.load(high + word_at + 128 * g)
            for i in tl.static_range(8):
                if i % 4 == 0:
                    words = tl.load(codes + word_at + 256 * g + 32 * i)
                    four = tl.load(scales + words_at + tile_row * 4 + 2 * g + i // 4)
                number = dequantise_q6_k(((words >> (4 * (i % 4))) & 0x000F000F) | upper_bits(bits, i), four, d, i, BN)
                tl.store(to + 128 * g + 16 * i, number.to(kind), mask=inside)
    else:
        if HAS_FIFTH_BIT:
            bits = spread_bits(tl.load(high + (halves_at + tile_row * 16)[:, None] + pair))
        if K_QUANT:
            d_dmin = load_d_dmin(scales + words_at + tile_row * 4)
        for j in tl.static_range(8):
            if j % 4 == 0:
                words = tl.load(codes + (words_at + tile_row * 16)[:, None] + 64 * j + pair)
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
            tl.store(to + 32 * j, number.to(kind), mask=inside)


def dequantise_packed(
    packed: PackedWeights, dtype: torch.dtype, first_row: int = 0, n_rows: int | None = None
) -> Tensor:
    """``n_rows`` rows of a packed matrix, ``[n_rows, K]`` from ``first_row`` on; K is padded to whole chunks of 256."""
    n_rows = packed.n_rows if n_rows is None else n_rows
    return _launch(packed, dtype, None, first_row, n_rows)


def lookup_packed(packed: PackedWeights, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ``ids`` [n] int64 of a packed matrix, ``[n, K]``; K is padded to whole chunks of 256."""
    return _launch(packed, dtype, ids, 0, ids.shape[0])


def _launch(packed: PackedWeights, dtype: torch.dtype, ids: Tensor | None, first_row: int, n_rows: int) -> Tensor:
    kind, n_chunks = packed.kind.name, packed.n_chunks
    out = torch.empty(n_rows, n_chunks * CHUNK, dtype=dtype, device=packed.tiles.device)
    dequantise_kernel[(triton.cdiv(n_rows, 8), n_chunks)](
        packed.codes, packed.high, packed.scales, packed.steps, ids, out, first_row, n_rows, n_chunks,
        KIND=kind, TILE=tile_bytes(kind), BN=8, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
