"""What drafting remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lucevisor.engine.drafting.acceptance import PositionRates
from lucevisor.engine.drafting.lookup import NgramLookup


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """What was accepted of a request's drafts: ``rates[looked_up]``.

    ``probabilities`` and ``looked_up`` describe the drafts that are offered or under verification.  ``copying``: the
    last drafts were looked up, and all of them were accepted.
    """

    request_id: str
    rates: tuple[PositionRates, PositionRates] = field(default_factory=lambda: (PositionRates(), PositionRates()))
    probabilities: Sequence[float] = ()
    n_left_out: int = 0  # of the draft stage's last drafts, that were unsure (``Slice.p_min``)
    looked_up: bool = False
    copying: bool = False
    lookup: NgramLookup | None = None  # n-grams of its tokens; None until drafts are looked up
    n_verified: int = 0
    n_accepted: int = 0
