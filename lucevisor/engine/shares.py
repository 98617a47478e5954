"""Fair shares between API keys: a virtual token counter, as in "Fairness in Serving Large Language Models" (VTC).

Every token computed for a key is charged to it, and the key with the least goes first.  A key that had nothing to do
is raised to the least of the busy ones, so nobody saves up credit while idle; a busy key falls behind the others by at
most ``credit`` tokens, so a slow stream does not earn the right to block everybody later.
Pure.  Invariant: only keys with unfinished requests are compared; without any, nothing is remembered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class KeyShares:
    """Tokens charged to each key that has unfinished requests."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()

    @property
    def contested(self) -> bool:
        """Whether more than one key has unfinished requests."""
        return len(self._requests) > 1

    def enter(self, key: str) -> None:
        """Count a request of ``key`` that came."""
        if key not in self._requests:
            self._served[key] = max(self._served.get(key, 0), self._least())
        self._requests[key] += 1

    def leave(self, key: str) -> None:
        """Count a request of ``key`` that is over."""
        self._requests[key] -= 1
        if not self._requests[key]:
            del self._requests[key]
        if not self._requests:
            self._served.clear()

    def charge(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Charge tokens to their keys."""
        if not self.contested:
            return  # only differences matter
        for key, n in tokens:
            self._served[key] += n
        least = max(self._served[key] for key in self._requests) - self._credit
        for key in self._requests:
            self._served[key] = max(self._served[key], least)

    def lead(self, key: str) -> int:
        """Return how many tokens ``key`` got more than the busy key that got least."""
        return self._served[key] - self._least() if self.contested else 0

    def _least(self) -> int:
        return min((self._served[key] for key in self._requests), default=0)
