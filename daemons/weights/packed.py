"""Packed weights: quant blocks repacked into tiles of 16 rows x 256 columns, each of them contiguous.

A kernel copies a tile as a whole or loads its parts in wide, aligned words.  Only the order of bytes changes:
:func:`repack` and :func:`unpack` are inverse, on any device.  A chunk is 256 columns, and ``element`` counts within it.
Rows are zero-padded to a multiple of 256 columns, matrices to a multiple of 16 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lucevisor.model.quant_types import CHUNK, TILE_ROWS, GgmlType, padded_columns, padded_rows, row_bytes

# A tile is the concatenation of its parts.  A part [A, 16, B] has B fields of each row, A times.  By type:
#
# Q4_K, Q5_K  codes   int32 [2, 16, 16]  word w of half h, field i < 4: low four bits of the elements
#                                        32 (4 h + i) + 2 w (bits 4 i) and its neighbour + 1 (bits 16 + 4 i)
#             high    int16 [1, 16, 16]  Q5_K: fifth bits of the elements 32 j + 2 w (bit j of w) and + 1 (bit 8 + j)
#             scales  int32 [1, 16, 4]   half j & 1 of word j >> 1: scale of 32 | minimum << 6 | bits << 12;
#                                        bits of the low halves: d, of the high ones: dmin, both f16, lowest first
# Q6_K        codes   int32 [4, 16, 8]   word w of h, field i < 4: low four bits of the elements
#                                        16 (4 h + i) + 2 w (bits 4 i) and its neighbour + 1 (bits 16 + 4 i)
#             high    int32 [2, 16, 8]   word w of g, field i < 8: upper two bits of the elements
#                                        16 (8 g + i) + 2 w (bits 2 i) and its neighbour + 1 (bits 16 + 2 i)
#             scales  int32 [1, 16, 4]   byte j & 3 of word j >> 2: scale of 16, signed
#             steps   f16   [1, 16, 1]   d
# Q4_0, Q5_0  codes   as Q4_K; high as Q5_K; steps f16 [1, 16, 8] d of each 32
# Q4_1, Q5_1  codes   as Q4_K; high as Q5_K; steps int32 [1, 16, 8] d | m << 16, both f16
# Q8_0        codes   int8  [8, 16, 32]  as stored; steps f16 [1, 16, 8] d
# IQ4_NL      as Q4_0
# MXFP4       codes   as Q4_K; steps uint8 [1, 16, 8] e of each 32
# IQ4_XS      codes   as Q4_K; scales int32 [1, 16, 2] d | t << 16, s
#
# Neighbours lie 16 bits apart in a word, so one shift and mask yields both halves of a pair of 16-bit floats.  A part's
# 16 rows adjoin, so that the lanes of a warp that hold rows g and t-th words load from all banks of shared memory.


class TilePart(NamedTuple):
    """A part ``[groups, TILE_ROWS, width]`` of a tile: ``name`` is its field in :class:`PackedWeights`."""

    name: str
    dtype: torch.dtype
    groups: int
    width: int

    @property
    def n_bytes(self) -> int:
        return self.groups * TILE_ROWS * self.width * self.dtype.itemsize


_CODES4 = TilePart("codes", torch.int32, 2, 16)
_HIGH1 = TilePart("high", torch.int16, 1, 16)
_SCALES = TilePart("scales", torch.int32, 1, 4)
_STEPS = TilePart("steps", torch.float16, 1, 8)
_STEP_PAIRS = TilePart("steps", torch.int32, 1, 8)
_EXPONENTS = TilePart("steps", torch.uint8, 1, 8)
TILES: dict[str, tuple[TilePart, ...]] = {
    "Q4_K": (_CODES4, _SCALES),
    "Q5_K": (_CODES4, _HIGH1, _SCALES),
    "Q6_K": (
        TilePart("codes", torch.int32, 4, 8),
        TilePart("high", torch.int32, 2, 8),
        _SCALES,
        TilePart("steps", torch.float16, 1, 1),
    ),
    "Q4_0": (_CODES4, _STEPS),
    "Q5_0": (_CODES4, _HIGH1, _STEPS),
    "Q4_1": (_CODES4, _STEP_PAIRS),
    "Q5_1": (_CODES4, _HIGH1, _STEP_PAIRS),
    "Q8_0": (TilePart("codes", torch.int8, 8, 32), _STEPS),
    "IQ4_NL": (_CODES4, _STEPS),
    "IQ4_XS": (_CODES4, TilePart("scales", torch.int32, 1, 2)),
    "MXFP4": (_CODES4, _EXPONENTS),
}
"""Quant type -> the parts of its tiles, in the order in which they lie."""


def tile_bytes(kind: str) -> int:
    """Bytes of a tile: those of its 16 rows in the file."""
    return sum(part.n_bytes for part in TILES[kind])


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """A matrix of ``n_rows`` rows, or X of them.

    ``tiles``: uint8 [..., ceil(n_rows / 16), K / 256, bytes of a tile].  ``codes``, ``high``, ``scales``, ``steps``:
    its parts as views [..., ceil(n_rows / 16), K / 256, A, 16, B]; None where the type has no such part.
    """

    kind: GgmlType
    tiles: Tensor
    n_rows: int
    codes: Tensor = field(init=False)
    high: Tensor | None = field(init=False, default=None)
    scales: Tensor | None = field(init=False, default=None)
    steps: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        at = 0
        for part in TILES[self.kind.name]:
            view = self.tiles[..., at : at + part.n_bytes].view(part.dtype)
            object.__setattr__(self, part.name, _split(view, -1, part.groups, TILE_ROWS, part.width))
            at += part.n_bytes

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes

    @property
    def n_chunks(self) -> int:
        return self.tiles.shape[-2]

    def parts(self) -> list[Tensor]:
        """The parts that exist, in the order in which they lie."""
        return [getattr(self, part.name) for part in TILES[self.kind.name]]

    def matrix(self, i: int) -> PackedWeights:
        """Matrix ``i`` of several."""
        return PackedWeights(self.kind, self.tiles[i], self.n_rows)

    def write(self, first: int, raw: Tensor) -> None:
        """Pack quant blocks ``[n, row_bytes]`` uint8 as the rows from ``first`` on, of one matrix after the other."""
        rows = torch.arange(first, first + raw.shape[0], device=raw.device)
        tile, row = self._places(rows)
        missing = row_bytes(self.kind, self.n_chunks * CHUNK) - raw.shape[1]
        if missing:
            raw = F.pad(raw, (0, missing))
        blocks = raw.view(raw.shape[0], -1, self.kind.block_bytes)
        for part, target, values in zip(
            TILES[self.kind.name], self._by_row(), _REPACK[self.kind.name](blocks), strict=True
        ):
            target[tile, row] = values.view(raw.shape[0], self.n_chunks, part.groups, part.width)

    def blocks(self, rows: Tensor, n_columns: int) -> Tensor:
        """The quant blocks ``[n, row_bytes]`` uint8 of ``rows`` [n], counted through one matrix after the other."""
        tile, row = self._places(rows)
        found = {
            part.name: view[tile, row].flatten(1)
            for part, view in zip(TILES[self.kind.name], self._by_row(), strict=True)
        }
        out = torch.cat(list(_UNPACK[self.kind.name](_Rows(**found))), dim=-1)
        return out.view(rows.shape[0], -1)[:, : row_bytes(self.kind, n_columns)]

    def _places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Tile and row in it of each of ``rows``."""
        within = rows % self.n_rows
        return rows // self.n_rows * self.tiles.shape[-3] + within // TILE_ROWS, within % TILE_ROWS

    def _by_row(self) -> Iterator[Tensor]:
        """The parts as ``[tiles, 16, K / 256, A, B]``."""
        for part in self.parts():
            yield (part.flatten(0, 1) if part.ndim == 6 else part).permute(0, 3, 1, 2, 4)


class _Rows(NamedTuple):
    """The fields of rows ``[N, *]``, chunk after chunk."""

    codes: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    steps: Tensor | None = None


def empty_packed(
    kind: GgmlType, n_rows: int, n_columns: int, device: torch.device, n_matrices: int | None = None
) -> PackedWeights:
    """Uninitialised packed weights of a matrix, or of ``n_matrices``; rows that fill a tile up are zero."""
    shape = (padded_rows(n_rows) // TILE_ROWS, padded_columns(n_columns) // CHUNK, tile_bytes(kind.name))
    several = () if n_matrices is None else (n_matrices,)
    tiles = torch.empty(*several, *shape, dtype=torch.uint8, device=device)
    if n_rows % TILE_ROWS:
        tiles[..., -1, :, :] = 0
    return PackedWeights(kind, tiles, n_rows)


def repack(kind: GgmlType, raw: Tensor) -> PackedWeights:
    """Quant blocks ``[N, row_bytes]`` or ``[X, N, row_bytes]`` uint8 to packed weights, on the same device."""
    *several, n_rows, n_bytes = raw.shape
    n_columns = n_bytes // kind.block_bytes * kind.block_elements
    out = empty_packed(kind, n_rows, n_columns, raw.device, *several)
    out.write(0, raw.reshape(-1, n_bytes))
    return out


def unpack(packed: PackedWeights, n_columns: int) -> Tensor:
    """Packed weights back to the quant blocks ``[N, row_bytes]`` uint8 of all matrices."""
    n_rows = packed.n_rows * (packed.tiles.shape[0] if packed.tiles.ndim == 4 else 1)
    return packed.blocks(torch.arange(n_rows, device=packed.tiles.device), n_columns)


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


def _q4_k(b: Tensor) -> Iterator[Tensor]:
    yield _words(_k_codes(b[..., 16:144]), 4, 32)
    yield _k_scale_words(b)


def _q4_k_blocks(p: _Rows) -> Iterator[Tensor]:
    assert p.scales is not None
    yield _k_scale_bytes(_split(p.scales, 1, -1, 4))
    yield _k_bytes(_codes(p.codes, 4, 32))


def _q5_k(b: Tensor) -> Iterator[Tensor]:
    fifth = ((b[..., 16:48].unsqueeze(-2) >> _shifts(1, b.device)) & 1).flatten(-2)
    yield _words(_k_codes(b[..., 48:176]), 4, 32)
    yield _words(fifth, 1, 32)
    yield _k_scale_words(b)


def _q5_k_blocks(p: _Rows) -> Iterator[Tensor]:
    assert p.scales is not None
    assert p.high is not None
    yield _k_scale_bytes(_split(p.scales, 1, -1, 4))
    fifth = _split(_codes(p.high, 1, 32), -1, 8, 32)
    yield (fifth << _shifts(1, fifth.device)).sum(dim=-2, dtype=torch.uint8)
    yield _k_bytes(_codes(p.codes, 4, 32))


# ---- Q6_K: l 0:128, h 128:192, scales 192:208, d 208:210


def _q6_k(b: Tensor) -> Iterator[Tensor]:
    low = _low_high(_split(b[..., 0:128], -1, 2, 64)).flatten(-3)
    high = ((_split(b[..., 128:192], -1, 2, 1, 32) >> _shifts(2, b.device)) & 3).flatten(-3)
    yield _words(low, 4, 16)
    yield _words(high, 2, 16)
    yield b[..., 192:208].clone(memory_format=torch.contiguous_format).view(torch.int32)
    yield b[..., 208:210].contiguous().view(torch.float16)


def _q6_k_blocks(p: _Rows) -> Iterator[Tensor]:
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


def _simple_blocks(p: _Rows) -> Iterator[Tensor]:
    assert p.steps is not None
    yield _bytes_of(_split(p.steps, 1, -1, 1))
    if p.high is not None:
        bits = _split(_codes(p.high, 1, 32).flatten(1), 1, -1, 4, 8)
        yield (bits << _shifts(1, bits.device).flatten()).sum(dim=-1, dtype=torch.uint8)
    nibbles = _split(_codes(p.codes, 4, 32).flatten(1), 1, -1, 2, 16)
    yield nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)


def _q4_0(b: Tensor) -> Iterator[Tensor]:
    yield _simple_codes(b[..., 2:18])
    yield _steps(b)


def _q4_1(b: Tensor) -> Iterator[Tensor]:
    yield _simple_codes(b[..., 4:20])
    yield _pairs(b)


def _q5_0(b: Tensor) -> Iterator[Tensor]:
    yield _simple_codes(b[..., 6:22])
    yield _simple_high(b[..., 2:6])
    yield _steps(b)


def _q5_1(b: Tensor) -> Iterator[Tensor]:
    yield _simple_codes(b[..., 8:24])
    yield _simple_high(b[..., 4:8])
    yield _pairs(b)


def _q8_0(b: Tensor) -> Iterator[Tensor]:
    yield b[..., 2:34].contiguous().view(torch.int8)
    yield _steps(b)


def _q8_0_blocks(p: _Rows) -> Iterator[Tensor]:
    assert p.steps is not None
    yield _bytes_of(_split(p.steps, 1, -1, 1))
    yield _bytes_of(_split(p.codes, 1, -1, 32))


# ---- IQ4_NL as Q4_0; MXFP4: e 0:1, q 1:17; IQ4_XS: d 0:2, t 2:4, s 4:8, q 8:136, eight times 16 bytes as Q4_0's


def _mxfp4(b: Tensor) -> Iterator[Tensor]:
    yield _simple_codes(b[..., 1:17])
    yield b[..., 0].contiguous()


def _iq4_xs(b: Tensor) -> Iterator[Tensor]:
    yield _simple_codes(_split(b[..., 8:136], -1, 8, 16).flatten(1, 2))
    yield b[..., 0:8].contiguous().view(torch.int32).flatten(1)


def _iq4_xs_blocks(p: _Rows) -> Iterator[Tensor]:
    assert p.scales is not None
    yield _bytes_of(_split(p.scales, 1, -1, 2))
    nibbles = _split(_codes(p.codes, 4, 32), -1, 8, 2, 16)
    yield (nibbles[..., 0, :] | (nibbles[..., 1, :] << 4)).flatten(-2)


_REPACK: dict[str, Callable[[Tensor], Iterator[Tensor]]] = {
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "Q8_0": _q8_0,
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "IQ4_NL": _q4_0, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
_UNPACK: dict[str, Callable[[_Rows], Iterator[Tensor]]] = {
    "Q4_K": _q4_k_blocks, "Q5_K": _q5_k_blocks, "Q6_K": _q6_k_blocks, "Q8_0": _q8_0_blocks,
    "Q4_0": _simple_blocks, "Q4_1": _simple_blocks, "Q5_0": _simple_blocks, "Q5_1": _simple_blocks,
    "IQ4_NL": _simple_blocks, "IQ4_XS": _iq4_xs_blocks, "MXFP4": _simple_blocks,
}  # fmt: skip
