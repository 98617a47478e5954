"""Attention over a part of the keys, and the parts of a whole put together by the log of the sum of their weights.

Knows tensors only.  Invariant: the parts of disjoint keys, merged in any order, are attention over all of them, within
float32 rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from daemons.ops.attention import scored_parts

TO_LOG2 = 1.4426950408889634


@dataclass(slots=True)
class Partial:
    """``values`` float32 [B, n, H, Dv]: the softmax over a part of the keys; ``sums`` float32 [B, n, H]: the log2 of
    the sum of its weights.
    """

    values: Tensor
    sums: Tensor

    def slice(self, index: int) -> Partial:
        """One of the B slices, in the same memory."""
        return Partial(self.values[index : index + 1], self.sums[index : index + 1])

    def add(self, other: Partial) -> None:
        """Merge another part into this one, in place."""
        top = torch.maximum(self.sums, other.sums)
        mine, others = torch.exp2(self.sums - top), torch.exp2(other.sums - top)
        total = mine + others
        self.values.mul_((mine / total).unsqueeze(-1)).addcmul_(other.values, (others / total).unsqueeze(-1))
        torch.add(top, total.log2_(), out=self.sums)

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a key of each head whose value is zero, of the logits ``sinks`` [H]."""
        nothing = self.values.new_zeros(()).expand_as(self.values)
        self.add(Partial(nothing, (sinks * TO_LOG2).expand_as(self.sums)))


def merged(values: Tensor, sums: Tensor) -> Partial:
    """Merge along the first dimension: [S, ...] and [S, ...] as in Partial."""
    if len(values) == 1:
        return Partial(values[0], sums[0])
    top = sums.amax(dim=0)
    weights = torch.exp2(sums - top)
    total = weights.sum(dim=0)
    whole = (values * (weights / total).unsqueeze(-1)).sum(dim=0)
    return Partial(whole, top + total.log2())


def partial_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float = 0.0
) -> Partial:
    """:func:`daemons.ops.attention.reference` with its sums.  Every query must see a key."""
    values, sums = [], []
    for scores, unfolded in scored_parts(q, k, mask, scale=scale, softcap=softcap):
        weights = torch.softmax(scores, dim=-1)
        values.append(unfolded(torch.matmul(weights, v.transpose(1, 2).float())))
        sums.append(unfolded(torch.logsumexp(scores, dim=-1, keepdim=True).mul_(TO_LOG2)).squeeze(-1))
    return Partial(torch.cat(values, dim=1), torch.cat(sums, dim=1))
