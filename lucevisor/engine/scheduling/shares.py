"""Fair shares between API keys: a virtual token counter, as in "Fairness in Serving Large Language Models" (VTC).

Each computed token is charged to its key, and the key that was charged least goes first.  An idle key that returns is
raised to the least busy one, so credit cannot be saved up; a busy key falls behind the others by at most ``credit``
tokens, so a slow stream cannot block the others later.
Pure.  Invariant: only keys with unfinished requests are compared.
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
        """Count a new request of ``key``."""
        if key not in self._requests:
            self._served[key] = max(self._served.get(key, 0), self._least())
        self._requests[key] += 1

    def leave(self, key: str) -> None:
        """Count a finished request of ``key``."""
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
        """Return how many more tokens ``key`` was served than the least served busy key."""
        return self._served[key] - self._least() if self.contested else 0

    def _least(self) -> int:
        return min((self._served[key] for key in self._requests), default=0)
