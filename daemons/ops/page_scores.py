"""How much queries attend to whole pages, from sketches of their keys: what KV Flash ranks pages by (policy ``qk``).

Of each page in host memory the device keeps, per kv head, the mean of its keys, and of each key how it differs from
that: a bit for each number's sign, and a factor.  A mean alone loses a key that differs from its 63 neighbours, as that
of a fact among others does; signs find it (1-bit sketches, as in RaBitQ, arXiv:2405.12497).  A page's score: its
share of the softmax over all positions, the largest over rows, the mean over heads.  Knows tensors only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lucevisor.model.values import PAGE_TOKENS

QUERIES = 16
"""Last rows of a slice that are asked: the end of a question, where it is short."""


class Sketches(NamedTuple):
    """Of n pages: ``means`` [K, n, D], ``signs`` uint8 [K, n, 64, D / 8], ``factors`` [K, n, 64]; bfloat16 if kept."""

    means: Tensor
    signs: Tensor
    factors: Tensor


@cache
def sign_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The eight signs that a byte stands for, lowest bit first: [256, 8] of 1 and -1."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return (2 * bits - 1).to(device=device, dtype=dtype)


def sketches_of(keys: Tensor, dtype: torch.dtype = torch.bfloat16) -> Sketches:
    """Sketches of the keys float32 [n, 64, K, D] of n pages, with means and factors of ``dtype``."""
    by_head = keys.permute(2, 0, 1, 3)  # [K, n, 64, D]
    means = by_head.mean(dim=2).to(dtype)
    rest = by_head - means.float().unsqueeze(2)
    # the factor with which products with signs are right for what lies in the key's own direction
    factors = rest.square().sum(dim=-1) / rest.abs().sum(dim=-1).clamp_(min=1e-30)
    bits = F.pad((rest > 0).to(torch.uint8), (0, -rest.shape[-1] % 8)).view(*rest.shape[:-1], -1, 8)
    signs = (bits << torch.arange(8, dtype=torch.uint8, device=keys.device)).sum(dim=-1, dtype=torch.uint8)
    return Sketches(means, signs, factors.to(dtype))


def log_sums(q: Tensor, sketches: Sketches) -> Tensor:
    """Logs of the sums of the weights of each page, float32 [K, r, n], for scaled queries [K, r, D]."""
    means, signs, factors = sketches
    n_heads, n_pages, width = means.shape
    unpacked = F.embedding(signs.to(torch.int32), sign_table(q.device, q.dtype)).view(
        n_heads, n_pages * PAGE_TOKENS, -1
    )
    padded = F.pad(q, (0, unpacked.shape[-1] - width))
    products = torch.matmul(padded, unpacked.transpose(1, 2)).float().view(n_heads, -1, n_pages, PAGE_TOKENS)
    products.mul_(factors.float().unsqueeze(1))
    products += torch.matmul(q.float(), means.float().transpose(1, 2)).unsqueeze(-1)
    return torch.logsumexp(products, dim=-1)


def queries_by_head(q: Tensor, n_kv_heads: int, scale: float) -> Tensor:
    """Scaled queries [K, H / K r, D] of the rows ``q`` [r, H, D]."""
    dtype = torch.float32 if q.device.type == "cpu" else q.dtype
    by_head = (q.float() * scale).to(dtype).view(len(q), n_kv_heads, -1, q.shape[-1])  # [r, K, G, D]
    return by_head.permute(1, 2, 0, 3).reshape(n_kv_heads, -1, q.shape[-1])


def scores_of(sums: Tensor, n_rows: int) -> Tensor:
    """Scores [n] of all pages, from the logs of their sums [K, H / K r, n] for ``n_rows`` rows of queries."""
    shares = torch.softmax(sums, dim=-1)
    return shares.view(len(sums), -1, n_rows, sums.shape[-1]).amax(dim=2).mean(dim=(0, 1))


class KeySketches:
    """Sketches of one layer's pages in host memory."""

    def __init__(self, n_host: int, n_kv_heads: int, width: int, device: torch.device) -> None:
        self.kept = Sketches(
            torch.zeros(n_kv_heads, n_host, width, dtype=torch.bfloat16, device=device),
            torch.zeros(n_kv_heads, n_host, PAGE_TOKENS, -(-width // 8), dtype=torch.uint8, device=device),
            torch.zeros(n_kv_heads, n_host, PAGE_TOKENS, dtype=torch.bfloat16, device=device),
        )
        self.missing: set[int] = set()  # rows whose keys did not come from the device

    def keep(self, keys: Tensor, rows: Tensor) -> None:
        """Note the sketches of pages [n, 64, K, D] that go to rows of host memory."""
        for mine, new in zip(self.kept, sketches_of(keys), strict=True):
            mine.index_copy_(1, rows, new)
