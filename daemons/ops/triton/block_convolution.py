"""Convolution along short slices with kernels of their own for each token, as DFlash 2 drafters have them.

The torch form is :func:`daemons.ops.basic.block_convolution`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512
"""Channels per program."""


@triton.jit(do_not_specialize=["n"])
def block_convolution_kernel(
    x,  # [B n, E]
    delta,  # [B n, 2 TAPS groups]
    base,  # [2, TAPS, E] float32 contiguous
    out,  # [B n, E] contiguous
    n,
    n_columns,  # E
    x_stride,
    delta_stride,
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, token, group = column < n_columns, row % n, column // GROUP
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        at = SIDE * TAPS + tap
        kernel = tl.load(base + at * n_columns + column, mask=mask, other=0.0)
        change = tl.load(delta + row * delta_stride + at * (n_columns // GROUP) + group, mask=mask, other=0.0)
        inside = column < tl.where(token >= tap, n_columns, 0)
        value = tl.load(x + (row - tap) * x_stride + column, mask=inside, other=0.0)
        total += (kernel + change.to(tl.float32)) * value.to(tl.float32)
    tl.store(out + row * n_columns + column, total.to(out.dtype.element_ty), mask=mask)


def block_convolution(x: Tensor, delta: Tensor, base: Tensor, side: int, n: int) -> Tensor:
    """See :meth:`daemons.ops.operations.Operations.block_convolution`."""
    rows, width = x.shape
    taps = base.shape[1]
    group = width * 2 * taps // delta.shape[1]
    assert rows % n == 0
    assert base.shape == (2, taps, width)
    assert delta.shape[1] * group == 2 * taps * width
    assert x.stride(1) == delta.stride(1) == 1
    assert base.is_contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block_convolution_kernel[rows, triton.cdiv(width, TILE)](
        x, delta, base, out, n, width, x.stride(0), delta.stride(0),
        SIDE=side, TAPS=taps, GROUP=group, BLOCK=TILE, num_warps=4,
    )  # fmt: skip
    return out
