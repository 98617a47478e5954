"""KV Flash: which ``full`` pages of a sequence stay on the devices.

Pure; one decision for all shards, which know neither policy nor bound.  The first pages of a sequence (attention sinks)
and its last ones always stay.  Attention reads every resident page at each step, so the least recently used one is the
oldest behind the head.  Policy ``lru`` drops what leaves; ``exact`` keeps it in host memory, where attention reads it.

Invariant: what is resident depends on the slices of a sequence alone, never on other sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.model.pages import HEAD_PAGES, TAIL_PAGES, ResidencyPolicy, max_resident_chunk


@dataclass(frozen=True, slots=True)
class Residency:
    """The most pages of a sequence on the devices.  Raises ValueError if the protected ones leave no room."""

    pool_pages: int
    policy: ResidencyPolicy = "lru"

    def __post_init__(self) -> None:
        if self.max_chunk < 1:
            least = HEAD_PAGES + TAIL_PAGES + 1
            raise ValueError(f"pool_pages is {self.pool_pages}; {least} is the least, for the protected pages and one")

    @property
    def max_chunk(self) -> int:
        """Tokens of the longest slice."""
        return max_resident_chunk(self.pool_pages)

    @property
    def keeps_host(self) -> bool:
        """Whether what leaves is kept in host memory."""
        return self.policy != "lru"

    @property
    def attends_host(self) -> bool:
        """Whether attention reads what is kept there."""
        return self.policy == "exact"

    def surplus(self, n_resident: int, n_new: int) -> range:
        """Return which of ``n_resident`` pages, in the order of positions, leave before ``n_new`` more are added."""
        return range(HEAD_PAGES, HEAD_PAGES + max(0, n_resident + n_new - self.pool_pages))
