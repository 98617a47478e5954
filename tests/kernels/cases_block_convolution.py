"""Specialisations of the convolution along blocks that drafters use."""

from __future__ import annotations

from daemons.ops.triton.block_convolution import TILE, block_convolution_kernel
from tests.kernels.targets import Case


def _convolution(dtype: str, side: int) -> Case:
    signature = {"x": f"*{dtype}", "delta": f"*{dtype}", "base": "*fp32", "out": f"*{dtype}", "n": "i32"}
    signature |= dict.fromkeys(("n_columns", "x_stride", "delta_stride"), "i32")
    constants = {"SIDE": side, "TAPS": 2, "GROUP": 16, "BLOCK": TILE}
    aligned = tuple(name for name in signature if name != "n")
    name = f"block_convolution {dtype} {side}"
    return Case(name, block_convolution_kernel, signature, constants, aligned, {"num_warps": 4})


CASES = [_convolution("bf16", 0), _convolution("fp16", 1)]
