"""Token masks (grammar bitmasks) of structured output, applied to rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def apply_masks(x: Tensor, masks: Tensor, rows: Sequence[int]) -> None:
    """Set what ``masks`` uint8 [m, bytes], 8 tokens a byte, forbid in the ``rows`` of logits ``x`` [n, V] to -inf."""
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
    bits = (masks.to(x.device, non_blocking=True).unsqueeze(-1) >> shifts) & 1
    forbidden = bits.flatten(1)[:, : x.shape[1]] == 0
    forbidden = torch.nn.functional.pad(forbidden, (0, x.shape[1] - forbidden.shape[1]), value=True)
    if len(rows) == x.shape[0]:
        x.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=x.device)
        x.index_copy_(0, index, x[index].masked_fill_(forbidden, float("-inf")))
