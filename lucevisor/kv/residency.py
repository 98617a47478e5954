"""KV Flash: which ``full`` pages of a sequence stay on the devices.

Pure; one decision for all shards, which know neither policy nor bound.  The first pages of a sequence (attention sinks)
and its last ones always stay.  Attention reads every resident page at each step, so the least recently used one is the
oldest behind the head.  Policy ``lru`` drops what leaves; ``exact`` keeps it in host memory, where attention reads it;
``qk`` keeps it there, too, and swaps pages so that the last queries' most attended ones are resident; ``drafter`` swaps
in those that a small model finds relevant to the end of a prompt.

Invariant: what is resident depends on the slices of a sequence alone, never on other sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lucevisor.model.pages import HEAD_PAGES, TAIL_PAGES, ResidencyPolicy, max_host_pages, max_resident_chunk, pages_of
from lucevisor.model.values import PAGE_TOKENS

FADING: Final = 0.8  # what a score is worth at the next ranking
_UNRANKED = float("inf")  # pages that were not there when pages were ranked are the newest


@dataclass(frozen=True, slots=True)
class PagedOut:
    """Which entries of a sequence lie in host memory, ascending, under which policy and bound, and how the first
    entries were ranked last.  A sequence with the same bound goes on from it as that one would have.
    """

    policy: ResidencyPolicy
    pool_pages: int
    entries: tuple[int, ...]
    scores: tuple[float, ...] = ()

    @property
    def approximate(self) -> bool:
        """Whether pages were computed by queries that did not see all that was before them."""
        return self.policy != "exact"

    @property
    def n_exact(self) -> int:
        """The first tokens that saw all that was before them."""
        return self.pool_pages * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Residency:
    """The most pages of a sequence on the devices.  Raises ValueError if the protected ones leave no room.

    ``tau``: tokens between two rankings of the pages, where the policy ranks them.
    """

    pool_pages: int
    policy: ResidencyPolicy = "lru"
    tau: int = 64

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

    @property
    def ranks_pages(self) -> bool:
        """Whether pages come back, chosen by how much queries attend to them, or what a small model says."""
        return self.policy in ("qk", "drafter")

    @property
    def ranks_decodes(self) -> bool:
        """Whether the stages rank the pages, by their own queries, and not for prompts alone."""
        return self.policy == "qk"

    def ranks_at(self, position: int) -> bool:
        """Whether the query of a decode at ``position`` ranks the pages."""
        return self.ranks_decodes and position % self.tau == 0

    def host_pages(self, n_pages: int) -> int:
        """Return how many of ``n_pages`` of a sequence lie in host memory at most."""
        return max_host_pages(n_pages, self.pool_pages, self.policy)

    def leaving(self, n_tokens: int, paged_out: PagedOut | None) -> tuple[int, ...]:
        """Return the entries of a restored prefix that lie in host memory: those that were ``paged_out``, or if that
        had another bound, the worst of all that do not fit with the next token's.
        """
        n_pages = pages_of(n_tokens)
        if paged_out is not None and paged_out.pool_pages == self.pool_pages and paged_out.entries[-1] < n_pages - 1:
            return paged_out.entries
        scores = paged_out.scores if paged_out is not None else ()
        return tuple(self.surplus(range(n_pages), pages_of(n_tokens + 1) - n_pages, scores))

    def surplus(self, entries: Sequence[int], n_new: int, scores: Sequence[float]) -> list[int]:
        """Return the places of the resident ``entries`` that leave before ``n_new`` more are added, ascending.

        ``scores``: of the sequence's first entries, as they were ranked last.
        """
        n = max(0, len(entries) + n_new - self.pool_pages)
        if not scores:
            return list(range(HEAD_PAGES, HEAD_PAGES + n))
        places = range(HEAD_PAGES, len(entries) - TAIL_PAGES)
        least = sorted(places, key=lambda place: (_score(scores, entries[place]), place))[:n]
        return sorted(least + list(range(places.stop, places.stop + n - len(least))))

    def swap(self, entries: Sequence[int], out: Sequence[int], scores: Sequence[float]) -> tuple[list[int], list[int]]:
        """Return which of the resident ``entries`` leave and which of those ``out`` come back, equally many, so that
        the best are resident; both ascending.
        """
        movable = [entry for entry in entries[HEAD_PAGES : len(entries) - TAIL_PAGES] if entry < len(scores)]
        ranked = sorted([*movable, *out], key=lambda entry: (-_score(scores, entry), -entry))
        best = set(ranked[: len(movable)])
        return [entry for entry in movable if entry not in best], [entry for entry in out if entry in best]


def with_neighbours(scores: Sequence[float]) -> list[float]:
    """Return the scores of pages, each at least half of its neighbours': what begins on one may end on the next."""
    around = [0.0, *scores, 0.0]
    return [max(score, a / 2, b / 2) for a, score, b in zip(around, scores, around[2:], strict=False)]


def remembered(before: Sequence[float], now: Sequence[float]) -> list[float]:
    """Return scores that keep a fading share of earlier rankings: one decode's query does not undo what a question
    asked.
    """
    n = min(len(before), len(now))
    return [max(new, FADING * old) for old, new in zip(before, now, strict=False)] + [*now[n:], *before[n:]]


def _score(scores: Sequence[float], entry: int) -> float:
    return scores[entry] if entry < len(scores) else _UNRANKED
