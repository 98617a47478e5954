"""Packed weights dequantise to the bits of ``daemons.weights.dequant``."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from daemons.ops.triton.dequant import dequantise_packed
from daemons.weights.dequant import dequantise
from tests.kernels.matrices import (
    SHORT,
    Matrix,
    bits,
    extreme,
    ignore_numpy_overflow,
    of_dtypes,
    of_kinds,
)

__all__ = ["ignore_numpy_overflow"]  # a fixture


@of_dtypes
@of_kinds
def test_numbers_are_those_of_dequantise(kind, dtype):
    m = Matrix.random(kind, 9, 512)
    wanted = dequantise(m.kind, m.raw, dtype)
    assert torch.equal(bits(dequantise_packed(m.packed, dtype)), bits(wanted))
    for first, n in ((3, 5), (8, 1)):
        assert torch.equal(bits(dequantise_packed(m.packed, dtype, first, n)), bits(wanted[first : first + n]))


@pytest.mark.parametrize("kind", SHORT)
def test_rows_are_zero_padded_to_chunks(kind):
    m = Matrix.random(kind, 9, 352)
    found = dequantise_packed(m.packed, torch.float32)
    assert torch.equal(bits(found[:, :352]), bits(dequantise(m.kind, m.raw, torch.float32)))
    assert found.shape == (9, 512)
    assert not bool(found[:, 352:].any())


def test_all_exponents_and_codes_of_mxfp4():
    raw = np.zeros((255, 17 * 8), dtype=np.uint8)
    blocks = raw.reshape(255, 8, 17)
    blocks[:, :, 0] = np.arange(255)[:, None]
    blocks[:, :, 1:] = np.arange(128, dtype=np.uint8).reshape(8, 16) * 2 + 1
    m = Matrix.of("MXFP4", raw)
    wanted = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(bits(dequantise_packed(m.packed, torch.float32)).cpu(), bits(torch.from_numpy(wanted)))


@of_dtypes
@of_kinds
def test_extreme_scales_give_the_same_bits(kind, dtype):
    m = Matrix.of(kind, extreme(kind))
    found = dequantise_packed(m.packed, dtype)
    assert torch.equal(bits(found), bits(dequantise(m.kind, m.raw, dtype)))
    assert not bool(found.isnan().any())
