"""Rows of adjusted logits to token ids: the most likely one, or one drawn by the Gumbel-max trick.

Each id gets noise from seed, position and id alone, and the id whose probability wins against its noise is drawn. A
probability that is rounded otherwise, after a rebuild or beside other requests, matters for its own id alone; an
inverse cumulative sum would move the bounds of all ids behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from daemons.device import one_thread
from lucevisor.model.workspace import DRAW_ROWS, WIDE_DRAW_ROWS
from lucevisor.protocol.steps import SamplingParams

CANDIDATES = 1024
"""Rows whose filters keep fewer tokens than this need no full sort of the vocabulary."""

_MASK = (1 << 64) - 1


def draw_key(seed: int, position: int) -> int:
    """64 bits from ``seed`` and ``position`` alone.  Source: splitmix64 (Steele, Lea, Flood 2014)."""
    z = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & _MASK
    for _ in range(2):  # twice, to decorrelate adjacent seeds and positions
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z = z ^ (z >> 31)
    return z


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from ``seed`` and ``position`` alone."""
    return (draw_key(seed, position) >> 11) / (1 << 53)


def draw_index(p: Tensor, ids: Tensor, key: int) -> int:
    """Draw an index into probabilities ``p`` [n] of ``ids`` [n]."""
    return int(_gumbel_max(p[None], ids[None].int(), _keys(p.device, [key]))[0])


def take(x: Tensor, rows: list[int]) -> Tensor:
    """Some rows of x, in ascending order; x itself if they are all."""
    return x if len(rows) == x.shape[0] else x[rows]


def put(tokens: list[int], rows: list[int], found: list[int]) -> None:
    """Set the tokens of some rows to what was found for them."""
    for i, token in zip(rows, found, strict=True):
        tokens[i] = token


def draw(x: Tensor, samplings: Sequence[SamplingParams], keys: Sequence[int]) -> list[int]:
    """Draw one id a row from adjusted logits ``x`` [n, V]; ``keys``: the draw_key of each row."""
    if len(keys) > DRAW_ROWS:
        return [token for part in _parts(len(keys)) for token in draw(x[part], samplings[part], keys[part])]
    scaled = x / _on(x.device, [[s.temperature] for s in samplings], torch.float32)
    key = _keys(x.device, keys)
    filtered = [i for i, s in enumerate(samplings) if s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0]
    plain = [i for i, s in enumerate(samplings) if not (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0)]
    tokens = [0] * len(samplings)
    if plain:
        p = torch.softmax(take(scaled, plain), dim=-1)
        put(tokens, plain, _gumbel_max(p, _all_ids(p), take(key, plain)).tolist())
    width = min(x.shape[-1], max(CANDIDATES, *(s.top_k for s in samplings)))
    while filtered:
        wide = list[int]()  # flat distributions: what the filters keep is wider than the candidates
        n_rows = len(filtered) if width <= CANDIDATES else WIDE_DRAW_ROWS
        for at in range(0, len(filtered), n_rows):
            part = filtered[at : at + n_rows]
            settings = [samplings[i] for i in part]
            found, complete = _filtered(take(scaled, part), settings, take(key, part), width)
            put(tokens, part, found.tolist())
            wide += [i for i, ok in zip(part, complete.tolist(), strict=True) if not ok]
        filtered, width = wide, x.shape[-1]
    return tokens


def _parts(n_rows: int) -> list[slice]:
    """Return the rows that are drawn from at a time."""
    return [slice(at, at + DRAW_ROWS) for at in range(0, n_rows, DRAW_ROWS)]


def can_draw_on_device(samplings: Sequence[SamplingParams]) -> bool:
    """Return whether rows are drawn alike, and nothing between logits and token depends on what is found."""
    if all(s.greedy for s in samplings):
        return all(s.stateless for s in samplings)
    if any(s.greedy or s.sorts or not s.stateless for s in samplings):
        return False
    bounded = [0 < s.top_k <= CANDIDATES for s in samplings]
    return all(bounded) or not any(s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0 for s in samplings)


def draw_by_row(x: Tensor, samplings: Sequence[SamplingParams], keys: Sequence[int]) -> list[int]:
    """:func:`draw` of each row alone, and on a cpu by one thread, so that its numbers always have the same bits."""
    with one_thread(x.device):
        rows = zip(x.unsqueeze(1), samplings, keys, strict=True)
        return [draw(row.clone(), [s], [key])[0] for row, s, key in rows]


def draw_on_device(
    x: Tensor, samplings: Sequence[SamplingParams], keys: Sequence[int], *, by_row: bool = False
) -> Tensor:
    """Draw as ``draw`` does from logits ``x`` [n, V] where ``can_draw_on_device``; ids int64 [n] on the device.

    ``by_row``: as :func:`draw_by_row`.
    """
    if samplings[0].greedy:
        return x.argmax(dim=-1)
    if by_row:
        rows = zip(x.unsqueeze(1), samplings, keys, strict=True)
        return torch.cat([draw_on_device(row.clone(), [s], [key]) for row, s, key in rows])
    if len(keys) > DRAW_ROWS:
        return torch.cat([draw_on_device(x[part], samplings[part], keys[part]) for part in _parts(len(keys))])
    scaled = x / _on(x.device, [[s.temperature] for s in samplings], torch.float32)
    key = _keys(x.device, keys)
    if samplings[0].top_k > 0:
        return _filtered(scaled, samplings, key, min(x.shape[-1], max(CANDIDATES, *(s.top_k for s in samplings))))[0]
    p = torch.softmax(scaled, dim=-1)
    return _gumbel_max(p, _all_ids(p), key)


def _on(device: torch.device, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """A small tensor on a device, without waiting for what is queued there."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def _filtered(scaled: Tensor, samplings: Sequence[SamplingParams], key: Tensor, width: int) -> tuple[Tensor, Tensor]:
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
    chosen = ids.gather(1, _gumbel_max(kept, ids.int(), key)[:, None])[:, 0]
    return chosen, complete[:, 0]


def _all_ids(p: Tensor) -> Tensor:
    return torch.arange(p.shape[-1], dtype=torch.int32, device=p.device)[None]


def _keys(device: torch.device, keys: Sequence[int]) -> Tensor:
    """The halves of 64-bit keys, int32 [n, 2]."""
    halves = [[key & 0xFFFFFFFF, key >> 32] for key in keys]
    return _on(device, [[half - (half >> 31 << 32) for half in pair] for pair in halves], torch.int32)


def _gumbel_max(p: Tensor, ids: Tensor, keys: Tensor) -> Tensor:
    """Index of the entry of ``p`` [n, W] that wins: p over an exponential variate of its id (int32, [n, W] or [1, W]).

    That is the argmax of log p plus Gumbel noise.  A variate comes from 31 bits, those of murmur3's finalizer after
    each half of the key; log1p keeps small ones, which win, exact to float32's relative precision.
    """
    bits = _mix(_mix(ids ^ keys[:, :1]).bitwise_xor_(keys[:, 1:])).bitwise_and_(0x7FFFFFFF)
    exponential = bits.float().add_(0.5).mul_(-(2.0**-31)).log1p_().neg_()
    return (p / exponential).argmax(dim=-1)


def _mix(h: Tensor) -> Tensor:
    """Mix int32 in place, one to one.  Source: MurmurHash3's fmix32 (Appleby); products wrap."""
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    h.bitwise_xor_((h >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))
