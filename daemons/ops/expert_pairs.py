"""Which row goes to which expert, and the same sorted by expert.

Knows no matrices.  Invariant: nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class ExpertPairs:
    """``pairs`` int64 [P]: the expert of each pair of row and expert.  ``n_experts``: how many there are."""

    pairs: Tensor
    n_experts: int

    def __len__(self) -> int:
        return self.pairs.numel()

    @cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """The pairs by expert, int64 [P], and where those of each expert start and the last one's end, int64 [X + 1].

        Found once, however many matrices ask for it.
        """
        experts, order = self.pairs.sort(stable=True)
        names = torch.arange(self.n_experts + 1, device=experts.device)
        return order, torch.searchsorted(experts, names)
