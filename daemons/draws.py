"""Rows of adjusted logits to token ids: greedy ones apart, a row's number in [0, 1) decides on its token.

That number depends on seed and position alone.  Knows rows and settings, no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lucevisor.protocol.steps import Sampling

CANDIDATES = 1024
"""Rows whose filters keep fewer tokens than this need no full sort of the vocabulary."""

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from ``seed`` and ``position`` alone.  Source: splitmix64 (Steele, Lea, Flood 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    for _ in range(2):  # twice, to decorrelate adjacent seeds and positions
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z = z ^ (z >> 31)
    return (z >> 11) / (1 << 53)


def index_at(p: Tensor, u: float) -> int:
    """The index that ``u`` in [0, 1) decides on, of probabilities ``p`` [n]."""
    return int(_inverse_cdf(p[None], p.new_tensor([[u]]))[0])


def take(x: Tensor, rows: list[int]) -> Tensor:
    """Some rows of x, in ascending order; x itself if they are all."""
    return x if len(rows) == x.shape[0] else x[rows]


def put(tokens: list[int], rows: list[int], found: list[int]) -> None:
    """Set the tokens of some rows to what was found for them."""
    for i, token in zip(rows, found, strict=True):
        tokens[i] = token


def draw(x: Tensor, samplings: Sequence[Sampling], u: Sequence[float]) -> list[int]:
    """Draw one id a row from adjusted logits ``x`` [n, V]; ``u[i]`` in [0, 1) decides row i."""
    scaled = x / _on(x.device, [[s.temperature] for s in samplings], torch.float32)
    point = _on(x.device, [[v] for v in u], torch.float64)
    filtered = [i for i, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0]
    plain = [i for i, s in enumerate(samplings) if not (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)]
    tokens = [0] * len(samplings)
    if plain:
        p = torch.softmax(take(scaled, plain), dim=-1, dtype=torch.float64)
        put(tokens, plain, _inverse_cdf(p, take(point, plain)).tolist())
    width = min(x.shape[-1], max(CANDIDATES, *(s.top_k for s in samplings)))
    while filtered:
        settings = [samplings[i] for i in filtered]
        found, complete = _filtered(take(scaled, filtered), settings, take(point, filtered), width)
        put(tokens, filtered, found.tolist())
        # the rest are flat distributions: what the filters keep is wider than the candidates
        filtered, width = [i for i, ok in zip(filtered, complete.tolist(), strict=True) if not ok], x.shape[-1]
    return tokens


def draws_blindly(samplings: Sequence[Sampling]) -> bool:
    """Whether rows are drawn alike, and nothing between logits and token depends on what is found."""
    if all(s.greedy for s in samplings):
        return all(s.stateless for s in samplings)
    if any(s.greedy or s.sorts or not s.stateless for s in samplings):
        return False
    bounded = [0 < s.top_k <= CANDIDATES for s in samplings]
    return all(bounded) or not any(s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 for s in samplings)


def draw_blindly(x: Tensor, samplings: Sequence[Sampling], u: Sequence[float]) -> Tensor:
    """Draw as ``draw`` does from logits ``x`` [n, V] where ``draws_blindly``; ids int64 [n] on the device."""
    if samplings[0].greedy:
        return x.argmax(dim=-1)
    scaled = x / _on(x.device, [[s.temperature] for s in samplings], torch.float32)
    point = _on(x.device, [[v] for v in u], torch.float64)
    if samplings[0].top_k > 0:
        return _filtered(scaled, samplings, point, min(x.shape[-1], max(CANDIDATES, *(s.top_k for s in samplings))))[0]
    return _inverse_cdf(torch.softmax(scaled, dim=-1, dtype=torch.float64), point)


def _on(device: torch.device, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """A small tensor on a device, without waiting for what is queued there."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _filtered(scaled: Tensor, samplings: Sequence[Sampling], point: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Draw among the ``width`` most likely ids; second result: whether the filters certainly keep no others."""
    device, vocabulary = scaled.device, scaled.shape[-1]
    values, ids = scaled.topk(width, dim=-1)
    p = torch.exp(values.double() - torch.logsumexp(scaled.double(), dim=-1, keepdim=True))
    top_k = _on(device, [[s.top_k if s.top_k > 0 else vocabulary] for s in samplings], torch.int64)
    top_p = _on(device, [[s.top_p] for s in samplings], torch.float64)
    min_p = _on(device, [[s.min_p] for s in samplings], torch.float64)
    p = torch.where(torch.arange(width, device=device) < top_k, p, 0.0)
    # with top_k, renormalise over the k kept; without, p is over the whole vocabulary and need not sum to 1 here
    p = p / torch.where(top_k < vocabulary, p.sum(dim=-1, keepdim=True), 1.0)
    below = p.cumsum(dim=-1)
    keep = ((below - p) < top_p) & (p >= min_p * p[:, :1])
    keep[:, 0] = True
    complete = (top_k <= width) | (below[:, -1:] >= top_p) & (top_p < 1) | (p[:, -1:] < min_p * p[:, :1])
    complete = complete | (width == vocabulary)
    kept = torch.where(keep, p, 0.0)
    chosen = ids.gather(1, _inverse_cdf(kept, point)[:, None])[:, 0]
    return chosen, complete[:, 0]


def _inverse_cdf(p: Tensor, point: Tensor) -> Tensor:
    """Index of the first entry at which the running sum of ``p`` [n, W] exceeds ``point`` [n, 1] of the total."""
    running = p.cumsum(dim=-1)
    index = torch.searchsorted(running, point * running[:, -1:], right=True)[:, 0]
    last = (p > 0).to(torch.int32).cumsum(dim=-1).argmax(dim=-1)  # rounding must not pick an entry of probability zero
    return torch.minimum(index, last)
