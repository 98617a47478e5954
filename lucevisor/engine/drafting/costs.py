"""What rounds of drafting cost and yield: seconds by width, tokens a second, and the widths of a batch.

Pure.  A round gives every sequence a verify step and the drafts after it.  Widths are even (the same for all slices of
a step, so that a CUDA graph fits) or each request's own; which pays follows from measured steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Final

from lucevisor.engine.drafting.decode_times import WARM_STEPS, DecodeTimes, middle
from lucevisor.protocol.loading import DraftKind

ROW_SHARE: Final = 0.05
"""Assumed cost of one more row, of a step of one: between a GPU (0.02) and a small CPU (0.06)."""
LOOK_SHARE: Final = 0.15
"""Of a plain round, that looking at drafts before they are verified takes, where it was not measured: 0.1 to 0.2 on an
H200, in which nothing is computed."""
SPARED_SHARE: Final = 0.5
"""Of the rows of rejected drafts, that looking is assumed to spare."""
FREE_SHARE: Final = 0.01
"""Of a round: drafts that cost no more than this are asked for too, and their probabilities decide about verifying."""
LEAST_GAIN: Final = 1.03
"""What drafting must promise over plain decoding, and keep by measured times: estimates are no better than that."""
MANY_SLICES: Final = 3
"""Slices from which one warm step tells what its shape takes and whether drafts are accepted: it has as many verdicts
as three steps of one slice, and costs more rows."""
MOST_COLD: Final = 8
"""Cold steps of a shape in a row that do not count; then that is what they take."""
_KEPT_RATIOS: Final = 9
_KEPT_GAPS: Final = 32
_STALE_GAPS: Final = 1024
"""Rounds without a look after which is forgotten what one takes: a machine that was disturbed then is tried again."""
_UPKEEP_STEPS: Final = 128
"""Steps over which upkeep is averaged: most take nothing, one in up to 64 does the work of all."""


@dataclass(frozen=True, slots=True)
class DrafterPrior:
    """What is assumed of a drafter before it was measured: the chance of its first draft, the cost of one draft as a
    share of a plain step, and how much of that cost one more draft adds.
    """

    first_chance: float
    draft_share: float
    more_share: float


PRIORS: Final[dict[DraftKind, DrafterPrior]] = {
    DraftKind.MTP: DrafterPrior(0.8, 0.06, 1.0),  # a pass of one block and the output matrix for each draft
    DraftKind.DFLASH: DrafterPrior(0.75, 0.15, 0.02),  # one pass for all drafts
}


class Round(Enum):
    """A round of decodes, by what its step waits for."""

    PLAIN = "plain"  # no drafts
    UNSEEN = "unseen"  # drafts that are verified before they are known here
    SEEN = "seen"  # drafts that are looked at first


@dataclass(slots=True)
class DraftTimes:
    """Measured times of steps, of drafts, and of steps whose slices have unequal lengths."""

    prior: DrafterPrior
    steps: DecodeTimes = field(default_factory=lambda: DecodeTimes(ROW_SHARE))
    drafts: DecodeTimes = field(init=False)
    upkeep_share: float = 0.0  # of a plain step, that the draft stage takes for a step when it is not asked for drafts
    _gaps: dict[Round, deque[float]] = field(default_factory=dict)  # seconds: RoundGaps
    _gap_s: dict[Round, float] = field(default_factory=dict)  # the middle of them
    _drafted: Round = Round.UNSEEN  # the last round with drafts
    _n_unlooked: int = 0  # rounds with drafts since one looked at them
    _n_upkeep: int = 0
    _n_uneven: int = 0
    _n_cold: dict[tuple[bool, int, int], int] = field(default_factory=dict)  # of a shape since its last warm step
    _uneven: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_RATIOS))

    def __post_init__(self) -> None:
        self.drafts = DecodeTimes(self.prior.more_share)

    def add_step(self, n_rows: int, n_slices: int, seconds: float, *, cold: bool = False) -> None:
        """Count a step; slices have unequal lengths if the rows cannot be shared out evenly.

        ``cold``: of a shape whose graph was not there yet.  Of many slices one that is not counts at once.
        """
        if n_rows % n_slices == 0:
            self._add(self.steps, n_rows, n_slices, seconds, cold)
            return
        expected = self.steps.seconds(n_rows, n_slices)
        self._n_uneven += 1
        if expected is not None and not cold and (self._n_uneven > WARM_STEPS or n_slices >= MANY_SLICES):
            self._uneven.append(seconds / expected)

    def add_draft(self, n_ahead: int, n_slices: int, seconds: float, *, cold: bool = False) -> None:
        """Count what the draft stage took for ``n_ahead`` drafts of each slice; ``cold`` as in ``add_step``."""
        self._add(self.drafts, n_ahead, n_slices, seconds, cold)

    def _add(self, times: DecodeTimes, n: int, n_slices: int, seconds: float, cold: bool) -> None:
        """Count a step, unless it is cold: the next ones are faster.  Few slices tell by their first ones, cold or not,
        what such steps take at most.
        """
        shape, many = (times is self.drafts, n, n_slices), n_slices >= MANY_SLICES
        self._n_cold[shape] = self._n_cold.get(shape, 0) + 1 if cold else 0
        if not 0 < self._n_cold[shape] <= MOST_COLD or not (many or times.n_known(n, n_slices)):
            times.add(n, n_slices, seconds, warm=many and not cold)

    def add_gap(self, kind: Round, seconds: float) -> None:
        """Count what a round took beside its step and drafts."""
        own = self._gaps.setdefault(kind, deque(maxlen=_KEPT_GAPS))
        own.append(seconds)
        self._gap_s[kind] = middle(own)
        if kind is Round.PLAIN:
            return
        self._drafted = kind
        self._n_unlooked = 0 if kind is Round.SEEN else self._n_unlooked + 1
        if self._n_unlooked > _STALE_GAPS:
            self._gaps.pop(Round.SEEN, None)
            self._gap_s.pop(Round.SEEN, None)

    def gap_s(self, *, drafted: bool) -> float:
        """Return what a round takes beside its step and drafts, with drafts as in the last one that had some; the same
        is assumed of both until one of the other was measured.
        """
        kinds = (self._drafted, Round.PLAIN) if drafted else (Round.PLAIN, self._drafted)
        return next((self._gap_s[kind] for kind in kinds if kind in self._gap_s), 0.0)

    @property
    def look_s(self) -> float | None:
        """What a round takes longer for a look at its drafts; None before that was measured."""
        seen, unseen = self._gap_s.get(Round.SEEN), self._gap_s.get(Round.UNSEEN)
        return None if seen is None or unseen is None else seen - unseen

    def add_upkeep(self, share: float) -> None:
        """Count what the draft stage took for a step without drafts, of a plain step."""
        self._n_upkeep = min(_UPKEEP_STEPS, self._n_upkeep + 1)
        self.upkeep_share += (share - self.upkeep_share) / self._n_upkeep

    @property
    def uneven_ratio(self) -> float:
        """How much longer a step of unequal slices takes; 1 before it was measured."""
        return median(self._uneven) if self._uneven else 1.0

    @property
    def uneven_known(self) -> bool:
        """Whether ``uneven_ratio`` was measured."""
        return len(self._uneven) > 0


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """How the micro-batches of ``n_decoding`` sequences share stages and drafter.

    ``n_groups`` take turns, each with the next stage while another has the one before; without drafts ``n_stages``
    would.  ``slowest``: share of the slowest stage in a step's time.  ``apart``: the drafter works beside the output
    stage, not in its place.
    """

    n_decoding: int = 1
    n_groups: int = 1
    n_stages: int = 1
    slowest: float = 1.0
    apart: bool = False

    def round_s(self, step_s: float, draft_s: float = 0.0, n_groups: int = 0) -> float:
        """Return the seconds until each group had a step and its drafts: what one takes on its way, or what the busiest
        device does for all of them (``n_groups``, if given).
        """
        busiest_s = self.slowest * step_s
        busiest_s = max(busiest_s, draft_s) if self.apart else busiest_s + draft_s
        return max(step_s + draft_s, (n_groups or self.n_groups) * busiest_s)

    @property
    def pace(self) -> float:
        """Seconds of a round without drafts, over those of a step."""
        return self.round_s(1.0)


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """Estimates for steps of ``n_slices``; ``plain_s``: of a plain one.  ``shares``: how often each of the drafts that
    are asked for is made, of one slice whose unsure drafts are left out; empty: always.
    """

    times: DraftTimes
    n_slices: int
    plain_s: float
    schedule: BatchSchedule = BatchSchedule()
    shares: Sequence[float] = ()

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
        if not width:
            return self._plain_round_s(self.upkeep_s)
        verify_s = self.verify_s(self.n_slices * width)
        if self.shares:
            steps = [self.verify_s(n) for n in range(width + 1)]
            made = [*self.shares, *[self.shares[-1]] * width]
            verify_s = steps[0] + sum(share * (b - a) for share, (a, b) in zip(made, pairwise(steps), strict=False))
        return self.drafted_round_s(verify_s, self.draft_s(width))

    def with_free(self, width: int, max_drafts: int) -> int:
        """Return the largest width up to ``max_drafts`` whose drafts cost hardly more than those of ``width``.

        Of many slices those that were made before: a block of drafts of all of them is no small step.
        """
        most = self.draft_s(width) + FREE_SHARE * self.round_s(width)
        widths: Sequence[int] = range(width, max_drafts + 1)
        if self.many:
            widths = [n for n in widths if n == width or self.times.drafts.n_known(n, self.n_slices)]
        return max(n for n in widths if self.draft_s(n) <= most)

    def drafted_round_s(self, step_s: float, draft_s: float) -> float:
        """Return the seconds of a round with such a step and such drafts."""
        return self._with_gap(self.schedule.round_s(step_s, draft_s), drafted=True)

    def charged(self, step_s: float, *, drafted: bool) -> float:
        """Return how many plain rounds such a step takes the place of; drafts are charged apart."""
        return self._with_gap(self.schedule.pace * step_s, drafted=drafted) / self.bare_round_s

    @property
    def bare_round_s(self) -> float:
        """Seconds of a round of plain decoding without any drafter."""
        return self._plain_round_s(0.0)

    @property
    def upkeep_s(self) -> float:
        """Seconds that the draft stage takes for a step when it is not asked for drafts."""
        return self.times.upkeep_share * self.plain_s

    def stages_s(self, n_drafts: int) -> float:
        """Return what verifying so many drafts takes of a round."""
        return self.schedule.pace * self.verify_s(n_drafts)

    def row_s(self, n_drafts: int) -> float:
        """Return what a row of a draft costs on average, up to so many drafts."""
        return self.schedule.pace * (self.verify_s(n_drafts) - self.plain_s) / n_drafts

    def pays_to_look(self, width: int, tokens: float) -> bool:
        """Whether it may pay to wait for the probabilities of ``width`` drafts, with which a slice yields ``tokens``:
        the rows of rejected ones that it spares cost more than it takes.
        """
        look_s, rejected = self.times.look_s, self.n_slices * (width + 1 - tokens)
        look_s = LOOK_SHARE * self.bare_round_s if look_s is None else look_s
        return width > 0 and SPARED_SHARE * rejected * self.row_s(self.n_slices * width) > look_s

    @property
    def many(self) -> bool:
        """Whether there are so many slices that widths are tried with one step each, one by one."""
        return self.n_slices >= MANY_SLICES

    def is_known(self, width: int, max_age: int) -> bool:
        """Whether a step with ``width`` drafts for every slice was measured, and lately."""
        age = self.times.steps.age(self.n_slices * (1 + width), self.n_slices)
        return age is not None and age <= max_age

    def n_known(self, width: int) -> int:
        """Return how many steps with ``width`` drafts for every slice an estimate rests on."""
        return self.times.steps.n_known(self.n_slices * (1 + width), self.n_slices)

    @property
    def n_plain(self) -> int:
        """Plain steps that ``plain_s`` rests on."""
        return self.n_known(0)

    def optimistic_s(self, width: int) -> float:
        """Return ``round_s`` if a step takes only half of the assumed increase over the next smaller known one; if one
        or two of many slices were measured, which may have been disturbed, a quarter of it.
        """
        share = 0.25 if self.many and 0 < self.n_known(width) <= WARM_STEPS else 0.5
        assumed_s = self.verify_s(self.n_slices * width)
        smaller = [w for w in range(width) if self.is_known(w, 1 << 62)]
        smaller_s = self.verify_s(self.n_slices * smaller[-1]) if smaller else self.plain_s
        least_s = min(smaller_s, assumed_s)
        return self.drafted_round_s(least_s + share * (assumed_s - least_s), self.draft_s(width))

    def _plain_round_s(self, upkeep_s: float) -> float:
        """Seconds of a round without drafts: with as many groups as there are now, or with one for each stage."""
        schedule = self.schedule
        seconds = schedule.round_s(self.plain_s, upkeep_s)
        if schedule.n_groups > schedule.n_stages:
            n_slices = -(-schedule.n_decoding // schedule.n_stages)
            plain_s = self.times.steps.seconds(n_slices, n_slices)
            if plain_s is not None:
                seconds = min(seconds, schedule.round_s(plain_s, upkeep_s, schedule.n_stages))
        return self._with_gap(seconds, drafted=False)

    def _with_gap(self, seconds: float, *, drafted: bool) -> float:
        """Add what lies between the messages of a round.  Stages that prepare a step while another one computes save
        less than half of their time: more was measured while kernels were compiled."""
        return seconds + max(self.times.gap_s(drafted=drafted), -seconds / 2)


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
    """Return widths whose sum shows that they are unequal: one draft fewer where it could be shared out evenly."""
    if not any(widths) or sum(widths) % len(widths):
        return widths
    drafting = [i for i, width in enumerate(widths) if width]
    least = min(drafting, key=lambda i: tokens[i][widths[i]] - tokens[i][widths[i] - 1])
    return [width - (i == least) for i, width in enumerate(widths)]
