"""The C++ kernels as functions of tensors.  kernels.cpp has the entry points, tiles.h the layout of packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from daemons.ops.cpu.compiler import library
from lucevisor.model.quant_types import GgmlType, padded_rows

KINDS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"})
"""Quant types that have tiles."""

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_long
_SIGNATURES = {
    "tile_bytes": [_LONG],
    "pack": [_LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "dequantise": [_LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "multiply": [_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG],
}


class _Matrix(ctypes.Structure):
    """kernels.cpp's Matrix."""

    _fields_ = (("kind", _LONG), ("n_rows", _LONG), ("tiles", _POINTER))


@dataclass(frozen=True, slots=True)
class Tiles:
    """``n_rows`` rows of a quant type in tiles of 16 rows x one block of columns, uint8."""

    kind: GgmlType
    n_rows: int
    data: Tensor


class CpuKernels:
    """The compiled library.  Activations and results are contiguous bfloat16."""

    def __init__(self) -> None:
        """Raises daemons.ops.cpu.compiler.CpuCompileError."""
        self._library = library()
        for name, types in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, _LONG
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def tiles_bytes(self, kind: GgmlType, n_rows: int, n_columns: int) -> int:
        """Bytes of the tiles of a matrix."""
        n_tiles = padded_rows(n_rows) // 16 * (n_columns // kind.block_elements)
        return n_tiles * int(self._library.tile_bytes(kind.id))

    def pack(self, kind: GgmlType, raw: Tensor, tiles: Tensor) -> None:
        """Quant blocks as in the file, ``raw`` [n, row_bytes], into ``tiles``, rows padded to a multiple of 16."""
        n_rows, row_bytes = raw.shape
        raw = raw.contiguous()
        self._library.pack(kind.id, raw.data_ptr(), n_rows, row_bytes // kind.block_bytes, row_bytes, tiles.data_ptr())

    def dequantise(self, tiles: Tiles, n_columns: int, first: int, out: Tensor) -> None:
        """Rows from ``first`` on, a multiple of 16, into ``out`` bfloat16 [n, n_columns]."""
        self._library.dequantise(tiles.kind.id, tiles.data.data_ptr(), n_columns, first, out.shape[0], out.data_ptr())

    def matrices(self, parts: Sequence[Tiles]) -> ctypes.Array[_Matrix]:
        """What :meth:`multiply` takes; the caller keeps ``parts``."""
        return (_Matrix * len(parts))(*(_Matrix(p.kind.id, p.n_rows, p.data.data_ptr()) for p in parts))

    def multiply(self, matrices: ctypes.Array[_Matrix], x: Tensor, n_out: int) -> Tensor:
        """``x`` [n, K] times the matrices one below the other -> [n, n_out].  No row depends on those beside it."""
        rows, n_columns = x.shape
        out = x.new_empty(rows, n_out)
        self._library.multiply(
            ctypes.addressof(matrices), len(matrices), x.data_ptr(), rows, n_columns, out.data_ptr(), n_out
        )
        return out

    def scratch(self, n_rows: int, n_columns: int) -> Tensor:
        """Memory for dequantised rows, the same at each call: fresh pages would take longer than to fill them."""
        size = n_rows * n_columns
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.bfloat16)
        return self._scratch[:size].view(n_rows, n_columns)


@cache
def cpu_kernels() -> CpuKernels:
    """The library of this process.  Raises daemons.ops.cpu.compiler.CpuCompileError."""
    return CpuKernels()
