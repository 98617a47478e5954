"""Block formats against gguf-py's own dequantisation, on random bytes."""

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.weights.dequant import dequantise, four_bit
from lucevisor.model.quant_types import BY_NAME, NATIVE
from tests.daemons.tiny_models import random_blocks
from tests.numerics import UNIT

KINDS = ["F32", "F16", "BF16", *sorted(NATIVE)]
OTHERS = ["IQ1_M", "IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "NVFP4", "TQ1_0", "TQ2_0"]


def oracle(kind: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # random scales are NaN and infinite at times
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), rows=st.integers(1, 3), blocks=st.integers(1, 3), seed=st.integers(0, 1 << 32))
def test_any_bytes_give_the_reference_bits(kind, rows, blocks, seed):
    raw = np.random.default_rng(seed).integers(0, 256, (rows, blocks * BY_NAME[kind].block_bytes), dtype=np.uint8)
    wanted = oracle(kind, raw)
    found = dequantise(BY_NAME[kind], torch.from_numpy(raw), torch.float32).numpy()
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted)  # NaN equals NaN here


@pytest.mark.parametrize("kind", [k for k in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4") if k in NATIVE])
def test_numbers_that_the_library_quantised_come_back(kind):
    """The library writes these types too: what it stored of a matrix is read as it reads it, and near the matrix."""
    x = np.random.default_rng(3).normal(0, 0.04, (24, 256)).astype(np.float32)
    raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind])
    found = dequantise(BY_NAME[kind], torch.from_numpy(raw), torch.float32).numpy()
    np.testing.assert_array_equal(found, oracle(kind, raw))
    assert np.abs(found - x).max() < {"Q8_0": 0.001, "MXFP4": 0.04}.get(kind, 0.02)


def test_every_power_of_two_of_mxfp4():
    """All 256 exponents with all sixteen codes: the two smallest are subnormal numbers."""
    raw = np.zeros((256, 17), dtype=np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 17
    found = dequantise(BY_NAME["MXFP4"], torch.from_numpy(raw), torch.float32).numpy()
    np.testing.assert_array_equal(found, oracle("MXFP4", raw))
    assert found[0].max() == 12 * 2.0**-128


@pytest.mark.parametrize("kind", sorted(NATIVE))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_rounded_float32_number(kind, dtype):
    raw = torch.from_numpy(random_blocks(np.random.default_rng(4), kind, 3, 512))
    assert torch.equal(dequantise(BY_NAME[kind], raw, dtype), dequantise(BY_NAME[kind], raw, torch.float32).to(dtype))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_types_are_read_by_the_library(kind):
    raw = np.random.default_rng(1).integers(0, 256, (2, 2 * BY_NAME[kind].block_bytes), dtype=np.uint8)
    found = dequantise(BY_NAME[kind], torch.from_numpy(raw), torch.float32).numpy()
    np.testing.assert_array_equal(found, oracle(kind, raw))


def test_a_type_nobody_reads_is_refused():
    with pytest.raises(NotImplementedError):
        dequantise(BY_NAME["Q8_K"], torch.zeros(1, 292, dtype=torch.uint8), torch.float32)


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(["Q4_0", "Q4_1", "Q4_K"]), seed=st.integers(0, 1 << 32))
def test_four_bit_groups_are_the_same_numbers(kind, seed):
    raw = random_blocks(np.random.default_rng(seed), kind, 4, 512)
    codes, scale, zero = four_bit(BY_NAME[kind], torch.from_numpy(raw))
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 16
    numbers = (codes.view(4, -1, 32).float() - 8) * scale.unsqueeze(-1) + zero.unsqueeze(-1)
    # three roundings here and three there, none of a number larger than 16 scales and a zero
    allowed = 6 * UNIT * (16 * scale.abs() + zero.abs()).unsqueeze(-1).expand_as(numbers).reshape(4, -1).numpy()
    assert (np.abs(numbers.reshape(4, -1).numpy() - oracle(kind, raw)) <= allowed).all()


def test_only_four_bit_types_have_four_bit_codes():
    with pytest.raises(KeyError, match="Q6_K"):
        four_bit(BY_NAME["Q6_K"], torch.zeros(1, 210, dtype=torch.uint8))
