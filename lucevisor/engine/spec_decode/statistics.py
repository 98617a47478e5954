"""Statistics of speculation since the start. Invariant: accepted <= verified <= drafted. The times of a step are shared
out by rows and add up to it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class LookupCounts:
    """Of drafts that were looked up in the sequence's own tokens: verify slices of them, and their drafts."""

    n_verify: int = 0
    n_verified: int = 0
    n_accepted: int = 0


@dataclass(slots=True)
class DraftStatistics:
    """``n_plain``, ``n_verify``: decodes without and with drafts. ``n_drafted``: drafts made, verified or not.
    ``verified[i]``, ``accepted[i]``: at position i. ``draft_s``: time of the draft stage for drafts, in ``n_steps``;
    ``upkeep_s``: for the rest. ``verify_s``: time of all other stages for verify slices."""

    n_plain: int = 0
    n_verify: int = 0
    n_drafted: int = 0
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    verify_s: float = 0.0
    lookups: LookupCounts = field(default_factory=LookupCounts)
    n_steps: int = 0
    upkeep_s: float = 0.0

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

    def drafted(self, n_drafted: int, share: float, seconds: float) -> None:
        """Count an answer of the draft stage; ``share`` of its rows are of slices that drafts follow."""
        self.n_steps += n_drafted > 0
        self.n_drafted += n_drafted
        self.draft_s += seconds * share
        self.upkeep_s += seconds * (1 - share)

    def decoded(self, num_real_drafts: int, n_accepted: int, *, looked_up: bool, reported: bool = True) -> None:
        """Count a verdict. ``n_accepted``: drafts among the tokens that were kept, padding that is right by chance
        included. ``reported`` False: the drafter was detached before it answered."""
        n_drafts = max(num_real_drafts, n_accepted)
        self.n_verify += n_drafts > 0
        self.n_plain += n_drafts == 0
        missing = [0] * (n_drafts - len(self.verified))
        self.verified += missing
        self.accepted += missing
        for position in range(n_drafts):
            self.verified[position] += 1
            self.accepted[position] += position < n_accepted
        self.n_drafted += n_drafts - num_real_drafts if reported and not looked_up else n_drafts
        if looked_up and n_drafts:
            self.lookups.n_verify += 1
            self.lookups.n_verified += n_drafts
            self.lookups.n_accepted += n_accepted
