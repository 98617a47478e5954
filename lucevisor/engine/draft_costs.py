"""What rounds of drafting cost and yield: seconds by width, tokens a second, and the widths of a batch.

Pure.  A round is a verify step and the drafts after it.  Widths are even (the same for all slices of a step, so that a
CUDA graph fits) or each request's own; which pays follows from measured steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from lucevisor.engine.decode_times import WARM_STEPS, DecodeTimes
from lucevisor.protocol.loading import DraftKind

ROW_SHARE: Final = 0.05
"""Assumed cost of one more row, of a step of one: between a GPU (0.02) and a small CPU (0.06)."""
_KEPT_RATIOS: Final = 9


@dataclass(frozen=True, slots=True)
class DrafterPrior:
    """What is assumed of a drafter before it was measured: the chance of its first draft, what one draft costs, of a
    plain step, and how much of that one more adds.
    """

    first_chance: float
    draft_share: float
    more_share: float


PRIORS: Final[dict[DraftKind, DrafterPrior]] = {
    DraftKind.MTP: DrafterPrior(0.8, 0.06, 1.0),  # a pass of one block and the output matrix for each draft
    DraftKind.DFLASH: DrafterPrior(0.75, 0.15, 0.02),  # one pass for all drafts
}


@dataclass(slots=True)
class DraftTimes:
    """Measured times of steps, of drafts, and of steps whose slices have unequal lengths."""

    prior: DrafterPrior
    steps: DecodeTimes = field(default_factory=lambda: DecodeTimes(ROW_SHARE))
    drafts: DecodeTimes = field(init=False)
    _n_uneven: int = 0
    _uneven: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_RATIOS))

    def __post_init__(self) -> None:
        self.drafts = DecodeTimes(self.prior.more_share)

    def add_step(self, n_rows: int, n_slices: int, seconds: float) -> None:
        """Count a step; slices have unequal lengths if the rows cannot be shared out evenly."""
        if n_rows % n_slices == 0:
            self.steps.add(n_rows, n_slices, seconds)
            return
        expected = self.steps.seconds(n_rows, n_slices)
        self._n_uneven += 1
        if expected is not None and self._n_uneven > WARM_STEPS:
            self._uneven.append(seconds / expected)

    @property
    def uneven_ratio(self) -> float:
        """How much longer a step of unequal slices takes; 1 before it was measured."""
        return median(self._uneven) if self._uneven else 1.0

    @property
    def uneven_known(self) -> bool:
        """Whether ``uneven_ratio`` was measured."""
        return len(self._uneven) > 0


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Estimates for steps of ``n_slices``; ``plain_s``: of a plain one."""

    times: DraftTimes
    n_slices: int
    plain_s: float

    def verify_s(self, n_drafts: int) -> float:
        """Return the seconds of a step that verifies so many drafts, all slices together."""
        return self.times.steps.seconds(self.n_slices + n_drafts, self.n_slices) or self.plain_s

    def draft_s(self, width: int) -> float:
        """Return the seconds of drafting ``width`` tokens behind every slice."""
        if not width:
            return 0.0
        known, prior = self.times.drafts.seconds(width, self.n_slices), self.times.prior
        return self.plain_s * prior.draft_share * (1 + prior.more_share * (width - 1)) if known is None else known

    def round_s(self, width: int) -> float:
        """Return the seconds of a round with ``width`` drafts for every slice."""
        return self.verify_s(self.n_slices * width) + self.draft_s(width)

    def row_s(self, n_drafts: int) -> float:
        """Return what a row of a draft costs on average, up to so many drafts."""
        return (self.verify_s(n_drafts) - self.plain_s) / n_drafts

    def is_known(self, width: int, max_age: int) -> bool:
        """Whether a step with ``width`` drafts for every slice was measured, and lately."""
        age = self.times.steps.age(self.n_slices * (1 + width), self.n_slices)
        return age is not None and age <= max_age

    @property
    def n_plain(self) -> int:
        """Plain steps that ``plain_s`` rests on."""
        return self.times.steps.n_known(self.n_slices, self.n_slices)

    def optimistic_s(self, width: int) -> float:
        """Return ``round_s`` if a step takes half as much more than the next smaller known one as is assumed."""
        assumed_s = self.verify_s(self.n_slices * width)
        smaller = [w for w in range(width) if self.is_known(w, 1 << 62)]
        smaller_s = self.verify_s(self.n_slices * smaller[-1]) if smaller else self.plain_s
        return (min(smaller_s, assumed_s) + assumed_s) / 2 + self.draft_s(width)


def own_widths(tokens: Sequence[Sequence[float]], least: float) -> list[int]:
    """Return for each slice how many drafts yield at least ``least`` tokens each; ``tokens[i][n]``: with n drafts."""
    found = []
    for each in tokens:
        n = 0
        while n + 1 < len(each) and each[n + 1] - each[n] >= least:
            n += 1
        found.append(n)
    return found


def uneven(widths: list[int], tokens: Sequence[Sequence[float]]) -> list[int]:
    """Return widths whose sum tells that they are unequal: one draft fewer where they could be shared out evenly."""
    if not any(widths) or sum(widths) % len(widths):
        return widths
    drafting = [i for i, width in enumerate(widths) if width]
    least = min(drafting, key=lambda i: tokens[i][widths[i]] - tokens[i][widths[i] - 1])
    return [width - (i == least) for i, width in enumerate(widths)]
