"""Remembers how parts were shortened, so that a part that returns is shortened in the same way.

The beginning of a growing chat then stays the same, and prefix slots keep matching it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from lucevisor.compression.selection import Range


class SelectionCache:
    """The least recently used of more than ``max_parts`` are forgotten."""

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
