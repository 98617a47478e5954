"""Packed weights are the blocks' bytes in the order that daemons.weights.packed says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from daemons.weights.dequant import dequantise
from daemons.weights.packed import empty_packed, repack, unpack
from lucevisor.model.quant_types import BY_NAME, REPACKED, WeightFormat, format_bytes
from tests.daemons.tiny_models import random_blocks

KINDS = sorted(REPACKED)
SHORT = sorted(name for name in REPACKED if BY_NAME[name].block_elements == 32)
"""Types whose rows may end within a chunk."""


def raw_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(random_blocks(np.random.default_rng(5), kind, rows, columns))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5])
def test_any_bytes_come_back(kind, rows):
    type_ = BY_NAME[kind]
    n_bytes = 3 * 256 // type_.block_elements * type_.block_bytes
    raw = torch.from_numpy(np.random.default_rng(rows).integers(0, 256, (rows, n_bytes), dtype=np.uint8))
    packed = repack(type_, raw)
    assert packed.nbytes == raw.nbytes
    assert torch.equal(unpack(type_, packed, 3 * 256), raw)
    room = empty_packed(type_, rows, 3 * 256, raw.device)
    for wanted, found in zip(packed.tensors(), room.tensors(), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert wanted.is_contiguous()


@pytest.mark.parametrize("kind", SHORT)
@pytest.mark.parametrize("columns", [32, 352, 704])
def test_rows_that_end_within_a_chunk_are_filled_up(kind, columns):
    type_ = BY_NAME[kind]
    raw = raw_of(kind, 3, columns)
    packed = repack(type_, raw)
    assert torch.equal(unpack(type_, packed, columns), raw)
    filled = torch.zeros(3, format_bytes(type_, (1, columns), WeightFormat.PACKED), dtype=torch.uint8)
    filled[:, : raw.shape[1]] = raw
    for found, wanted in zip(packed.tensors(), repack(type_, filled).tensors(), strict=True):
        assert torch.equal(found, wanted)
    room = empty_packed(type_, 3, columns, raw.device)
    assert [t.shape for t in room.tensors()] == [t.shape for t in packed.tensors()]
    assert packed.nbytes == format_bytes(type_, (3, columns), WeightFormat.PACKED)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_repacked_by_themselves(kind):
    raw = raw_of(kind, 6, 512)
    whole, some = repack(BY_NAME[kind], raw), repack(BY_NAME[kind], raw[2:4])
    for a, b in zip(whole.tensors(), some.tensors(), strict=True):
        assert torch.equal(a[2:4].view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_fields_stand_where_the_table_says(kind):
    """Numbers computed from the packed weights alone, element by element."""
    type_ = BY_NAME[kind]
    raw = raw_of(kind, 3, 512)
    wanted = dequantise(type_, raw, torch.float32).numpy()
    packed = repack(type_, raw)
    codes = packed.codes.numpy().astype(np.int64)
    high = None if packed.high is None else packed.high.numpy().astype(np.int64)
    found = np.zeros_like(wanted)
    for n in range(3):
        for k in range(512):
            chunk, e = divmod(k, 256)
            found[n, k] = number(kind, packed, codes[n], None if high is None else high[n], n, chunk, e)
    np.testing.assert_array_equal(found, wanted)


def number(kind, packed, codes, high, n, chunk, e):
    f32 = np.float32
    if kind == "Q8_0":
        return f32(packed.steps[n, chunk * 8 + e // 32]) * f32(codes[chunk * 256 + e])
    size = 16 if kind == "Q6_K" else 32
    j, within = divmod(e, size)
    w, odd = divmod(within, 2)
    q = codes[chunk * 32 + size // 2 * (j >> 2) + w] >> 16 * odd + 4 * (j & 3) & 15
    if kind == "Q6_K":
        q |= (high[chunk * 16 + 8 * (j >> 3) + w] >> 16 * odd + 2 * (j & 7) & 3) << 4
        scale = packed.scales[n].view(torch.int8)[chunk * 16 + j]
        return f32(packed.steps[n, chunk]) * f32(scale) * f32(q - 32)
    if high is not None:
        q |= (high[chunk * 16 + w] >> 8 * odd + j & 1) << 4
    if kind in ("Q4_0", "Q5_0"):
        return f32(packed.steps[n, chunk * 8 + j]) * f32(q - (16 if high is not None else 8))
    if kind in ("Q4_1", "Q5_1"):
        d, m = packed.steps[n, chunk * 8 + j].reshape(1).view(torch.float16).float().numpy()
        return d * f32(q) + m
    words = packed.scales[n, chunk * 4 : chunk * 4 + 4].numpy().astype(np.int64)
    field = words[j >> 1] >> 16 * (j & 1)
    ends = [sum((words[w] >> 16 * odd + 12 & 15) << 4 * w for w in range(4)) for odd in range(2)]
    d, dmin = np.array(ends, dtype=np.uint16).view(np.float16).astype(f32)
    return d * f32(field & 63) * f32(q) - dmin * f32(field >> 6 & 63)
