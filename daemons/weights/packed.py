"""Packed weights: quant blocks repacked so that a GPU loads each of their parts in wide, aligned words.

Only the order of a row's bytes changes: :func:`repack` and :func:`unpack` are inverse, on any device.  A chunk is 256
numbers, and ``element`` counts within it.  Rows are zero-padded to a multiple of 256, to ``K`` numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lucevisor.model.quant_types import CHUNK, GgmlType, padded_columns, row_bytes

# Tensors by type:
#
# Q4_K, Q5_K  codes   int32 [N, K/8]    word 16 h + w (h < 2, w < 16), field i < 4: low four bits of the elements
#                                       32 (4 h + i) + 2 w (bits 4 i) and its neighbour + 1 (bits 16 + 4 i)
#             high    int16 [N, K/16]   Q5_K: fifth bits of the elements 32 j + 2 w (bit j of w) and + 1 (bit 8 + j)
#             scales  int32 [N, K/64]   half j & 1 of word j >> 1 (of four): scale of 32 | minimum << 6 | bits << 12;
#                                       bits of the low halves: d, of the high ones: dmin, both f16, lowest first
# Q6_K        codes   int32 [N, K/8]    word 8 h + w (h < 4, w < 8), field i < 4: low four bits of the elements
#                                       16 (4 h + i) + 2 w (bits 4 i) and its neighbour + 1 (bits 16 + 4 i)
#             high    int32 [N, K/16]   word 8 g + w (g < 2), field i < 8: upper two bits of the elements
#                                       16 (8 g + i) + 2 w (bits 2 i) and its neighbour + 1 (bits 16 + 2 i)
#             scales  int32 [N, K/64]   byte j & 3 of word j >> 2: scale of 16, signed
#             steps   f16   [N, K/256]  d
# Q4_0, Q5_0  codes   as Q4_K; high as Q5_K; steps f16 [N, K/32] d
# Q4_1, Q5_1  codes   as Q4_K; high as Q5_K; steps int32 [N, K/32] d | m << 16, both f16
# Q8_0        codes   int8  [N, K]      as stored; steps f16 [N, K/32] d
#
# Neighbours lie 16 bits apart in a word, so one shift and mask yields both halves of a pair of 16-bit floats.


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The parts of quant blocks as tensors ``[..., N, *]``; None where the type has no such part."""

    codes: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    steps: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors that exist, in field order."""
        return [t for t in (self.codes, self.high, self.scales, self.steps) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    def map(self, change: Callable[[Tensor], Tensor]) -> PackedWeights:
        """Apply ``change`` to every tensor."""
        found = [None if t is None else change(t) for t in (self.codes, self.high, self.scales, self.steps)]
        assert found[0] is not None
        return PackedWeights(found[0], *found[1:])


@dataclass(frozen=True, slots=True)
class _PackedField:
    """``bits`` per number of the matrix, stored as ``dtype``."""

    dtype: torch.dtype
    bits: float


_CODES4 = _PackedField(torch.int32, 4)
_HIGH1 = _PackedField(torch.int16, 1)
_LAYOUTS: dict[str, tuple[_PackedField | None, ...]] = {
    "Q4_K": (_CODES4, None, _PackedField(torch.int32, 0.5), None),
    "Q5_K": (_CODES4, _HIGH1, _PackedField(torch.int32, 0.5), None),
    "Q6_K": (
        _CODES4,
        _PackedField(torch.int32, 2),
        _PackedField(torch.int32, 0.5),
        _PackedField(torch.float16, 1 / 16),
    ),
    "Q4_0": (_CODES4, None, None, _PackedField(torch.float16, 0.5)),
    "Q5_0": (_CODES4, _HIGH1, None, _PackedField(torch.float16, 0.5)),
    "Q4_1": (_CODES4, None, None, _PackedField(torch.int32, 1)),
    "Q5_1": (_CODES4, _HIGH1, None, _PackedField(torch.int32, 1)),
    "Q8_0": (_PackedField(torch.int8, 8), None, None, _PackedField(torch.float16, 0.5)),
}


def empty_packed(kind: GgmlType, n_rows: int, n_columns: int, device: torch.device) -> PackedWeights:
    """Uninitialised packed weights of a matrix."""
    k = padded_columns(n_columns)
    made = [
        None
        if p is None
        else torch.empty(n_rows, round(k * p.bits) // (8 * p.dtype.itemsize), dtype=p.dtype, device=device)
        for p in _LAYOUTS[kind.name]
    ]
    assert made[0] is not None
    return PackedWeights(made[0], *made[1:])


def repack(kind: GgmlType, raw: Tensor) -> PackedWeights:
    """Quant blocks ``[N, row_bytes]`` uint8 to packed weights, on the same device."""
    n_columns = raw.shape[1] // kind.block_bytes * kind.block_elements
    missing = row_bytes(kind, padded_columns(n_columns)) - raw.shape[1]
    if missing:
        raw = F.pad(raw, (0, missing))
    return _REPACK[kind.name](raw.view(raw.shape[0], -1, kind.block_bytes))


def unpack(kind: GgmlType, packed: PackedWeights, n_columns: int) -> Tensor:
    """Packed weights ``[N, *]`` back to the quant blocks ``[N, row_bytes]`` uint8."""
    out = torch.cat(list(_UNPACK[kind.name](packed)), dim=-1)
    return out.view(packed.codes.shape[0], -1)[:, : row_bytes(kind, n_columns)]


# ---- words of codes


def _words(codes: Tensor, width: int, size: int) -> Tensor:
    """Codes ``[N, chunks, 256]`` uint8 of ``width`` bits to words ``[N, words]``, int16 or int32.

    ``size``: elements of a group.  The words of a group hold its pairs; adjacent groups share words.
    """
    n = {1: 8, 2: 8, 4: 4}[width]  # fields in half a word
    pairs = _split(codes, -1, -1, n, size // 2, 2).movedim(-3, -1)  # [..., groups of groups, pair, 2, n]
    per_byte = 8 // width
    fields = _split(pairs, -1, -1, per_byte)
    shift = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    some = (fields << shift).sum(dim=-1, dtype=torch.uint8)
    return some.flatten(-2).contiguous().view(torch.int16 if width == 1 else torch.int32).flatten(1)


def _codes(words: Tensor, width: int, size: int) -> Tensor:
    """Inverse of :func:`_words`: ``[N, words]`` to codes ``[N, chunks, 256]`` uint8."""
    some = _split(words.contiguous().view(torch.uint8), -1, -1, size // 2, 2, 1 if width < 2 else 2)
    shift = torch.arange(0, 8, width, dtype=torch.uint8, device=words.device)
    fields = ((some.unsqueeze(-1) >> shift) & ((1 << width) - 1)).flatten(-2)  # [..., groups of groups, pair, 2, n]
    return _split(fields.movedim(-1, -3).flatten(1), 1, -1, CHUNK)


def _split(x: Tensor, dim: int, *extents: int) -> Tensor:
    """One dimension -> several."""
    return torch.unflatten(x, dim, extents)


def _low_high(q: Tensor) -> Tensor:
    """Bytes ``[..., n]`` -> nibbles ``[..., 2, n]``, low ones first."""
    return torch.stack((q & 15, q >> 4), dim=-2)


def _shifts(step: int, device: torch.device) -> Tensor:
    """0, step, ... 8 - step as a column."""
    return torch.arange(0, 8, step, dtype=torch.uint8, device=device).unsqueeze(-1)


def _bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


# ---- Q4_K and Q5_K: d 0:2, dmin 2:4, s 4:16, then h of Q5_K, then q


def _k_scale_words(b: Tensor) -> Tensor:
    """Blocks -> ``[N, chunks, 4]`` int32."""
    lows, minima, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = torch.cat((lows & 63, (rest & 15) | ((lows >> 6) << 4)), dim=-1)
    minimum = torch.cat((minima & 63, (rest >> 4) | ((minima >> 6) << 4)), dim=-1)
    ends = torch.cat((_low_high(b[..., 0:2].unsqueeze(-1)), _low_high(b[..., 2:4].unsqueeze(-1))), dim=-1)
    nibble = ends.flatten(-3, -2).flatten(-2)  # d and dmin interleaved
    first = scale | ((minimum & 3) << 6)
    second = (minimum >> 2) | (nibble << 4)
    return torch.stack((first, second), dim=-1).flatten(-2).contiguous().view(torch.int32)


def _k_scale_bytes(words: Tensor) -> Tensor:
    """``[N, chunks, 4]`` int32 -> the blocks' first 16 bytes."""
    b = _split(_bytes_of(words), -1, 8, 2)
    first, second = b[..., 0], b[..., 1]
    scale = first & 63
    minimum = (first >> 6) | ((second & 15) << 2)
    nibble = _split(second >> 4, -1, 2, 2, 2)  # [byte, low or high, d or dmin]
    ends = (nibble[..., 0, :] | (nibble[..., 1, :] << 4)).transpose(-1, -2).flatten(-2)
    lows = scale[..., :4] | ((scale[..., 4:] >> 4) << 6)
    minima = minimum[..., :4] | ((minimum[..., 4:] >> 4) << 6)
    rest = (scale[..., 4:] & 15) | ((minimum[..., 4:] & 15) << 4)
    return torch.cat((ends, lows, minima, rest), dim=-1)


def _k_codes(q: Tensor) -> Tensor:
    """The 128 bytes of q -> codes ``[N, chunks, 256]``.  Bytes 32 g .. of q: sub-blocks 2 g (low), 2 g + 1 (high)."""
    return _low_high(_split(q, -1, 4, 32)).flatten(-3)


def _k_bytes(codes: Tensor) -> Tensor:
    nibbles = _split(codes, -1, 4, 2, 32)
    return (nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)).flatten(-2)


def _q4_k(b: Tensor) -> PackedWeights:
    return PackedWeights(_words(_k_codes(b[..., 16:144]), 4, 32), None, _k_scale_words(b).flatten(1))


def _q4_k_blocks(p: PackedWeights) -> Iterator[Tensor]:
    assert p.scales is not None
    yield _k_scale_bytes(_split(p.scales, 1, -1, 4))
    yield _k_bytes(_codes(p.codes, 4, 32))


def _q5_k(b: Tensor) -> PackedWeights:
    fifth = ((b[..., 16:48].unsqueeze(-2) >> _shifts(1, b.device)) & 1).flatten(-2)
    return PackedWeights(_words(_k_codes(b[..., 48:176]), 4, 32), _words(fifth, 1, 32), _k_scale_words(b).flatten(1))


def _q5_k_blocks(p: PackedWeights) -> Iterator[Tensor]:
    assert p.scales is not None
    assert p.high is not None
    yield _k_scale_bytes(_split(p.scales, 1, -1, 4))
    fifth = _split(_codes(p.high, 1, 32), -1, 8, 32)
    yield (fifth << _shifts(1, fifth.device)).sum(dim=-2, dtype=torch.uint8)
    yield _k_bytes(_codes(p.codes, 4, 32))


# ---- Q6_K: l 0:128, h 128:192, scales 192:208, d 208:210


def _q6_k(b: Tensor) -> PackedWeights:
    low = _low_high(_split(b[..., 0:128], -1, 2, 64)).flatten(-3)
    high = ((_split(b[..., 128:192], -1, 2, 1, 32) >> _shifts(2, b.device)) & 3).flatten(-3)
    return PackedWeights(
        _words(low, 4, 16),
        _words(high, 2, 16),
        b[..., 192:208]
        .clone(memory_format=torch.contiguous_format)
        .view(torch.int32)
        .flatten(1),  # clone: a single row would alias its input
        b[..., 208:210].contiguous().view(torch.float16).flatten(1),
    )


def _q6_k_blocks(p: PackedWeights) -> Iterator[Tensor]:
    assert p.high is not None
    assert p.scales is not None
    assert p.steps is not None
    low = _split(_codes(p.codes, 4, 16), -1, 2, 2, 64)
    yield (low[..., 0, :] | (low[..., 1, :] << 4)).flatten(-2)
    high = _split(_codes(p.high, 2, 16), -1, 2, 4, 32)
    yield (high << _shifts(2, high.device)).sum(dim=-2, dtype=torch.uint8).flatten(-2)
    yield _bytes_of(_split(p.scales, 1, -1, 4))
    yield _bytes_of(_split(p.steps, 1, -1, 1))


# ---- Q4_0, Q4_1: d 0:2, of Q4_1 m 2:4, q of 16 bytes (elements i and i + 16); Q5_0, Q5_1: before q 4 bytes, bit i of
# which is element i's; Q8_0: d 0:2, q 2:34


def _steps(b: Tensor) -> Tensor:
    return b[..., 0:2].contiguous().view(torch.float16).flatten(1)


def _pairs(b: Tensor) -> Tensor:
    """d and m as one word."""
    return b[..., 0:4].contiguous().view(torch.int32).flatten(1)


def _simple_codes(q: Tensor) -> Tensor:
    """q of every block ``[N, blocks, 16]`` -> words."""
    return _words(_split(_low_high(q).flatten(1), 1, -1, CHUNK), 4, 32)


def _simple_high(h: Tensor) -> Tensor:
    """The four bytes of bits of every block -> words."""
    bits = (h.unsqueeze(-1) >> _shifts(1, h.device).flatten()) & 1
    return _words(_split(bits.flatten(1), 1, -1, CHUNK), 1, 32)


def _simple_blocks(p: PackedWeights) -> Iterator[Tensor]:
    assert p.steps is not None
    yield _bytes_of(_split(p.steps, 1, -1, 1))
    if p.high is not None:
        bits = _split(_codes(p.high, 1, 32).flatten(1), 1, -1, 4, 8)
        yield (bits << _shifts(1, bits.device).flatten()).sum(dim=-1, dtype=torch.uint8)
    nibbles = _split(_codes(p.codes, 4, 32).flatten(1), 1, -1, 2, 16)
    yield nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)


def _q4_0(b: Tensor) -> PackedWeights:
    return PackedWeights(_simple_codes(b[..., 2:18]), steps=_steps(b))


def _q4_1(b: Tensor) -> PackedWeights:
    return PackedWeights(_simple_codes(b[..., 4:20]), steps=_pairs(b))


def _q5_0(b: Tensor) -> PackedWeights:
    return PackedWeights(_simple_codes(b[..., 6:22]), _simple_high(b[..., 2:6]), steps=_steps(b))


def _q5_1(b: Tensor) -> PackedWeights:
    return PackedWeights(_simple_codes(b[..., 8:24]), _simple_high(b[..., 4:8]), steps=_pairs(b))


def _q8_0(b: Tensor) -> PackedWeights:
    return PackedWeights(b[..., 2:34].contiguous().view(torch.int8).flatten(1), steps=_steps(b))


def _q8_0_blocks(p: PackedWeights) -> Iterator[Tensor]:
    assert p.steps is not None
    yield _bytes_of(_split(p.steps, 1, -1, 1))
    yield _bytes_of(_split(p.codes, 1, -1, 32))


_REPACK: dict[str, Callable[[Tensor], PackedWeights]] = {
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_0": _q8_0,
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
}  # fmt: skip
_UNPACK: dict[str, Callable[[PackedWeights], Iterator[Tensor]]] = {
    "Q4_K": _q4_k_blocks, "Q5_K": _q5_k_blocks, "Q6_K": _q6_k_blocks, "Q8_0": _q8_0_blocks,
    "Q4_0": _simple_blocks, "Q4_1": _simple_blocks, "Q5_0": _simple_blocks, "Q5_1": _simple_blocks,
}  # fmt: skip
