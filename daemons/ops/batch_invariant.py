"""What batch-invariant operations of several devices share; see ``Operations.batch_invariant``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from daemons.ops.operations import PagedAttention, PagedQuery
from daemons.ops.paged import PagedTensor


def in_short_slices(
    attend: PagedAttention, n_tokens: int, q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery
) -> Tensor:
    """``attend`` with so many tokens of each slice at a time, as the sums of its parts take memory."""
    n = where.n_tokens
    if n <= n_tokens:
        return attend(q, keys, values, where)
    by_slice = q.view(-1, n, *q.shape[1:])
    parts = []
    for at in range(0, n, n_tokens):
        part = by_slice[:, at : at + n_tokens]
        here = replace(where, starts=where.starts + at, n_tokens=part.shape[1])
        found = attend(part.flatten(0, 1), keys, values, here)
        parts.append(found.view(len(part), -1, *found.shape[1:]))
    return torch.cat(parts, dim=1).flatten(0, 1)
