"""Stop strings, matched across token boundaries.

Knows no tokens or requests. Invariant: the emitted text does not depend on how the stream was chunked; of several stop
strings the one that completes first wins (of those ending at the same character, the longest).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may start a stop string; `matched` is the stop string found, or None."""

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`included`: a stop string is text, too.

        Raises ValueError for an empty stop string, which would stop before the first character.
        """
        if any(not stop for stop in stops):
            raise ValueError("stop: a stop string is empty; leave it out or give it a character")
        self._stops = tuple(dict.fromkeys(stops))
        self._included = included
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is safe to emit; "" after a match."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return pending[: end if self._included else start]
        held = max(overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        """Return the held-back text at the end of a generation without a match."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, needle: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `needle`."""
    for length in range(min(len(text), len(needle) - 1), 0, -1):
        if text.endswith(needle[:length]):
            return length
    return 0
