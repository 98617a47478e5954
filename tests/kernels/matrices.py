"""Random quantised matrices in every form, for the tests of kernels with packed weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from daemons.ops.triton.gemv import packed_gemv
from daemons.ops.triton.split_k import GemvConfig
from daemons.weights.dequant import dequantise
from daemons.weights.packed import PackedWeights, repack
from lucevisor.model.quant_types import BY_NAME, REPACKED, GgmlType
from tests.daemons.tiny_models import random_blocks
from tests.kernels.gemv_error import assert_gemv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
KINDS = sorted(REPACKED)
SHORT = sorted(name for name in REPACKED if BY_NAME[name].block_elements == 32)
"""Types whose rows may end within a chunk of 256."""

of_kinds = pytest.mark.parametrize("kind", KINDS)
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
SCALES = dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0, 1)) | {"Q6_K": (208, 1), "MXFP4": (0, 0)}
"""Where in a block float16 scales lie, and how many, where there are not two at its start."""

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA or HIP device: nothing is captured or compiled")


@pytest.fixture(autouse=True)
def ignore_numpy_overflow():
    """The interpreter rounds with numpy, which warns about infinite float16 numbers."""
    with np.errstate(over="ignore"):
        yield


@dataclass
class Matrix:
    """A quantised matrix [..., N, K]: blocks [N, row_bytes], packed weights, and its numbers in float64."""

    kind: GgmlType
    raw: Tensor
    packed: PackedWeights
    numbers: Tensor

    @classmethod
    def of(cls, kind: str, raw: np.ndarray) -> Matrix:
        type_, blocks = BY_NAME[kind], torch.from_numpy(raw).to(DEVICE)
        return cls(type_, blocks, repack(type_, blocks), dequantise(type_, blocks, torch.float32).double())

    @classmethod
    def random(cls, kind: str, n: int, k: int) -> Matrix:
        """Numbers of either sign, as in a model: minima are half the range of codes below zero."""
        raw = random_blocks(np.random.default_rng(n + k), kind, n, k)
        scales = halves(raw, kind)
        if scales.shape[-1] == 2:
            scales[..., 1] = scales[..., 0] * (7.5 if kind == "Q4_K" else 15.5)
        return cls.of(kind, raw)

    def experts(self, n_experts: int) -> Matrix:
        """The same rows as matrices of experts."""
        packed = repack(self.kind, self.raw.view(n_experts, -1, self.raw.shape[-1]))
        return Matrix(self.kind, self.raw, packed, self.numbers.view(n_experts, -1, self.numbers.shape[-1]))

    def blocks_of(self, expert: int) -> Tensor:
        """The blocks of one expert."""
        return self.raw.view(*self.numbers.shape[:-1], -1)[expert]

    def check(self, x: Tensor, config: GemvConfig | None = None) -> Tensor:
        found = packed_gemv(self.packed, x, config=config)
        assert_gemv(found, x, self.kind, self.raw)
        return found


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def halves(raw: np.ndarray, kind: str) -> np.ndarray:
    """A view [rows, blocks, scales] of the float16 scales inside blocks; of MXFP4 of none."""
    blocks = raw.reshape(raw.shape[0], -1, BY_NAME[kind].block_bytes)
    first, count = SCALES.get(kind, (0, 2))
    return blocks[..., first : first + 2 * count].view(np.float16)


def extreme(kind: str) -> np.ndarray:
    """Rows of 256 numbers: scales zero, negative, the largest and the smallest there are; then ordinary ones."""
    raw = random_blocks(np.random.default_rng(3), kind, 12, 256)
    scales = halves(raw, kind)
    if kind == "MXFP4":
        raw.reshape(12, -1, 17)[:7, :, 0] = np.array([0, 0, 100, 110, 128, 135, 139])[:, None]
        raw.reshape(12, -1, 17)[:2, :, 1:] = 0
        return raw
    for row, scale in enumerate((0.0, -0.0, 65504.0, -65504.0, 2.0**-14, 2.0**-24, -(2.0**-24))):
        scales[row] = scale
    scales[7:9] *= -1
    scales[9, ::2] = 0
    scales[10, ..., 0] *= -1  # the scale, but not the minimum, where there is one
    return raw
