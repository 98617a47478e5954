"""How much queries attend to whole pages, from bounds of their keys: what KV Flash ranks pages by (policy ``qk``).

Of each page in host memory the device keeps the least and the greatest number of every key dimension; with them no
score of a key in the page is above ``relu(q) . greatest - relu(-q) . least``.  A page's score is its share of the
softmax over these bounds, the largest over rows and heads: heads that look for something give their page much, others
give all pages little.  Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bounds_of(keys: Tensor) -> Tensor:
    """Bounds bfloat16 [n, 2, K, D] of the keys [n, 64, K, D] of n pages."""
    return torch.stack((keys.amin(dim=1), keys.amax(dim=1)), dim=1).to(torch.bfloat16)


class KeyBounds:
    """Bounds of the keys of one layer's pages in host memory, bfloat16 [host pages, 2, K, D]."""

    def __init__(self, n_host: int, n_kv_heads: int, width: int, device: torch.device) -> None:
        self.bounds = torch.zeros(n_host, 2, n_kv_heads, width, dtype=torch.bfloat16, device=device)

    def keep(self, keys: Tensor, rows: Tensor) -> None:
        """Note the bounds of pages [n, 64, K, D] that go to rows of host memory."""
        self.bounds.index_copy_(0, rows, bounds_of(keys))

    def scores(self, q: Tensor, keys: Tensor, rows: Tensor, scale: float) -> Tensor:
        """Scores float32 of pages [n, 64, K, D] on the device, then of ``rows`` in host memory, for queries
        [r, H, D].
        """
        both = torch.cat((bounds_of(keys), self.bounds.index_select(0, rows)))
        least, greatest = both.float().permute(1, 2, 3, 0)  # [K, D, n]
        by_head = q.float().view(len(q), least.shape[0], -1, q.shape[-1]).transpose(0, 1).flatten(1, 2)  # [K, r G, D]
        most = torch.matmul(by_head.relu(), greatest) - torch.matmul(by_head.neg().relu(), least)
        return torch.softmax(most * scale, dim=-1).amax(dim=(0, 1))
