"""How 9 to 32 rows are multiplied that do not fit a block's shared memory: shapes of gemv_streamed.cu's launches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import torch

from daemons.ops.cuda.compiler import compile_kernel
from daemons.ops.cuda.limits import DTYPES, DeviceLimits, eight_rows_bytes
from daemons.weights.packed import tile_bytes

MAX_STREAMED_ROWS = 32
MAX_SIDE = 17
"""Warps of a block: more would have too few registers."""
MAX_TEAMS = 3
CLUSTERS = (1, 2)
"""Blocks that split the columns: of larger clusters fewer run at once than the device has room for."""
PART_BYTES = 512
"""A warp's sums of a tile with eight rows."""
FEW_CHUNKS, FEW_ROWS = 16, 16
"""Up to so many chunks, up to so many rows are faster beside the rings, in more splits."""


@dataclass(frozen=True, slots=True)
class StreamedShape:
    """Eights of rows, warps of a team (side by side), teams, blocks of a cluster, units in flight of a warp's and of a
    team's ring; shared bytes of a block and blocks.
    """

    tiles_of_rows: int
    n_side: int
    n_teams: int
    cluster: int
    depth: int
    x_depth: int
    shared_bytes: int
    n_blocks: int

    @property
    def warps(self) -> int:
        """For how many the kernel is compiled: each four share a scheduler's registers."""
        return -(-self.n_side * self.n_teams // 4) * 4

    def constants(self, kind: str) -> tuple[str, ...]:
        """What gemv_streamed.cu is compiled with."""
        return (
            f"KIND={kind}",
            f"TILE_BYTES={tile_bytes(kind)}",
            f"DEPTH={self.depth}",
            f"X_DEPTH={self.x_depth}",
            f"WARPS={self.warps}",
            f"TILES_OF_ROWS={self.tiles_of_rows}",
            f"CLUSTER={self.cluster}",
        )


def with_memory(
    kind: str, eights: int, side: int, teams: int, cluster: int, n_tiles: int, limits: DeviceLimits
) -> StreamedShape | None:
    """The shape with the deepest rings that fit."""
    pieces = side * eights
    inbox = 0 if cluster == 1 else -(-pieces // cluster) * cluster
    parts = ((teams - 1) * pieces + inbox) * PART_BYTES
    for depth, x_depth in ((4, 4), (4, 3), (3, 3), (3, 2), (2, 2)):
        rings = side * teams * depth * (tile_bytes(kind) + 8)
        n_bytes = rings + teams * x_depth * (eights * eight_rows_bytes(kind) + 16) + parts
        if n_bytes <= limits.block_shared_bytes:
            return StreamedShape(eights, side, teams, cluster, depth, x_depth, n_bytes, -(-n_tiles // side) * cluster)
    return None


def shapes(kind: str, n_rows: int, n_chunks: int, n_tiles: int, limits: DeviceLimits) -> list[StreamedShape]:
    """Shapes that fit, those first that should take least time."""
    found: list[tuple[float, int, StreamedShape]] = []
    for cluster, teams in itertools.product(CLUSTERS, range(1, MAX_TEAMS + 1)):
        if cluster * teams > n_chunks:
            continue
        for side in range(1, MAX_SIDE // teams + 1):
            shape = with_memory(kind, -(-n_rows // 8), side, teams, cluster, n_tiles, limits)
            if shape is not None:
                found.append((_cost(kind, shape, -(-n_chunks // cluster), limits), -side * teams, shape))
    found.sort(key=lambda f: f[:-1])
    return [f[-1] for f in found]


def _cost(kind: str, shape: StreamedShape, n_chunks: int, limits: DeviceLimits) -> float:
    """Bytes that a multiprocessor reads, where those from a cache count less, and what else takes as long; more where
    few warps or shallow rings wait for them.
    """
    waves = -(-shape.n_blocks // (limits.n_processors // shape.cluster * shape.cluster))
    weights = shape.n_side * tile_bytes(kind)
    units = shape.n_teams * -(-n_chunks // shape.n_teams)
    rows = 0.6 * shape.tiles_of_rows * eight_rows_bytes(kind)
    idle = 1 + 3 / (shape.n_side * shape.n_teams) + (0.08 if shape.x_depth == 2 and n_chunks > FEW_CHUNKS else 0)
    return idle * waves * (units * (weights + rows) + 60_000)


@cache
def streamed_shape(kind: str, n_rows: int, n_chunks: int, n_tiles: int, limits: DeviceLimits) -> StreamedShape | None:
    """None: no block fits, or the rows are faster beside the rings (gemv_rows.cu)."""
    if not limits.clusters or not 8 < n_rows <= MAX_STREAMED_ROWS:
        return None
    found = shapes(kind, n_rows, n_chunks, n_tiles, limits)
    if n_rows <= FEW_ROWS and (n_chunks <= FEW_CHUNKS or not found or found[0].n_blocks > limits.n_processors):
        return None
    return found[0] if found else None


def compile_streamed(architecture: str, kind: str, shape: StreamedShape, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernels of gemv_streamed.cu.  Raises CompileError."""
    return compile_kernel("gemv_streamed.cu", architecture, (*shape.constants(kind), *DTYPES[dtype], *defines))
