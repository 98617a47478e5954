"""Shortens prompts: finds their parts, scores them, selects ranges, and caches the selection.

Invariants: kept tokens stay in order; all tokens outside parts are kept; of a part at most the requested share is kept,
and less than a chunk below it, but always its last chunk."""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final, Literal

import structlog

from lucevisor.compression.windows import QUESTION_TOKENS, PromptPart, WindowScorer, parts_of, question_end
from lucevisor.errors import ScoringError

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
    """Return the token ranges to keep, ascending and merged. ``anchors``: chunks that share a phrase with the question;
    at most half of what head and tail leave."""
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
    """Return the chunks of a part around places that repeat ANCHOR_TOKENS tokens of ``question``, but for runs that
    occur too often. ``tokens``: all of the part, of which the first ``n_searched`` may repeat it."""
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


Outcome = Literal["compressed", "short", "nothing", "failed"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("compressed", "short", "nothing", "failed")
"""Of a prompt: it was shortened; is below the threshold; has no part to shorten; could not be scored."""

log = structlog.get_logger("lucevisor.compression")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSettings:
    """``threshold``: the shortest prompt to shorten.  ``curve``: see :func:`keep_ratio_at`."""

    threshold: int
    keep_ratio: float
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def min_share(self) -> float:
        """The least share that is ever kept."""
        return min((share for _, share in self.curve), default=self.keep_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedPrompt:
    """A prompt after compression.  ``n_before``, ``n_kept``: its tokens; ``reason``: why it was not shortened."""

    ids: Sequence[int]
    turn_ends: list[int]
    n_before: int
    outcome: Outcome
    reason: str = ""

    @property
    def n_kept(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class CompressionStatistics:
    """Since the start: prompts by outcome, tokens of those that were shortened, windows and seconds of scoring."""

    outcomes: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    n_tokens: int = 0
    n_kept: int = 0
    n_windows: int = 0
    n_scored: int = 0
    n_remembered: int = 0
    seconds: float = 0.0


class SelectionCache:
    """Ranges that were kept of the most recent parts, so a growing chat keeps its beginning and prefix slots
    match it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[Range, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int]) -> tuple[Range, ...] | None:
        """Return what was kept of these tokens, or None."""
        key = _key(tokens)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def add(self, tokens: Sequence[int], ranges: Sequence[Range]) -> None:
        """Store the kept tokens of a prompt."""
        self._kept[_key(tokens)] = tuple(ranges)
        while len(self._kept) > 4096:
            self._kept.popitem(last=False)


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()


class Compressor:
    """Shortens prompts by the scores of ``windows``."""

    def __init__(self, settings: CompressionSettings, windows: WindowScorer) -> None:
        self.settings, self._windows, self._tokenizer = settings, windows, windows.tokenizer
        self._kept = SelectionCache()
        self._statistics = CompressionStatistics()

    @property
    def statistics(self) -> CompressionStatistics:
        now, windows = self._statistics, self._windows
        now.n_windows, now.n_scored = windows.n_windows, windows.n_tokens
        return now

    @property
    def n_remembered_parts(self) -> int:
        return len(self._kept)

    async def compress(self, ids: Sequence[int], turn_ends: Sequence[int], roles: Sequence[str]) -> CompressedPrompt:
        """Return the prompt, shortened if it is long enough and has parts to shorten; whole if scoring fails."""
        prompt = await self._compress(ids, turn_ends, roles)
        now = self._statistics
        now.outcomes[prompt.outcome] += 1
        if prompt.outcome == "compressed":
            now.n_tokens += prompt.n_before
            now.n_kept += prompt.n_kept
        return prompt

    async def _compress(self, ids: Sequence[int], turn_ends: Sequence[int], roles: Sequence[str]) -> CompressedPrompt:
        def whole(outcome: Outcome, reason: str) -> CompressedPrompt:
            return CompressedPrompt(
                ids=ids, turn_ends=list(turn_ends), n_before=len(ids), outcome=outcome, reason=reason
            )

        if len(ids) < self.settings.threshold:
            return whole("short", f"shorter than pflash.threshold = {self.settings.threshold}")
        started = time.monotonic()
        parts = await asyncio.to_thread(parts_of, ids, turn_ends, roles, self._tokenizer)
        if not parts:
            return whole("nothing", "no part of it may be shortened")
        try:
            end = question_end(ids, turn_ends, self._tokenizer)
            kept = {part: await self._kept_of(part, ids, end) for part in parts}
        except ScoringError as error:
            log.warning("prompt not shortened", n_tokens=len(ids), reason=str(error))
            return whole("failed", str(error))
        finally:
            self._statistics.seconds += time.monotonic() - started
        shorter, ends = _joined(ids, turn_ends, kept)
        return CompressedPrompt(ids=shorter, turn_ends=ends, n_before=len(ids), outcome="compressed")

    async def _kept_of(self, part: PromptPart, ids: Sequence[int], end: int) -> Sequence[Range]:
        """Return the ranges of a part that stay: as before, if it was shortened before.  ``end``: of the question."""
        tokens = list(ids[part.start : part.stop])
        cached = self._kept.find(tokens)
        if cached is not None:
            self._statistics.n_remembered += 1
            return cached
        question = list(ids[max(0, end - QUESTION_TOKENS) : end])
        # The question itself is not scored: it would find nothing but itself.
        n_scored = max(0, min(len(tokens), end - len(question) - part.start))
        scores = await self._windows.scores(tokens[:n_scored], question)
        scores += [0.0] * (len(tokens) - n_scored)
        settings = self.settings
        ratio = keep_ratio_at(len(ids), settings.keep_ratio, settings.curve)
        ranges = await asyncio.to_thread(lambda: select(scores, ratio, anchor_chunks(tokens, question, n_scored)))
        self._kept.add(tokens, ranges)
        return ranges


def _joined(
    ids: Sequence[int], turn_ends: Sequence[int], kept: Mapping[PromptPart, Sequence[Range]]
) -> tuple[list[int], list[int]]:
    """Return the ids that stay, and where the turns end in them."""
    out: list[int] = []
    dropped: list[Range] = []  # in the prompt
    done = 0
    for part, ranges in kept.items():
        at = part.start
        for start, stop in [*ranges, (len(part), len(part))]:
            if part.start + start > at:
                dropped.append((at, part.start + start))
            at = part.start + stop
    for start, stop in dropped:
        out += ids[done:start]
        done = stop
    out += ids[done:]
    ends, n_dropped, ahead = [], 0, iter([*dropped, (len(ids) + 1, 0)])
    start, stop = next(ahead)
    for end in turn_ends:
        while start < end:
            n_dropped += stop - start
            start, stop = next(ahead)
        ends.append(end - n_dropped)
    return out, ends
