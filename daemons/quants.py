"""GGML quant blocks to numbers, in plain torch, on any device.

Input is always raw bytes ``[rows, row_bytes]`` uint8, output ``[rows, columns]``.  Arithmetic is float32 in the order
of the reference (gguf-py ``quants.py``, ggml-quants.c), so results are the same bits.  Knows nothing of files and
models.

Byte maps (f16 is IEEE half, little-endian; element order is the block's own):

    Q8_0  34  per  32: d f16 | q int8[32]                                    x = d q
    Q4_0  18  per  32: d f16 | q[16], byte i: elements i (low), i+16 (high)  x = d (q - 8)
    Q4_K 144  per 256: d f16 | dmin f16 | s[12] | q[128]
                       eight sub-blocks of 32; bytes 32g..32g+31 of q: sub-block 2g (low), 2g+1 (high)
                       s packs eight 6-bit scales and eight 6-bit minima:
                         j < 4:  scale s[j] & 63                        minimum s[j+4] & 63
                         j >= 4: scale s[j+4] & 15 | (s[j-4] >> 6) << 4  minimum s[j+4] >> 4 | (s[j] >> 6) << 4
                       x = (d scale) q - (dmin minimum)
    Q5_K 176  per 256: d f16 | dmin f16 | s[12] | h[32] | q[128]
                       as Q4_K; fifth bit of element l of sub-block j: bit j of h[l]
    Q6_K 210  per 256: l[128] | h[64] | scale int8[16] | d f16
                       two halves of 128 elements with 64 bytes of l and 32 of h each; four runs of 32 in a half:
                         run 0: l[i] & 15, run 1: l[i+32] & 15, run 2: l[i] >> 4, run 3: l[i+32] >> 4,
                         upper two bits of run r: h[i] >> 2r & 3;  one scale for 16 elements
                       x = (d scale) (q - 32)
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf import quants as reference
from torch import Tensor

from lucevisor.wire.ggml_types import BY_NAME, GgmlType

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def _half(raw: Tensor) -> Tensor:
    """Two bytes a number -> float32."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _split(x: Tensor, *extents: int) -> Tensor:
    """Last dimension -> several."""
    return x.reshape(*x.shape[:-1], *extents)


def _low_high(q: Tensor) -> Tensor:
    """``[..., n]`` bytes -> ``[..., 2, n]`` nibbles, low ones first."""
    return torch.stack((q & 15, q >> 4), dim=-2)


def _k_scales(s: Tensor) -> tuple[Tensor, Tensor]:
    """The twelve bytes of Q4_K and Q5_K -> eight scales, eight minima, float32."""
    a, b, c = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), dim=-1)
    minimum = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), dim=-1)
    return scale.to(torch.float32), minimum.to(torch.float32)


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[..., 0:2]) * b[..., 2:34].contiguous().view(torch.int8).to(torch.float32)


def _q4_0(b: Tensor) -> Tensor:
    q = _low_high(b[..., 2:18]).flatten(-2)
    return _half(b[..., 0:2]) * (q.to(torch.float32) - 8)


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
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


def dequantise(kind: GgmlType, raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers of ``raw`` ``[rows, row_bytes]`` uint8 as ``[rows, columns]`` of ``dtype``, on the device of ``raw``.

    Types outside this file go through gguf-py on the cpu.  Raises NotImplementedError for a type that it does not know.
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
    with np.errstate(all="ignore"):  # infinite scales of a damaged file become infinite numbers, as in our own code
        numbers = reference.dequantize(raw.cpu().numpy(), gguf.GGMLQuantizationType(kind.id))
    return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32)).to(raw.device)


def four_bit(kind: GgmlType, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q4_0 and Q4_K rows as codes and affine groups of 32: ``x = (q - 8) scale + zero``.

    Returns q ``[rows, columns]`` uint8 (0..15), scale and zero ``[rows, columns / 32]`` float32.
    Q4_0 has x = d (q - 8), so zero is 0; Q4_K has x = s q - m, so zero is 8 s - m.
    """
    rows = raw.shape[0]
    b = raw.view(rows, -1, kind.block_bytes)
    if kind is BY_NAME["Q4_0"]:
        scale = _half(b[..., 0:2])
        return (
            _low_high(b[..., 2:18]).reshape(rows, -1),
            scale.reshape(rows, -1),
            torch.zeros_like(scale).reshape(rows, -1),
        )
    if kind is not BY_NAME["Q4_K"]:
        raise KeyError(f"{kind.name} blocks are not four-bit groups of 32")
    scales, minima = _k_scales(b[..., 4:16])
    scale = _half(b[..., 0:2]) * scales
    zero = 8 * scale - _half(b[..., 2:4]) * minima
    return _q4_k_codes(b).reshape(rows, -1), scale.reshape(rows, -1), zero.reshape(rows, -1)
