"""Prompt lookup decoding: drafts are what followed the last tokens when they occurred before in the same sequence.

Pure.  Invariant: only tokens of the sequence itself are proposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LENGTH: Final = 4
"""Tokens that must occur again before what followed them is proposed."""


class NgramIndex:
    """The n-grams of a growing sequence, and where each occurred last."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # by n-gram that is not the last one: the position behind it

    def __len__(self) -> int:
        """Return how many tokens it knows."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            if len(self._tokens) >= LENGTH:
                self._after[tuple(self._tokens[-LENGTH:])] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that are likely to follow; [] without a match."""
        at = self._after.get(tuple(self._tokens[-LENGTH:]))
        return [] if at is None else self._tokens[at : at + most]
