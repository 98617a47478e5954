"""GEMV in CUDA C++: up to MAX_ROWS rows times packed weights, or a row for each (token, expert) pair.

gemv.cu has the kernel of one row, gemv_rows.cu that of more, docs/kernels.md how they compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from daemons.ops.cuda.compiler import compile_kernel
from daemons.ops.cuda.driver import Kernel
from daemons.ops.triton.split_k import reduce_splits, split_buffer
from daemons.weights.packed import PackedWeights, empty_packed, tile_bytes
from lucevisor.model.quant_types import BY_NAME, CHUNK, TILE_ROWS, padded_rows

KINDS = frozenset({"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q5_0"})
"""Quant types that the kernels multiply."""
MAX_ROWS = 16
MIN_CAPABILITY = (8, 0)
DTYPES = {torch.bfloat16: (), torch.float16: ("FLOAT16_ACTIVATIONS",)}
"""dtype of the activations -> what the kernels are compiled with."""
WARPS = 8
"""Warps of a block."""
ROWS_WARPS = 16
"""Those of gemv_rows.cu."""
MAX_SPLITS = 8
ROUND = 4
"""Tiles after which a block's warps add their sums."""
RESERVED_BYTES = 1024
"""Shared memory that the driver takes of each block."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """A device's multiprocessors, and bytes of shared memory of each and of one block."""

    n_processors: int
    shared_bytes: int
    block_shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> SharedMemory:
        found = torch.cuda.get_device_properties(device)
        block = int(found.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # missing in torch's stub
        return cls(found.multi_processor_count, found.shared_memory_per_multiprocessor, block)


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How a matrix is multiplied: tiles in flight per warp, shared bytes of a block, blocks per multiprocessor."""

    depth: int
    shared_bytes: int
    per_processor: int


@cache
def gemv_shape(kind: str, n_chunks: int, limits: SharedMemory) -> GemvShape | None:
    """Two blocks on a multiprocessor rather than one, then as many tiles in flight as fit; None: no block fits."""
    row = -(-n_chunks // 4) * 16 + n_chunks * (512 + (32 if kind in ("Q4_K", "Q5_K") else 0))
    for per_processor in (2, 1):
        for depth in (4, 3, 2):
            n_bytes = WARPS * depth * (tile_bytes(kind) + 8) + 2 * ROUND * WARPS * TILE_ROWS * 4 + row
            available = min(limits.block_shared_bytes, limits.shared_bytes // per_processor - RESERVED_BYTES)
            if n_bytes <= available:
                return GemvShape(depth, n_bytes, per_processor)
    return None


@dataclass(frozen=True, slots=True)
class RowsShape:
    """How a matrix is multiplied with 8 ``tiles_of_rows`` rows: splits of the columns, else as in GemvShape."""

    tiles_of_rows: int
    depth: int
    shared_bytes: int
    n_splits: int


@cache
def rows_shape(kind: str, n_chunks: int, n_rows: int, limits: SharedMemory) -> RowsShape | None:
    """As few splits as keep the rows in shared memory, then as many tiles in flight as fit; None: too many splits."""
    tiles = -(-n_rows // 8)
    chunk = tiles * (4096 + 32 + (256 if kind in ("Q4_K", "Q5_K") else 0))
    for n_splits in range(1, min(MAX_SPLITS, n_chunks) + 1):
        for depth in (3, 2):
            rings = ROWS_WARPS * depth * (tile_bytes(kind) + 8)
            n_bytes = rings + 2 * ROWS_WARPS * tiles * 512 + -(-n_chunks // n_splits) * chunk
            if n_bytes <= limits.block_shared_bytes:
                return RowsShape(tiles, depth, n_bytes, n_splits)
    return None


def compile_gemv_rows(architecture: str, kind: str, shape: RowsShape, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernel of several rows.  Raises CompileError."""
    return compile_kernel("gemv_rows.cu", architecture, (*rows_constants(kind, shape), *DTYPES[dtype], *defines))


def rows_constants(kind: str, shape: RowsShape) -> tuple[str, ...]:
    """What gemv_rows.cu is compiled with."""
    constants = (f"KIND={kind}", f"TILE_BYTES={tile_bytes(kind)}", f"DEPTH={shape.depth}", f"WARPS={ROWS_WARPS}")
    return (*constants, f"TILES_OF_ROWS={shape.tiles_of_rows}")


def gemv_constants(kind: str, depth: int) -> tuple[str, ...]:
    """What gemv.cu is compiled with."""
    constants = (f"KIND={kind}", f"TILE_BYTES={tile_bytes(kind)}", f"DEPTH={depth}", f"WARPS={WARPS}")
    return (*constants, f"ROUND={ROUND}")


def compile_gemv(architecture: str, kind: str, depth: int, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernel of one row.  Raises CompileError."""
    return compile_kernel("gemv.cu", architecture, (*gemv_constants(kind, depth), *DTYPES[dtype], *defines))


class CudaGemv:
    """The kernels for one device and dtype.  ``defines``: for tests, what else it is compiled with."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *defines: str) -> None:
        self.device, self.dtype, self.defines, self.limits = device, dtype, defines, SharedMemory.of(device)
        major, minor = torch.cuda.get_device_capability(device)
        self.architecture = f"sm_{major}{minor}"
        self._kernels: dict[tuple[str, int], Kernel] = {}
        self._rows_kernels: dict[tuple[str, int, int], Kernel] = {}

    def prepare(self, kind: str, n_chunks: int) -> int:
        """Compile what rows of ``n_chunks`` times ``kind`` need; returns how many rows there are kernels for.

        Raises CompileError or DriverError when it cannot run here.
        """
        shape = gemv_shape(kind, n_chunks, self.limits) if kind in KINDS else None
        if shape is None:
            return 0
        self._kernel(kind, shape.depth)
        n_rows = 1
        for more in range(8, MAX_ROWS + 1, 8):
            rows = rows_shape(kind, n_chunks, more, self.limits)
            if rows is None:
                break
            self._rows_kernel(kind, rows)
            n_rows = more
        return n_rows

    def _kernel(self, kind: str, depth: int) -> Kernel:
        found = self._kernels.get((kind, depth))
        if found is None:
            code = compile_gemv(self.architecture, kind, depth, self.dtype, *self.defines)
            found = Kernel(code, "gemv", self.device, self.limits.block_shared_bytes, dependent=True)
            self._kernels[kind, depth] = found
        return found

    def _rows_kernel(self, kind: str, shape: RowsShape) -> Kernel:
        key = (kind, shape.tiles_of_rows, shape.depth)
        if key not in self._rows_kernels:
            code = compile_gemv_rows(self.architecture, kind, shape, self.dtype, *self.defines)
            kernel = Kernel(code, "gemv_rows", self.device, self.limits.block_shared_bytes, dependent=True)
            self._rows_kernels[key] = kernel
        return self._rows_kernels[key]

    def rows(self, packed: PackedWeights, x: Tensor) -> Tensor:
        """``x [T, K] W'`` -> [T, N], for T from 2 to what :meth:`prepare` returned."""
        kind, n_chunks, n_out, n_rows = packed.kind.name, packed.n_chunks, packed.n_rows, x.shape[0]
        shape = rows_shape(kind, n_chunks, n_rows, self.limits)
        assert shape is not None
        if x.data_ptr() % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        out = x.new_empty(n_rows, n_out)
        parts = split_buffer(out, shape.n_splits)
        n_blocks = min(self.limits.n_processors // shape.n_splits, padded_rows(n_out) // TILE_ROWS)
        arguments = (packed.tiles, x, out, parts, n_rows, n_out, n_chunks, x.shape[1])
        kernel = self._rows_kernel(kind, shape)
        kernel((n_blocks, shape.n_splits), 32 * ROWS_WARPS, shape.shared_bytes, arguments)
        reduce_splits(parts, out)
        return out

    def into(self, packed: PackedWeights, x: Tensor, out: Tensor) -> None:
        """``x [1, K] W'`` -> ``out`` [1, N], which may be a part of a longer row."""
        self._one_row(packed, x, None, 1, out)

    def __call__(
        self, packed: PackedWeights, x: Tensor, experts: Tensor | None = None, pairs_per_row: int = 1
    ) -> Tensor:
        """``x [T, K] W'`` -> [T, N]; or, with ``experts`` int64 [P], row p // pairs_per_row of x times matrix
        experts[p] -> [P, N].
        """
        if experts is None and x.shape[0] > 1:
            return self.rows(packed, x)
        out = x.new_empty(1 if experts is None else experts.shape[0], packed.n_rows)
        self._one_row(packed, x, experts, pairs_per_row, out)
        return out

    def _one_row(
        self, packed: PackedWeights, x: Tensor, experts: Tensor | None, pairs_per_row: int, out: Tensor
    ) -> None:
        kind, n_chunks, n_out = packed.kind.name, packed.n_chunks, packed.n_rows
        shape = gemv_shape(kind, n_chunks, self.limits)
        assert shape is not None
        if x.data_ptr() % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        n_results = out.shape[0]
        n_blocks = max(1, shape.per_processor * self.limits.n_processors // n_results)
        grid = (min(n_blocks, padded_rows(n_out) // TILE_ROWS), n_results)
        arguments = (packed.tiles, x, experts, out, n_out, n_chunks, x.shape[1], pairs_per_row)
        self._kernel(kind, shape.depth)(grid, 32 * WARPS, shape.shared_bytes, arguments)


def cuda_gemv(device: torch.device, dtype: torch.dtype) -> CudaGemv:
    """The kernel, after a product with zeros.  Raises CompileError, DriverError or what torch raises."""
    gemv, kind = CudaGemv(device, dtype), "Q4_K"
    gemv.prepare(kind, 1)
    packed = empty_packed(BY_NAME[kind], TILE_ROWS, CHUNK, device)
    packed.tiles.zero_()
    if bool(gemv(packed, torch.ones(1, CHUNK, dtype=dtype, device=device)).any()):
        raise RuntimeError("a product with zeros is not zero")
    return gemv
