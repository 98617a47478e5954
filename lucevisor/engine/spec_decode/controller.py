"""Speculative decoding policy: how many tokens to draft and how many drafts to verify, for the most tokens a second.

The acceptance rate is averaged by position of a draft, the time of a round (from one result of a micro-batch to its
next) by batch and width. A neighbouring width is tried now and then. If drafts do not pay, they are tried at growing
intervals, and an unused drafter is suspended. docs/speculation.md has the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final, NamedTuple

from lucevisor.engine.spec_decode.ngram import MATCH_CHANCES, NgramLookup
from lucevisor.protocol.loading import DraftKind
from lucevisor.protocol.steps import Drafted

MEMORY: Final = 24
"""Length of the moving averages, in verdicts and rounds: a paragraph of text."""
ON_GAIN: Final = 1.05
"""Speed-up over plain decoding that turns drafting on; it stays on while the speed-up is above 1."""
TRIAL_INTERVAL: Final = 64
"""Steps between trials of another width; doubles up to MAX_TRIAL_INTERVAL while drafting stays on or off."""
MAX_TRIAL_INTERVAL: Final = 512
TRIAL_ROUNDS: Final = 2
"""Warm rounds of a trial.  A single sequence gets twice as many, as each round has one verdict."""
LONG_AFTER: Final = 2
"""Verify steps in a row with looked-up drafts, all accepted, after which a lookup fills more than a drafter's block."""
ACTIVE_STEPS: Final = 128
"""Steps without drafts, trials aside, after which the drafter is suspended; also the length of its first suspension."""
MAX_SUSPEND_STEPS: Final = 8192
SUSPENDED: Final = "the drafter is suspended, because plain decoding is faster; it is tried again now and then"

PRIOR_VERDICTS: Final = 2.0  # weight of an assumed acceptance rate
ROW_SHARE: Final = 0.05  # assumed time of one more row, relative to a step of one row: GPU 0.02, small cpu 0.06


class DrafterPrior(NamedTuple):
    """Assumptions about a drafter: acceptance rate of its first draft, time of one draft relative to a plain step, and
    the share of that time for each further draft."""

    first_chance: float
    draft_share: float
    more_share: float


PRIORS: Final[dict[DraftKind, DrafterPrior]] = {
    DraftKind.MTP: DrafterPrior(0.8, 0.06, 1.0),  # one block and the output matrix for each draft
    DraftKind.DFLASH: DrafterPrior(0.75, 0.15, 0.02),  # one pass for all drafts
    DraftKind.MODEL: DrafterPrior(0.8, 0.3, 1.0),  # a pass of a smaller model for each draft
}


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """``match_length``: of the n-gram match that gave the newest drafts; 0 if the drafter made them. ``n_copied``:
    verify steps in a row, up to the last, whose drafts came from lookup and were all accepted."""

    match_length: int = 0
    n_copied: int = 0
    lookup: NgramLookup | None = None  # n-grams of its tokens; None until drafts are looked up
    n_asked: int = 0  # steps after which drafts were considered
    n_verified: int = 0
    n_accepted: int = 0

    @property
    def looked_up(self) -> bool:
        """True if the drafts came from prompt lookup."""
        return self.match_length > 0


@dataclass(slots=True)
class AcceptanceRate:
    """Exponentially weighted acceptance rate of drafts."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: bool) -> None:
        """Count a verdict."""
        keep = 1 - 1 / MEMORY
        self.accepted = self.accepted * keep + accepted
        self.tried = self.tried * keep + 1

    def decay(self) -> None:
        """Lower the weight of past verdicts, for a new text."""
        share = min(1.0, MEMORY / 4 / self.tried) if self.tried else 1.0
        self.accepted *= share
        self.tried *= share

    def mean(self, prior: float) -> float:
        """Return the mean, with ``prior`` as two more verdicts."""
        return (self.accepted + PRIOR_VERDICTS * prior) / (self.tried + PRIOR_VERDICTS)


class RoundShape(NamedTuple):
    """Key of a round's time, besides its width: decoding sequences, whether an additional micro-batch is drafted beside
    the stages, and whether the drafter makes drafts."""

    n_decoding: int
    beside: bool
    asked: bool


@dataclass(slots=True)
class RoundTimes:
    """Seconds of a round by batch and width."""

    prior: DrafterPrior
    known: dict[RoundShape, dict[int, tuple[float, int]]] = field(default_factory=dict)  # seconds, rounds
    upper: dict[tuple[RoundShape, int], float] = field(default_factory=dict)  # cold rounds, which compile or capture

    def add(self, batch: RoundShape, width: int, seconds: float, *, cold: bool) -> None:
        if cold:
            self.upper[batch, width] = min(self.upper.get((batch, width), seconds), seconds)
            return
        widths = self.known.setdefault(batch, {})
        mean, n = widths.get(width, (seconds, 0))
        sample = min(seconds, 2 * mean) if n > 1 else seconds
        widths[width] = mean + (sample - mean) * max(1 / (n + 1), 2 / MEMORY), n + 1

    def n_rounds(self, batch: RoundShape, width: int) -> int:
        """Return how many warm rounds were counted."""
        return self.known.get(batch, {}).get(width, (0.0, 0))[1]

    def seconds(self, batch: RoundShape, width: int) -> float | None:
        """Return the seconds of a round, interpolated or scaled from the nearest measured ones; None before any."""
        widths = dict(self.known.get(batch, {}))
        plain = self.known.get(RoundShape(batch.n_decoding, False, False), {}).get(0)
        if plain is not None:
            widths.setdefault(0, plain)
        if width in widths:
            return widths[width][0]
        below, above = [w for w in widths if w < width], [w for w in widths if w > width]
        if below and above:
            low, high = max(below), min(above)
            a, b = widths[low][0], widths[high][0]
            estimate = a + (b - a) * (width - low) / (high - low)
        elif widths:
            near = max(below) if below else min(above)
            estimate = widths[near][0] * self._assumed(batch, width) / self._assumed(batch, near)
        elif batch.beside:
            return self.seconds(batch._replace(beside=False), width)
        else:
            others = [other for other in self.known if not other.beside and 0 in self.known[other]]
            if not others:
                return self.upper.get((batch, width))
            other = min(others, key=lambda other: abs(other.n_decoding - batch.n_decoding))
            estimate = self.known[other][0][0] * self._assumed(batch, width) / self._assumed(other, 0)
        return min(estimate, self.upper.get((batch, width), estimate))

    def _assumed(self, batch: RoundShape, width: int) -> float:
        """Return the assumed time of a round over that of a step of one row."""
        plain = 1 + ROW_SHARE * (batch.n_decoding - 1)
        step = plain + ROW_SHARE * batch.n_decoding * width
        drafts = self.prior.draft_share * (1 + self.prior.more_share * (width - 1)) if batch.asked and width else 0.0
        return step + plain * drafts


@dataclass(slots=True)
class WidthTrial:
    """A trial of another width for some rounds."""

    n_decoding: int
    width: int
    beside: bool
    n_rounds: int  # warm ones that are left
    n_steps: int  # of any kind that are left


class SpecDecodeController:
    """Chooses the width of a batch: how many tokens to draft and verify.  One per engine."""

    def __init__(
        self, max_drafts: int, kind: DraftKind = DraftKind.MTP, *, fixed: bool = False, max_lookup: int = 0
    ) -> None:
        """``fixed``: always ``max_drafts``.  ``max_lookup`` as in SpeculationSettings."""
        self.apart = False  # the drafter works beside the output stage
        self.max_drafts, self.fixed, self._prior = max_drafts, fixed, PRIORS[kind]
        self.max_lookup = max(max_drafts, max_lookup)
        self._drafted = [AcceptanceRate() for _ in range(max_drafts)]  # by position
        self._looked_up = {length: AcceptanceRate() for length in MATCH_CHANCES}
        self._times = RoundTimes(self._prior)
        self._choices: dict[int, tuple[int, bool]] = {}  # width and beside, by decoding sequences
        self._width, self._beside, self._chosen = 0, False, False  # last choice; a choice was made
        self._n_decoding = self._n_groups = 1
        self._extra_group = False  # drafted beside the stages
        self._trial: WidthTrial | None = None
        self._n_steps, self._trial_at, self._trial_interval = 0, 0, TRIAL_INTERVAL

    # ---- decisions

    def num_draft_tokens(self, drafts: RequestDrafts, n_decoding: int) -> int:
        """Return how many drafts to ask for after the next sampled token; 0: none."""
        if self.fixed:
            return self.max_drafts
        self._n_decoding = n_decoding
        if drafts.n_copied and n_decoding == 1:
            return 0  # lookup gives enough drafts
        if not drafts.n_asked:  # a new text, with another acceptance rate
            self._trial_at = min(self._trial_at, self._n_steps + TRIAL_INTERVAL // 2)
            if n_decoding == 1:
                self._decay_rates()
        drafts.n_asked += 1
        width, self._beside = self._choose(n_decoding)
        return width

    def candidates(self, drafts: RequestDrafts, drafted: Drafted, n_decoding: int) -> Drafted:
        """Return the drafts to consider for the next slice: those of the draft stage, or those found in the sequence's
        own tokens where more of them are likely to be accepted. One that decodes alone, and has copied whole drafts
        twice in a row, gets ``max_lookup`` of these."""
        lookup, drafts.match_length = drafts.lookup, 0
        match = lookup.match() if lookup is not None and not lookup.n_waiting else None
        if lookup is not None and match is not None:
            n = self.max_lookup if drafts.n_copied >= LONG_AFTER and n_decoding == 1 else self.max_drafts
            expected = self._tokens(match.length, n)[-1]
            if expected > self._tokens(0, len(drafted.tokens))[-1]:
                drafts.match_length = match.length
                drafted = Drafted(drafted.sequence, lookup.continuation(match, n), [])
        if not drafts.looked_up:
            drafts.n_copied = 0
        return drafted

    def num_verify_tokens(self, offers: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        """Return how many drafts each of the next slices, all of one step, verifies; 0: a plain decode."""
        self._n_decoding = n_decoding
        counts = [len(drafted.tokens) for _, drafted in offers]
        most, asked = max(counts), any(drafted.tokens and not drafts.looked_up for drafts, drafted in offers)
        if self.fixed:
            return most
        if self._trial is not None and self._trial.n_decoding == n_decoding and asked:
            return min(most, self._trial.width)
        copied = most == self.max_lookup > self.max_drafts
        if copied and self._times.n_rounds(RoundShape(n_decoding, False, False), most) < TRIAL_ROUNDS:
            return most
        tokens = [self._tokens(drafts.match_length, n) for (drafts, _), n in zip(offers, counts, strict=True)]
        rates = list[float]()
        widths: list[int] = sorted({*range(min(most, self.max_drafts) + 1), most})  # each has a graph of its own
        for width in widths:
            seconds = self._times.seconds(RoundShape(n_decoding, self._beside and asked, asked and width > 0), width)
            if seconds is None:
                return 0
            rates.append(sum(expected[min(width, len(expected) - 1)] for expected in tokens) / max(seconds, 1e-9))
        return widths[rates.index(max(rates))]

    @property
    def width(self) -> int:
        """Current number of drafts to ask for."""
        return self.max_drafts if self.fixed else self._width

    @property
    def no_drafts(self) -> str:
        """Reason why no drafts are asked for now; empty while they are, or before a choice was made."""
        if self.fixed or self._width or not self._chosen:
            return ""
        return "drafting is off: by measured times and acceptance plain decoding is faster"

    @property
    def in_trial(self) -> bool:
        return self._trial is not None

    def choose_groups(self, n_stages: int) -> int:
        """Return the number of micro-batches: one per stage, and one more beside a separate drafter."""
        self._extra_group = self.apart and self._n_decoding > n_stages and (self.fixed or self._beside)
        self._n_groups = n_stages + self._extra_group
        return self._n_groups

    # ---- measurements

    def record_verdict(self, drafts: RequestDrafts, n_drafts: int, n_accepted: int) -> None:
        """Count a verdict on candidates, padding left out."""
        for position in range(min(n_drafts, n_accepted + 1)):
            chance = self._looked_up[drafts.match_length] if drafts.looked_up else self._drafted[position]
            chance.add(position < n_accepted)
        drafts.n_copied = drafts.n_copied + 1 if drafts.looked_up and n_accepted == n_drafts else 0

    def record_step(self) -> None:
        self._n_steps += 1
        if self._n_steps % 4 == 0:
            self._choices.clear()
        if self._trial is not None:
            self._trial.n_steps -= 1
            if self._trial.n_steps <= 0 or self._trial.n_decoding != self._n_decoding:
                self._end_trial()

    def record_round(self, width: int, seconds: float, *, asked: bool, cold: bool = False) -> None:
        """Count a round in which every slice verified ``width`` drafts; ``asked``: the drafter made them."""
        self._times.add(RoundShape(self._n_decoding, asked and self._extra_group, asked), width, seconds, cold=cold)
        if self._trial is not None and asked == (self._trial.width > 0) and width == self._trial.width and not cold:
            self._trial.n_rounds -= 1
            if self._trial.n_rounds <= 0:
                self._end_trial()

    # ---- inside

    def _tokens(self, match_length: int, n: int) -> list[float]:
        """Return the tokens expected of a slice with 0, 1, ... n drafts; ``match_length``: of a lookup, else 0."""
        if match_length:
            chances = [self._looked_up[match_length].mean(MATCH_CHANCES[match_length])] * n
        else:
            chances, before = [], self._prior.first_chance
            for position in range(n):
                before = self._drafted[position].mean(before)
                chances.append(before)
        return list(accumulate(accumulate(chances, mul), initial=1.0))

    def _rate(self, n_decoding: int, width: int, beside: bool, tokens: Sequence[float]) -> float:
        seconds = self._times.seconds(RoundShape(n_decoding, beside, width > 0), width)
        return tokens[width] / max(seconds or 1.0, 1e-9)

    def _choose(self, n_decoding: int) -> tuple[int, bool]:
        """Return the width, and whether to draft beside the stages; begin a trial if one is due."""
        if self._trial is not None and self._trial.n_decoding == n_decoding:
            return self._trial.width, self._trial.beside
        if n_decoding in self._choices:
            return self._choices[n_decoding]
        if not self._times.n_rounds(RoundShape(n_decoding, False, False), 0) and not self._times.known:
            return 0, False  # the very first round measures plain decoding
        tokens = self._tokens(0, self.max_drafts)
        options = [(width, False) for width in range(self.max_drafts + 1)]
        options += [(width, True) for width in range(1, self.max_drafts + 1)] if self.apart and n_decoding > 1 else []
        rates = {option: self._rate(n_decoding, *option, tokens) for option in options}
        best = max(options, key=rates.__getitem__)
        if rates[best] <= rates[0, False] * (1.0 if self._width else ON_GAIN):
            best = 0, False
        if (best[0] > 0) != (self._width > 0):
            self._trial_interval = TRIAL_INTERVAL
        self._choices[n_decoding] = best
        self._width, self._chosen = best[0], True
        if self._n_steps < self._trial_at:
            return best
        self._begin_trial(n_decoding, best, rates)
        return self._choose(n_decoding)

    def _begin_trial(self, n_decoding: int, best: tuple[int, bool], rates: dict[tuple[int, bool], float]) -> None:
        """Begin a trial of the least measured neighbour, plain decoding included; without drafts of the best width."""
        width, beside = best
        if width:
            near = [(width + 1, beside), (width - 1, beside and width > 1), (0, False), (width, not beside)]
            options = [option for option in near if option in rates and option != best]
            width, beside = min(
                options, key=lambda o: self._times.n_rounds(RoundShape(n_decoding, o[1], o[0] > 0), o[0])
            )
        else:
            self._decay_rates()
            width, beside = max((option for option in rates if option[0]), key=rates.__getitem__)
        n_rounds = TRIAL_ROUNDS * (1 + (n_decoding == 1))
        self._trial = WidthTrial(n_decoding, width, beside, n_rounds, n_steps=4 * n_rounds * self._n_groups)
        self._trial_at = self._n_steps + self._trial_interval
        self._trial_interval = min(2 * self._trial_interval, MAX_TRIAL_INTERVAL)

    def _end_trial(self) -> None:
        self._trial = None
        self._choices.clear()

    def _decay_rates(self) -> None:
        for chance in self._drafted:
            chance.decay()


class DrafterSuspension:
    """Suspension of an unused drafter, which costs time: its context follows every step. A suspended one is resumed
    after a number of steps, which doubles each time that it stays unused, or, if it was used before, when a request
    arrives while no sequence is decoding."""

    def __init__(self) -> None:
        self.suspended = False
        self._used = False  # since it was resumed last
        self._n_steps = 0  # since it was used, resumed or suspended
        self._interval = ACTIVE_STEPS

    def is_due(self, *, idle: bool) -> bool:
        """Return whether to resume the drafter, or to suspend it; ``idle``: no sequence is decoding."""
        if self.suspended:
            return self._n_steps >= self._interval or (idle and self._used)
        return self._n_steps >= ACTIVE_STEPS

    def toggle(self) -> None:
        self.suspended, self._n_steps = not self.suspended, 0
        if self.suspended:
            self._interval = ACTIVE_STEPS if self._used else min(2 * self._interval, MAX_SUSPEND_STEPS)
        else:
            self._used = False

    def record_step(self) -> None:
        self._n_steps += 1

    def record_use(self) -> None:
        """Record that drafts are asked for outside a trial."""
        self._n_steps, self._used = 0, True

    def reset(self) -> None:
        """Start with another drafter, or the same one attached again."""
        self.suspended = self._used = False
        self._n_steps = 0
