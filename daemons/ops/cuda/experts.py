"""(token, expert) pairs by expert in CUDA C++: each expert's matrix is read once for up to 32 of its rows.

gemv_experts.cu has the kernels, docs/kernels.md how they compute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from daemons.ops.cuda.compiler import compile_kernel, start
from daemons.ops.cuda.driver import Kernel
from daemons.ops.cuda.limits import DTYPES, DeviceLimits, eight_rows_bytes
from daemons.weights.packed import PackedWeights, tile_bytes
from lucevisor.model.quant_types import TILE_ROWS, padded_rows

ORDER_THREADS = 1024
"""Of the block that orders the pairs; as many experts at most."""


MAX_ROWS_PER_EXPERT = 21.0
"""On average."""


class PairOrder(NamedTuple):
    """``pairs`` int32 [P]: pair ids by expert; ``offsets`` int32 [X + 1]: where each expert's begin."""

    pairs: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Eights of an expert's rows that a block multiplies at once, warps, tiles in flight of each, blocks that share an
    expert's tiles, shared bytes of a block.
    """

    eights: int
    warps: int
    depth: int
    n_blocks: int
    shared_bytes: int

    def constants(self, kind: str) -> tuple[str, ...]:
        """What gemv_experts.cu is compiled with."""
        sizes = (f"KIND={kind}", f"TILE_BYTES={tile_bytes(kind)}", f"DEPTH={self.depth}", f"WARPS={self.warps}")
        return (*sizes, f"EIGHTS={self.eights}")


@cache
def experts_shape(
    kind: str, n_chunks: int, n_tiles: int, rows_per_expert: float, limits: DeviceLimits
) -> ExpertsShape | None:
    """As measured on an H200: eights for nearly all experts, two blocks on a multiprocessor for one.

    None: no block fits, or an expert has so many rows that dequantising them for larger tiles is faster.
    """
    if rows_per_expert > MAX_ROWS_PER_EXPERT:
        return None
    eights = min(4, math.ceil(rows_per_expert * 1.75 / 8))
    warps, per_processor = (8, 2) if eights == 1 else (16, 1)
    for depth in (3, 2):
        n_bytes = warps * depth * (tile_bytes(kind) + 8) + n_chunks * eights * eight_rows_bytes(kind)
        if n_bytes <= min(limits.block_shared_bytes, limits.shared_bytes // per_processor - 1024):
            n_blocks = max(1, min(4 if eights == 1 else 2, n_tiles // warps // 2))
            return ExpertsShape(eights, warps, depth, n_blocks, n_bytes)
    return None


def compile_experts(architecture: str, kind: str, shape: ExpertsShape, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernels of gemv_experts.cu.  Raises CompileError."""
    return compile_kernel("gemv_experts.cu", architecture, (*shape.constants(kind), *DTYPES[dtype], *defines))


class CudaExperts:
    """The kernels for one device and dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype, architecture: str, *defines: str) -> None:
        self.device, self.dtype, self.architecture, self.defines = device, dtype, architecture, defines
        self.limits = DeviceLimits.of(device)
        self._kernels: dict[tuple[str, ...], tuple[Kernel, Kernel]] = {}

    def shape(self, packed: PackedWeights, n_pairs: int) -> ExpertsShape | None:
        """None: no kernel for so many pairs."""
        n_experts = packed.tiles.shape[0]
        if n_experts >= ORDER_THREADS:
            return None
        n_tiles = padded_rows(packed.n_rows) // TILE_ROWS
        return experts_shape(packed.kind.name, packed.n_chunks, n_tiles, n_pairs / n_experts, self.limits)

    def order(self, packed: PackedWeights, experts: Tensor) -> PairOrder:
        """The order of pairs by their ``experts`` int64 [P]."""
        n_pairs, n_experts = experts.numel(), packed.tiles.shape[0]
        shape = self.shape(packed, n_pairs)
        assert shape is not None
        pairs = torch.empty(n_pairs, dtype=torch.int32, device=experts.device)
        offsets = torch.empty(n_experts + 1, dtype=torch.int32, device=experts.device)
        kernel = self._kernels_of(packed.kind.name, shape)[0]
        kernel((1, 1), ORDER_THREADS, 8 * ORDER_THREADS, (experts, pairs, offsets, n_pairs, n_experts))
        return PairOrder(pairs, offsets)

    def __call__(self, packed: PackedWeights, x: Tensor, order: PairOrder, pairs_per_row: int) -> Tensor:
        """Row p // pairs_per_row of x [T, K] times the matrix of pair p's expert, for all pairs: [P, N]."""
        n_pairs, n_out = order.pairs.shape[0], packed.n_rows
        shape = self.shape(packed, n_pairs)
        assert shape is not None
        if x.data_ptr() % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        out = x.new_empty(n_pairs, n_out)
        sizes = (n_out, packed.n_chunks, x.shape[1], pairs_per_row)
        kernel = self._kernels_of(packed.kind.name, shape)[1]
        grid = (shape.n_blocks, packed.tiles.shape[0])
        kernel(grid, 32 * shape.warps, shape.shared_bytes, (packed.tiles, x, order.pairs, order.offsets, out, *sizes))
        return out

    def _kernels_of(self, kind: str, shape: ExpertsShape) -> tuple[Kernel, Kernel]:
        key = shape.constants(kind)
        if key not in self._kernels:
            code = start(compile_experts, self.architecture, kind, shape, self.dtype, *self.defines)
            order = Kernel(code, "order_pairs", self.device, 0, dependent=True)
            product = Kernel(code, "gemv_experts", self.device, self.limits.block_shared_bytes, dependent=True)
            self._kernels[key] = order, product
        return self._kernels[key]
