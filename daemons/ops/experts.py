"""Weights of routed experts in each form: products with one expert, with many at once, or by (token, expert) pairs.

Knows no routing; ``selection`` decides which class a tensor gets.  Shapes: X experts, each ``[N, K]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.linear import BlockLinear, ConcatLinear, DenseLinear, Float32CpuLinear, Linear, Product
from daemons.weights.dequant import dequantise
from lucevisor.model.quant_types import GgmlType
from lucevisor.model.workspace import DEQUANT_ELEMENTS

MAX_GATHERED_PAIRS = 64
"""Pairs up to which matrices are copied for their pairs, without synchronising with the host."""
UNLIMITED_PAIRS = 1 << 30
"""No limit: more pairs than any step has."""


class ExpertWeights(Protocol):
    """``n_experts`` matrices of ``n_out`` rows.  ``n_elements``: of one; ``n_bytes``: of all, on their device."""

    n_experts: int
    n_out: int
    n_elements: int
    n_bytes: int
    max_async_pairs: int
    """(token, expert) pairs up to which :meth:`grouped_gemm` runs without synchronising with the host."""

    def linear(self, expert: int) -> Linear:
        """One expert's matrix as a linear layer."""

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrices ``[P, N, K]`` of ``experts`` [P], which may repeat."""

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        """``[P, N]``: row p // pairs_per_row of x [T, K] times the matrix of pair p's expert.

        Never synchronises with the host.
        """


def gather_gemm(weights: ExpertWeights, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
    """:meth:`ExpertWeights.grouped_gemm` on copies of the matrices, a bounded number at a time."""
    rows = x.repeat_interleave(pairs_per_row, dim=0).unsqueeze(2)
    step = max(1, DEQUANT_ELEMENTS // weights.n_elements)
    batches = zip(torch.split(pairs.experts, step), torch.split(rows, step), strict=True)
    return torch.cat([torch.bmm(weights.dequantised(e, x.dtype), batch) for e, batch in batches]).squeeze(2)


class DenseExperts:
    """Plain matrices ``[X, N, K]`` of the activations' dtype.  With a ``product`` only one with each expert's rows."""

    def __init__(self, weight: Tensor, product: Product | None = None) -> None:
        self.weight, self.max_async_pairs = weight, 0 if product else MAX_GATHERED_PAIRS
        self.n_experts, self.n_out, n_columns = weight.shape
        self.n_elements, self.n_bytes = self.n_out * n_columns, weight.nbytes
        form: Callable[[Tensor], Linear] = DenseLinear
        if product is not None:
            form = partial(DenseLinear, product=product)
        elif weight.device.type == "cpu" and weight.dtype == torch.float32:
            form = Float32CpuLinear
        self.linears = [form(matrix) for matrix in weight]

    def linear(self, expert: int) -> Linear:
        return self.linears[expert]

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.index_select(0, experts)

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        return gather_gemm(self, x, pairs, pairs_per_row)


class BlockExperts:
    """Quant blocks as in the file, raw ``[X, N, row_bytes]``; only routed experts are dequantised.

    ``product`` as in :class:`DenseExperts`.
    """

    def __init__(self, kind: GgmlType, raw: Tensor, n_columns: int, product: Product | None = None) -> None:
        self.kind, self.raw, self.n_columns = kind, raw, n_columns
        self.max_async_pairs = 0 if product else MAX_GATHERED_PAIRS
        self.n_experts, self.n_out = raw.shape[:2]
        self.n_elements, self.n_bytes = self.n_out * n_columns, raw.nbytes
        self.linears: list[Linear] = [BlockLinear(kind, matrix, n_columns, product or F.linear) for matrix in raw]

    def linear(self, expert: int) -> Linear:
        return self.linears[expert]

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        raw = self.raw.index_select(0, experts).flatten(0, 1)
        return dequantise(self.kind, raw, dtype).view(-1, self.n_out, self.n_columns)

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        return gather_gemm(self, x, pairs, pairs_per_row)


class SeparateExperts:
    """One linear layer per expert, in any form."""

    max_async_pairs = MAX_GATHERED_PAIRS

    def __init__(self, linears: list[Linear], n_columns: int) -> None:
        self.linears, self.n_columns = linears, n_columns
        self.n_experts, self.n_out = len(linears), linears[0].n_out
        self.n_elements, self.n_bytes = self.n_out * n_columns, sum(p.n_bytes for p in linears)

    def linear(self, expert: int) -> Linear:
        return self.linears[expert]

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        unit = torch.eye(self.n_columns, dtype=dtype, device=experts.device)
        return torch.stack([self.linears[e](unit).t() for e in experts.tolist()])

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        return gather_gemm(self, x, pairs, pairs_per_row)


class ConcatExperts:
    """Matrices of the same experts in several forms, concatenated along their rows."""

    def __init__(self, parts: list[ExpertWeights]) -> None:
        self.parts = parts
        self.n_experts, self.n_out = parts[0].n_experts, sum(p.n_out for p in parts)
        self.n_elements, self.n_bytes = sum(p.n_elements for p in parts), sum(p.n_bytes for p in parts)
        self.max_async_pairs = min(p.max_async_pairs for p in parts)

    def linear(self, expert: int) -> Linear:
        return ConcatLinear([p.linear(expert) for p in self.parts])

    def dequantised(self, experts: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.cat([p.dequantised(experts, dtype) for p in self.parts], dim=1)

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        return torch.cat([p.grouped_gemm(x, pairs, pairs_per_row) for p in self.parts], dim=1)
