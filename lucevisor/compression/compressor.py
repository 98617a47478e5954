"""Shortens prompts: finds their parts, scores them, selects ranges, and caches the selection.

The scorer scores windows of tokens; if it fails, the prompt is served whole.  Invariant: kept tokens stay in order, and
all tokens outside parts are kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import structlog

from lucevisor.compression.parts import PromptPart, parts_of, question_end
from lucevisor.compression.selection import Range, anchor_chunks, keep_ratio_at, select
from lucevisor.compression.windows import QUESTION_TOKENS, Windows
from lucevisor.errors import ScoringError

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
    """Ranges that were kept of the most recent parts.

    A part that returns is shortened in the same way, so a growing chat keeps its beginning and prefix slots match it.
    """

    def __init__(self, max_parts: int = 4096) -> None:
        self._max_parts = max_parts
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
        while len(self._kept) > self._max_parts:
            self._kept.popitem(last=False)


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("i", tokens).tobytes(), digest_size=16).digest()


class Compressor:
    """Shortens prompts by the scores of ``windows``."""

    def __init__(self, settings: CompressionSettings, windows: Windows) -> None:
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
        """Return the prompt, shortened if it is long enough and has parts to shorten.

        If scoring fails, the prompt stays whole; nothing is raised.
        """
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
