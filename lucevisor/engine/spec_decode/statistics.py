"""Statistics of speculation since the start: drafts made, verified and accepted, acceptance length, times.

Counts are kept by the origin of a sequence's prefix, so that an acceptance rate that suffers from a restore or a
recovery shows.

Invariants: accepted <= verified <= drafted; a decode yields one token and one more for every accepted draft, except
where the stop id was a draft: then none follows it.  The times of a step are shared out by rows and add up to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final, Literal, NamedTuple

PrefixOrigin = Literal["fresh", "restored", "recovered"]
"""Of a sequence: all of its prompt was computed for it, it began with a prefix slot, of memory or from disk, or it
went on after the loss of a daemon."""
ORIGINS: Final[tuple[PrefixOrigin, ...]] = ("fresh", "restored", "recovered")


@dataclass(slots=True)
class DraftCounts:
    """Of the sequences of one origin, or of all.

    ``n_plain``, ``n_verify``: decodes without and with drafts.  ``n_drafted``: drafts made, verified or not.
    ``verified[i]``, ``accepted[i]``: drafts at position i.  ``draft_s``: time of the draft stage for drafts;
    ``verify_s``: time of all other stages, one after the other, for verify slices.
    """

    n_plain: int = 0
    n_verify: int = 0
    n_drafted: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0

    @property
    def n_verified(self) -> int:
        return sum(self.verified)

    @property
    def n_accepted(self) -> int:
        return sum(self.accepted)

    @property
    def acceptance_length(self) -> float:
        """The acceptance length: tokens that a verify slice yields; 0 before there was one."""
        return 1 + self.n_accepted / self.n_verify if self.n_verify else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a decode yields, with drafts or without; 0 before there was one."""
        n_decodes = self.n_plain + self.n_verify
        return 1 + self.n_accepted / n_decodes if n_decodes else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of accepted drafts at each position, of those that were verified there."""
        return [n / of for n, of in zip(self.accepted, self.verified, strict=True)]

    def decoded(self, n_drafts: int, n_accepted: int) -> None:
        self.n_verify += n_drafts > 0
        self.n_plain += n_drafts == 0
        missing = [0] * (n_drafts - len(self.verified))
        self.verified += missing
        self.accepted += missing
        for position in range(n_drafts):
            self.verified[position] += 1
            self.accepted[position] += position < n_accepted

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.n_plain + other.n_plain,
            self.n_verify + other.n_verify,
            self.n_drafted + other.n_drafted,
            [a + b for a, b in zip_longest(self.verified, other.verified, fillvalue=0)],
            [a + b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)],
            self.draft_s + other.draft_s,
            self.verify_s + other.verify_s,
        )


@dataclass(slots=True)
class LookupCounts:
    """Of drafts that were looked up in the sequence's own tokens: verify slices of them, and their drafts."""

    n_verify: int = 0
    n_verified: int = 0
    n_accepted: int = 0


class StepShare(NamedTuple):
    """Share of a step that a slice takes: ``rows`` of work for drafts, of all its ``n_rows``."""

    origin: PrefixOrigin
    n_rows: int
    rows: int


@dataclass(slots=True)
class DraftStatistics:
    """All counts; one per engine.

    ``n_steps``: steps for which the draft stage made drafts.  ``upkeep_s``: time of the draft stage for what it was not
    asked drafts after: it extends its context by every token of the target.
    """

    by_origin: dict[PrefixOrigin, DraftCounts] = field(default_factory=lambda: {one: DraftCounts() for one in ORIGINS})
    lookups: LookupCounts = field(default_factory=LookupCounts)
    n_steps: int = 0
    upkeep_s: float = 0.0

    @property
    def total(self) -> DraftCounts:
        return sum(self.by_origin.values(), DraftCounts())

    def drafted(self, shares: Sequence[StepShare], n_drafted: Sequence[int], seconds: float) -> None:
        """Count an answer of the draft stage: ``n_drafted[i]`` drafts after slice i, ``seconds`` for all slices."""
        self.n_steps += any(n_drafted)
        for share, n in zip(shares, n_drafted, strict=True):
            self.by_origin[share.origin].n_drafted += n
        remaining_s = seconds
        for share, part_s in _shared_out(shares, seconds):
            self.by_origin[share.origin].draft_s += part_s
            remaining_s -= part_s
        self.upkeep_s += max(0.0, remaining_s)

    def stepped(self, shares: Sequence[StepShare], seconds: float) -> None:
        for share, part_s in _shared_out(shares, seconds):
            self.by_origin[share.origin].verify_s += part_s

    def decoded(
        self, origin: PrefixOrigin, num_real_drafts: int, n_accepted: int, *, looked_up: bool, reported: bool = True
    ) -> None:
        """Count a verdict.  ``n_accepted``: drafts among the tokens that were kept; a padding token that is right by
        chance counts as a draft.  ``reported`` False: the drafter was detached before it answered.
        """
        counts, n_drafts = self.by_origin[origin], max(num_real_drafts, n_accepted)
        counts.decoded(n_drafts, n_accepted)
        counts.n_drafted += n_drafts - num_real_drafts if reported and not looked_up else n_drafts
        if looked_up and n_drafts:
            self.lookups.n_verify += 1
            self.lookups.n_verified += n_drafts
            self.lookups.n_accepted += n_accepted


def _shared_out(shares: Sequence[StepShare], seconds: float) -> list[tuple[StepShare, float]]:
    """Return the seconds of each slice's work for drafts, by rows."""
    n_rows = sum(share.n_rows for share in shares)
    return [(share, seconds * share.rows / n_rows) for share in shares if share.rows]
