"""Linear layers and experts with packed weights, on Triton kernels.  For GPUs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.experts import UNLIMITED_PAIRS
from daemons.ops.linear import rows_at_a_time
from daemons.ops.triton.dequant import dequantise_packed
from daemons.ops.triton.gemv import MAX_GEMV_ROWS, packed_gemv
from daemons.ops.triton.grouped_gemm import packed_grouped_gemm
from daemons.weights.packed import PackedWeights, empty_packed
from lucevisor.model.quant_types import BY_NAME, CHUNK, GgmlType

MAX_GEMV_PAIRS = 320
"""(token, expert) pairs up to which each is a gemv of its own; above, a grouped gemm."""


class PackedLinear:
    """A matrix ``[N, K]``: gemv on its codes up to MAX_GEMV_ROWS, above a library gemm on dequantised rows."""

    def __init__(self, kind: GgmlType, packed: PackedWeights, n_columns: int) -> None:
        self.kind, self.packed, self.n_columns = kind, packed, n_columns
        self.n_out, self.n_bytes = packed.codes.shape[0], packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] <= MAX_GEMV_ROWS:
            return packed_gemv(self.kind, self.packed, x.contiguous())
        step = rows_at_a_time(self.n_columns)
        if step >= self.n_out:
            return F.linear(x, self._dequantised(x.dtype, 0, self.n_out))
        out = x.new_empty(x.shape[0], self.n_out)
        for at in range(0, self.n_out, step):
            n = min(step, self.n_out - at)
            torch.mm(x, self._dequantised(x.dtype, at, n).t(), out=out[:, at : at + n])
        return out

    def _dequantised(self, dtype: torch.dtype, first: int, n: int) -> Tensor:
        return dequantise_packed(self.kind, self.packed, dtype, first, n).narrow(1, 0, self.n_columns)


class PackedExperts:
    """Matrices ``[X, N, K]``; see :class:`daemons.ops.experts.ExpertWeights`."""

    max_async_pairs = UNLIMITED_PAIRS

    def __init__(self, kind: GgmlType, packed: PackedWeights, n_columns: int) -> None:
        self.kind, self.packed = kind, packed
        self.n_experts, self.n_out = packed.codes.shape[:2]
        self.n_columns, self.n_elements, self.n_bytes = n_columns, self.n_out * n_columns, packed.nbytes

    def linear(self, expert: int) -> PackedLinear:
        return PackedLinear(self.kind, self.packed.map(lambda tensor: tensor[expert]), self.n_columns)

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        packed = self.packed.map(lambda tensor: tensor.index_select(0, experts).flatten(0, 1))
        numbers = dequantise_packed(self.kind, packed, dtype)
        return numbers.view(-1, self.n_out, numbers.shape[1]).narrow(2, 0, self.n_columns)

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        if len(pairs) <= MAX_GEMV_PAIRS:
            return packed_gemv(self.kind, self.packed, x.contiguous(), pairs.experts, pairs_per_row)
        return packed_grouped_gemm(self.kind, self.packed, x.contiguous(), pairs, pairs_per_row)


def probe(device: torch.device, dtype: torch.dtype) -> None:
    """Multiply a small matrix; raises whatever Triton raises where it cannot compile or run."""
    kind = BY_NAME["Q4_K"]
    packed = empty_packed(kind, 32, CHUNK, device).map(torch.zeros_like)
    product = packed_gemv(kind, packed, torch.ones(1, CHUNK, dtype=dtype, device=device))
    if bool(product.any()):
        raise RuntimeError("a product with zeros is not zero")
