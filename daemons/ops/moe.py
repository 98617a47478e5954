"""Routed experts: who is chosen, and the products with those chosen.

Knows neither files nor families.  Invariant: a token's result depends on that token alone, and its experts are summed
in the order of their weights, so it is the same in every batch.

Shapes: T tokens, E embedding, X experts, k chosen for each token, F width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.ops.basic import gated
from daemons.ops.experts import ExpertMatrices

FEW_PAIRS = 64
"""Up to this many pairs of token and expert an accelerator gathers matrices instead of asking who was chosen."""
EXPANDED_NUMBERS = 1 << 26
"""Numbers of gathered matrices held at a time."""
SMALLEST_SUM = 6.103515625e-5
"""Sums of weights are at least this, the smallest normal float16, before weights are divided by them (llama.cpp)."""


@dataclass(frozen=True)
class Router:
    """``weight`` float32 [X, E].  ``bias`` [X] counts in the choice only; ``expert_scale`` [X] multiplies final
    weights.
    """

    weight: Tensor
    n_used: int
    gating: str
    normalise: bool
    scale: float
    bias: Tensor | None = None
    expert_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts int64 [T, k] and their weights float32 [T, k] of rows ``x`` [T, E]."""
        scores = F.linear(x.float(), self.weight)
        scores = torch.sigmoid(scores) if self.gating == "sigmoid" else torch.softmax(scores, dim=-1)
        if self.bias is None:
            weights, experts = scores.topk(self.n_used, dim=-1)
        else:
            experts = (scores + self.bias).topk(self.n_used, dim=-1).indices
            weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_(min=SMALLEST_SUM)
        if self.scale != 1.0:
            weights = weights * self.scale
        return experts, weights if self.expert_scale is None else weights * self.expert_scale[experts]


@dataclass(frozen=True)
class ExpertMlp:
    """``down_e(act(gate_e x) * (up_e x))``; gate and up are one matrix [2F, E] for each expert."""

    gate_up: ExpertMatrices
    down: ExpertMatrices
    activation: str

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum [T, E] over each row's experts [T, k]."""
        if x.device.type != "cpu" and experts.numel() <= FEW_PAIRS:
            return self.gathered(x, experts, weights)
        return self.grouped(x, experts, weights)

    def grouped(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Rows are sorted by expert, each chosen expert multiplies its own once.  Waits for the device to say who was
        chosen."""
        k = experts.shape[1]
        chosen, order = experts.flatten().sort(stable=True)
        rows = x.index_select(0, order // k)
        names, counts = (found.tolist() for found in torch.unique_consecutive(chosen, return_counts=True))
        out = x.new_empty(rows.shape[0], self.down.n_out)
        at = 0
        for expert, n in zip(names, counts, strict=True):
            inner = gated(self.gate_up.one(expert)(rows[at : at + n]), self.activation)
            out[at : at + n] = self.down.one(expert)(inner)
            at += n
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return _weighted(out.index_select(0, back).view(-1, k, self.down.n_out), weights)

    def gathered(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The matrices of every pair are copied together and multiplied as one batch; nobody waits for the device."""
        k, pairs = experts.shape[1], experts.flatten()
        size = max(1, EXPANDED_NUMBERS // (self.gate_up.n_numbers + self.down.n_numbers))
        rows = x.repeat_interleave(k, dim=0).unsqueeze(-1)
        parts = []
        for at in range(0, pairs.shape[0], size):
            part = pairs[at : at + size]
            inner = gated(
                torch.bmm(self.gate_up.some(part, x.dtype), rows[at : at + size]).squeeze(-1), self.activation
            )
            parts.append(torch.bmm(self.down.some(part, x.dtype), inner.unsqueeze(-1)).squeeze(-1))
        return _weighted(torch.cat(parts).view(-1, k, self.down.n_out), weights)


def _weighted(results: Tensor, weights: Tensor) -> Tensor:
    """Sum of results [T, k, E] with weights [T, k], in float32; of results' dtype."""
    return torch.bmm(weights.unsqueeze(1), results.float()).squeeze(1).to(results.dtype)
