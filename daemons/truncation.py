"""Filters over the whole vocabulary (top_n_sigma, typical_p, XTC) and mirostat, one row at a time.

For rows that ask for them; sampling.py filters all others together.  Knows probabilities and parameters only.
Order: top_n_sigma, top_k, typical_p, top_p, min_p, XTC; each acts on what the previous one left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lucevisor.protocol.steps import Mirostat, SamplingParams

_MOST_LIKELY = 100
"""Tokens from which mirostat 1 estimates how fast probabilities fall."""


def filtered(scaled: Tensor, s: SamplingParams, u_xtc: float) -> tuple[Tensor, Tensor]:
    """Filter logits ``scaled`` [V], divided by the temperature; return the remaining probabilities, descending, and
    ids.

    ``u_xtc`` in [0, 1) decides whether XTC acts.
    """
    x, ids = scaled.double().sort(descending=True, stable=True)
    keep = torch.isfinite(x)
    if s.top_n_sigma > 0:
        keep &= x >= x[0] - s.top_n_sigma * x[keep].std(correction=0)
    if s.top_k > 0:
        keep[s.top_k :] = False
    p, ids = torch.softmax(x[keep], dim=0), ids[keep]
    if s.typical_p < 1:
        p, ids = _typical(p, ids, s.typical_p)
    if s.top_p < 1:
        below = p.cumsum(0) - p
        p, ids = _some(p, ids, (below < s.top_p).index_fill_(0, below.new_zeros(1).long(), True))
    if s.min_p > 0:
        p, ids = _some(p, ids, p >= s.min_p * p[0])
    if u_xtc < s.xtc_probability:
        n_above = int((p >= s.xtc_threshold).sum())
        p, ids = p[max(0, n_above - 1) :], ids[max(0, n_above - 1) :]
    return p / p.sum(), ids


def _some(p: Tensor, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    p = p[keep]
    return p / p.sum(), ids[keep]


def _typical(p: Tensor, ids: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """Locally typical sampling (Meister et al. 2022): tokens whose surprise is nearest the entropy, up to ``mass``."""
    surprise = -p.log()
    distance = (surprise - torch.special.entr(p).sum()).abs()
    order = distance.argsort(stable=True)
    running = p[order].cumsum(0)
    n = int((running <= mass).sum()) + 1
    return _some(p, ids, torch.zeros_like(p, dtype=torch.bool).index_fill_(0, order[:n], True))


def mirostat_keeps(scaled: Tensor, m: Mirostat, mu: float) -> tuple[Tensor, Tensor]:
    """Filter logits ``scaled`` [V] by mirostat; return the remaining probabilities, descending, and ids.

    Source: Basu et al. 2021, algorithm 1, and version 2 as in llama.cpp: tokens of at most ``mu`` bits of surprise.
    """
    x, ids = scaled.double().sort(descending=True, stable=True)
    keep = torch.isfinite(x)
    p, ids = torch.softmax(x[keep], dim=0), ids[keep]
    n = _expected_rank(p, mu, scaled.shape[-1]) if m.version == 1 else int((-p.log2() <= mu).sum())
    p = p[: max(1, n)]
    return p / p.sum(), ids[: max(1, n)]


def _expected_rank(p: Tensor, mu: float, vocabulary: int) -> int:
    """The number of tokens whose expected surprise is ``mu``, if probabilities ``p`` fall by a power of the rank."""
    n = min(_MOST_LIKELY, len(p)) - 1
    if n < 1:
        return 1
    rank = torch.arange(n, dtype=torch.float64)
    t, b = ((rank + 2) / (rank + 1)).log(), (p[:n] / p[1 : n + 1]).log().cpu()
    s = float((t * b).sum() / (t * t).sum())
    epsilon = s - 1
    if s <= 0 or epsilon == 0:
        return len(p)
    # in logarithms: k = (epsilon 2^mu / (1 - V^-epsilon))^(1/s) overflows for flat distributions
    ratio = epsilon / -math.expm1(-epsilon * math.log(vocabulary))
    exponent = (math.log(ratio) + mu * math.log(2)) / s
    return len(p) if exponent > math.log(len(p)) else max(1, int(math.exp(exponent)))


def next_mu(p: float, m: Mirostat, mu: float) -> float:
    """Return mirostat's ``mu`` after a token of probability ``p`` among the remaining ones."""
    return mu - m.eta * (-math.log2(p) - m.tau)
