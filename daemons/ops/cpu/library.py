"""The C++ kernels as functions of tensors.  kernels.cpp has the entry points, tiles.h the layout of packed weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from daemons.ops.cpu.compiler import library
from lucevisor.model.quant_types import CPU_TILE_ROWS, GgmlType, padded_rows

KINDS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"})
"""Quant types that have tiles."""

_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "tile_bytes": [_LONG],
    "pack": [_LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "dequantise": [_LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "lookup": [_LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG, _POINTER],
    "multiply": [_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER, _LONG, _LONG],
    "multiplies_many_by_onednn": [],
    "multiply_dense": [_POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _LONG, _LONG],
    "gate_rows": [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER],
    "softcap": [_POINTER, _LONG, _FLOAT, _POINTER],
    "log1p_of": [_POINTER, _LONG, _POINTER],
    "rms_norm": [
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _LONG, _FLOAT),
        *(_POINTER, _POINTER, _POINTER, _POINTER),
    ],
    "qk_norm_rope": [
        *(_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _FLOAT),
        *(_POINTER, _POINTER, _LONG, _POINTER),
    ],
    "act_and_mul": [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER],
    "output_gate": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG, _LONG, _LONG, _POINTER],
    "block_convolution": [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _LONG, _LONG, _POINTER],
    "delta_net": [_POINTER],
    "apply_updates": [_POINTER],
    "paged_attention": [_POINTER],
    "write_pages": [_POINTER, _POINTER, _POINTER, _LONG, _LONG],
    "rope_tables": [_POINTER, _LONG, _POINTER, _LONG, _FLOAT, _POINTER, _POINTER],
    "add": [_POINTER, _POINTER, _LONG, _POINTER],
    "copy_rows": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _LONG],
    "rms_norm_float": [_POINTER, _LONG, _LONG, _POINTER, _FLOAT, _POINTER],
    "offset": [_POINTER, _LONG, _LONG, _POINTER],
    "shift_rows": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER, _POINTER, _POINTER],
    "cast": [_POINTER, _LONG, _LONG, _POINTER],
    "top_k": [_POINTER, _LONG, _LONG, _LONG, _POINTER, _POINTER],
    "most_likely": [_POINTER, _LONG, _LONG, _POINTER, _POINTER],
    "select_path": [_POINTER, _LONG],
    "replay": [_POINTER, _LONG],
}


class _Matrix(ctypes.Structure):
    """kernels.cpp's Matrix."""

    _fields_ = (("kind", _LONG), ("n_rows", _LONG), ("tiles", _POINTER))


def _structure(**groups: tuple[Any, str]) -> tuple[tuple[str, Any], ...]:
    """Fields of one C type after the other: ``a=(type, "names of fields")``."""
    return tuple((name, kind) for kind, names in groups.values() for name in names.split())


class DeltaNetArguments(ctypes.Structure):
    """delta_net.h's DeltaNet."""

    _fields_ = _structure(
        a=(_POINTER, "y windows states updates ids kept conv_weight decay_rates dt_bias norm_weight out mixed"),
        b=(_LONG, "y_stride slices n n_key n_value dim width"),
        c=(_FLOAT, "norm_eps"),
    )


class UpdatesArguments(ctypes.Structure):
    """delta_net.h's Updates."""

    _fields_ = _structure(
        a=(_POINTER, "states updates rows"),
        b=(_LONG, "n source target layers states_stride updates_stride n_key n_value dim width"),
    )


class PagesArguments(ctypes.Structure):
    """paged_attention.h's Pages."""

    _fields_ = _structure(a=(_POINTER, "numbers scales"), b=(_LONG, "kind heads width stored"))


class AttentionArguments(ctypes.Structure):
    """paged_attention.h's PagedAttention."""

    _fields_ = _structure(
        a=(_POINTER, "q"),
        b=(PagesArguments, "keys values"),
        c=(_POINTER, "tables rows starts lows sinks out"),
        d=(_LONG, "stride slices n heads table_stride window causal"),
        e=(_FLOAT, "scale softcap"),
    )


class PathArguments(ctypes.Structure):
    """topk.h's CandidatePath."""

    _fields_ = _structure(a=(_POINTER, "best tokens first before after gate path probabilities"), b=(_LONG, "n k rank"))


@dataclass(frozen=True, slots=True)
class Tiles:
    """``n_rows`` rows of a quant type in tiles of CPU_TILE_ROWS x one block of columns, uint8."""

    kind: GgmlType
    n_rows: int
    data: Tensor


class CpuKernels:
    """The compiled library.  Activations and results are contiguous bfloat16."""

    def __init__(self) -> None:
        """Raises daemons.ops.cpu.compiler.CpuCompileError."""
        self.library = library()
        self.calls: Any = self.library
        """Entry points by name: the library's, or while a step is recorded those of a CallRecorder."""
        for name, types in SIGNATURES.items():
            function = getattr(self.library, name)
            function.argtypes, function.restype = types, _LONG
        self.many_by_onednn = bool(self.library.multiplies_many_by_onednn())
        """Whether oneDNN's product of dequantised weights is faster here for many rows than :meth:`multiply`."""
        self._scratch = torch.empty(0, dtype=torch.bfloat16)

    def tiles_bytes(self, kind: GgmlType, n_rows: int, n_columns: int) -> int:
        """Bytes of the tiles of a matrix."""
        n_tiles = padded_rows(n_rows, CPU_TILE_ROWS) // CPU_TILE_ROWS * (n_columns // kind.block_elements)
        return n_tiles * int(self.calls.tile_bytes(kind.id))

    def pack(self, kind: GgmlType, raw: Tensor, tiles: Tensor) -> None:
        """Quant blocks as in the file, ``raw`` [n, row_bytes], into ``tiles``, padded to whole tiles."""
        n_rows, row_bytes = raw.shape
        raw = raw.contiguous()
        self.calls.pack(kind.id, raw.data_ptr(), n_rows, row_bytes // kind.block_bytes, row_bytes, tiles.data_ptr())

    def dequantise(self, tiles: Tiles, n_columns: int, first: int, out: Tensor) -> None:
        """Rows from ``first`` on, a multiple of CPU_TILE_ROWS, into ``out`` bfloat16 [n, n_columns]."""
        self.calls.dequantise(tiles.kind.id, tiles.data.data_ptr(), n_columns, first, out.shape[0], out.data_ptr())

    def lookup(self, kind: GgmlType, raw: Tensor, ids: Tensor) -> Tensor:
        """Rows of a table of quant blocks, ``raw`` [V, row_bytes], by ``ids`` int64 [n] -> [n, columns]."""
        row_bytes = raw.shape[1]
        n_blocks = row_bytes // kind.block_bytes
        out = torch.empty(ids.shape[0], n_blocks * kind.block_elements, dtype=torch.bfloat16)
        self.calls.lookup(
            kind.id, raw.data_ptr(), row_bytes, n_blocks, ids.data_ptr(), ids.stride(0), ids.shape[0], out.data_ptr()
        )
        return out

    def matrices(self, parts: Sequence[Tiles]) -> ctypes.Array[_Matrix]:
        """What :meth:`multiply` takes; the caller keeps ``parts``."""
        return (_Matrix * len(parts))(*(_Matrix(p.kind.id, p.n_rows, p.data.data_ptr()) for p in parts))

    def multiply(
        self, matrices: ctypes.Array[_Matrix], x: Tensor, n_out: int, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """``x`` [n, K] times the matrices one below the other -> [n, n_out], bfloat16 or float32.  No row depends on
        those beside it.

        Activations are rounded to 8-bit integers times a factor for each row and 256 columns; sums of a group's
        products are exact, and so are those of 256 columns where scales are integers.
        """
        rows, n_columns = x.shape
        out = x.new_empty(rows, n_out, dtype=dtype)
        address, is_float = ctypes.addressof(matrices), dtype == torch.float32
        self.calls.multiply(address, len(matrices), x.data_ptr(), rows, n_columns, out.data_ptr(), n_out, is_float)
        return out

    def multiply_dense(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``x`` [n, K] times a matrix [N, K] of its dtype -> [n, N] of ``dtype``, bfloat16 or float32; None: x's.

        No row depends on those beside it.
        """
        assert x.dtype == weight.dtype
        assert weight.is_contiguous()
        x, dtype = x.contiguous(), dtype or x.dtype
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
        self.calls.multiply_dense(
            x.data_ptr(), weight.data_ptr(), x.dtype is torch.float32, *x.shape, out.shape[1],
            out.data_ptr(), dtype is torch.float32, out.shape[1],
        )  # fmt: skip
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
