"""Linear layers on tiles of packed weights: C++ in integers; oneDNN's bfloat16 product of many rows, with AMX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.cpu.library import CpuKernels, Tiles
from lucevisor.model.quant_types import CPU_TILE_ROWS, GgmlType

FEW_ROWS = 32
"""Rows up to which C++ is faster than oneDNN on every cpu."""
ALL_ROWS = 1 << 30
SCRATCH_ELEMENTS = 1 << 24
"""Weights that are dequantised at a time."""


class TiledLinear:
    """Matrices ``[N, K]`` one below the other, bfloat16 activations.

    Up to ``max_rows`` rows a row's result is the same whatever rows are beside it.
    """

    def __init__(self, kernels: CpuKernels, parts: Sequence[Tiles], n_columns: int, max_rows: int = ALL_ROWS) -> None:
        self.kernels, self.parts, self.n_columns, self.max_rows = kernels, list(parts), n_columns, max_rows
        self.n_out, self.n_bytes = sum(p.n_rows for p in parts), sum(p.data.nbytes for p in parts)
        self._matrices = kernels.matrices(self.parts)

    @property
    def implementation(self) -> str:
        """What runs for how many rows, for the report of kernel selection."""
        if self.max_rows == ALL_ROWS:
            return "tiles, c++ in integers"
        return f"tiles, c++ in integers to {self.max_rows} rows, bfloat16 onednn beyond"

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= self.max_rows:
            return self.kernels.multiply(self._matrices, x.contiguous(), self.n_out)
        batches = list(self._batches())
        if len(batches) == 1:
            return F.linear(x, self._dequantised(batches[0]))
        out, at = x.new_empty(x.shape[0], self.n_out), 0
        for batch in batches:
            weight = self._dequantised(batch)
            out[:, at : at + len(weight)] = F.linear(x, weight)
            at += len(weight)
        return out

    def in_float32(self, x: Tensor) -> Tensor:
        """See :class:`daemons.ops.linear.WideLinear`."""
        return self.kernels.multiply(self._matrices, x.contiguous(), self.n_out, torch.float32)

    def _batches(self) -> Iterator[list[tuple[Tiles, int, int]]]:
        """Rows that are dequantised together: (tiles, first row, rows)."""
        step = max(CPU_TILE_ROWS, SCRATCH_ELEMENTS // self.n_columns // CPU_TILE_ROWS * CPU_TILE_ROWS)
        if self.n_out <= step:
            yield [(part, 0, part.n_rows) for part in self.parts]
            return
        for part in self.parts:
            for first in range(0, part.n_rows, step):
                yield [(part, first, min(step, part.n_rows - first))]

    def _dequantised(self, batch: list[tuple[Tiles, int, int]]) -> Tensor:
        out, at = self.kernels.scratch(sum(n for _, _, n in batch), self.n_columns), 0
        for part, first, n in batch:
            self.kernels.dequantise(part, self.n_columns, first, out[at : at + n])
            at += n
        return out


class CpuQuantTable:
    """See :class:`daemons.ops.linear.QuantTable`."""

    def __init__(self, kernels: CpuKernels, kind: GgmlType, raw: Tensor) -> None:
        self.kernels, self.kind, self.raw, self.n_bytes = kernels, kind, raw, raw.nbytes
        assert raw.is_contiguous()

    def __call__(self, ids: Tensor) -> Tensor:
        return self.kernels.lookup(self.kind, self.raw, ids)
