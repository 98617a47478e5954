"""The gated product of an MLP, ``act(gate x) * (up x)``: in one kernel where the matrix has one for it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.experts import ExpertWeights
from daemons.ops.linear import Linear
from daemons.ops.operations import Operations


@runtime_checkable
class GatedLinear(Protocol):
    """A matrix [2F, K], gate above up, that may have such a kernel."""

    def gates(self, n_rows: int, activation: str) -> bool:
        """Whether it has one for so many rows."""

    def gated(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, F]."""


@runtime_checkable
class GatedExperts(Protocol):
    """The same for experts."""

    def gates(self, n_pairs: int, activation: str) -> bool:
        """Whether it has one for so many pairs."""

    def gated(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        """Row p // pairs_per_row of x [T, K] for pair p -> [P, F]."""


def gated_product(linear: Linear, x: Tensor, activation: str, operations: Operations) -> Tensor:
    """x [T, K] times a matrix [2F, K] -> [T, F]."""
    if isinstance(linear, GatedLinear) and linear.gates(x.shape[0], activation):
        return linear.gated(x)
    return operations.act_and_mul(linear(x), activation)


def gated_experts(
    weights: ExpertWeights, x: Tensor, pairs: ExpertPairs, pairs_per_row: int, activation: str, operations: Operations
) -> Tensor:
    """Row p // pairs_per_row of x [T, K] times the matrix [2F, K] of pair p's expert -> [P, F]."""
    if isinstance(weights, GatedExperts) and weights.gates(len(pairs), activation):
        return weights.gated(x, pairs, pairs_per_row)
    return operations.act_and_mul(weights.grouped_gemm(x, pairs, pairs_per_row), activation)
