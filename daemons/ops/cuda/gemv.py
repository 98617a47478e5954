"""GEMV in CUDA C++: one row times packed weights, or a row for each (token, expert) pair.

gemv.cu has the kernel, docs/kernels.md how it computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daemons.ops.cuda.compiler import compile_kernel
from daemons.ops.cuda.driver import Kernel
from daemons.weights.packed import PackedWeights, empty_packed, tile_bytes
from lucevisor.model.quant_types import BY_NAME, CHUNK, TILE_ROWS, padded_rows

KINDS = frozenset({"Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q5_0"})
"""Quant types that the kernel multiplies."""
MIN_CAPABILITY = (8, 0)
DTYPES = {torch.bfloat16: (), torch.float16: ("FLOAT16_ACTIVATIONS",)}
"""dtype of the activations -> what gemv.cu is compiled with."""
WARPS = 8
"""Warps of a block."""
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


def gemv_shape(kind: str, n_chunks: int, limits: SharedMemory) -> GemvShape | None:
    """Two blocks on a multiprocessor rather than one, then as many tiles in flight as fit; None: no block fits."""
    row = -(-n_chunks // 4) * 16 + n_chunks * (512 + (32 if kind in ("Q4_K", "Q5_K") else 0))
    for per_processor in (2, 1):
        for depth in (4, 3, 2):
            n_bytes = WARPS * depth * (tile_bytes(kind) + 8) + 2 * WARPS * TILE_ROWS * 4 + row
            available = min(limits.block_shared_bytes, limits.shared_bytes // per_processor - RESERVED_BYTES)
            if n_bytes <= available:
                return GemvShape(depth, n_bytes, per_processor)
    return None


def compile_gemv(architecture: str, kind: str, depth: int, dtype: torch.dtype, *defines: str) -> bytes:
    """Machine code of the kernel.  Raises CompileError."""
    constants = (f"KIND={kind}", f"TILE_BYTES={tile_bytes(kind)}", f"DEPTH={depth}", f"WARPS={WARPS}")
    return compile_kernel("gemv.cu", architecture, (*constants, *DTYPES[dtype], *defines))


class CudaGemv:
    """The kernel for one device and dtype.  ``defines``: for tests, what else it is compiled with."""

    def __init__(self, device: torch.device, dtype: torch.dtype, *defines: str) -> None:
        self.device, self.dtype, self.defines, self.limits = device, dtype, defines, SharedMemory.of(device)
        major, minor = torch.cuda.get_device_capability(device)
        self.architecture = f"sm_{major}{minor}"
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def prepare(self, kind: str, n_chunks: int) -> bool:
        """Compile what rows of ``n_chunks`` times ``kind`` need; False: there is no kernel for them.

        Raises CompileError or DriverError when it cannot run here.
        """
        if kind not in KINDS:
            return False
        shape = gemv_shape(kind, n_chunks, self.limits)
        if shape is not None:
            self._kernel(kind, shape.depth)
        return shape is not None

    def _kernel(self, kind: str, depth: int) -> Kernel:
        found = self._kernels.get((kind, depth))
        if found is None:
            code = compile_gemv(self.architecture, kind, depth, self.dtype, *self.defines)
            found = Kernel(code, "gemv", self.device, self.limits.block_shared_bytes, dependent=True)
            self._kernels[kind, depth] = found
        return found

    def __call__(
        self, packed: PackedWeights, x: Tensor, experts: Tensor | None = None, pairs_per_row: int = 1
    ) -> Tensor:
        """``x [1, K] W'`` -> [1, N]; or, with ``experts`` int64 [P], row p // pairs_per_row of x times matrix
        experts[p] -> [P, N].
        """
        kind, n_chunks, n_out = packed.kind.name, packed.n_chunks, packed.n_rows
        shape = gemv_shape(kind, n_chunks, self.limits)
        assert shape is not None
        if x.data_ptr() % 16 or not x.is_contiguous():
            x = x.clone(memory_format=torch.contiguous_format)
        n_results = 1 if experts is None else experts.shape[0]
        out = x.new_empty(n_results, n_out)
        n_blocks = max(1, shape.per_processor * self.limits.n_processors // n_results)
        grid = (min(n_blocks, padded_rows(n_out) // TILE_ROWS), n_results)
        arguments = (packed.tiles, x, experts, out, n_out, n_chunks, x.shape[1], pairs_per_row)
        self._kernel(kind, shape.depth)(grid, 32 * WARPS, shape.shared_bytes, arguments)
        return out


def cuda_gemv(device: torch.device, dtype: torch.dtype) -> CudaGemv:
    """The kernel, after a product with zeros.  Raises CompileError, DriverError or what torch raises."""
    gemv, kind = CudaGemv(device, dtype), "Q4_K"
    gemv.prepare(kind, 1)
    packed = empty_packed(BY_NAME[kind], TILE_ROWS, CHUNK, device)
    packed.tiles.zero_()
    if bool(gemv(packed, torch.ones(1, CHUNK, dtype=dtype, device=device)).any()):
        raise RuntimeError("a product with zeros is not zero")
    return gemv
