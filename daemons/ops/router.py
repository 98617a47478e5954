"""MoE router: which experts a token goes to, and with which weights.

Knows no experts' matrices.  Invariant: a token's choice depends on that token alone; its experts come in the order of
their scores.

Shapes: T tokens, E embedding, X experts, k chosen for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_WEIGHT_SUM = 6.103515625e-5
"""Sums of weights are at least this, the smallest normal float16, before weights are divided by them (llama.cpp)."""


class RoutedExperts(NamedTuple):
    """``experts`` int64 [T, k] and their ``weights`` float32 [T, k].

    ``shared_gate`` float32 [T]: what the shared expert's result is multiplied by; None: it has no gate.
    """

    experts: Tensor
    weights: Tensor
    shared_gate: Tensor | None


RouteFn = Callable[[Tensor], RoutedExperts]
"""Rows [T, E] to who is chosen for them."""


@dataclass(frozen=True)
class Router:
    """``weight`` float32 [X, E]; with ``has_shared_gate`` one row more, the gate of the shared expert.

    ``bias`` [X] counts in the choice only; ``expert_scale`` [X] multiplies final weights.
    """

    weight: Tensor
    n_used: int
    gating: str
    normalise: bool
    scale: float
    bias: Tensor | None = None
    expert_scale: Tensor | None = None
    has_shared_gate: bool = False

    @property
    def n_experts(self) -> int:
        return self.weight.shape[0] - self.has_shared_gate

    def __call__(self, x: Tensor) -> RoutedExperts:
        return self.select_experts(self.scores(x))

    def scores(self, x: Tensor) -> Tensor:
        """Products float32 [T, X] of rows ``x`` [T, E], with ``has_shared_gate`` [T, X + 1]."""
        return F.linear(x.float(), self.weight)

    def select_experts(self, scores: Tensor) -> RoutedExperts:
        """Those chosen by :meth:`scores`."""
        shared_gate = torch.sigmoid(scores[:, -1]) if self.has_shared_gate else None
        scores = scores[:, : self.n_experts]
        scores = torch.sigmoid(scores) if self.gating == "sigmoid" else torch.softmax(scores, dim=-1)
        if self.bias is None:
            weights, experts = scores.topk(self.n_used, dim=-1)
        else:
            experts = (scores + self.bias).topk(self.n_used, dim=-1).indices
            weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_(min=MIN_WEIGHT_SUM)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[experts]
        return RoutedExperts(experts, weights, shared_gate)
