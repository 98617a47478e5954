"""Speculative decoding: how many tokens to draft and how many drafts to verify, for the most tokens a second.

Pure: verdicts and measured times in, widths out; no clock.  Acceptance is averaged by position of a draft, times by
shape of a step; a width yields the tokens expected of it over the seconds of its round.  Now and then another width is
tried for some steps, so that its time is known.  Where no drafts pay they are tried again after growing intervals.
docs/speculation.md has the rules and what they were measured to do.

Invariant: it never asks for more than ``max_drafts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final

from lucevisor.engine.drafting.lookup import LOOKUP_PROBABILITIES
from lucevisor.engine.drafting.request import RequestDrafts
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import Drafted

MIN_GAIN: Final = 1.03
"""What drafts must promise over plain decoding: estimates are no better than that."""
MEMORY: Final = 24
"""Verdicts and steps that an average remembers: a paragraph of text."""
PRIOR_WEIGHT: Final = 2.0
"""Verdicts that an assumed chance counts as."""
POSITION_DECAY: Final = 0.97
"""Chance of a draft behind an accepted one over the one before, until it is measured."""
ROW_SHARE: Final = 0.05
"""Time of one more row of a step until it is measured, of a step of one row: 0.02 on a GPU, 0.06 on a small cpu."""
TRY_STEPS: Final = 2
"""Warm steps for which a width is tried; a lone slice gets twice as many, as each has one verdict."""
TRY_INTERVAL: Final = 64
"""Steps between tries; it doubles with each that was in vain while nothing is drafted."""
MAX_TRY_INTERVAL: Final = 512
FADED: Final = 6.0
"""Verdicts that count when drafts are tried again: the text may be another."""


@dataclass(frozen=True, slots=True)
class DrafterPrior:
    """What is assumed of a drafter before it was measured: the chance of its first draft, the time of one draft over
    that of a plain step, and how much of that one more draft adds.
    """

    first_chance: float
    draft_share: float
    more_share: float


PRIORS: Final[dict[DraftKind, DrafterPrior]] = {
    DraftKind.MTP: DrafterPrior(0.8, 0.06, 1.0),  # a pass of one block and the output matrix for each draft
    DraftKind.DFLASH: DrafterPrior(0.75, 0.15, 0.02),  # one pass for all drafts
}


@dataclass(slots=True)
class Chance:
    """The share of accepted drafts, which forgets: MEMORY verdicts."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: bool) -> None:
        """Count a verdict."""
        keep = 1 - 1 / MEMORY
        self.accepted = self.accepted * keep + accepted
        self.tried = self.tried * keep + 1

    def fade(self) -> None:
        """Forget all but FADED verdicts."""
        share = min(1.0, FADED / self.tried) if self.tried else 1.0
        self.accepted *= share
        self.tried *= share

    def mean(self, prior: float) -> float:
        """Return the chance of a draft."""
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


@dataclass(slots=True)
class ShapeTimes:
    """Seconds by shape, (slices, rows of all or drafts of each); ``share``: assumed growth of one more."""

    share: float
    known: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)  # seconds, steps
    at_most: dict[tuple[int, int], float] = field(default_factory=dict)  # of cold steps, which compile or capture

    def add(self, n_slices: int, size: int, seconds: float, *, cold: bool) -> None:
        """Count a step."""
        shape = n_slices, size
        if cold:
            self.at_most[shape] = min(self.at_most.get(shape, seconds), seconds)
            return
        mean, n = self.known.get(shape, (seconds, 0))
        sample = min(seconds, 2 * mean) if n > 1 else seconds
        self.known[shape] = mean + (sample - mean) * max(1 / (n + 1), 2 / MEMORY), n + 1

    def n_known(self, n_slices: int, size: int) -> int:
        """Return how many warm steps of a shape were counted."""
        return self.known.get((n_slices, size), (0.0, 0))[1]

    def seconds(self, n_slices: int, size: int) -> float | None:
        """Return what a step takes, by the nearest known shapes; None before there is one."""
        if (n_slices, size) in self.known:
            return self.known[n_slices, size][0]
        found = [self.at_most[shape] for shape in [(n_slices, size)] if shape in self.at_most]
        same = sorted(one for slices, one in self.known if slices == n_slices)
        below, above = [one for one in same if one < size], [one for one in same if one > size]
        if below and above:
            low, high = below[-1], above[0]
            a, b = self.known[n_slices, low][0], self.known[n_slices, high][0]
            found.append(a + (b - a) * (size - low) / (high - low))
        elif self.known:
            near = min(self.known, key=lambda one: (bool(same) and one[0] != n_slices, abs(one[1] - size), one))
            found.append(self.known[near][0] * (1 + self.share * (size - 1)) / (1 + self.share * (near[1] - 1)))
        elif not found and self.at_most:
            found += self.at_most.values()
        return min(found, default=None)


class SpecDecodeController:
    """Widths of a batch; one per engine."""

    def __init__(self, max_drafts: int, kind: DraftKind = DraftKind.MTP, *, fixed: bool = False) -> None:
        """``fixed``: always ``max_drafts``."""
        self.n_groups = self.n_stages = 1  # micro-batches that share the decoding sequences; stages
        self.apart = False  # the drafter works beside the output stage
        self.max_drafts, self.fixed, self._prior = max_drafts, fixed, PRIORS[kind]
        self._drafted = [Chance() for _ in range(max_drafts)]  # by position
        self._looked_up = {length: Chance() for length in LOOKUP_PROBABILITIES}
        self._steps, self._drafts = ShapeTimes(ROW_SHARE), ShapeTimes(self._prior.more_share)
        self._gap_s: dict[bool, float] = {}  # by whether drafts were waited for
        self._upkeep_s = 0.0  # of the drafter, for a step that asks for nothing
        self._slowest = 1.0  # share of the slowest stage in the time of a step
        self._widths: dict[int, int] = {}  # chosen, by slices of a step
        self._width = 0  # chosen last
        self._chosen = False  # plain decoding was measured
        self._n_decoding = 1
        self._try: tuple[int, int, int] | None = None  # slices, width, steps that are left
        self._n_steps, self._try_at, self._try_interval = 0, 0, TRY_INTERVAL

    # ---- what the scheduler asks

    def n_ahead(self, own: RequestDrafts, n_decoding: int) -> int:
        """Return how many drafts to ask for behind the next sampled token; 0: none."""
        if self.fixed:
            return self.max_drafts
        self._n_decoding = n_decoding
        n_slices = max(1, -(-n_decoding // self.n_groups))
        if own.copying and n_slices == 1:
            return 0  # its own tokens are drafts enough
        if not own.n_asked:  # its text may be easier or harder than those before it
            self._try_at = min(self._try_at, self._n_steps + TRY_INTERVAL // 2)
            if n_slices == 1:
                self._fade()
        own.n_asked += 1
        return self._try[1] if self._try is not None and self._try[0] == n_slices else self._choose(n_slices)

    def candidates(self, own: RequestDrafts, drafted: Drafted) -> Drafted:
        """Return the drafts to consider for the next slice: those of the draft stage, if any, or those found in the
        sequence's own tokens where more of them are likely to be accepted.
        """
        lookup, own.match_length = own.lookup, 0
        match = lookup.match() if lookup is not None and not lookup.n_waiting else None
        if lookup is not None and match is not None:
            promised = self._tokens(match.length, self.max_drafts)[-1]
            if promised > self._tokens(0, len(drafted.tokens))[-1]:
                own.match_length = match.length
                drafted = Drafted(drafted.sequence, lookup.continuation(match, self.max_drafts), [])
        own.copying = own.copying and own.looked_up
        return drafted

    def n_verify(self, drafts: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        """Return how many drafts each of the next slices verifies, all of one step; padding makes them equally long.

        0: a plain decode.
        """
        self._n_decoding, n = n_decoding, len(drafts)
        counts = [min(self.max_drafts, len(drafted.tokens)) for _, drafted in drafts]
        most, plain_s = max(counts), self._steps.seconds(n, n)
        if self.fixed:
            return most
        if plain_s is None:
            return 0
        if self._try is not None and self._try[:1] == (n,):
            return min(most, self._try[1])
        tokens = [self._tokens(own.match_length, count) for (own, _), count in zip(drafts, counts, strict=True)]
        rate = self._rate(n, self._widths.get(n, 0))
        worth = [
            sum(each[min(width, len(each) - 1)] for each in tokens) - rate * self._pace * self._step_s(n, width)
            for width in range(most + 1)
        ]
        return max(range(most + 1), key=worth.__getitem__)

    @property
    def width(self) -> int:
        """Drafts that are asked for at present."""
        return self.max_drafts if self.fixed else self._width

    @property
    def no_drafts(self) -> str:
        """Why no drafts are asked for at present; empty while they are, or before that was decided."""
        if self.fixed or self._width or not self._chosen:
            return ""
        return "the drafter is not asked: by times and acceptance plain decoding is faster"

    @property
    def trying(self) -> bool:
        """Whether a width is being tried."""
        return self._try is not None

    def choose_groups(self, n_stages: int) -> int:
        """Return the micro-batches to deal sequences into: one a stage, one more while a drafter apart works beside."""
        self.n_stages = n_stages
        beside = self.apart and self._n_decoding > n_stages and self.width > 0
        if beside and not self.fixed:
            n, width = self._n_decoding, self.width
            usual, more = -(-n // n_stages), -(-n // (n_stages + 1))
            beside = self._round_s(more, width, n_stages + 1) < self._round_s(usual, width, n_stages)
        self.n_groups = n_stages + beside
        return self.n_groups

    # ---- what it is told

    def verified(self, own: RequestDrafts, n_drafts: int, n_accepted: int) -> None:
        """Note a verdict on candidates, padding left out."""
        for position in range(min(n_drafts, n_accepted + 1)):
            chance = self._looked_up[own.match_length] if own.looked_up else self._drafted[position]
            chance.add(position < n_accepted)
        own.copying = own.looked_up and n_accepted == n_drafts

    def measured(
        self, n_rows: int, n_slices: int, seconds: float, slowest_s: float | None = None, *, cold: bool = False
    ) -> None:
        """Note how long the stages took for a step of decodes, one after the other, and the slowest of several.

        ``cold`` as in StepResult.
        """
        self._n_steps += 1
        if n_rows % n_slices == 0:
            self._steps.add(n_slices, n_rows, seconds, cold=cold)
        if slowest_s is not None and seconds > 0:
            self._slowest += (slowest_s / seconds - self._slowest) / MEMORY
        if self._try is not None:
            slices, width, n_left = self._try
            if slices != n_slices or (n_left := n_left - (not cold)) <= 0:
                self._try = None
                self._widths.clear()
            else:
                self._try = slices, width, n_left
        if self._n_steps % 4 == 0:
            self._widths.clear()

    def measured_draft(self, n_slices: int, n_ahead: int, seconds: float, *, cold: bool = False) -> None:
        """Note how long the draft stage took for a step of decodes that asked for ``n_ahead`` drafts each; ``cold`` as
        in StepResult.
        """
        self._drafts.add(n_slices, n_ahead, seconds, cold=cold)

    def measured_upkeep(self, seconds: float) -> None:
        """Note how long the draft stage took for a step of decodes behind which it was asked for nothing."""
        self._upkeep_s += (seconds - self._upkeep_s) / MEMORY

    def measured_gap(self, seconds: float, *, drafted: bool) -> None:
        """Note what a round took beside its step and drafts: links and planning."""
        known = self._gap_s.get(drafted, seconds)
        self._gap_s[drafted] = known + (seconds - known) / MEMORY

    # ---- inside

    def _tokens(self, match_length: int, n: int) -> list[float]:
        """Return the tokens expected of a slice with 0, 1, ... n drafts; ``match_length``: of a lookup, else 0."""
        if match_length:
            chance = self._looked_up[match_length].mean(LOOKUP_PROBABILITIES[match_length])
            chances = [chance] * n
        else:
            chances, before = [], self._prior.first_chance / POSITION_DECAY
            for position in range(n):
                before = self._drafted[position].mean(before * POSITION_DECAY)
                chances.append(before)
        return list(accumulate(accumulate(chances, mul), initial=1.0))

    def _step_s(self, n_slices: int, width: int) -> float:
        return self._steps.seconds(n_slices, n_slices * (1 + width)) or 0.0

    def _draft_s(self, n_slices: int, width: int) -> float:
        if not width:
            return self._upkeep_s
        known, prior = self._drafts.seconds(n_slices, width), self._prior
        if known is None:
            known = self._step_s(n_slices, 0) * prior.draft_share * (1 + prior.more_share * (width - 1))
        return known

    @property
    def _pace(self) -> float:
        """Seconds of a round without drafts, over those of a step."""
        return max(1.0, min(self.n_groups, self._n_decoding) * self._slowest)

    def _round_s(self, n_slices: int, width: int, n_groups: int = 0) -> float:
        """Return the seconds until each micro-batch had a step and its drafts: what one takes on its way, or what the
        busiest device does for all of them.
        """
        n_groups = min(n_groups or self.n_groups, self._n_decoding)
        step_s, draft_s = self._step_s(n_slices, width), self._draft_s(n_slices, width)
        busiest_s = max(self._slowest * step_s, draft_s) if self.apart else self._slowest * step_s + draft_s
        seconds = max(step_s + draft_s, n_groups * busiest_s)
        known = self._gap_s.get(width > 0, self._gap_s.get(width == 0, 0.0))
        return seconds + max(known, -seconds / 2)  # negative where stages prepare a step while another one computes

    def _rate(self, n_slices: int, width: int) -> float:
        """Return the tokens a second of a micro-batch."""
        return n_slices * self._tokens(0, width)[-1] / self._round_s(n_slices, width)

    def _choose(self, n_slices: int) -> int:
        """Return the width for steps of so many slices, and begin a try if one is due."""
        known = self._widths.get(n_slices)
        if known is not None:
            return known
        if self._steps.seconds(n_slices, n_slices) is None:
            return 0  # the first step of all shows what plain decoding takes
        tokens = self._tokens(0, self.max_drafts)
        rates = [n_slices * n / self._round_s(n_slices, width) for width, n in enumerate(tokens)]
        best = max(range(self.max_drafts + 1), key=rates.__getitem__)
        if rates[best] < MIN_GAIN * rates[0]:
            best = 0
        self._widths[n_slices] = self._width = best
        self._chosen = True
        if best:
            self._try_interval = TRY_INTERVAL
        if self._n_steps >= self._try_at:
            self._begin_try(n_slices, best, rates)
            return self._try[1] if self._try is not None else best
        return best

    def _fade(self) -> None:
        for chance in self._drafted:
            chance.fade()

    def _begin_try(self, n_slices: int, best: int, rates: Sequence[float]) -> None:
        """Try another width: the neighbour or plain decoding that was measured least; without drafts the best one."""
        if best:
            near = [width for width in (best + 1, best - 1, 0) if 0 <= width <= self.max_drafts and width != best]
            width = min(near, key=lambda one: self._steps.n_known(n_slices, n_slices * (1 + one)))
        else:
            self._fade()
            width = max(range(1, self.max_drafts + 1), key=rates.__getitem__)
            self._try_interval = min(2 * self._try_interval, MAX_TRY_INTERVAL)
        self._try = n_slices, width, TRY_STEPS * (1 + (n_slices == 1))
        self._try_at = self._n_steps + self._try_interval
