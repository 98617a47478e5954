"""How 2 to 32 rows are multiplied in slabs of tiles, of which each block gets an equal share: gemv_slabs.cu."""

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

MAX_SLAB_ROWS = 32
WARPS = 16
FEWEST_CHUNKS, MANY_CHUNKS = 8, 16
"""So many chunks of a block pay for the parts' way through memory; with more than eight rows, for which others need
more room or launches, so many of the matrix."""
MAX_SPLITS = 8
MAX_PARTS_BYTES = 64 << 20
PART_BYTES = 512
"""A warp's sums of a tile with eight rows."""
SUM_TILES = 2
"""Tiles whose parts a block adds."""


@dataclass(frozen=True, slots=True)
class SlabShape:
    """Whether the matrix's first half is the gate of the other one; eights of rows, tiles in flight of a warp, splits
    of the columns, blocks of each split, shared bytes of a block; whether matrix units read rows from there.
    """

    gated: bool
    tiles_of_rows: int
    depth: int
    n_splits: int
    n_blocks: int
    shared_bytes: int
    from_shared: bool

    def constants(self, kind: str) -> tuple[str, ...]:
        """What gemv_slabs.cu is compiled with."""
        return (
            f"KIND={kind}",
            f"TILE_BYTES={tile_bytes(kind)}",
            f"WARPS={WARPS}",
            f"TILES_EACH={SUM_TILES}",
            f"DEPTH={self.depth}",
            f"TILES_OF_ROWS={self.tiles_of_rows}",
            f"GATED={int(self.gated)}",
            f"FROM_SHARED={int(self.from_shared)}",
        )

    def parts_bytes(self, n_tiles: int) -> int:
        """Of the sums that blocks leave for the second kernel: a part ends where a slab or a block's piece does."""
        n_parts = self.n_splits * (n_slabs(n_tiles) + self.n_blocks)
        return n_parts * WARPS * self.tiles_of_rows * PART_BYTES


def n_slabs(n_tiles: int) -> int:
    """Slabs of the matrix, with a gate, too: halves of whole tiles."""
    return -(-n_tiles // WARPS)


@cache
def slab_shape(kind: str, n_rows: int, n_chunks: int, n_tiles: int, limits: DeviceLimits) -> SlabShape | None:
    """None: there is no such kernel, or others are faster: blocks would have few chunks each, or leave many parts."""
    if not (limits.wide_products and limits.fast_memory) or not 1 < n_rows <= MAX_SLAB_ROWS:
        return None
    found = fitting_shape(kind, n_rows, n_chunks, n_tiles, limits)
    if found is None or found.n_splits > MAX_SPLITS or found.parts_bytes(n_tiles) > MAX_PARTS_BYTES:
        return None
    n_each = n_slabs(n_tiles) * n_chunks // limits.n_processors
    return found if n_each >= FEWEST_CHUNKS or (n_rows > 8 and n_chunks >= MANY_CHUNKS) else None


@cache
def fitting_shape(kind: str, n_rows: int, n_chunks: int, n_tiles: int, limits: DeviceLimits) -> SlabShape | None:
    """As few splits as keep a block's chunks of the rows in shared memory beside its rings; None: no block fits."""
    eights, slabs = -(-n_rows // 8), n_slabs(n_tiles)
    for n_splits in range(1, min(n_chunks, limits.n_processors) + 1):
        longest = -(-n_chunks // n_splits)
        n_blocks = min(limits.n_processors // n_splits, slabs * (n_chunks // n_splits))
        n_kept = min(longest, -(-slabs * longest // n_blocks))
        for depth in (3, 2):
            n_bytes = WARPS * depth * (tile_bytes(kind) + 8) + n_kept * eights * eight_rows_bytes(kind)
            if n_bytes <= limits.block_shared_bytes:
                return SlabShape(False, eights, depth, n_splits, n_blocks, n_bytes, from_shared=eights > 1)
    return None


def compile_slabs(kind: str, shape: SlabShape, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernels of gemv_slabs.cu.  Raises CompileError."""
    return compile_kernel("gemv_slabs.cu", WIDE_ARCHITECTURE, (*shape.constants(kind), *DTYPES[dtype], *defines))


class SlabGemv:
    """The kernels for one device and dtype.  ``defines``: for tests, what else they are compiled with."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *defines: str) -> None:
        self.device, self.dtype, self.defines, self.limits = device, dtype, defines, DeviceLimits.of(device)
        self._kernels: dict[tuple[str, ...], tuple[Kernel, Kernel]] = {}

    def kernels(self, kind: str, shape: SlabShape) -> tuple[Kernel, Kernel]:
        """The product, and the one that adds parts."""
        key = shape.constants(kind)
        if key not in self._kernels:
            code, limit = start(compile_slabs, kind, shape, self.dtype, *self.defines), self.limits.block_shared_bytes
            product = Kernel(code, "gemv_slabs", self.device, limit, dependent=True)
            self._kernels[key] = product, Kernel(code, "gemv_slabs_sums", self.device, 0, dependent=True)
        return self._kernels[key]

    def __call__(self, shape: SlabShape, packed: PackedWeights, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x [T, K] W'`` -> [T, N], or with a gate [T, N / 2]; rows of x are contiguous and aligned to 16 bytes.

        ``out``: where it goes, maybe a part of longer rows.
        """
        n_rows, n_out, n_chunks = x.shape[0], packed.n_rows, packed.n_chunks
        n_tiles = padded_rows(n_out) // TILE_ROWS
        if shape.gated:
            n_out //= 2
        if out is None:
            out = x.new_empty(n_rows, n_out)
        parts = torch.empty(shape.parts_bytes(n_tiles), dtype=torch.uint8, device=x.device)
        product, sums = self.kernels(packed.kind.name, shape)
        sizes = (n_rows, n_out, n_chunks)
        arguments = (packed.tiles, x, parts, *sizes, x.shape[1])
        product((shape.n_blocks, shape.n_splits), 32 * WARPS, shape.shared_bytes, arguments)
        grid, n_threads = (-(-n_out // (SUM_TILES * TILE_ROWS)), 1), 32 * SUM_TILES * shape.tiles_of_rows
        sums(grid, n_threads, 0, (parts, out, *sizes, shape.n_blocks, shape.n_splits, out.stride(0)))
        return out
