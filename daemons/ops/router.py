"""MoE router: which experts a token goes to, and with which weights.

Knows no expert weights.  Invariant: a token's experts depend on that token alone, and are ordered by their scores.

Shapes: T tokens, E embedding, X experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_WEIGHT_SUM = 6.103515625e-5
"""Lower bound of a sum of weights before normalisation: the smallest normal float16, as in llama.cpp."""


class RoutedExperts(NamedTuple):
    """``experts`` int64 [T, k] and their ``weights`` float32 [T, k].

    ``shared_gate`` float32 [T]: the factor of the shared expert's result; None: it has no gate.
    """

    experts: Tensor
    weights: Tensor
    shared_gate: Tensor | None


RouteFn = Callable[[Tensor], RoutedExperts]
"""Rows [T, E] to their routed experts."""


@dataclass(frozen=True)
class Router:
    """``weight`` float32 [X, E]; with ``has_shared_gate`` one more row, the gate of the shared expert.

    ``bias`` [X] is added to scores for the selection only; ``expert_scale`` [X] multiplies the final weights;
    ``logit_bias`` [X] is added to logits.
    """

    weight: Tensor
    n_used: int
    gating: str
    normalise: bool
    scale: float
    bias: Tensor | None = None
    expert_scale: Tensor | None = None
    has_shared_gate: bool = False
    logit_bias: Tensor | None = None

    @property
    def n_experts(self) -> int:
        return self.weight.shape[0] - self.has_shared_gate

    def __call__(self, x: Tensor) -> RoutedExperts:
        return self.select_experts(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:
        """Router logits float32 [T, X] of rows ``x`` [T, E]; [T, X + 1] with a shared gate."""
        return F.linear(x.float(), self.weight, self.logit_bias)

    def select_experts(self, scores: Tensor) -> RoutedExperts:
        """The top-k experts and their weights by the logits of :meth:`scores`."""
        shared_gate = torch.sigmoid(scores[:, -1]) if self.has_shared_gate else None
        scores = scores[:, : self.n_experts]
        scores = torch.sigmoid(scores) if self.gating == "sigmoid" else torch.softmax(scores, dim=-1)
        return self.top_experts(scores, shared_gate, lambda weights: weights.sum(dim=-1, keepdim=True))

    def top_experts(
        self, scores: Tensor, shared_gate: Tensor | None, sum_of: Callable[[Tensor], Tensor]
    ) -> RoutedExperts:
        """The top-k experts by probabilities ``scores`` [T, X]; ``sum_of``: [T, k] to [T, 1]."""
        if self.bias is None:
            weights, experts = scores.topk(self.n_used, dim=-1)
        else:
            experts = (scores + self.bias).topk(self.n_used, dim=-1).indices
            weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / sum_of(weights).clamp_(min=MIN_WEIGHT_SUM)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts]
        return RoutedExperts(experts, weights, shared_gate)
