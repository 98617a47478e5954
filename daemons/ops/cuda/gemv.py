"""Quantised matmul in CUDA C++ (llama.cpp's MMVQ): up to 256 rows, or a row for each (token, expert) pair.

gemv.cu has the kernel of one row, gemv_rows.cu, gemv_streamed.cu, gemv_slabs.cu and gemm.cu those of more,
docs/kernels.md how they compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from daemons.ops.cuda.compiler import compile_kernel, start
from daemons.ops.cuda.driver import Kernel
from daemons.ops.cuda.experts import CudaExperts
from daemons.ops.cuda.gemm import MAX_GEMM_ROWS, Gemm, GemmShape, gemm_shape
from daemons.ops.cuda.limits import DTYPES, DeviceLimits, eight_rows_bytes
from daemons.ops.cuda.slabs import SlabGemv, SlabShape, slab_shape
from daemons.ops.cuda.streamed import MAX_STREAMED_ROWS, StreamedShape, compile_streamed, streamed_shape
from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.triton.split_k import reduce_splits, split_buffer
from daemons.weights.packed import PackedWeights, empty_packed, tile_bytes
from lucevisor.model.quant_types import BY_NAME, CHUNK, TILE_ROWS, padded_rows

KINDS = frozenset({"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q5_0", "MXFP4"})
"""Quant types that the kernels multiply."""
MAX_ROWS = 16
MIN_CAPABILITY = (8, 0)
FEW_WARPS, MANY_WARPS, MANY_CHUNKS = 8, 12, 20
"""Warps of a block, and those of a matrix of so many chunks and more."""
ROWS_WARPS = 16
"""Those of gemv_rows.cu."""
MAX_SPLITS = 8
RESERVED_BYTES = 1024
"""Shared memory that the driver takes of each block."""


@dataclass(frozen=True, slots=True)
class GemvShape:
    """How a matrix is multiplied: warps of a block, tiles in flight per warp, tiles after which a block's warps add
    their sums, shared bytes of a block, blocks per multiprocessor.
    """

    warps: int
    depth: int
    round: int
    shared_bytes: int
    per_processor: int


@cache
def gemv_shape(kind: str, n_chunks: int, limits: DeviceLimits) -> GemvShape | None:
    """Two blocks on a multiprocessor rather than one, then as many tiles in flight as fit; None: no block fits."""
    row = -(-n_chunks // 4) * 16 + n_chunks * (512 + (32 if kind in ("Q4_K", "Q5_K") else 0))
    n_round = 4 if n_chunks >= 10 else 8 if n_chunks >= 5 else 16
    warps = MANY_WARPS if n_chunks >= MANY_CHUNKS else FEW_WARPS
    for per_processor in (2, 1):
        for depth in (4, 3, 2):
            n_bytes = warps * depth * (tile_bytes(kind) + 8) + 2 * n_round * warps * TILE_ROWS * 4 + row
            available = min(limits.block_shared_bytes, limits.shared_bytes // per_processor - RESERVED_BYTES)
            if n_bytes <= available:
                return GemvShape(warps, depth, n_round, n_bytes, per_processor)
    return None


@dataclass(frozen=True, slots=True)
class RowsShape:
    """How a matrix is multiplied with 8 ``tiles_of_rows`` rows: splits of the columns, else as in GemvShape."""

    tiles_of_rows: int
    depth: int
    shared_bytes: int
    n_splits: int


ShapeOfRows = SlabShape | StreamedShape | RowsShape | GemmShape


@cache
def rows_shape(kind: str, n_chunks: int, n_rows: int, limits: DeviceLimits) -> RowsShape | None:
    """As few splits as keep the rows in shared memory, then as many tiles in flight as fit; None: too many splits."""
    tiles = -(-n_rows // 8)
    chunk = tiles * eight_rows_bytes(kind)
    for n_splits in range(1, min(MAX_SPLITS, n_chunks) + 1):
        for depth in (3, 2):
            rings = ROWS_WARPS * depth * (tile_bytes(kind) + 8)
            n_bytes = rings + 2 * ROWS_WARPS * tiles * 512 + -(-n_chunks // n_splits) * chunk
            if n_bytes <= limits.block_shared_bytes:
                return RowsShape(tiles, depth, n_bytes, n_splits)
    return None


def shape_of_rows(kind: str, n_chunks: int, n_tiles: int, n_rows: int, limits: DeviceLimits) -> ShapeOfRows | None:
    """How 2 to 256 rows are multiplied, by what was faster; the same for 1 to 8 of them, 9 to 16, and so on."""
    if n_rows > MAX_STREAMED_ROWS:
        return gemm_shape(kind, n_rows, n_chunks, n_tiles, limits)
    beside = rows_shape(kind, n_chunks, n_rows, limits) if n_rows <= MAX_ROWS else None
    slabs = slab_shape(kind, n_rows, n_chunks, n_tiles, limits)
    if slabs is not None and (n_rows > 8 or beside is None or beside.n_splits > 1):
        return slabs
    return streamed_shape(kind, n_rows, n_chunks, n_tiles, limits) or beside


def compile_gemv_rows(architecture: str, kind: str, shape: RowsShape, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernel of several rows.  Raises CompileError."""
    return compile_kernel("gemv_rows.cu", architecture, (*rows_constants(kind, shape), *DTYPES[dtype], *defines))


def rows_constants(kind: str, shape: RowsShape) -> tuple[str, ...]:
    """What gemv_rows.cu is compiled with."""
    constants = (f"KIND={kind}", f"TILE_BYTES={tile_bytes(kind)}", f"DEPTH={shape.depth}", f"WARPS={ROWS_WARPS}")
    return (*constants, f"TILES_OF_ROWS={shape.tiles_of_rows}")


def gemv_constants(kind: str, warps: int, depth: int, *, gated: bool = False) -> tuple[str, ...]:
    """What gemv.cu is compiled with."""
    constants = (f"KIND={kind}", f"TILE_BYTES={tile_bytes(kind)}", f"DEPTH={depth}", f"WARPS={warps}")
    return (*constants, f"GATED={int(gated)}")


def compile_gemv(architecture: str, constants: tuple[str, ...], dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernel of one row.  Raises CompileError."""
    return compile_kernel("gemv.cu", architecture, (*constants, *DTYPES[dtype], *defines))


class CudaGemv:
    """The kernels for one device and dtype.  ``defines``: for tests, what else it is compiled with."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *defines: str) -> None:
        self.device, self.dtype, self.defines, self.limits = device, dtype, defines, DeviceLimits.of(device)
        major, minor = torch.cuda.get_device_capability(device)
        self.architecture = f"sm_{major}{minor}"
        self._kernels: dict[tuple[str, ...], Kernel] = {}
        self._experts = CudaExperts(device, dtype, self.architecture, *defines)
        self._streamed: dict[tuple[str, ...], tuple[Kernel, Kernel]] = {}
        self._slabs = SlabGemv(device, dtype, *defines)
        self._gemm = Gemm(device, dtype, *defines)
        self._rows_kernels: dict[tuple[str, int, int], Kernel] = {}
        self._prepared: dict[tuple[str, GemvShape, tuple[ShapeOfRows, ...]], tuple[Kernel, ...]] = {}

    def prepare(self, packed: PackedWeights) -> int:
        """Start to compile what rows times a matrix need; returns how many rows there are kernels for."""
        return self._prepare(packed)[0]

    def load(self, packed: PackedWeights) -> None:
        """Wait for what :meth:`prepare` started.  Raises CompileError or DriverError when it cannot run here."""
        for kernel in self._prepare(packed)[1]:
            kernel.load()

    def _prepare(self, packed: PackedWeights) -> tuple[int, tuple[Kernel, ...]]:
        kind, n_chunks = packed.kind.name, packed.n_chunks
        shape = gemv_shape(kind, n_chunks, self.limits) if kind in KINDS else None
        if shape is None:
            return 0, ()
        n_rows, shapes = 1, list[ShapeOfRows]()
        if packed.tiles.ndim < 4:  # experts have a kernel of their own
            for more in (*range(8, MAX_STREAMED_ROWS + 1, 8), 2 * MAX_STREAMED_ROWS, MAX_GEMM_ROWS):
                if (found := self._shape_of_rows(packed, more)) is None:
                    break
                n_rows = more
                shapes.append(found)
        if (wanted := (kind, shape, tuple(shapes))) not in self._prepared:
            of_rows = [kernel for found in shapes for kernel in self._kernels_of(kind, found)]
            self._prepared[wanted] = (self._kernel(kind, shape), *of_rows)
        return n_rows, self._prepared[wanted]

    def _kernels_of(self, kind: str, shape: ShapeOfRows) -> tuple[Kernel, ...]:
        match shape:
            case SlabShape():
                return self._slabs.kernels(kind, shape)
            case StreamedShape():
                return self._streamed_kernels(kind, shape)
            case RowsShape():
                return (self._rows_kernel(kind, shape),)
            case GemmShape():
                return self._gemm.kernels(kind, shape)

    def _kernel(self, kind: str, shape: GemvShape, *, gated: bool = False) -> Kernel:
        key = gemv_constants(kind, shape.warps, shape.depth, gated=gated)
        if key not in self._kernels:
            code = start(compile_gemv, self.architecture, key, self.dtype, *self.defines)
            self._kernels[key] = Kernel(code, "gemv", self.device, self.limits.block_shared_bytes, dependent=True)
        return self._kernels[key]

    def _rows_kernel(self, kind: str, shape: RowsShape) -> Kernel:
        key = (kind, shape.tiles_of_rows, shape.depth)
        if key not in self._rows_kernels:
            code = start(compile_gemv_rows, self.architecture, kind, shape, self.dtype, *self.defines)
            kernel = Kernel(code, "gemv_rows", self.device, self.limits.block_shared_bytes, dependent=True)
            self._rows_kernels[key] = kernel
        return self._rows_kernels[key]

    def _shape_of_rows(self, packed: PackedWeights, n_rows: int) -> ShapeOfRows | None:
        n_tiles = padded_rows(packed.n_rows) // TILE_ROWS
        return shape_of_rows(packed.kind.name, packed.n_chunks, n_tiles, n_rows, self.limits)

    def _streamed_kernels(self, kind: str, shape: StreamedShape) -> tuple[Kernel, Kernel]:
        key = shape.constants(kind)
        if key not in self._streamed:
            code = start(compile_streamed, self.architecture, kind, shape, self.dtype, *self.defines)
            limit, cluster = self.limits.block_shared_bytes, shape.cluster
            spread = Kernel(code, "stream_rows", self.device, 0, dependent=True)
            product = Kernel(code, "gemv_streamed", self.device, limit, dependent=True, cluster=cluster)
            self._streamed[key] = spread, product
        return self._streamed[key]

    def _stream(self, shape: StreamedShape, packed: PackedWeights, x: Tensor) -> Tensor:
        kind, n_chunks, n_rows = packed.kind.name, packed.n_chunks, x.shape[0]
        out = x.new_empty(n_rows, packed.n_rows)
        n_bytes = n_chunks * shape.tiles_of_rows * eight_rows_bytes(kind)
        stream = torch.empty(n_bytes, dtype=torch.uint8, device=x.device)
        spread, product = self._streamed_kernels(kind, shape)
        spread((n_chunks, shape.tiles_of_rows), 32, 0, (x, stream, n_rows, x.shape[1]))
        sizes = (n_rows, packed.n_rows, n_chunks, shape.n_side, shape.n_teams)
        n_threads = 32 * shape.n_side * shape.n_teams
        product((shape.n_blocks, 1), n_threads, shape.shared_bytes, (packed.tiles, stream, out, *sizes))
        return out

    def rows(self, packed: PackedWeights, x: Tensor) -> Tensor:
        """``x [T, K] W'`` -> [T, N], for T from 2 to what :meth:`prepare` returned."""
        kind, n_chunks, n_out, n_rows = packed.kind.name, packed.n_chunks, packed.n_rows, x.shape[0]
        x, shape = _aligned(x), self._shape_of_rows(packed, n_rows)
        if isinstance(shape, SlabShape):
            return self._slabs(shape, packed, x)
        if isinstance(shape, GemmShape):
            return self._gemm(shape, packed, x)
        if isinstance(shape, StreamedShape):
            return self._stream(shape, packed, x)
        assert shape is not None
        out = x.new_empty(n_rows, n_out)
        parts = split_buffer(out, shape.n_splits)
        n_blocks = min(self.limits.n_processors // shape.n_splits, padded_rows(n_out) // TILE_ROWS)
        arguments = (packed.tiles, x, out, parts, n_rows, n_out, n_chunks, x.shape[1])
        kernel = self._rows_kernel(kind, shape)
        kernel((n_blocks, shape.n_splits), 32 * ROWS_WARPS, shape.shared_bytes, arguments)
        reduce_splits(parts, out)
        return out

    def places(self, packed: PackedWeights, n_rows: int) -> bool:
        """Whether :meth:`into` has a kernel for so many rows, up to what :meth:`prepare` returned."""
        return n_rows == 1 or isinstance(self._shape_of_rows(packed, n_rows), SlabShape | GemmShape)

    def into(self, packed: PackedWeights, x: Tensor, out: Tensor) -> None:
        """``x [T, K] W'`` -> ``out`` [T, N], which may be a part of longer rows."""
        if x.shape[0] == 1:
            self._one_row(packed, x, None, 1, out)
            return
        shape = self._shape_of_rows(packed, x.shape[0])
        if isinstance(shape, GemmShape):
            self._gemm(shape, packed, _aligned(x), out)
            return
        assert isinstance(shape, SlabShape)
        self._slabs(shape, packed, _aligned(x), out)

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

    def gates(self, packed: PackedWeights, n_rows: int) -> bool:
        """Whether :meth:`gated` has a kernel for so many rows of x, up to what :meth:`prepare` returned."""
        return n_rows == 1 or isinstance(self._shape_of_rows(packed, n_rows), SlabShape)

    def gated(self, packed: PackedWeights, x: Tensor, experts: Tensor | None = None, pairs_per_row: int = 1) -> Tensor:
        """``silu(gate x) * (up x)`` of rows x [T, K], or of pairs as in a call, -> [., N / 2]: the first half of a
        matrix's rows is the gate.  N is a multiple of 32.
        """
        if experts is None and x.shape[0] > 1:
            shape = self._shape_of_rows(packed, x.shape[0])
            assert isinstance(shape, SlabShape)
            return self._slabs(replace(shape, gated=True), packed, _aligned(x))
        out = x.new_empty(1 if experts is None else experts.shape[0], packed.n_rows // 2)
        self._one_row(packed, x, experts, pairs_per_row, out, gated=True)
        return out

    def groups(self, packed: PackedWeights, n_pairs: int) -> bool:
        """Whether :meth:`grouped` has a kernel for so many (token, expert) pairs."""
        return self._experts.shape(packed, n_pairs) is not None

    def grouped(self, packed: PackedWeights, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        """Row p // pairs_per_row of x [T, K] times the matrix of pair p's expert -> [P, N]."""
        order = pairs.ordered(lambda experts: self._experts.order(packed, experts))
        return self._experts(packed, x, order, pairs_per_row)

    def _one_row(
        self,
        packed: PackedWeights,
        x: Tensor,
        experts: Tensor | None,
        pairs_per_row: int,
        out: Tensor,
        *,
        gated: bool = False,
    ) -> None:
        kind, n_chunks, (n_results, n_out) = packed.kind.name, packed.n_chunks, out.shape
        shape = gemv_shape(kind, n_chunks, self.limits)
        assert shape is not None
        x = _aligned(x)
        n_blocks = max(1, shape.per_processor * self.limits.n_processors // n_results)
        grid = (min(n_blocks, padded_rows(n_out) // TILE_ROWS), n_results)
        sizes = (n_out, n_chunks, x.shape[1], pairs_per_row, shape.round)
        arguments = (packed.tiles, x, experts, out, *sizes)
        self._kernel(kind, shape, gated=gated)(grid, 32 * shape.warps, shape.shared_bytes, arguments)


def _aligned(x: Tensor) -> Tensor:
    """Its rows contiguous, at a multiple of 16 bytes."""
    if x.data_ptr() % 16 or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x


def cuda_gemv(device: torch.device, dtype: torch.dtype) -> CudaGemv:
    """The kernel, after a product with zeros.  Raises CompileError, DriverError or what torch raises."""
    gemv, packed = CudaGemv(device, dtype), empty_packed(BY_NAME["Q4_K"], TILE_ROWS, CHUNK, device)
    packed.tiles.zero_()
    if bool(gemv(packed, torch.ones(1, CHUNK, dtype=dtype, device=device)).any()):
        raise RuntimeError("a product with zeros is not zero")
    return gemv
