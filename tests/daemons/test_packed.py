"""Packed weights are the blocks' bytes in the order that daemons.weights.packed says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daemons.weights.dequant import dequantise
from daemons.weights.packed import empty_packed, repack, tile_bytes, unpack
from lucevisor.model.quant_types import BY_NAME, REPACKED, WeightFormat, format_bytes
from tests.daemons.tiny_models import random_blocks

KINDS = sorted(REPACKED)
SHORT = sorted(name for name in REPACKED if BY_NAME[name].block_elements == 32)
"""Types whose rows may end within a chunk."""


def raw_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(random_blocks(np.random.default_rng(5), kind, rows, columns))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_any_bytes_come_back(kind, rows):
    type_ = BY_NAME[kind]
    n_bytes = 3 * 256 // type_.block_elements * type_.block_bytes
    raw = torch.from_numpy(np.random.default_rng(rows).integers(0, 256, (rows, n_bytes), dtype=np.uint8))
    packed = repack(type_, raw)
    assert packed.nbytes == -(-rows // 16) * 16 * n_bytes == format_bytes(type_, (rows, 768), WeightFormat.PACKED)
    assert packed.tiles.shape[-1] == tile_bytes(kind)
    assert torch.equal(unpack(packed, 3 * 256), raw)
    ids = torch.tensor([rows - 1, 0, rows // 2])
    assert torch.equal(packed.blocks(ids, 3 * 256), raw[ids])


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("columns", [32, 352, 704])
def test_rows_that_end_within_a_chunk_are_filled_up(kind, columns):
    type_ = BY_NAME[kind]
    raw = raw_of(kind, 3, columns)
    packed = repack(type_, raw)
    assert torch.equal(unpack(packed, columns), raw)
    filled = torch.zeros(3, packed.nbytes // 16, dtype=torch.uint8)
    filled[:, : raw.shape[1]] = raw
    assert torch.equal(unpack(packed, packed.n_chunks * 256), filled)
    assert packed.nbytes == format_bytes(type_, (3, columns), WeightFormat.PACKED)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_repacked_by_themselves(kind):
    """In any order and any number, and of several matrices in a row."""
    raw = raw_of(kind, 60, 512)
    packed = empty_packed(BY_NAME[kind], 20, 512, raw.device, 3)
    for start, stop in ((30, 60), (0, 7), (7, 30)):
        packed.write(start, raw[start:stop])
    assert torch.equal(unpack(packed, 512), raw)
    for i in range(3):
        assert torch.equal(unpack(packed.matrix(i), 512), raw[20 * i : 20 * i + 20])
    whole = repack(BY_NAME[kind], raw.view(3, 20, -1))
    assert torch.equal(whole.tiles[:, 0], packed.tiles[:, 0])
    assert whole.nbytes == format_bytes(BY_NAME[kind], (3, 20, 512), WeightFormat.PACKED)


@pytest.mark.parametrize("kind", KINDS)
def test_fields_stand_where_the_table_says(kind):
    """Numbers computed from the packed weights alone, element by element."""
    type_ = BY_NAME[kind]
    raw = raw_of(kind, 19, 512)
    wanted = dequantise(type_, raw, torch.float32).numpy()[16:]
    packed = repack(type_, raw)
    codes, high = packed.codes[1].numpy().astype(np.int64), packed.high
    found = np.zeros_like(wanted)
    for n in range(3):
        for k in range(512):
            chunk, e = divmod(k, 256)
            bits = None if high is None else high[1, chunk, :, n].numpy().astype(np.int64)
            found[n, k] = number(kind, packed, codes[chunk, :, n], bits, n, chunk, e)
    np.testing.assert_array_equal(found, wanted)


def number(kind, packed, codes, high, n, chunk, e):
    """Element e of a chunk of row 16 + n, whose words are ``codes`` [A, B] and ``high`` [A, B]."""
    f32 = np.float32
    steps = None if packed.steps is None else packed.steps[1, chunk, 0, n]
    if kind == "Q8_0":
        return f32(steps[e // 32]) * f32(codes[e // 32, e % 32])
    size = 16 if kind == "Q6_K" else 32
    j, within = divmod(e, size)
    w, odd = divmod(within, 2)
    q = codes[j >> 2, w] >> 16 * odd + 4 * (j & 3) & 15
    if kind == "Q6_K":
        q |= (high[j >> 3, w] >> 16 * odd + 2 * (j & 7) & 3) << 4
        scale = packed.scales[1, chunk, 0, n].contiguous().view(torch.int8)[j]
        return f32(steps[0]) * f32(scale) * f32(q - 32)
    if high is not None:
        q |= (high[0, w] >> 8 * odd + j & 1) << 4
    if kind in ("Q4_0", "Q5_0"):
        return f32(steps[j]) * f32(q - (16 if high is not None else 8))
    if kind in ("Q4_1", "Q5_1"):
        d, m = steps[j].reshape(1).view(torch.float16).float().numpy()
        return d * f32(q) + m
    words = packed.scales[1, chunk, 0, n].numpy().astype(np.int64)
    field = words[j >> 1] >> 16 * (j & 1)
    ends = [sum((words[w] >> 16 * odd + 12 & 15) << 4 * w for w in range(4)) for odd in range(2)]
    d, dmin = np.array(ends, dtype=np.uint16).view(np.float16).astype(f32)
    return d * f32(field & 63) * f32(q) - dmin * f32(field >> 6 & 63)
