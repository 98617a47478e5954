"""The MLP of routed experts, in the form that suits the device and the number of (token, expert) pairs.

Knows neither files nor families.  Invariant: a token's result depends on that token alone, and its experts are summed
in the order of their weights.

Shapes: T tokens, E embedding, X experts, k experts per token, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.experts import ExpertWeights
from daemons.ops.gated import gated_experts
from daemons.ops.operations import Operations
from daemons.ops.router import RoutedExperts
from lucevisor.model.workspace import DEQUANT_ELEMENTS


@dataclass(frozen=True)
class ExpertMlp:
    """``down_e(act(gate_e x) * (up_e x))``; gate and up of an expert are one matrix [2F, E].

    ``biases`` [X, 2F] and [X, E] are added to both products; of the activations' dtype.
    """

    gate_up: ExpertWeights
    down: ExpertWeights
    activation: str
    operations: Operations
    biases: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor, routing: RoutedExperts, shared: Tensor | None = None) -> Tensor:
        """The weighted sum [T, E] over each row's experts, plus ``shared`` [T, E] times the shared gate."""
        return self.operations.moe_combine(
            self.results(x, routing.experts), routing.weights, shared, routing.shared_gate
        )

    def results(self, x: Tensor, experts: Tensor) -> Tensor:
        """The results [T, k, E] of each row's experts [T, k], before they are combined."""
        if x.device.type == "cpu":
            return self.per_expert(x, experts)
        if experts.numel() <= min(self.gate_up.max_async_pairs, self.down.max_async_pairs):
            return self.grouped(x, experts)
        return self.per_expert(x, experts) if self.operations.batch_invariant else self.batched(x, experts)

    def per_expert(self, x: Tensor, experts: Tensor) -> Tensor:
        """One product per routed expert with its own rows: no matrix is copied, each is read once."""
        sorted_rows = _SortedRows(x, experts)
        out = x.new_empty(experts.numel(), self.down.n_out)
        at = 0
        for expert, n in zip(sorted_rows.experts.tolist(), sorted_rows.counts.tolist(), strict=True):
            gate_up = self.gate_up.linear(expert)(sorted_rows.rows[at : at + n])
            if self.biases is not None:
                gate_up = gate_up + self.biases[0][expert]
            out[at : at + n] = self.down.linear(expert)(self._act_and_mul(gate_up))
            if self.biases is not None:
                out[at : at + n] += self.biases[1][expert]
            at += n
        return sorted_rows.unsort(out)

    def grouped(self, x: Tensor, experts: Tensor) -> Tensor:
        """Grouped gemm over (token, expert) pairs; never synchronises with the host."""
        k, pairs = experts.shape[1], ExpertPairs(experts.flatten(), self.gate_up.n_experts)
        if self.biases is None:
            inner = gated_experts(self.gate_up, x, pairs, k, self.activation, self.operations)
            return self.down.grouped_gemm(inner, pairs, 1).view(-1, k, self.down.n_out)
        add_bias, (gate_up, down) = self.operations.add_bias, self.biases
        inner = self._act_and_mul(add_bias(self.gate_up.grouped_gemm(x, pairs, k), gate_up, pairs.experts))
        return add_bias(self.down.grouped_gemm(inner, pairs, 1), down, pairs.experts).view(-1, k, self.down.n_out)

    def batched(self, x: Tensor, experts: Tensor) -> Tensor:
        """Batched gemm over dequantised experts, those with most rows first, so that batches need little padding.

        Synchronises with the host once, to read how many rows each expert has.
        """
        sorted_rows = _SortedRows(x, experts)
        counts = sorted_rows.counts.tolist()
        largest_first = sorted_rows.counts.argsort(descending=True)
        ends = sorted_rows.counts.cumsum(0)
        out = x.new_empty(experts.numel(), self.down.n_out)
        descending = sorted(counts, reverse=True)
        for at in range(0, len(counts), self.experts_at_a_time):
            batch = largest_first[at : at + self.experts_at_a_time]
            first = (ends - sorted_rows.counts)[batch].unsqueeze(1)
            # short lists are padded with their last row, whose result is then written more than once
            place = torch.minimum(first + torch.arange(descending[at], device=x.device), ends[batch].unsqueeze(1) - 1)
            result = self._batch(sorted_rows.rows[place], sorted_rows.experts[batch])
            out.index_copy_(0, place.flatten(), result.flatten(0, 1))
        return sorted_rows.unsort(out)

    def _act_and_mul(self, x: Tensor) -> Tensor:
        return self.operations.act_and_mul(x, self.activation)

    @property
    def experts_at_a_time(self) -> int:
        """Experts whose dequantised matrices are held at a time."""
        return max(1, DEQUANT_ELEMENTS // (self.gate_up.n_elements + self.down.n_elements))

    def _batch(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Rows [P, n, E] of experts [P] -> [P, n, E]."""
        both = torch.bmm(rows, self.gate_up.dequantised(experts, rows.dtype).transpose(1, 2))
        if self.biases is not None:
            both += self.biases[0][experts].unsqueeze(1)
        inner = self._act_and_mul(both.flatten(0, 1)).view(*rows.shape[:2], -1)
        out = torch.bmm(inner, self.down.dequantised(experts, rows.dtype).transpose(1, 2))
        return out if self.biases is None else out + self.biases[1][experts].unsqueeze(1)


class _SortedRows:
    """Rows of x repeated for each of their experts and sorted by expert.

    ``experts``: the routed ones, ascending; ``counts``: their numbers of rows.  All on the device.
    """

    def __init__(self, x: Tensor, experts: Tensor) -> None:
        self.k = experts.shape[1]
        sorted_experts, self.order = experts.flatten().sort(stable=True)
        self.rows = x.index_select(0, self.order // self.k)
        self.experts, self.counts = torch.unique_consecutive(sorted_experts, return_counts=True)

    def unsort(self, results: Tensor) -> Tensor:
        """Results in the order of :attr:`rows` -> [T, k, E], in the order of tokens."""
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(self.order.shape[0], device=results.device)
        return results.index_select(0, place).view(-1, self.k, results.shape[-1])
