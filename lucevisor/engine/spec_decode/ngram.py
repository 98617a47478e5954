"""Prompt lookup decoding (n-gram lookup): drafts that repeat what followed the same tokens earlier in the sequence.

Hash chains over n-grams, as in LZ77: ``_heads`` holds the newest occurrence of a bucket, ``_older`` the one before
each. Four bytes a token and 256 KiB a sequence; indexing and matching are bounded per call."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.vision import IMAGE_ID

MIN_MATCH: Final = 3
"""Tokens that must agree: pairs recur by chance in any text."""
MAX_MATCH: Final = 8
"""Tokens compared: acceptance hardly grows beyond."""
MAX_CANDIDATES: Final = 16
"""Occurrences tried: a match takes microseconds, however often a text repeats itself."""
INDEX_TOKENS: Final = 2048
"""Tokens indexed per call, about half a millisecond."""
MATCH_CHANCES: Final = {3: 0.35, 4: 0.45, 5: 0.55, 6: 0.65, 7: 0.75, 8: 0.85}
"""By matching tokens: what a looked-up draft reports as its probability; verdicts calibrate it."""

_N_BUCKETS: Final = 1 << 16
_MASK: Final = _N_BUCKETS - 1
_FACTORS: Final = (40503, 69069, 30345)  # odd, of about 16 bits, so that close ids fall into different buckets


@dataclass(frozen=True, slots=True)
class NgramMatch:
    """``tokens[start - length : start]`` are the last ``length`` tokens of the sequence; ``start`` followed them."""

    start: int
    length: int


class NgramLookup:
    """The index of one sequence; ``tokens`` may grow at its end."""

    def __init__(self, tokens: TokenBuffer) -> None:
        self._tokens = tokens
        self._heads = array("i", [-1]) * _N_BUCKETS
        self._older = array("i", [-1]) * (MIN_MATCH - 1)  # by last position of an n-gram

    @property
    def n_waiting(self) -> int:
        """Tokens that are not indexed yet; the last one waits for its successor."""
        return max(0, len(self._tokens) - 1 - len(self._older))

    def index(self, limit: int = INDEX_TOKENS) -> int:
        """Index at most ``limit`` tokens more, oldest first; return how many."""
        start = len(self._older)
        n = min(limit, self.n_waiting)
        if n <= 0:
            return 0
        ids = self._tokens[start - MIN_MATCH + 1 : start + n]
        heads, older = self._heads, self._older
        p, q, r = _FACTORS
        for at, (a, b, c) in enumerate(zip(ids, ids[1:], ids[2:], strict=False), start):
            bucket = (a * p ^ b * q ^ c * r) & _MASK
            older.append(heads[bucket])
            heads[bucket] = at
        return n

    def match(self) -> NgramMatch | None:
        """Return the longest match of the last tokens among the newest candidates, the newest of equal ones."""
        n = len(self._tokens)
        tail = self._tokens[max(0, n - MAX_MATCH) :]
        if n <= MIN_MATCH:
            return None
        a, b, c = tail[-MIN_MATCH:]
        p, q, r = _FACTORS
        at, best = self._heads[(a * p ^ b * q ^ c * r) & _MASK], NgramMatch(0, MIN_MATCH - 1)
        for _ in range(MAX_CANDIDATES):
            if at < 0:
                break
            length = _n_common_suffix(self._tokens[max(0, at + 1 - len(tail)) : at + 1], tail)
            if length > best.length:
                best = NgramMatch(at + 1, length)
                if length == len(tail):
                    break
            at = self._older[at]
        return best if best.start else None

    def continuation(self, match: NgramMatch, n: int) -> list[int]:
        """Return the ``n`` tokens that followed a match, fewer where an image did; at the end the repetition
        goes on."""
        tokens = self._tokens[match.start : match.start + n]
        period = len(self._tokens) - match.start
        while len(tokens) < n:
            tokens.append(tokens[len(tokens) - period])
        n_text = next((i for i, token in enumerate(tokens) if token >= IMAGE_ID), n)
        return tokens[:n_text]


def _n_common_suffix(first: list[int], second: list[int]) -> int:
    n = 0
    for a, b in zip(reversed(first), reversed(second), strict=False):
        if a != b:
            break
        n += 1
    return n
