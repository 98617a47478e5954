"""Linear layers, experts and tables with packed weights (quantised matmul; llama.cpp's MMQ and MMVQ).  For GPUs.

Triton kernels and, for few rows, CUDA C++.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.experts import UNLIMITED_PAIRS
from daemons.ops.linear import rows_at_a_time
from daemons.ops.triton.dequant import dequantise_packed, lookup_packed
from daemons.ops.triton.gemv import MAX_GEMV_ROWS, packed_gemv
from daemons.ops.triton.grouped_gemm import packed_grouped_gemm
from daemons.weights.packed import PackedWeights, empty_packed
from lucevisor.model.quant_types import BY_NAME, CHUNK, TILE_ROWS

MAX_GEMV_PAIRS_PER_EXPERT = 1.25
"""(token, expert) pairs, on average, up to which each is a gemv of its own; above, a grouped gemm."""
MAX_ROW_GEMV_PAIRS = 64
"""Pairs up to which ``row_gemv`` multiplies each, and at most one an expert on average: with more it is faster to read
an expert's matrix once."""


class RowGemv(Protocol):
    """A few rows times packed weights, or one row for each (token, expert) pair; see ``daemons.ops.cuda.gemv``."""

    def __call__(
        self, packed: PackedWeights, x: Tensor, experts: Tensor | None = None, pairs_per_row: int = 1
    ) -> Tensor: ...

    def gates(self, packed: PackedWeights, n_rows: int) -> bool: ...

    def gated(
        self, packed: PackedWeights, x: Tensor, experts: Tensor | None = None, pairs_per_row: int = 1
    ) -> Tensor: ...

    def places(self, packed: PackedWeights, n_rows: int) -> bool: ...

    def into(self, packed: PackedWeights, x: Tensor, out: Tensor) -> None: ...

    def groups(self, packed: PackedWeights, n_pairs: int) -> bool: ...

    def grouped(self, packed: PackedWeights, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor: ...


class PackedLinear:
    """A matrix ``[N, K]``: gemv on its codes up to ``gemv_rows``, above a library gemm on dequantised rows.

    ``row_gemv``: for up to ``max_rows``; None: as for more.
    """

    def __init__(
        self,
        packed: PackedWeights,
        n_columns: int,
        row_gemv: RowGemv | None = None,
        max_rows: int = 1,
        gemv_rows: int = MAX_GEMV_ROWS,
    ) -> None:
        self.packed, self.n_columns, self.row_gemv = packed, n_columns, row_gemv
        self.max_rows, self.gemv_rows = max_rows, gemv_rows
        self.n_out, self.n_bytes = packed.n_rows, packed.nbytes

    @property
    def implementation(self) -> str:
        """What runs for how many rows, for the report of kernel selection."""
        few = "" if self.row_gemv is None else f"cuda c++ to {self.max_rows} rows, "
        return f"packed, {few}triton to {self.gemv_rows}, dequantised beyond"

    def __call__(self, x: Tensor) -> Tensor:
        if self.row_gemv is not None and 1 <= x.shape[0] <= self.max_rows:
            return self.row_gemv(self.packed, x)
        if x.shape[0] <= self.gemv_rows:
            return packed_gemv(self.packed, x.contiguous())
        step = rows_at_a_time(self.n_columns)
        if step >= self.n_out:
            return F.linear(x, self._dequantised(x.dtype, 0, self.n_out))
        out = x.new_empty(x.shape[0], self.n_out)
        for at in range(0, self.n_out, step):
            n = min(step, self.n_out - at)
            torch.mm(x, self._dequantised(x.dtype, at, n).t(), out=out[:, at : at + n])
        return out

    def gates(self, n_rows: int, activation: str) -> bool:
        """See :class:`daemons.ops.gated.GatedLinear`."""
        if self.row_gemv is None or not 1 <= n_rows <= self.max_rows or not gateable(self.packed, activation):
            return False
        return self.row_gemv.gates(self.packed, n_rows)

    def gated(self, x: Tensor) -> Tensor:
        """See :class:`daemons.ops.gated.GatedLinear`."""
        assert self.row_gemv is not None
        return self.row_gemv.gated(self.packed, x)

    def writes_in_place(self, n_rows: int) -> bool:
        """Whether ``into`` may be called."""
        if self.row_gemv is None or not 1 <= n_rows <= self.max_rows:
            return False
        return self.row_gemv.places(self.packed, n_rows)

    def into(self, x: Tensor, out: Tensor) -> None:
        """The product with rows x [T, K], written to ``out`` [T, N], a part of longer rows."""
        assert self.row_gemv is not None
        self.row_gemv.into(self.packed, x, out)

    def _dequantised(self, dtype: torch.dtype, first: int, n: int) -> Tensor:
        return dequantise_packed(self.packed, dtype, first, n).narrow(1, 0, self.n_columns)


def gateable(packed: PackedWeights, activation: str) -> bool:
    """Whether ``row_gemv`` has a kernel that applies the activation: halves of whole tiles."""
    return activation == "silu" and packed.n_rows % (2 * TILE_ROWS) == 0


class PackedTable:
    """Rows by id of a packed matrix ``[V, K]``."""

    def __init__(self, packed: PackedWeights, n_columns: int, dtype: torch.dtype) -> None:
        self.packed, self.n_columns, self.dtype = packed, n_columns, dtype
        self.n_bytes = packed.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return lookup_packed(self.packed, ids.contiguous(), self.dtype)[:, : self.n_columns].contiguous()


class PackedExperts:
    """Matrices ``[X, N, K]``; see :class:`daemons.ops.experts.ExpertWeights`.

    ``row_gemv``: for up to ``max_pairs`` pairs.
    """

    max_async_pairs = UNLIMITED_PAIRS

    def __init__(
        self,
        packed: PackedWeights,
        n_columns: int,
        row_gemv: RowGemv | None = None,
        max_pairs: int = MAX_ROW_GEMV_PAIRS,
    ) -> None:
        self.packed, self.row_gemv = packed, row_gemv
        self.n_experts, self.n_out = packed.tiles.shape[0], packed.n_rows
        self.max_pairs = min(max_pairs, self.n_experts)
        self.n_columns, self.n_elements, self.n_bytes = n_columns, self.n_out * n_columns, packed.nbytes

    @property
    def implementation(self) -> str:
        """What runs for how many pairs, for the report of kernel selection."""
        if self.row_gemv is None:
            return "packed, triton"
        return f"packed, cuda c++ to {self.max_pairs} pairs and by expert, triton for many rows of each"

    def linear(self, expert: int) -> PackedLinear:
        return PackedLinear(self.packed.matrix(expert), self.n_columns, self.row_gemv)

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        tiles = self.packed.tiles.index_select(0, experts).flatten(0, 1)
        numbers = dequantise_packed(PackedWeights(self.packed.kind, tiles, tiles.shape[0] * TILE_ROWS), dtype)
        return numbers.view(experts.shape[0], -1, numbers.shape[1])[:, : self.n_out, : self.n_columns]

    def gates(self, n_pairs: int, activation: str) -> bool:
        """Whether :meth:`gated` has a kernel for so many pairs."""
        return n_pairs <= self.max_pairs and self.row_gemv is not None and gateable(self.packed, activation)

    def gated(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        """``act(gate x) * (up x)`` for each pair: as :meth:`grouped_gemm`, then the activation."""
        assert self.row_gemv is not None
        return self.row_gemv.gated(self.packed, x, pairs.experts, pairs_per_row)

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        if len(pairs) <= self.max_pairs and self.row_gemv is not None:
            return self.row_gemv(self.packed, x, pairs.experts, pairs_per_row)
        if self.row_gemv is not None and self.row_gemv.groups(self.packed, len(pairs)):
            return self.row_gemv.grouped(self.packed, x, pairs, pairs_per_row)
        if len(pairs) <= MAX_GEMV_PAIRS_PER_EXPERT * self.n_experts:
            return packed_gemv(self.packed, x.contiguous(), pairs.experts, pairs_per_row)
        return packed_grouped_gemm(self.packed, x.contiguous(), pairs, pairs_per_row)


def smoke_test(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply a small matrix; raises whatever Triton raises where it cannot compile or run."""
    packed = empty_packed(BY_NAME["Q4_K"], 32, CHUNK, device)
    packed.tiles.zero_()
    product = packed_gemv(packed, torch.ones(1, CHUNK, dtype=dtype, device=device))
    if bool(product.any()):
        raise RuntimeError("a product with zeros is not zero")
