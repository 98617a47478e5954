"""The convolution along blocks matches its torch form, and that the sum it stands for."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from daemons.ops.basic import block_convolution as torch_form
from daemons.ops.triton.block_convolution import block_convolution
from tests.kernels.limits import assert_near

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def inputs(rows: int, width: int, taps: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(rows + width)
    shapes = (rows, width), (rows, 2 * taps * width // group), (2, taps, width)
    x, delta, base = (torch.randn(*shape, generator=random).to(DEVICE) for shape in shapes)
    return x.to(dtype), delta.to(dtype), base


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("rows", "n", "width", "taps", "group"), [(16, 8, 64, 2, 16), (3, 1, 600, 2, 8), (8, 4, 96, 6, 96)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_slice_is_convolved_by_itself(dtype, rows, n, width, taps, group, side) -> None:
    x, delta, base = inputs(rows, width, taps, group, dtype)
    found = block_convolution(x, delta, base, side, n)
    assert found.dtype == dtype
    assert_near(found, lambda x, delta, base: torch_form(x.float(), delta.float(), base, side, n), x, delta, base)


def test_the_torch_form_is_the_sum() -> None:
    """One slice of three tokens, two taps, groups of two channels; before the slice there are zeros."""
    x, delta, base = inputs(3, 4, 2, 2, torch.float32)
    for side in (0, 1):
        found = torch_form(x, delta, base, side, 3)
        for token in range(3):
            for channel in range(4):
                kernels = [base[side, tap, channel] + delta[token, side * 4 + tap * 2 + channel // 2] for tap in (0, 1)]
                before = x[token - 1, channel] if token else 0.0
                wanted = kernels[0] * x[token, channel] + kernels[1] * before
                assert float(found[token, channel]) == pytest.approx(float(wanted), abs=1e-6)
