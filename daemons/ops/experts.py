"""Resting matrices of experts: one product with the matrix of an expert, or the matrices of many at once.

Knows forms, no routing.  ``X`` experts, each ``[N, K]``; which class a tensor gets is decided by ``choose``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.linear import BlockLinear, ConcatLinear, DenseLinear, Float32CpuLinear, Linear
from daemons.weights.dequant import dequantise
from lucevisor.model.quant_types import GgmlType
from lucevisor.model.workspace import DEQUANT_ELEMENTS

MAX_GATHERED_PAIRS = 64
"""Pairs of row and expert up to which matrices are gathered."""
UNLIMITED_PAIRS = 1 << 30
"""More pairs than any step has."""


class ExpertWeights(Protocol):
    """``n_experts`` matrices of ``n_out`` rows; ``n_numbers`` of one; ``n_bytes`` of all on their device."""

    n_experts: int
    n_out: int
    n_numbers: int
    n_bytes: int
    max_async_pairs: int
    """(token, expert) pairs up to which :meth:`grouped_gemm` runs without synchronising with the host."""

    def linear(self, expert: int) -> Linear:
        """The product with one expert's matrix."""

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """Matrices ``[P, N, K]`` of the experts [P], which may repeat."""

    def grouped_gemm(self, x: Tensor, routes: ExpertPairs, pairs_per_row: int) -> Tensor:
        """``[P, N]``: row p // share of x [T, K] times the matrix of pair p's expert.  Does not wait for the device."""


def gather_gemm(matrices: ExpertWeights, x: Tensor, routes: ExpertPairs, pairs_per_row: int) -> Tensor:
    """:meth:`ExpertWeights.grouped_gemm` with copies of the matrices, a bounded number of them at a time."""
    rows = x.repeat_interleave(pairs_per_row, dim=0).unsqueeze(2)
    step = max(1, DEQUANT_ELEMENTS // matrices.n_numbers)
    pairs = zip(torch.split(routes.pairs, step), torch.split(rows, step), strict=True)
    return torch.cat([torch.bmm(matrices.dequantised(e, x.dtype), part) for e, part in pairs]).squeeze(2)


class DenseExperts:
    """Plain matrices ``[X, N, K]`` of the activations' dtype."""

    max_async_pairs = MAX_GATHERED_PAIRS

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.n_experts, self.n_out, n_columns = weight.shape
        self.n_numbers, self.n_bytes = self.n_out * n_columns, weight.nbytes
        form = Float32CpuLinear if weight.device.type == "cpu" and weight.dtype == torch.float32 else DenseLinear
        self.products: list[Linear] = [form(matrix) for matrix in weight]

    def linear(self, expert: int) -> Linear:
        return self.products[expert]

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.index_select(0, experts)

    def grouped_gemm(self, x: Tensor, routes: ExpertPairs, pairs_per_row: int) -> Tensor:
        return gather_gemm(self, x, routes, pairs_per_row)


class BlockExperts:
    """The file's quant blocks, raw ``[X, N, row_bytes]``; only chosen experts are expanded."""

    max_async_pairs = MAX_GATHERED_PAIRS

    def __init__(self, kind: GgmlType, raw: Tensor, n_columns: int) -> None:
        self.kind, self.raw, self.n_columns = kind, raw, n_columns
        self.n_experts, self.n_out = raw.shape[:2]
        self.n_numbers, self.n_bytes = self.n_out * n_columns, raw.nbytes
        self.products: list[Linear] = [BlockLinear(kind, matrix, n_columns) for matrix in raw]

    def linear(self, expert: int) -> Linear:
        return self.products[expert]

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        raw = self.raw.index_select(0, experts).flatten(0, 1)
        return dequantise(self.kind, raw, dtype).view(-1, self.n_out, self.n_columns)

    def grouped_gemm(self, x: Tensor, routes: ExpertPairs, pairs_per_row: int) -> Tensor:
        return gather_gemm(self, x, routes, pairs_per_row)


class SeparateExperts:
    """Products of experts in whatever form they are, one after the other."""

    max_async_pairs = MAX_GATHERED_PAIRS

    def __init__(self, products: list[Linear], n_columns: int) -> None:
        self.products, self.n_columns = products, n_columns
        self.n_experts, self.n_out = len(products), products[0].n_out
        self.n_numbers, self.n_bytes = self.n_out * n_columns, sum(p.n_bytes for p in products)

    def linear(self, expert: int) -> Linear:
        return self.products[expert]

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        unit = torch.eye(self.n_columns, dtype=dtype, device=experts.device)
        return torch.stack([self.products[e](unit).t() for e in experts.tolist()])

    def grouped_gemm(self, x: Tensor, routes: ExpertPairs, pairs_per_row: int) -> Tensor:
        return gather_gemm(self, x, routes, pairs_per_row)


class ConcatExperts:
    """Matrices of the same experts in several forms, below each other."""

    def __init__(self, parts: list[ExpertWeights]) -> None:
        self.parts = parts
        self.n_experts, self.n_out = parts[0].n_experts, sum(p.n_out for p in parts)
        self.n_numbers, self.n_bytes = sum(p.n_numbers for p in parts), sum(p.n_bytes for p in parts)
        self.max_async_pairs = min(p.max_async_pairs for p in parts)

    def linear(self, expert: int) -> Linear:
        return ConcatLinear([p.linear(expert) for p in self.parts])

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([p.dequantised(experts, dtype) for p in self.parts], dim=1)

    def grouped_gemm(self, x: Tensor, routes: ExpertPairs, pairs_per_row: int) -> Tensor:
        return torch.cat([p.grouped_gemm(x, routes, pairs_per_row) for p in self.parts], dim=1)
