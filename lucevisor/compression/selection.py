"""Selection of the chunks of a prompt's part to keep, by the relevance of its tokens.

Chunks are aligned to the end of the part, so the first may be shorter.  Invariant: at most the requested share is
kept, and less than a chunk below it, but always the last chunk; chunks kept for their place or for a repeated phrase
count towards it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

CHUNK_TOKENS = 32
HEAD_CHUNKS, TAIL_CHUNKS = 8, 24
"""Chunks kept for their position: at most an eighth and a quarter of the budget, and always the last one."""
POOL_TOKENS = CHUNK_TOKENS + 1
"""Width of the moving average over scores, by which relevant tokens near a chunk's edge also raise the next chunk."""
ANCHOR_TOKENS = 4
"""Equal runs of so many tokens in the question and in the text mark a place where the question is answered."""
Range = tuple[int, int]
"""Half-open, in tokens."""


def select(scores: Sequence[float], ratio: float, anchors: Iterable[int] = ()) -> list[Range]:
    """Return the token ranges to keep, ascending and merged.

    ``anchors``: chunks that share a phrase with the question; at most half of what head and tail leave.
    """
    bounds = chunks_of(len(scores))
    if not bounds:
        return []
    budget = max(CHUNK_TOKENS, int(len(scores) * ratio))
    n_kept, last = budget // CHUNK_TOKENS, len(bounds) - 1
    kept = _SelectedChunks(bounds, budget)
    kept.fill(range(last, last - min(TAIL_CHUNKS, max(1, n_kept // 4)), -1))
    kept.fill(range(min(HEAD_CHUNKS, n_kept // 8)))
    means = chunk_scores(scores)
    best = sorted(range(len(bounds)), key=lambda chunk: (-means[chunk], chunk))
    anchored = set(anchors)
    kept.fill([chunk for chunk in best if chunk in anchored][: (n_kept - len(kept.chunks)) // 2])
    kept.fill(best)
    return kept.ranges()


class _SelectedChunks:
    """Chunks within a budget of tokens; a chunk that does not fit any more is left out."""

    def __init__(self, bounds: Sequence[Range], budget: int) -> None:
        self._bounds, self._left = bounds, budget
        self.chunks: set[int] = set()

    def fill(self, candidates: Iterable[int]) -> None:
        for chunk in candidates:
            start, stop = self._bounds[chunk]
            if chunk not in self.chunks and stop - start <= self._left:
                self._left -= stop - start
                self.chunks.add(chunk)

    def ranges(self) -> list[Range]:
        merged: list[Range] = []
        for start, stop in (self._bounds[chunk] for chunk in sorted(self.chunks)):
            if merged and merged[-1][1] == start:
                start = merged.pop()[0]
            merged.append((start, stop))
        return merged


def chunks_of(n_tokens: int) -> list[Range]:
    """Return the chunks of a part, ascending."""
    first = n_tokens % CHUNK_TOKENS
    starts = range(first, n_tokens, CHUNK_TOKENS)
    return [*([(0, first)] if first else []), *((start, start + CHUNK_TOKENS) for start in starts)]


def chunk_scores(scores: Sequence[float]) -> list[float]:
    """Return the mean of the averaged scores in each chunk."""
    n, half = len(scores), POOL_TOKENS // 2
    sums = [0.0, *accumulate(scores)]
    pooled = [
        (sums[high] - sums[low]) / (high - low)
        for low, high in ((max(0, i - half), min(n, i + half + 1)) for i in range(n))
    ]
    return [sum(pooled[start:stop]) / (stop - start) for start, stop in chunks_of(n)]


def anchor_chunks(tokens: Sequence[int], question: Sequence[int], n_searched: int) -> set[int]:
    """Return the chunks of a part around places that repeat ANCHOR_TOKENS tokens of ``question``.

    ``tokens``: all of the part, of which the first ``n_searched`` may repeat it.  Runs that occur too often are
    ignored.
    """
    bounds = chunks_of(len(tokens))
    n_chunks, shift = len(bounds), -len(tokens) % CHUNK_TOKENS
    radius, most = (2, 8) if n_chunks < 1024 else (4, 16) if n_chunks < 2048 else (8, 32)
    places: dict[tuple[int, ...], list[int]] = {run: [] for run in _runs(question)}
    if not places:
        return set()
    for at, run in enumerate(_runs(tokens[:n_searched]), shift):
        if run in places:
            places[run].append(at)
    return {
        chunk
        for occurrences in places.values()
        if len(occurrences) <= most
        for at in occurrences
        for chunk in range(
            max(0, at // CHUNK_TOKENS - radius), min(n_chunks, (at + ANCHOR_TOKENS - 1) // CHUNK_TOKENS + radius + 1)
        )
    }


def _runs(tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return zip(*(tokens[i:] for i in range(ANCHOR_TOKENS)), strict=False)


def keep_ratio_at(n_tokens: int, keep_ratio: float, curve: Sequence[tuple[int, float]]) -> float:
    """Return the share that stays of a prompt of ``n_tokens``.

    ``curve``: ascending (tokens, share), linear between its points and constant beyond them; empty: ``keep_ratio``.
    """
    if not curve:
        return keep_ratio
    if n_tokens <= curve[0][0]:
        return curve[0][1]
    for (low, of_low), (high, of_high) in pairwise(curve):
        if n_tokens <= high:
            return of_low + (of_high - of_low) * (n_tokens - low) / (high - low)
    return curve[-1][1]
