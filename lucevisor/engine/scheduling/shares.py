"""Fair shares between clients: a virtual token counter, as in "Fairness in Serving Large Language Models" (VTC).

A client is an API key, or without keys an address.  Each computed token is charged to its client, and the one that was
charged least goes first.  An idle client that returns is raised to the least busy one, so credit cannot be saved up; a
busy one falls behind the others by at most ``credit`` tokens, so a slow stream cannot block the others later.
Pure.  Invariant: only clients with unfinished requests are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class ClientShares:
    """Tokens charged to each client that has unfinished requests, or owes some."""

    def __init__(self, credit: int) -> None:
        self._credit = credit
        self._served: dict[str, int] = {}
        self._requests: Counter[str] = Counter()
        self._least = 0  # of those with requests

    @property
    def contested(self) -> bool:
        """Whether more than one client has unfinished requests."""
        return len(self._requests) > 1

    def enter(self, client: str) -> None:
        """Count a new request of ``client``."""
        if client not in self._requests:
            self._served[client] = max(self._served.get(client, 0), self._least)
            owing = self._served.items()
            self._served = {name: n for name, n in owing if n > self._least or name in self._requests or name == client}
        self._requests[client] += 1
        self._update()

    def leave(self, client: str) -> None:
        """Count a finished request of ``client``."""
        self._requests[client] -= 1
        if not self._requests[client]:
            del self._requests[client]
        if not self._requests:
            self._served.clear()
        self._update()

    def charge(self, tokens: Iterable[tuple[str, int]]) -> None:
        """Charge tokens to their clients."""
        if not self.contested:
            return  # only differences matter
        for client, n in tokens:
            self._served[client] += n
        least = max(self._served[client] for client in self._requests) - self._credit
        for client in self._requests:
            self._served[client] = max(self._served[client], least)
        self._update()

    def lead(self, client: str) -> int:
        """Return how many more tokens ``client`` was served than the least served busy client."""
        return self._served[client] - self._least if self.contested else 0

    def _update(self) -> None:
        self._least = min((self._served[client] for client in self._requests), default=0)
