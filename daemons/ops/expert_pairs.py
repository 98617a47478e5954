"""(token, expert) pairs of a step, and their order by expert.

Knows no matrices.  Invariant: nothing here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

Order = TypeVar("Order")


@dataclass
class ExpertPairs:
    """``experts`` int64 [P]: the expert of each (token, expert) pair, one of ``n_experts``."""

    experts: Tensor
    n_experts: int
    _order: Any = field(default=None, init=False)

    def __len__(self) -> int:
        return self.experts.numel()

    def ordered(self, order: Callable[[Tensor], Order]) -> Order:
        """What ``order`` makes of the experts, for kernels with an order of their own; cached likewise."""
        if self._order is None:
            self._order = order(self.experts)
        found: Order = self._order
        return found

    @cached_property
    def sorted_by_expert(self) -> tuple[Tensor, Tensor]:
        """Pair ids by expert, int64 [P], and the offsets of each expert's pairs, int64 [X + 1].

        Cached, since all matrices of a layer need it.
        """
        experts, order = self.experts.sort(stable=True)
        ids = torch.arange(self.n_experts + 1, device=experts.device)
        return order, torch.searchsorted(experts, ids)
