"""What drafting remembers of one request."""

from __future__ import annotations

from dataclasses import dataclass

from lucevisor.engine.drafting.lookup import NgramLookup


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """``match_length``: tokens that agreed where the drafts that are offered or under verification were looked up; 0:
    the drafter made them.  ``copying``: the last drafts were looked up, and all of them were accepted.  ``n_asked``:
    steps behind which drafts were considered.
    """

    request_id: str
    match_length: int = 0
    copying: bool = False
    lookup: NgramLookup | None = None  # n-grams of its tokens; None until drafts are looked up
    n_asked: int = 0
    n_verified: int = 0
    n_accepted: int = 0

    @property
    def looked_up(self) -> bool:
        """Whether the drafts were found in its own tokens."""
        return self.match_length > 0
