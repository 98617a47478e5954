"""The DRY penalty: lowers the logits of tokens that would continue a repetition, more for longer ones.

Source: p-e-w's text-generation-webui pull request 5677, as llama.cpp computes it.  Knows token ids only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lucevisor.protocol.steps import Dry

LONGEST = 1024
"""Repetitions of more tokens count as this many: what searching a context of one repeated token costs is bounded."""

_MOST = 1e38
"""A penalty that leaves logits finite."""

_LOG_MAX = 88.7228391
"""ln of the largest float32."""

Breakers = Mapping[int, Sequence[tuple[int, ...]]]
"""Tails of the sequence breakers by their heads."""


def breakers_by_head(dry: Dry) -> Breakers:
    """The settings' breakers in the form that the search wants."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for head, *tail in dry.breakers:
        found.setdefault(head, []).append(tuple(tail))
    return found


class TokenHistory:
    """Token ids of a sequence in a growing array."""

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._n = 0

    def extend(self, ids: Sequence[int]) -> None:
        need = self._n + len(ids)
        if need > len(self._ids):
            grown = np.empty(max(need, 2 * len(self._ids)), dtype=np.int64)
            grown[: self._n] = self._ids[: self._n]
            self._ids = grown
        self._ids[self._n : need] = ids
        self._n = need

    def followed_by(self, ids: Sequence[int]) -> np.ndarray:
        """The ids, then others: [n + len(ids)] int64."""
        own = self._ids[: self._n]
        return np.concatenate([own, np.asarray(ids, dtype=np.int64)]) if ids else own


def penalise_repetition(row: Tensor, tokens: np.ndarray, dry: Dry, breakers: Breakers) -> None:
    """Apply the penalty to logits ``row`` [V], in place, for the token after ``tokens`` [n] int64."""
    lengths = repetition_lengths(tokens if dry.last_n < 0 else tokens[-dry.last_n :], dry.allowed_length, breakers)
    if not lengths:
        return
    steepest = int(_LOG_MAX / math.log(dry.base)) if dry.base > 1 else LONGEST
    amounts = [min(_MOST, dry.multiplier * dry.base ** min(n - dry.allowed_length, steepest)) for n in lengths.values()]
    ids = torch.tensor(list(lengths), dtype=torch.long, device=row.device)
    row[ids] -= torch.tensor(amounts, dtype=torch.float32, device=row.device)


def repetition_lengths(tokens: np.ndarray, least: int, breakers: Breakers) -> dict[int, int]:
    """By token: how long the repetition is that it would continue, where that is ``least`` or more.

    A repetition is a suffix of ``tokens`` that occurs earlier; what followed it there continues it, unless it is a
    breaker by itself.
    """
    n = len(tokens)
    limit = min(_since_break(tokens, breakers), LONGEST)
    if n <= least or limit < least:
        return {}
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # of the earlier occurrences
    found: dict[int, int] = {}
    for length in range(1, limit + 1):
        if length >= least:
            found.update(
                (token, length) for token in np.unique(tokens[ends + 1]).tolist() if () not in breakers.get(token, ())
            )
        ends = ends[ends >= length]
        ends = ends[tokens[ends - length] == tokens[n - 1 - length]]
        if not len(ends):
            break
    return found


def _since_break(tokens: np.ndarray, breakers: Breakers) -> int:
    """Tokens after the last sequence breaker."""
    n = int(tokens.size)
    heads = np.fromiter(breakers, dtype=np.int64, count=len(breakers))
    places: list[int] = np.flatnonzero(np.isin(tokens, heads))[::-1].tolist()
    for at in places:
        fitting = [len(tail) for tail in breakers[tokens[at]] if tuple(tokens[at + 1 : at + 1 + len(tail)]) == tail]
        if fitting:
            return n - 1 - at - max(fitting)
    return n
