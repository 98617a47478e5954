"""Quant blocks of the file to packed weights in one launch, bit for bit ``PackedWeights.write``.

A load beside a replay waits for multiprocessors at each launch.  Blocks are read in half words of two bytes, of which
every quant type but MXFP4 has a whole number; where blocks begin is not aligned to more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from daemons.weights.packed import PackedWeights, tile_bytes

ROWS = 32
"""Rows of the file per program."""
INTERPRETED_ROWS = 256
"""The same in Triton's interpreter, which takes as long for many rows as for few."""


@triton.jit
def load_halves(row, at, left, inside):
    """Half words ``at`` of a chunk as int32; zero from ``left`` on, where the row of the file ends."""
    return tl.load(row + at, mask=inside & (at < left), other=0).to(tl.int32) & 0xFFFF


@triton.jit
def load_bytes(row, at, left, inside):
    """Bytes ``at`` of a chunk as int32, as :func:`load_halves` does."""
    return tl.load(row + at, mask=inside & (at < left), other=0).to(tl.int32) & 0xFF


@triton.jit
def spread_bytes(half):
    """Move the two bytes of a half word to bits 0..7 and 16..23."""
    return (half | (half << 8)) & 0x00FF00FF


@triton.jit
def spread_pairs(half):
    """Move the eight pairs of bits of a half word to the low halves of eight nibbles."""
    both = spread_bytes(half)
    both = (both | (both << 4)) & 0x0F0F0F0F
    return (both | (both << 2)) & 0x33333333


@triton.jit
def nibble_words(row, at, STEP: tl.constexpr, left, inside):
    """Words of codes from four half words, ``STEP`` apart: of their low nibbles, and of their high ones."""
    low, high = at * 0, at * 0
    for i in tl.static_range(4):
        both = spread_bytes(load_halves(row, at + STEP * i, left, inside))
        low |= (both & 0x000F000F) << (4 * i)
        high |= ((both >> 4) & 0x000F000F) << (4 * i)
    return low, high


@triton.jit
def nibble_words_of_bytes(row, at, STEP: tl.constexpr, left, inside):
    """The same from four pairs of bytes, ``STEP`` bytes apart."""
    low, high = at * 0, at * 0
    for i in tl.static_range(4):
        first = load_bytes(row, at + STEP * i, left, inside)
        both = first | (load_bytes(row, at + STEP * i + 1, left, inside) << 16)
        low |= (both & 0x000F000F) << (4 * i)
        high |= ((both >> 4) & 0x000F000F) << (4 * i)
    return low, high


@triton.jit
def k_scale_words(row, left, inside):
    """The four words of scales of a Q4_K or Q5_K block."""
    word = tl.arange(0, 4)[None, :]
    pair = word % 2
    first = word < 2  # groups 0 to 3, whose scales and minima are bits 0 to 5 of a byte
    scales = spread_bytes(load_halves(row, 2 + pair, left, inside))
    minima = spread_bytes(load_halves(row, 4 + pair, left, inside))
    rest = spread_bytes(load_halves(row, 6 + pair, left, inside))
    scale = tl.where(first, scales & 0x003F003F, (rest & 0x000F000F) | ((scales >> 2) & 0x00300030))
    minimum = tl.where(first, minima & 0x003F003F, ((rest >> 4) & 0x000F000F) | ((minima >> 2) & 0x00300030))
    d = (load_halves(row, word * 0, left, inside) >> (4 * word)) & 15
    dmin = (load_halves(row, word * 0 + 1, left, inside) >> (4 * word)) & 15
    return scale | (minimum << 6) | (d << 12) | (dmin << 28)


# Long: the layouts of all quant types
@triton.jit(do_not_specialize=["first", "n_raw", "width", "n_rows", "n_tiles", "n_chunks"])
def repack_kernel(
    raw, codes, high, scales, steps, first, n_raw, width, n_rows, n_tiles, n_chunks,
    KIND: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program: ROWS rows of ``raw`` [n_raw, width] int16, one chunk of 256 columns.

    They are the rows from ``first`` on of matrices of ``n_rows`` rows and ``n_tiles`` times ``n_chunks`` tiles each.
    """
    chunk = tl.program_id(0) % n_chunks
    raw_row = tl.program_id(0) // n_chunks * ROWS + tl.arange(0, ROWS)
    inside = (raw_row < n_raw)[:, None]
    to = first + raw_row
    tile_row = (to % n_rows % 16)[:, None]
    tile = (to // n_rows * n_tiles + to % n_rows // 16).to(tl.int64)[:, None] * n_chunks + chunk
    words_at, halves_at = tile * (TILE // 4), tile * (TILE // 2)
    HALVES: tl.constexpr = TILE // 32  # of a row in a chunk
    row = raw + (raw_row.to(tl.int64) * width)[:, None] + chunk * HALVES
    left = width - chunk * HALVES
    sixteen, eight, four = tl.arange(0, 16)[None, :], tl.arange(0, 8)[None, :], tl.arange(0, 4)[None, :]

    if KIND == "Q4_K" or KIND == "Q5_K":
        tl.store(scales + words_at + tile_row * 4 + four, k_scale_words(row, left, inside), mask=inside)
        if KIND == "Q5_K":
            bits = load_halves(row, 8 + sixteen, left, inside)
            tl.store(high + halves_at + tile_row * 16 + sixteen, bits.to(tl.int16), mask=inside)
        for h in tl.static_range(2):
            at = HALVES - 64 + 32 * h + sixteen
            even = spread_bytes(load_halves(row, at, left, inside))  # groups 4 h and 4 h + 1, in low and high nibbles
            odd = spread_bytes(load_halves(row, at + 16, left, inside))  # the two behind
            tl.store(codes + words_at + 256 * h + tile_row * 16 + sixteen, even | (odd << 8), mask=inside)
    elif KIND == "Q6_K":
        at_8 = words_at + tile_row * 8 + eight
        for g in tl.static_range(2):
            low_words, high_words = nibble_words(row, 32 * g + eight, 8, left, inside)
            tl.store(codes + at_8 + 256 * g, low_words, mask=inside)
            tl.store(codes + at_8 + 256 * g + 128, high_words, mask=inside)
            even = spread_pairs(load_halves(row, 64 + 16 * g + eight, left, inside))
            odd = spread_pairs(load_halves(row, 72 + 16 * g + eight, left, inside))
            tl.store(high + at_8 + 128 * g, even | (odd << 2), mask=inside)
        word = load_halves(row, 96 + 2 * four, left, inside) | (load_halves(row, 97 + 2 * four, left, inside) << 16)
        tl.store(scales + words_at + tile_row * 4 + four, word, mask=inside)
        d = load_halves(row, tile_row * 0 + 104, left, inside)
        tl.store(steps + halves_at + tile_row, d.to(tl.int16).to(tl.float16, bitcast=True), mask=inside)
    elif KIND == "MXFP4":
        single = row.to(tl.pointer_type(tl.uint8))
        e = load_bytes(single, 17 * eight, 2 * left, inside)
        tl.store(steps + tile * TILE + tile_row * 8 + eight, e.to(tl.uint8), mask=inside)
        for h in tl.static_range(2):
            low_words, high_words = nibble_words_of_bytes(single, 68 * h + 1 + 2 * eight, 17, 2 * left, inside)
            to_words = codes + words_at + 256 * h + tile_row * 16 + eight
            tl.store(to_words, low_words, mask=inside)
            tl.store(to_words + 8, high_words, mask=inside)
    elif KIND == "IQ4_XS":
        two = tl.arange(0, 2)[None, :]
        word = load_halves(row, 2 * two, left, inside) | (load_halves(row, 2 * two + 1, left, inside) << 16)
        tl.store(scales + words_at + tile_row * 2 + two, word, mask=inside)
        for h in tl.static_range(2):
            low_words, high_words = nibble_words(row, 4 + 32 * h + eight, 8, left, inside)
            to_words = codes + words_at + 256 * h + tile_row * 16 + eight
            tl.store(to_words, low_words, mask=inside)
            tl.store(to_words + 8, high_words, mask=inside)
    else:
        BLOCK: tl.constexpr = HALVES // 8  # of 32 columns
        step = load_halves(row, BLOCK * eight, left, inside)
        if KIND == "Q4_1" or KIND == "Q5_1":
            step |= load_halves(row, BLOCK * eight + 1, left, inside) << 16
            tl.store(steps + words_at + tile_row * 8 + eight, step, mask=inside)
        else:
            numbers = step.to(tl.int16).to(tl.float16, bitcast=True)
            tl.store(steps + halves_at + tile_row * 8 + eight, numbers, mask=inside)
        if KIND == "Q8_0":
            pairs = codes.to(tl.pointer_type(tl.int16)) + halves_at + tile_row * 16 + sixteen
            for j in tl.static_range(8):
                both = load_halves(row, BLOCK * j + 1 + sixteen, left, inside)
                tl.store(pairs + 256 * j, both.to(tl.int16), mask=inside)
        else:
            at_16 = words_at + tile_row * 16 + eight
            for h in tl.static_range(2):
                first_half = 4 * BLOCK * h + BLOCK - 8 + eight
                low_words, high_words = nibble_words(row, first_half, BLOCK, left, inside)
                tl.store(codes + at_16 + 256 * h, low_words, mask=inside)
                tl.store(codes + at_16 + 256 * h + 8, high_words, mask=inside)
        if KIND == "Q5_0" or KIND == "Q5_1":
            fifth = sixteen * 0
            for j in tl.static_range(8):
                bits = load_halves(row, BLOCK * j + BLOCK - 10 + sixteen // 8, left, inside) >> (2 * (sixteen % 8))
                fifth |= ((bits & 1) | ((bits & 2) << 7)) << j
            tl.store(high + halves_at + tile_row * 16 + sixteen, fifth.to(tl.int16), mask=inside)


def write_packed(packed: PackedWeights, first: int, raw: Tensor) -> None:
    """``packed.write(first, raw)``."""
    if raw.shape[1] % 2 or raw.storage_offset() % 2:  # not of whole blocks, or not where a load puts them
        raw = F.pad(raw, (0, 2 - raw.shape[1] % 2))
    halves = raw.contiguous().view(torch.int16)
    kind, n_chunks = packed.kind.name, packed.n_chunks
    rows = INTERPRETED_ROWS if raw.device.type == "cpu" else ROWS
    repack_kernel[(triton.cdiv(halves.shape[0], rows) * n_chunks,)](
        halves, packed.codes, packed.high, packed.scales, packed.steps, first, *halves.shape,
        packed.n_rows, packed.tiles.shape[-3], n_chunks, KIND=kind, TILE=tile_bytes(kind), ROWS=rows, num_warps=4,
    )  # fmt: skip
