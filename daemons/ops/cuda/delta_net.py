"""The recurrent gated delta net in CUDA C++: short slices (delta_net.cu), one token of many (delta_net_batch.cu)."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from daemons.ops.basic import l2_scale
from daemons.ops.cuda.compiler import compile_kernel, start
from daemons.ops.cuda.driver import Kernel
from daemons.ops.cuda.limits import DTYPES, DeviceLimits
from daemons.ops.operations import MAX_DECODE_TOKENS, DeltaNetPools, GatedDeltaNetParams
from daemons.ops.triton.recurrent_delta_rule import L2_EPS
from lucevisor.model.spec import update_width

DIM = 128
"""Width of the heads that the kernel is written for."""
MAX_HEADS = 8
"""Value heads of a key head, which form a cluster."""
WARPS, TEAM = 8, 4
"""Warps that compute a state, and those of them that have the same columns."""
FACTORS_BYTES = 16
"""What a token is multiplied by."""
TEAMS, SLOTS = 2, 3
"""Of a block with many slices: states that are computed at once, and states in shared memory."""
MAX_CLUSTER = 8
"""Blocks of a cluster that every device runs."""
MIN_BATCH = 5
"""Slices of one token from which on states pass through shared memory."""


def fits(params: GatedDeltaNetParams) -> bool:
    """Whether the kernel computes this shape."""
    return params.dim == DIM and params.n_value % params.n_key == 0 and params.n_value // params.n_key <= MAX_HEADS


def constants(params: GatedDeltaNetParams, blocks_each: int = 2) -> tuple[str, ...]:
    """What delta_net.cu is compiled with.  ``blocks_each``: blocks of a multiprocessor."""
    return (*_sizes(params), f"HALVES={halves(params)}", f"BLOCKS_EACH={blocks_each}")


def halves(params: GatedDeltaNetParams) -> int:
    """Blocks of delta_net.cu that have a state's columns."""
    return 2 if 2 * (params.n_value // params.n_key) <= MAX_CLUSTER else 1


def batch_constants(params: GatedDeltaNetParams) -> tuple[str, ...]:
    """What delta_net_batch.cu is compiled with."""
    return (*_sizes(params), f"TEAMS={TEAMS}", f"SLOTS={SLOTS}")


def _sizes(params: GatedDeltaNetParams) -> tuple[str, ...]:
    heads, taps = params.n_value // params.n_key, params.conv_weight.shape[0]
    return (f"HEADS={heads}", f"N_KEY={params.n_key}", f"TAPS={taps}", f"WARPS={WARPS}")


def batch_bytes(params: GatedDeltaNetParams, n_pairs: int) -> int:
    """Shared bytes of a block of delta_net_batch.cu with so many pairs of a slice and a key head."""
    heads = params.n_value // params.n_key
    pair = (2 + heads) * DIM * 4 + heads * FACTORS_BYTES
    return SLOTS * (DIM * DIM * 4 + 2 * 8) + TEAMS * (TEAM * 2 + 2) * DIM * 4 + n_pairs * pair


def shared_bytes(params: GatedDeltaNetParams, n: int) -> int:
    """Shared bytes of a block of delta_net.cu for slices of n tokens: sums; inputs, outputs and factors of tokens; a
    barrier; and the rows to write.
    """
    n_halves = halves(params)
    width = DIM // n_halves
    inputs, outputs = n * (2 * DIM + width) * 4, -(-n // n_halves) * DIM * 4
    return 2 * TEAM * 2 * width * 4 + inputs + outputs + n * FACTORS_BYTES + 8 + MAX_DECODE_TOKENS * 4


def compile_delta_net(
    architecture: str, params: GatedDeltaNetParams, dtype: torch.dtype, blocks_each: int = 2
) -> bytes:
    """Machine code of delta_net.cu.  Raises CompileError."""
    return compile_kernel("delta_net.cu", architecture, (*constants(params, blocks_each), *DTYPES[dtype]))


def compile_delta_net_batch(architecture: str, params: GatedDeltaNetParams, dtype: torch.dtype) -> bytes:
    """Machine code of delta_net_batch.cu.  Raises CompileError."""
    return compile_kernel("delta_net_batch.cu", architecture, (*batch_constants(params), *DTYPES[dtype]))


class CudaDeltaNet:
    """The kernels for the layers of one shape on a device."""

    def __init__(
        self, params: GatedDeltaNetParams, device: torch.device, dtype: torch.dtype, architecture: str
    ) -> None:
        most, cluster = shared_bytes(params, MAX_DECODE_TOKENS), halves(params) * (params.n_value // params.n_key)
        self.kernel, self._alone = (
            Kernel(
                start(compile_delta_net, architecture, params, dtype, n),
                "delta_net",
                device,
                most,
                dependent=True,
                cluster=cluster,
            )
            for n in (2, 1)
        )
        self._most_bytes, self._n_key = most, params.n_key
        self.limits = DeviceLimits.of(device)
        self.batch_kernel: Kernel | None = None
        free = self.limits.block_shared_bytes - batch_bytes(params, 0)
        n_pairs = free // (batch_bytes(params, 1) - batch_bytes(params, 0))
        self.max_slices = max(0, n_pairs) * self.limits.n_processors // params.n_key
        """Of a launch of the batch kernel, whose blocks keep what their pairs of a slice and a key head need."""
        if n_pairs > 0:
            code = start(compile_delta_net_batch, architecture, params, dtype)
            limit = self.limits.block_shared_bytes
            self.batch_kernel = Kernel(code, "delta_net_batch", device, limit, dependent=True)

    @cached_property
    def kernel_of_one(self) -> Kernel:
        """Of one slice: where each block has a multiprocessor to itself, none waits for another's arithmetic."""
        return self._alone if self._alone.max_clusters(32 * WARPS, self._most_bytes) >= self._n_key else self.kernel

    def load(self) -> None:
        """Wait until the kernels are compiled, and load them.  Raises CompileError or DriverError."""
        for kernel in (self.kernel, self.kernel_of_one, self.batch_kernel):
            if kernel is not None:
                kernel.load()

    def __call__(
        self, y: Tensor, pools: DeltaNetPools, ids: Tensor, kept: Tensor, params: GatedDeltaNetParams
    ) -> Tensor:
        """See :func:`daemons.ops.triton.recurrent_delta_rule.recurrent_gated_delta_net`."""
        m, n_slices = params, ids.shape[0]
        n = y.shape[0] // n_slices
        assert y.shape == (n * n_slices, m.columns)
        assert y.stride(1) == 1
        assert 1 <= n <= MAX_DECODE_TOKENS
        assert kept.shape == (n_slices, n)
        assert pools.updates.shape[1] == update_width(m.n_key, m.n_value, m.dim)
        assert all(x.is_contiguous() for x in (*pools, ids, kept))
        assert [x.dtype for x in (*pools, ids, kept)] == [torch.float32] * 3 + [torch.int64] * 2
        assert m.norm.weight is not None
        out = torch.empty(y.shape[0], m.n_value * m.dim, dtype=y.dtype, device=y.device)
        constants = m.conv_weight, m.decay_rates, m.dt_bias, m.norm.weight
        numbers = (y.stride(0), float(m.norm.epsilon), L2_EPS / m.dim, l2_scale(m.dim))
        if n == 1 and n_slices >= MIN_BATCH and self.batch_kernel is not None and self.max_slices >= MIN_BATCH:
            n_launches = -(-n_slices // self.max_slices)
            bounds = [i * n_slices // n_launches for i in range(n_launches + 1)]
            for at, end in pairwise(bounds):
                n_pairs = (end - at) * m.n_key
                n_blocks = min(self.limits.n_processors, n_pairs)
                n_bytes = batch_bytes(m, -(-n_pairs // n_blocks))
                rows = (y[at:end], out[at:end], pools.conv_states, pools.states, ids[at:end], kept[at:end])
                arguments = (*rows, *constants, end - at, *numbers)
                self.batch_kernel((n_blocks, 1), 32 * (TEAMS * WARPS + 1), n_bytes, arguments)
        else:
            grid = m.n_value * halves(m), n_slices
            tensors = (y, out, *pools, ids, kept, *constants)
            kernel = self.kernel if n_slices > 1 else self.kernel_of_one
            kernel(grid, 32 * WARPS, shared_bytes(m, n), (*tensors, n, *numbers))
        return out
