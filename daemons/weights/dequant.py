"""Dequantisation of GGML blocks in plain torch, on any device.

Input is raw bytes ``[rows, row_bytes]`` uint8, output ``[rows, columns]``.  Arithmetic is float32 in the order
of the reference (gguf-py ``quants.py``, ggml-quants.c), so results are bit-identical.  Knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants as reference
from torch import Tensor

from lucevisor.model.quant_types import BY_NAME, GgmlType

# Byte maps (f16 is IEEE half, little-endian; element order is the block's own):
#
#     Q8_0  34  per  32: d f16 | q int8[32]                                    x = d q
#     Q4_0  18  per  32: d f16 | q[16], byte i: elements i (low), i+16 (high)  x = d (q - 8)
#     Q4_1  20  per  32: d f16 | m f16 | q[16], as Q4_0                        x = d q + m
#     Q5_0  22  per  32: d f16 | h[4] | q[16]                                  x = d (q - 16)
#     Q5_1  24  per  32: d f16 | m f16 | h[4] | q[16]                          x = d q + m
#                        nibbles as Q4_0; fifth bit of element i: bit i & 7 of h[i >> 3]
#     IQ4_NL 18 per  32: d f16 | q[16], as Q4_0                                x = d LEVELS[q]
#     MXFP4 17  per  32: e | q[16], as Q4_0                                    x = 2^(e - 128) DOUBLED[q]
#                        DOUBLED are twice the e2m1 numbers: sign, two bits of exponent, one of mantissa
#     Q2_K  84  per 256: s[16] | q[64] | d f16 | dmin f16
#                        two halves of 128 elements with 32 bytes of q each; four runs of 32 in a half:
#                          run r: q[i] >> 2r & 3;  one byte of s for 16 elements: scale low, minimum high nibble
#                        x = (d scale) q - (dmin minimum)
#     Q3_K 110  per 256: h[32] | q[64] | s[12] | d f16
#                        as Q2_K; third bit of element i of run r of half k: bit 4k + r of h[i]
#                        scale j of 16: s[j & 7] low (j < 8) or high nibble | (s[8 + (j & 3)] >> 2 (j >> 2) & 3) << 4
#                        x = (d (scale - 32)) (q - 4)
#     IQ4_XS 136 per 256: d f16 | t[2] | s[4] | q[128]
#                        eight sub-blocks of 32, each 16 bytes of q as Q4_0
#                        scale j: nibble j of s, low ones first | (t[j >> 2] >> 2 (j & 3) & 3) << 4
#                        x = (d (scale - 32)) LEVELS[q]
#     Q4_K 144  per 256: d f16 | dmin f16 | s[12] | q[128]
#                        eight sub-blocks of 32; bytes 32g..32g+31 of q: sub-block 2g (low), 2g+1 (high)
#                        s packs eight 6-bit scales and eight 6-bit minima:
#                          j < 4:  scale s[j] & 63                        minimum s[j+4] & 63
#                          j >= 4: scale s[j+4] & 15 | (s[j-4] >> 6) << 4  minimum s[j+4] >> 4 | (s[j] >> 6) << 4
#                        x = (d scale) q - (dmin minimum)
#     Q5_K 176  per 256: d f16 | dmin f16 | s[12] | h[32] | q[128]
#                        as Q4_K; fifth bit of element l of sub-block j: bit j of h[l]
#     IQ2_XXS 66 per 256: d f16 | eight groups of 32: (index byte[4] | w u32)
#                        an index byte: eight numbers of GRID;  w: bits 7j..7j+6 sign of those of index byte j, as SIGNS
#                        has them, bits 28..31 s                                x = (d (s + 1/2) / 4) GRID sign
#     IQ2_XS  74 per 256: d f16 | q u16[32] | s[8]
#                        q: index 9 bits, sign 7 bits, as IQ2_XXS;  a nibble of s, low first, for 16 elements
#     IQ2_S   82 per 256: d f16 | q[32] | sign[32] | h[8] | s[8]
#                        two more bits of index i: bits 2 (i & 3).. of h[i >> 2];  bit j of a sign byte: element j
#                        s as IQ2_XS
#     IQ3_XXS 98 per 256: d f16 | q[64] | w u32[8]
#                        a byte of q: four numbers of GRID;  w as IQ2_XXS         x = (d (s + 1/2) / 2) GRID sign
#     IQ3_S  110 per 256: d f16 | q[64] | h[8] | sign[32] | s[4]
#                        ninth bit of index i: bit i & 7 of h[i >> 3];  signs as IQ2_S;  a nibble of s for 32 elements
#                                                                                x = (d (1 + 2 s)) GRID sign
#     IQ1_S   50 per 256: d f16 | q[32] | h u16[8]
#                        of group g of 32: three more bits of index byte j: bits 3j.. of h[g];  s bits 12..14;  bit 15:
#                        the sign of 1/8                                         x = (d (1 + 2 s)) (GRID +- 1/8)
#     IQ1_M   56 per 256: q[32] | h[16] | t u16[4]
#                        d f16: the upper nibbles of t, lowest first;  s of 16 elements: bits 3 (j & 3).. of t[j >> 2]
#                        nibble i of h: three more bits of index i, and the sign of 1/8;  x as IQ1_S
#     TQ1_0   54 per 256: q[48] | h[4] | d f16
#                        five numbers in base 3 of a byte of q, four of one of h: number k is the top digit of
#                        byte 3^k mod 256;  first digits of bytes 0..31 of q, second ones ...; then of 32..47; of h
#                                                                                x = d (digit - 1)
#     TQ2_0   66 per 256: q[64] | d f16;  q as Q2_K                              x = d (q - 1)
#     Q6_K 210  per 256: l[128] | h[64] | scale int8[16] | d f16
#                        two halves of 128 elements with 64 bytes of l and 32 of h each; four runs of 32 in a half:
#                          run 0: l[i] & 15, run 1: l[i+32] & 15, run 2: l[i] >> 4, run 3: l[i+32] >> 4,
#                          upper two bits of run r: h[i] >> 2r & 3;  one scale for 16 elements
#                        x = (d scale) (q - 32)

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""Values of the sixteen codes of IQ4_NL and IQ4_XS."""
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Values of the sixteen codes of MXFP4, times two."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def _half(raw: Tensor) -> Tensor:
    """float16 bytes to float32."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _split(x: Tensor, *extents: int) -> Tensor:
    """Unflatten the last dimension."""
    return x.reshape(*x.shape[:-1], *extents)


def _low_high(q: Tensor) -> Tensor:
    """``[..., n]`` bytes -> ``[..., 2, n]`` nibbles, low first."""
    return torch.stack((q & 15, q >> 4), dim=-2)


def _nibbles(q: Tensor) -> Tensor:
    """``[..., n]`` bytes to ``[..., 2 n]`` nibbles: the low ones of all bytes, then the high ones."""
    return _low_high(q).flatten(-2)


def _shifted(x: Tensor, step: int, n: int) -> Tensor:
    """``[..., m]`` bytes -> ``[..., n, m]``: shifted right by 0, step, ... bits."""
    shift = torch.arange(0, step * n, step, dtype=torch.uint8, device=x.device).unsqueeze(-1)
    return x.unsqueeze(-2) >> shift


def _fields(x: Tensor, n_bits: int) -> Tensor:
    """``[..., m]`` bytes -> the fields of ``n_bits`` that they hold, in order: byte by byte, lowest bits first."""
    fields = _shifted(x, n_bits, 8 // n_bits) & ((1 << n_bits) - 1)
    return fields.transpose(-1, -2).flatten(-2)


@cache
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Cached on the device: a copy at each call would synchronise."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _lookup(numbers: tuple[int, ...], q: Tensor) -> Tensor:
    """Codes 0..15 to float32.  Indices are int32, since int64 ones would be the largest tensor in memory."""
    return _table(numbers, q.device).index_select(0, q.reshape(-1).to(torch.int32)).view(q.shape)


def _k_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """The twelve scale bytes of Q4_K and Q5_K to eight scales and eight minima, float32."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), dim=-1)
    minimum = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), dim=-1)
    return scale.to(torch.float32), minimum.to(torch.float32)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[..., 0:2]) * b[..., 2:34].contiguous().view(torch.int8).to(torch.float32)


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[..., 0:2]) * (_nibbles(b[..., 2:18]).to(torch.float32) - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[..., 0:2]) * _nibbles(b[..., 4:20]).to(torch.float32) + _half(b[..., 2:4])


def _q5_0(b: Tensor) -> Tensor:
    q = _nibbles(b[..., 6:22]) | (_fields(b[..., 2:6], 1) << 4)
    return _half(b[..., 0:2]) * (q.to(torch.float32) - 16)


def _q5_1(b: Tensor) -> Tensor:
    q = _nibbles(b[..., 8:24]) | (_fields(b[..., 4:8], 1) << 4)
    return _half(b[..., 0:2]) * q.to(torch.float32) + _half(b[..., 2:4])


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b[..., 0:2]) * _lookup(LEVELS, _nibbles(b[..., 2:18]))


def _mxfp4(b: Tensor) -> Tensor:
    e = b[..., 0:1].to(torch.int32)
    # bits of 2^(e - 128): exponent field e - 1, and for e of 0 and 1 a subnormal number
    bits = torch.where(e < 2, (1 << 21) << e, (e - 1) << 23)
    return bits.view(torch.float32) * _lookup(DOUBLED, _nibbles(b[..., 1:17]))


def _iq4_xs(b: Tensor) -> Tensor:
    scale = _fields(b[..., 4:8], 4) | (_fields(b[..., 2:4], 2) << 4)
    d = _half(b[..., 0:2]) * (scale.to(torch.float32) - 32)
    q = _nibbles(_split(b[..., 8:136], 8, 16))
    return (d.unsqueeze(-1) * _lookup(LEVELS, q)).flatten(-2)


@cache
def _grid(name: str, device: torch.device) -> Tensor:
    """The numbers of each index of an IQ type, float32 [indices, 8 or 4], as gguf has them."""
    numbers: Any = getattr(reference, name)
    numbers.init_grid()
    return torch.from_numpy(numbers.grid.reshape(numbers.grid_shape)).to(device)


@cache
def _byte_signs(device: torch.device) -> Tensor:
    """Signs 1 or -1 [256, 8] of the bits of a byte, lowest first."""
    bits = torch.arange(256).unsqueeze(-1) >> torch.arange(8) & 1
    return (1.0 - 2.0 * bits).to(device)


@cache
def _signs(device: torch.device) -> Tensor:
    """Signs [128, 8] of seven bits; the eighth makes the number of minus signs even."""
    ksigns = torch.tensor(list(reference.IQ2_XXS.ksigns))
    return _byte_signs(torch.device("cpu"))[ksigns].to(device)


def _numbers(table: Tensor, index: Tensor) -> Tensor:
    """Rows ``[..., n, width]`` of a table for indices ``[..., n]``."""
    return table.index_select(0, index.reshape(-1).to(torch.int32)).view(*index.shape, table.shape[1])


def _words(raw: Tensor) -> Tensor:
    """``[..., 4 n]`` bytes -> int32 ``[..., n]``"""
    return raw.clone(memory_format=torch.contiguous_format).view(torch.int32)  # a view may lie off a word's start


def _short(raw: Tensor) -> Tensor:
    """``[..., 2 n]`` bytes -> ``[..., n]`` numbers of 16 bits without sign, int32."""
    return raw.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF


def _runs(x: Tensor, step: int, n: int) -> Tensor:
    """``[..., m]`` -> ``[..., m, n]``: shifted right by 0, step, ... bits."""
    return x.unsqueeze(-1) >> torch.arange(0, step * n, step, dtype=x.dtype, device=x.device)


def _scaled(scale: Tensor, numbers: Tensor, signs: Tensor | None = None) -> Tensor:
    """Numbers ``[..., n, width]`` times signs, times scales ``[..., s]``, each for as many numbers."""
    if signs is not None:
        numbers = numbers.view(signs.shape).mul_(signs)
    x = _split(numbers.flatten(-2), scale.shape[-1], -1)
    return x.mul_(scale.unsqueeze(-1)).flatten(-2)


def _sign_words(w: Tensor) -> tuple[Tensor, Tensor]:
    """Words of IQ2_XXS and IQ3_XXS ``[..., 8]``: s + 1/2, and the signs ``[..., 32, 8]``."""
    signs = _numbers(_signs(w.device), (_runs(w, 7, 4) & 127).flatten(-2))
    return (w >> 28 & 15).to(torch.float32) + 0.5, signs


def _iq2_xxs(b: Tensor) -> Tensor:
    groups = _split(b[..., 2:66], 8, 8)
    s, signs = _sign_words(_words(groups[..., 4:8]).squeeze(-1))
    numbers = _numbers(_grid("IQ2_XXS", b.device), groups[..., 0:4].flatten(-2))
    return _scaled(_half(b[..., 0:2]) * s * 0.25, numbers, signs)


def _iq2_xs(b: Tensor) -> Tensor:
    q = _short(b[..., 2:66])
    s = _half(b[..., 0:2]) * (_fields(b[..., 66:74], 4).to(torch.float32) + 0.5) * 0.25
    return _scaled(s, _numbers(_grid("IQ2_XS", b.device), q & 511), _numbers(_signs(b.device), q >> 9))


def _iq2_s(b: Tensor) -> Tensor:
    index = b[..., 2:34].to(torch.int32) | (_fields(b[..., 66:74], 2).to(torch.int32) << 8)
    s = _half(b[..., 0:2]) * (_fields(b[..., 74:82], 4).to(torch.float32) + 0.5) * 0.25
    return _scaled(s, _numbers(_grid("IQ2_S", b.device), index), _numbers(_byte_signs(b.device), b[..., 34:66]))


def _iq3_xxs(b: Tensor) -> Tensor:
    s, signs = _sign_words(_words(b[..., 66:98]))
    return _scaled(_half(b[..., 0:2]) * s * 0.5, _numbers(_grid("IQ3_XXS", b.device), b[..., 2:66]), signs)


def _iq3_s(b: Tensor) -> Tensor:
    index = b[..., 2:66].to(torch.int32) | (_fields(b[..., 66:74], 1).to(torch.int32) << 8)
    s = _half(b[..., 0:2]) * (_fields(b[..., 106:110], 4).to(torch.float32) * 2 + 1)
    return _scaled(s, _numbers(_grid("IQ3_S", b.device), index), _numbers(_byte_signs(b.device), b[..., 74:106]))


def _iq1(scale: Tensor, q: Tensor, high: Tensor, minus: Tensor) -> Tensor:
    """``high``: the upper bits of indices; ``minus``: whether 1/8 is taken off, for as many numbers each."""
    numbers = _numbers(_grid("IQ1_S", q.device), q.to(torch.int32) | high << 8)
    delta = 0.125 - 0.25 * minus.to(torch.float32)
    x = _split(numbers.flatten(-2), minus.shape[-1], -1)
    return _scaled(scale, x.add_(delta.unsqueeze(-1)))


def _iq1_s(b: Tensor) -> Tensor:
    h = _short(b[..., 34:50])
    scale = _half(b[..., 0:2]) * ((h >> 12 & 7) * 2 + 1).to(torch.float32)
    return _iq1(scale, b[..., 2:34], (_runs(h, 3, 4) & 7).flatten(-2), h >> 15 != 0)


def _iq1_m(b: Tensor) -> Tensor:
    s = (_runs(_short(b[..., 48:56]), 3, 4) & 7).flatten(-2)
    h = _fields(b[..., 32:48], 4)
    return _iq1(iq1_m_scale(b) * (s * 2 + 1).to(torch.float32), b[..., 0:32], (h & 7).to(torch.int32), h & 8 != 0)


def iq1_m_scale(b: Tensor) -> Tensor:
    """The scale of each block of IQ1_M, ``[..., 56]`` bytes -> float32 ``[..., 1]``."""
    top = b[..., 49:56:2] >> 4
    return _half(top[..., 0::2] | (top[..., 1::2] << 4))


def _tq1_0(b: Tensor) -> Tensor:
    powers = _table((1, 3, 9, 27, 81), b.device).to(torch.uint8).unsqueeze(-1)
    runs = ((b[..., 0:32], 5), (b[..., 32:48], 5), (b[..., 48:52], 4))
    q = torch.cat([(part.unsqueeze(-2) * powers[:n]).flatten(-2) for part, n in runs], dim=-1)  # modulo 256
    return _half(b[..., 52:54]) * ((q.to(torch.int16) * 3 >> 8) - 1).to(torch.float32)


def _tq2_0(b: Tensor) -> Tensor:
    return _half(b[..., 64:66]) * (_two_bits(b[..., 0:64]).flatten(-3).to(torch.float32) - 1)


def _two_bits(q: Tensor) -> Tensor:
    """The 64 bytes of Q2_K and Q3_K -> codes ``[..., 2, 4, 32]``: half, run, element."""
    return _shifted(_split(q, 2, 32), 2, 4) & 3


def _q2_k(b: Tensor) -> Tensor:
    s = b[..., 0:16]
    d = (_half(b[..., 80:82]) * (s & 15).to(torch.float32)).unsqueeze(-1)
    m = (_half(b[..., 82:84]) * (s >> 4).to(torch.float32)).unsqueeze(-1)
    q = _split(_two_bits(b[..., 16:80]).flatten(-3), 16, 16)
    return (d * q.to(torch.float32) - m).flatten(-2)


def _q3_k(b: Tensor) -> Tensor:
    high = (_shifted(b[..., 0:32], 1, 8) & 1).reshape(*b.shape[:-1], 2, 4, 32)
    q = (_two_bits(b[..., 32:96]) | (high << 2)).to(torch.int8) - 4
    s = b[..., 96:108]
    scale = _nibbles(s[..., 0:8]) | ((_shifted(s[..., 8:12], 2, 4) & 3).flatten(-2) << 4)
    d = _half(b[..., 108:110]) * (scale.to(torch.float32) - 32)
    return (d.unsqueeze(-1) * _split(q.flatten(-3), 16, 16).to(torch.float32)).flatten(-2)


def _k_affine(b: Tensor, q: Tensor) -> Tensor:
    scale, minimum = _k_scales(b[..., 4:16])
    d = (_half(b[..., 0:2]) * scale).unsqueeze(-1)
    m = (_half(b[..., 2:4]) * minimum).unsqueeze(-1)
    return (d * q.to(torch.float32) - m).flatten(-2)


def _q4_k(b: Tensor) -> Tensor:
    return _k_affine(b, _q4_k_codes(b))


def _q4_k_codes(b: Tensor) -> Tensor:
    return _low_high(_split(b[..., 16:144], 4, 32)).flatten(-3, -2)


def _q5_k(b: Tensor) -> Tensor:
    low = _low_high(_split(b[..., 48:176], 4, 32)).flatten(-3, -2)
    shift = torch.arange(8, dtype=torch.uint8, device=b.device).unsqueeze(-1)
    high = (b[..., 16:48].unsqueeze(-2) >> shift) & 1
    return _k_affine(b, low | (high << 4))


def _q6_k(b: Tensor) -> Tensor:
    low = _split(_low_high(_split(b[..., 0:128], 2, 64)), 2, 32).flatten(-3, -2)  # [..., 2, 4, 32]
    shift = torch.arange(0, 8, 2, dtype=torch.uint8, device=b.device).unsqueeze(-1)
    high = (_split(b[..., 128:192], 2, 1, 32) >> shift) & 3
    q = (low | (high << 4)).to(torch.int8) - 32
    scale = b[..., 192:208].contiguous().view(torch.int8).to(torch.float32)
    d = _half(b[..., 208:210]) * scale
    return (d.unsqueeze(-1) * _split(q.flatten(-3), 16, 16).to(torch.float32)).flatten(-2)


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
}  # fmt: skip


def dequantise(kind: GgmlType, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise ``raw`` ``[rows, row_bytes]`` uint8 to ``[rows, columns]`` of ``dtype``, on the same device.

    Other types go through gguf-py on the cpu.  Raises NotImplementedError for a type that it does not support.
    """
    rows = raw.shape[0]
    if kind.name in _FLOATS:
        return raw.contiguous().view(_FLOATS[kind.name]).to(dtype)
    block = _BLOCKS.get(kind.name)
    if block is None:
        return _by_reference(kind, raw).to(dtype)
    out = block(raw.view(rows, -1, kind.block_bytes))
    return out.reshape(rows, -1).to(dtype)


def _by_reference(kind: GgmlType, raw: Tensor) -> Tensor:
    with np.errstate(all="ignore"):  # infinite scales of a damaged file give infinities, as above
        numbers = reference.dequantize(raw.cpu().numpy(), gguf.GGMLQuantizationType(kind.id))
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).to(raw.device)


def four_bit(kind: GgmlType, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_0, Q4_1 and Q4_K rows as codes and affine groups of 32: ``x = (q - 8) scale + zero``.

    Returns q ``[rows, columns]`` uint8 (0..15), scale and zero ``[rows, columns / 32]`` float32.
    Q4_0 has x = d (q - 8), so zero is 0; Q4_1 has x = d q + m, so zero is 8 d + m; Q4_K has x = s q - m, so zero is
    8 s - m.
    """
    rows = raw.shape[0]
    b = raw.view(rows, -1, kind.block_bytes)
    if kind is BY_NAME["Q4_0"]:
        scale = _half(b[..., 0:2])
        return (
            _nibbles(b[..., 2:18]).reshape(rows, -1),
            scale.reshape(rows, -1),
            torch.zeros_like(scale).reshape(rows, -1),
        )
    if kind is BY_NAME["Q4_1"]:
        scale = _half(b[..., 0:2])
        zero = 8 * scale + _half(b[..., 2:4])
        return _nibbles(b[..., 4:20]).reshape(rows, -1), scale.reshape(rows, -1), zero.reshape(rows, -1)
    if kind is not BY_NAME["Q4_K"]:
        raise KeyError(f"{kind.name} blocks are not four-bit groups of 32")
    scales, minima = _k_scales(b[..., 4:16])
    scale = _half(b[..., 0:2]) * scales
    zero = 8 * scale - _half(b[..., 2:4]) * minima
    return _q4_k_codes(b).reshape(rows, -1), scale.reshape(rows, -1), zero.reshape(rows, -1)
