"""How much queries attend to whole pages, from the means of their keys: what KV Flash ranks pages by (policy ``qk``).

Of each page in host memory the device keeps the mean of its keys, per kv head.  A page's score is its share of the
softmax over the products of query and means: the largest over rows, the mean over heads.  Knows tensors only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def means_of(keys: Tensor) -> Tensor:
    """Means bfloat16 [n, K, D] of the keys [n, 64, K, D] of n pages."""
    return keys.mean(dim=1).to(torch.bfloat16)


class KeyMeans:
    """Means of the keys of one layer's pages in host memory, bfloat16 [host pages, K, D]."""

    def __init__(self, n_host: int, n_kv_heads: int, width: int, device: torch.device) -> None:
        self.means = torch.zeros(n_host, n_kv_heads, width, dtype=torch.bfloat16, device=device)
        self.missing: set[int] = set()  # rows whose keys did not come from the device

    def keep(self, keys: Tensor, rows: Tensor) -> None:
        """Note the means of pages [n, 64, K, D] that go to rows of host memory."""
        self.means.index_copy_(0, rows, means_of(keys))

    def scores(self, q: Tensor, keys: Tensor, rows: Tensor, scale: float) -> Tensor:
        """Scores float32 of pages [n, 64, K, D] on the device, then of ``rows`` in host memory, for queries
        [r, H, D].
        """
        means = torch.cat((means_of(keys), self.means.index_select(0, rows))).float().permute(1, 2, 0)  # [K, D, n]
        by_head = q.float().view(len(q), means.shape[0], -1, q.shape[-1]).permute(1, 2, 0, 3)  # [K, G, r, D]
        shares = torch.softmax(torch.matmul(by_head, means.unsqueeze(1)) * scale, dim=-1)
        return shares.amax(dim=2).mean(dim=(0, 1))
