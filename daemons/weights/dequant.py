"""Dequantisation of GGML blocks in plain torch, on any device.

Input is raw bytes ``[rows, row_bytes]`` uint8, output ``[rows, columns]``.  Arithmetic is float32 in the order
of the reference (gguf-py ``quants.py``, ggml-quants.c), so results are bit-identical.  Knows no files and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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
}  # fmt: skip


def dequantise(kind: GgmlType, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise ``raw`` ``[rows, row_bytes]`` uint8 to ``[rows, columns]`` of ``dtype``, on the same device.

    Other types go through gguf-py on the cpu.  Raises NotImplementedError for a type that it does not know.
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
