"""How 33 to 256 rows are multiplied by packed weights: shapes and launches of gemm.cu."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from daemons.ops.cuda.compiler import compile_kernel, start
from daemons.ops.cuda.driver import Kernel
from daemons.ops.cuda.limits import DTYPES, WIDE_ARCHITECTURE, DeviceLimits, eight_rows_bytes
from daemons.weights.packed import PackedWeights, tile_bytes
from lucevisor.model.quant_types import TILE_ROWS, padded_rows

SCALED_KINDS = frozenset({"Q4_K", "Q5_K", "Q6_K"})
"""Those whose scales act on codes, so that a lane has one sum for each row and column."""
WARPS = 8
MANY_CHUNKS = 16
"""Of the slabs of the matrix for each block, from which on 128 rows at once are faster than 64."""
MAX_GEMM_ROWS = 256
"""With more, a library's product with dequantised weights is as fast."""
PART_BYTES = 512
"""A warp's sums of a tile with eight rows."""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Eights of rows of a block, tiles in flight of a warp, chunks of rows in flight, shared bytes of a block; blocks,
    for each block of rows.
    """

    eights: int
    depth: int
    x_depth: int
    shared_bytes: int
    n_blocks: int
    n_row_blocks: int

    def constants(self, kind: str) -> tuple[str, ...]:
        """What gemm.cu is compiled with."""
        return (
            f"KIND={kind}",
            f"TILE_BYTES={tile_bytes(kind)}",
            f"TILES_OF_ROWS={self.eights}",
            f"WARPS={WARPS}",
            f"DEPTH={self.depth}",
            f"X_DEPTH={self.x_depth}",
        )

    @property
    def parts_bytes(self) -> int:
        """Of the sums that blocks leave for the third kernel."""
        return self.n_row_blocks * self.n_blocks * 2 * WARPS * self.eights * PART_BYTES


@cache
def gemm_shape(kind: str, n_rows: int, n_chunks: int, n_tiles: int, limits: DeviceLimits) -> GemmShape | None:
    """Blocks of 128 rows where registers allow and blocks get many chunks; None: no block fits, or the device has no
    such matrix units.
    """
    if not limits.wide_products or not 0 < n_rows <= MAX_GEMM_ROWS:
        return None
    many = -(-n_tiles // WARPS) * n_chunks >= MANY_CHUNKS * limits.n_processors
    eights = 16 if many and n_rows > 64 and kind in SCALED_KINDS else 8
    return fitting_shape(kind, eights, n_rows, n_chunks, n_tiles, limits)


def fitting_shape(
    kind: str, eights: int, n_rows: int, n_chunks: int, n_tiles: int, limits: DeviceLimits
) -> GemmShape | None:
    """The deepest rings that fit."""
    n_row_blocks = -(-n_rows // (8 * eights))
    n_blocks = min(limits.n_processors // n_row_blocks, -(-n_tiles // WARPS) * n_chunks)
    for x_depth, depth in ((3, 4), (3, 3), (2, 4), (2, 3), (2, 2)):
        rings = WARPS * depth * (tile_bytes(kind) + 8) + x_depth * (eights * eight_rows_bytes(kind) + 16)
        if rings <= limits.block_shared_bytes:
            return GemmShape(eights, depth, x_depth, rings, n_blocks, n_row_blocks)
    return None


def compile_gemm(kind: str, shape: GemmShape, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernels of gemm.cu.  Raises CompileError."""
    return compile_kernel("gemm.cu", WIDE_ARCHITECTURE, (*shape.constants(kind), *DTYPES[dtype], *defines))


class Gemm:
    """The kernels for one device and dtype.  ``defines``: for tests, what else they are compiled with."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *defines: str) -> None:
        self.device, self.dtype, self.defines, self.limits = device, dtype, defines, DeviceLimits.of(device)
        self._kernels: dict[tuple[str, ...], tuple[Kernel, Kernel, Kernel]] = {}

    def kernels(self, kind: str, shape: GemmShape) -> tuple[Kernel, Kernel, Kernel]:
        """What spreads the rows, the product, and what adds parts."""
        key = shape.constants(kind)
        if key not in self._kernels:
            code, limit = start(compile_gemm, kind, shape, self.dtype, *self.defines), self.limits.block_shared_bytes
            spread = Kernel(code, "gemm_rows", self.device, 0, dependent=True)
            product = Kernel(code, "gemm", self.device, limit, dependent=True)
            self._kernels[key] = spread, product, Kernel(code, "gemm_sums", self.device, 0, dependent=True)
        return self._kernels[key]

    def __call__(self, shape: GemmShape, packed: PackedWeights, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x [T, K] W'`` -> [T, N]; rows of x are contiguous and aligned to 16 bytes.

        ``out``: where it goes, maybe a part of longer rows.
        """
        kind, n_rows, n_out, n_chunks = packed.kind.name, x.shape[0], packed.n_rows, packed.n_chunks
        if out is None:
            out = x.new_empty(n_rows, n_out)
        n_slabs = -(-padded_rows(n_out) // (TILE_ROWS * WARPS))
        n_eights = shape.n_row_blocks * shape.eights
        stream = torch.empty(n_chunks * n_eights * eight_rows_bytes(kind), dtype=torch.uint8, device=x.device)
        parts = torch.empty(shape.parts_bytes, dtype=torch.uint8, device=x.device)
        spread, product, sums = self.kernels(kind, shape)
        spread((n_chunks, n_eights), 32, 0, (x, stream, n_rows, x.shape[1]))
        sizes = (n_rows, n_out, n_chunks)
        grid = (shape.n_blocks, shape.n_row_blocks)
        product(grid, 32 * WARPS, shape.shared_bytes, (packed.tiles, stream, out, parts, *sizes, out.stride(0)))
        sums((n_slabs, shape.n_row_blocks), 32 * WARPS, 0, (parts, out, *sizes, shape.n_blocks, out.stride(0)))
        return out
