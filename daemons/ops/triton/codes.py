"""Decode packed weights (layout: ``daemons.weights.packed``) inside a kernel: codes, scales and dequantised groups.

Each word of codes holds two neighbours, one in each half.  Shapes: BN rows of the matrix, L numbers in a group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def low_float16(word):
    """The float16 in the low half of a word, as float32."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def bitcast_float16(words, BN: tl.constexpr, L: tl.constexpr):
    """Words [BN, L / 2] of two float16 numbers each -> [BN, L]."""
    both = tl.join(words.to(tl.int16), (words >> 16).to(tl.int16))
    return both.reshape([BN, L]).to(tl.float16, bitcast=True)


@triton.jit
def code_bias(x):
    """What :func:`biased_codes` adds to codes for the dtype of ``x``."""
    if x.dtype.element_ty == tl.bfloat16:
        return 128.0
    elif x.dtype.element_ty == tl.float16:
        return 1024.0
    else:
        return 0.0


@triton.jit
def biased_codes(pairs, x, BN: tl.constexpr, L: tl.constexpr):
    """Words [BN, L / 2] with a code in each half -> code + BIAS [BN, L] in the dtype of ``x``, exactly."""
    if x.dtype.element_ty == tl.bfloat16:
        pairs |= 0x43004300
        both = tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16))
        return both.reshape([BN, L]).to(tl.bfloat16, bitcast=True)
    elif x.dtype.element_ty == tl.float16:
        return bitcast_float16(pairs | 0x64006400, BN, L)
    else:
        return tl.join((pairs & 0xFFFF).to(tl.float32), (pairs >> 16).to(tl.float32)).reshape([BN, L])


@triton.jit
def split_codes(pairs, BN: tl.constexpr, L: tl.constexpr):
    """Words [BN, L / 2] with a code in each half -> codes [BN, L] int32."""
    return tl.join(pairs & 0xFFFF, pairs >> 16).reshape([BN, L])


@triton.jit
def spread_bits(high):
    """Move the two bytes of an int16 to bits 4..11 and 20..27."""
    both = high.to(tl.int32)
    return ((both & 0xFF) | ((both & 0xFF00) << 8)) << 4


@triton.jit
def fifth_bits(high, J: tl.constexpr, TO: tl.constexpr = 4):
    """The fifth bit of group J's codes at bit TO of each half; ``high`` as :func:`spread_bits` leaves it."""
    if J + 4 > TO:
        return (high >> (J + 4 - TO)) & (0x00010001 << TO)
    else:
        return (high << (TO - J - 4)) & (0x00010001 << TO)


@triton.jit
def upper_bits(high, I: tl.constexpr):  # noqa: E741
    """Two-bit field I of each half, moved to bit 4."""
    if I < 2:
        return (high << (4 - 2 * I)) & 0x00300030
    else:
        return (high >> (2 * I - 4)) & 0x00300030


@triton.jit
def d_dmin_of(first, second, third, fourth):
    """The word d | dmin << 16 of a Q4_K or Q5_K chunk, from its four words of scales."""
    d_dmin = ((first >> 12) & 0x000F000F) | ((second >> 8) & 0x00F000F0)
    return d_dmin | ((third >> 4) & 0x0F000F00) | (fourth & -0x0FFF1000)


@triton.jit
def load_d_dmin(words):
    """:func:`d_dmin_of` the four words at ``words``."""
    return d_dmin_of(tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3))


@triton.jit
def dequantise_q4_k(both, word, d_dmin, J: tl.constexpr, BN: tl.constexpr):
    """Group J of a Q4_K or Q5_K chunk as numbers [BN, 32]; ``word``: its scale and minimum."""
    scale = low_float16(d_dmin) * ((word >> (16 * (J % 2))) & 63).to(tl.float32)
    minimum = (word >> (16 * (J % 2) + 6)) & 63
    code = split_codes(both, BN, 32).to(tl.float32)
    return scale[:, None] * code - (low_float16(d_dmin >> 16) * minimum.to(tl.float32))[:, None]


@triton.jit
def dequantise_q4(both, step, KIND: tl.constexpr, BN: tl.constexpr):
    """A group of Q4_0, Q4_1, Q5_0 or Q5_1 as numbers [BN, 32]."""
    code = split_codes(both, BN, 32)
    if KIND == "Q4_0":
        return step.to(tl.float32)[:, None] * (code - 8).to(tl.float32)
    elif KIND == "Q5_0":
        return step.to(tl.float32)[:, None] * (code - 16).to(tl.float32)
    else:
        return low_float16(step)[:, None] * code.to(tl.float32) + low_float16(step >> 16)[:, None]


@triton.jit
def dequantise_q6_k(both, four, d, J: tl.constexpr, BN: tl.constexpr):
    """Group J of a Q6_K chunk as numbers [BN, 16]; ``four``: the word that holds its scale, ``d``: the chunk's."""
    scale = d * ((four << (24 - 8 * (J % 4))) >> 24).to(tl.float32)
    return scale[:, None] * (split_codes(both, BN, 16) - 32).to(tl.float32)


@triton.jit
def code_values(code, KIND: tl.constexpr):
    """The numbers, int32, that codes of a type with a codebook stand for; ``daemons.weights.dequant`` has the lists.

    Four bits of a word for the sizes of MXFP4's, else a byte of four words.
    """
    if KIND == "MXFP4":
        size = (tl.full(code.shape, -0x379BCDF0, tl.int32) >> (4 * (code & 7))) & 15
        return tl.where(code < 8, size, -size)
    else:
        low = tl.where(code < 4, -0x4052677F, -0x09152231)
        high = tl.where(code < 12, 0x26190D01, 0x71594535)
        return (tl.where(code < 8, low, high) << (24 - 8 * (code & 3))) >> 24


@triton.jit
def codebook_scale(scales, steps, tile, row, J: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr):
    """What the values of group J of a chunk are multiplied by, float32.  ``tile``, ``row`` [BN]: where rows lie."""
    if KIND == "MXFP4":
        e = tl.load(steps + tile * TILE + row * 8 + J).to(tl.int32)
        bits = tl.where(e < 2, (e + 1) << 21, (e - 1) << 23)  # subnormal for e of 0 and 1
        return bits.to(tl.float32, bitcast=True)
    elif KIND == "IQ4_XS":
        first = tl.load(scales + tile * (TILE // 4) + row * 2)
        low = (tl.load(scales + tile * (TILE // 4) + row * 2 + 1) >> (4 * J)) & 15
        return low_float16(first) * ((low | (((first >> (16 + 2 * J)) & 3) << 4)) - 32).to(tl.float32)
    else:
        return tl.load(steps + tile * (TILE // 2) + row * 8 + J).to(tl.float32)


@triton.jit
def dequantise_codebook(
    both, scales, steps, tile, row, J: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr
):
    """Group J of a chunk of a type with a codebook as numbers [BN, 32]."""
    value = code_values(split_codes(both, BN, 32), KIND).to(tl.float32)
    return codebook_scale(scales, steps, tile, row, J, KIND, TILE)[:, None] * value


@triton.jit
def column_mask(row_mask, at, width, PADDED: tl.constexpr):
    """Mask of the rows of x at column ``at``: ``row_mask``, and with PADDED only columns below ``width``."""
    if PADDED:
        return row_mask & (
            row_mask.to(tl.int32) * 0 + at < width
        )  # + 0 makes a tensor: the interpreter's ``at`` may be an int
    else:
        return row_mask
