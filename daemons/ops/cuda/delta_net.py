"""The recurrent gated delta net in CUDA C++, for short slices; delta_net.cu has the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.ops.basic import l2_scale
from daemons.ops.cuda.compiler import compile_kernel
from daemons.ops.cuda.driver import Kernel
from daemons.ops.cuda.limits import DTYPES
from daemons.ops.operations import MAX_DECODE_TOKENS, GatedDeltaNetParams
from daemons.ops.triton.recurrent_delta_rule import L2_EPS

DIM = 128
"""Width of the heads that the kernel is written for."""
MAX_HEADS = 8
"""Value heads of a key head: blocks of a cluster."""
WARPS = 8
"""Warps of a block."""


def fits(params: GatedDeltaNetParams) -> bool:
    """Whether the kernel computes this shape."""
    return params.dim == DIM and params.n_value % params.n_key == 0 and params.n_value // params.n_key <= MAX_HEADS


def constants(params: GatedDeltaNetParams) -> tuple[str, ...]:
    """What delta_net.cu is compiled with."""
    heads, taps = params.n_value // params.n_key, params.conv_weight.shape[0]
    return (f"HEADS={heads}", f"N_KEY={params.n_key}", f"TAPS={taps}", f"WARPS={WARPS}")


def compile_delta_net(architecture: str, params: GatedDeltaNetParams, dtype: torch.dtype) -> bytes:
    """Machine code of the kernel.  Raises CompileError."""
    return compile_kernel("delta_net.cu", architecture, (*constants(params), *DTYPES[dtype]))


class CudaDeltaNet:
    """The kernel for the layers of one shape on a device.  Raises CompileError or DriverError."""

    def __init__(
        self, params: GatedDeltaNetParams, device: torch.device, dtype: torch.dtype, architecture: str
    ) -> None:
        code = compile_delta_net(architecture, params, dtype)
        heads = params.n_value // params.n_key
        self.shared_bytes = (2 * 3 + 2 * WARPS) * DIM * 4
        self.kernel = Kernel(code, "delta_net", device, self.shared_bytes, dependent=True, cluster=heads)

    def __call__(
        self, y: Tensor, conv_states: Tensor, states: Tensor, ids: Tensor, kept: Tensor, params: GatedDeltaNetParams
    ) -> Tensor:
        """See :func:`daemons.ops.triton.recurrent_delta_rule.recurrent_gated_delta_net`."""
        m, n_slices = params, ids.shape[0]
        n = y.shape[0] // n_slices
        assert y.shape == (n * n_slices, m.columns)
        assert y.stride(1) == 1
        assert 1 <= n <= MAX_DECODE_TOKENS
        assert kept.shape == (n_slices, n)
        assert all(x.is_contiguous() for x in (conv_states, states, ids, kept))
        assert [x.dtype for x in (conv_states, states, ids, kept)] == [torch.float32] * 2 + [torch.int64] * 2
        assert m.norm.weight is not None
        out = torch.empty(y.shape[0], m.n_value * m.dim, dtype=y.dtype, device=y.device)
        tensors = (y, out, conv_states, states, ids, kept, m.conv_weight, m.decay_rates, m.dt_bias, m.norm.weight)
        sizes = (n, y.stride(0), float(m.norm.epsilon), L2_EPS / m.dim, l2_scale(m.dim))
        self.kernel((m.n_value, n_slices), 32 * WARPS, self.shared_bytes, (*tensors, *sizes))
        return out
