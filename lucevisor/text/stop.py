"""Stop strings, found across the seams between tokens.

Knows neither tokens nor requests. Invariant: the text given out does not depend on how the stream was cut into pieces;
of several stop strings the one that is complete first wins (among those ending at the same character, the longest).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back what may be the beginning of a stop string; `matched` is the stop string found, or None."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings; raises ValueError for an empty one, which would stop before the first character."""
        if any(not stop for stop in stops):
            raise ValueError("stop: a stop string is empty; leave it out or give it a character")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is safe to give out; from the match on, always ""."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := seen.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return seen[:start]
        held = max(overlap(seen, stop) for stop in self._stops)
        self._held = seen[len(seen) - held :]
        return seen[: len(seen) - held]

    def flush(self) -> str:
        """Return the held-back text, when the generation has ended without a match."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, needle: str) -> int:
    """Return the length of the longest end of `text` that `needle` begins with, the whole needle excluded."""
    for length in range(min(len(text), len(needle) - 1), 0, -1):
        if text.endswith(needle[:length]):
            return length
    return 0
