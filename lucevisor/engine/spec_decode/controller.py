"""Speculative decoding policy: how many tokens to draft and how many drafts to verify, for the most tokens a second.

Verdicts and measured times in, widths out; no clock.  Acceptance is averaged by position of a draft.  The time of a
round, from one result of a micro-batch to its next, is averaged by batch and width, so it includes drafting, links and
waiting.  A neighbouring width is tried now and then.  Where no drafts pay they are tried at growing intervals, and a
drafter that is not used for a while is suspended.  docs/speculation.md has the rules.
"""

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
"""Verdicts and rounds that an average remembers: a paragraph of text."""
ON_GAIN: Final = 1.05
"""Gain over plain decoding from which drafting begins; once begun it goes on while it gains anything."""
TRY_INTERVAL: Final = 64
"""Steps between tries of another width; doubles up to MAX_TRY_INTERVAL while drafting stays on or off."""
MAX_TRY_INTERVAL: Final = 512
TRY_ROUNDS: Final = 2
"""Warm rounds of a try.  A single sequence gets twice as many, as each round has one verdict."""
ACTIVE_STEPS: Final = 128
"""Steps without drafts, other than tries, after which the drafter is suspended, and its first suspension."""
MAX_SUSPEND_STEPS: Final = 8192
SUSPENDED: Final = "the drafter is suspended, because plain decoding is faster; it is tried again now and then"

PRIOR_VERDICTS: Final = 2.0  # that an assumed chance counts as
ROW_SHARE: Final = 0.05  # assumed time of one more row, of a step of one row: 0.02 on a GPU, 0.06 on a small cpu


class DrafterPrior(NamedTuple):
    """Assumptions about a drafter before it is measured: chance of its first draft, time of one draft over that of a
    plain step, and how much of that each further draft adds.
    """

    first_chance: float
    draft_share: float
    more_share: float


PRIORS: Final[dict[DraftKind, DrafterPrior]] = {
    DraftKind.MTP: DrafterPrior(0.8, 0.06, 1.0),  # one block and the output matrix for each draft
    DraftKind.DFLASH: DrafterPrior(0.75, 0.15, 0.02),  # one pass for all drafts
}


@dataclass(slots=True, eq=False)
class RequestDrafts:
    """Drafting state of one request.

    ``match_length``: matching tokens of the lookup that found the drafts offered or verified last; 0 if the drafter
    made them.  ``copying``: the last drafts were looked up, and all of them were accepted.
    """

    match_length: int = 0
    copying: bool = False
    lookup: NgramLookup | None = None  # n-grams of its tokens; None until drafts are looked up
    n_asked: int = 0  # steps behind which drafts were considered
    n_verified: int = 0
    n_accepted: int = 0

    @property
    def looked_up(self) -> bool:
        """Whether the drafts were found in its own tokens."""
        return self.match_length > 0


@dataclass(slots=True)
class Chance:
    """Exponentially weighted share of accepted drafts."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: bool) -> None:
        """Count a verdict."""
        keep = 1 - 1 / MEMORY
        self.accepted = self.accepted * keep + accepted
        self.tried = self.tried * keep + 1

    def fade(self) -> None:
        """Forget most verdicts: the text may be another."""
        share = min(1.0, MEMORY / 4 / self.tried) if self.tried else 1.0
        self.accepted *= share
        self.tried *= share

    def mean(self, prior: float) -> float:
        """Return the chance of a draft."""
        return (self.accepted + PRIOR_VERDICTS * prior) / (self.tried + PRIOR_VERDICTS)


class Batch(NamedTuple):
    """What the time of a round depends on, besides its width: decoding sequences, whether an additional micro-batch is
    drafted beside the stages, and whether the drafter is asked.
    """

    n_decoding: int
    beside: bool
    asked: bool


@dataclass(slots=True)
class RoundTimes:
    """Seconds of a round by batch and width."""

    prior: DrafterPrior
    known: dict[Batch, dict[int, tuple[float, int]]] = field(default_factory=dict)  # seconds, rounds
    upper: dict[tuple[Batch, int], float] = field(default_factory=dict)  # cold rounds, which compile or capture

    def add(self, batch: Batch, width: int, seconds: float, *, cold: bool) -> None:
        """Count a round."""
        if cold:
            self.upper[batch, width] = min(self.upper.get((batch, width), seconds), seconds)
            return
        widths = self.known.setdefault(batch, {})
        mean, n = widths.get(width, (seconds, 0))
        sample = min(seconds, 2 * mean) if n > 1 else seconds
        widths[width] = mean + (sample - mean) * max(1 / (n + 1), 2 / MEMORY), n + 1

    def n_rounds(self, batch: Batch, width: int) -> int:
        """Return how many warm rounds were counted."""
        return self.known.get(batch, {}).get(width, (0.0, 0))[1]

    def seconds(self, batch: Batch, width: int) -> float | None:
        """Return the seconds of a round, interpolated or scaled from the nearest measured ones; None before any."""
        widths = dict(self.known.get(batch, {}))
        plain = self.known.get(Batch(batch.n_decoding, False, False), {}).get(0)
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

    def _assumed(self, batch: Batch, width: int) -> float:
        """Return the assumed time of a round over that of a step of one row."""
        plain = 1 + ROW_SHARE * (batch.n_decoding - 1)
        step = plain + ROW_SHARE * batch.n_decoding * width
        drafts = self.prior.draft_share * (1 + self.prior.more_share * (width - 1)) if batch.asked and width else 0.0
        return step + plain * drafts


@dataclass(slots=True)
class Try:
    """A width that is tried for some rounds."""

    n_decoding: int
    width: int
    beside: bool
    n_rounds: int  # warm ones that are left
    n_steps: int  # of any kind that are left


class SpecDecodeController:
    """Widths of a batch; one per engine."""

    def __init__(self, max_drafts: int, kind: DraftKind = DraftKind.MTP, *, fixed: bool = False) -> None:
        """``fixed``: always ``max_drafts``."""
        self.apart = False  # the drafter works beside the output stage
        self.max_drafts, self.fixed, self._prior = max_drafts, fixed, PRIORS[kind]
        self._drafted = [Chance() for _ in range(max_drafts)]  # by position
        self._looked_up = {length: Chance() for length in MATCH_CHANCES}
        self._times = RoundTimes(self._prior)
        self._choices: dict[int, tuple[int, bool]] = {}  # width and beside, by decoding sequences
        self._width, self._beside, self._chosen = 0, False, False  # chosen last; plain decoding was measured
        self._n_decoding = self._n_groups = 1
        self._extra_group = False  # drafted beside the stages
        self._try: Try | None = None
        self._n_steps, self._try_at, self._try_interval = 0, 0, TRY_INTERVAL

    # ---- decisions

    def num_draft_tokens(self, drafts: RequestDrafts, n_decoding: int) -> int:
        """Return how many drafts to ask for behind the next sampled token; 0: none."""
        if self.fixed:
            return self.max_drafts
        self._n_decoding = n_decoding
        if drafts.copying and n_decoding == 1:
            return 0  # its own tokens are drafts enough
        if not drafts.n_asked:  # its text may be easier or harder than those before it
            self._try_at = min(self._try_at, self._n_steps + TRY_INTERVAL // 2)
            if n_decoding == 1:
                self._fade()
        drafts.n_asked += 1
        width, self._beside = self._choose(n_decoding)
        return width

    def candidates(self, drafts: RequestDrafts, drafted: Drafted) -> Drafted:
        """Return the drafts to consider for the next slice: those of the draft stage, if any, or those found in the
        sequence's own tokens where more of them are likely to be accepted.
        """
        lookup, drafts.match_length = drafts.lookup, 0
        match = lookup.match() if lookup is not None and not lookup.n_waiting else None
        if lookup is not None and match is not None:
            expected = self._tokens(match.length, self.max_drafts)[-1]
            if expected > self._tokens(0, len(drafted.tokens))[-1]:
                drafts.match_length = match.length
                drafted = Drafted(drafted.sequence, lookup.continuation(match, self.max_drafts), [])
        drafts.copying = drafts.copying and drafts.looked_up
        return drafted

    def num_verify_tokens(self, offers: Sequence[tuple[RequestDrafts, Drafted]], n_decoding: int) -> int:
        """Return how many drafts each of the next slices verifies, all of one step; padding makes them equally long.

        0: a plain decode.
        """
        self._n_decoding = n_decoding
        counts = [min(self.max_drafts, len(drafted.tokens)) for _, drafted in offers]
        most, asked = max(counts), any(drafted.tokens and not drafts.looked_up for drafts, drafted in offers)
        if self.fixed:
            return most
        if self._try is not None and self._try.n_decoding == n_decoding and asked:
            return min(most, self._try.width)
        tokens = [self._tokens(drafts.match_length, n) for (drafts, _), n in zip(offers, counts, strict=True)]
        rates = []
        for width in range(most + 1):
            seconds = self._times.seconds(Batch(n_decoding, self._beside and asked, asked and width > 0), width)
            if seconds is None:
                return 0
            rates.append(sum(expected[min(width, len(expected) - 1)] for expected in tokens) / max(seconds, 1e-9))
        return max(range(most + 1), key=rates.__getitem__)

    @property
    def width(self) -> int:
        """Drafts that are asked for at present."""
        return self.max_drafts if self.fixed else self._width

    @property
    def no_drafts(self) -> str:
        """Why no drafts are asked for at present; empty while they are, or before that was decided."""
        if self.fixed or self._width or not self._chosen:
            return ""
        return "drafting is off: by measured times and acceptance plain decoding is faster"

    @property
    def trying(self) -> bool:
        """Whether a width is being tried."""
        return self._try is not None

    def choose_groups(self, n_stages: int) -> int:
        """Return the micro-batches to deal sequences into: one a stage, one more while a drafter apart works beside."""
        self._extra_group = self.apart and self._n_decoding > n_stages and (self.fixed or self._beside)
        self._n_groups = n_stages + self._extra_group
        return self._n_groups

    # ---- measurements

    def record_verdict(self, drafts: RequestDrafts, n_drafts: int, n_accepted: int) -> None:
        """Count a verdict on candidates, padding left out."""
        for position in range(min(n_drafts, n_accepted + 1)):
            chance = self._looked_up[drafts.match_length] if drafts.looked_up else self._drafted[position]
            chance.add(position < n_accepted)
        drafts.copying = drafts.looked_up and n_accepted == n_drafts

    def record_step(self) -> None:
        """Count a step of decodes."""
        self._n_steps += 1
        if self._n_steps % 4 == 0:
            self._choices.clear()
        if self._try is not None:
            self._try.n_steps -= 1
            if self._try.n_steps <= 0 or self._try.n_decoding != self._n_decoding:
                self._end_try()

    def record_round(self, width: int, seconds: float, *, asked: bool, cold: bool = False) -> None:
        """Count a round in which every slice verified ``width`` drafts; ``asked``: the drafter made them.  ``cold`` as
        in StepResult.
        """
        self._times.add(Batch(self._n_decoding, asked and self._extra_group, asked), width, seconds, cold=cold)
        if self._try is not None and asked == (self._try.width > 0) and width == self._try.width and not cold:
            self._try.n_rounds -= 1
            if self._try.n_rounds <= 0:
                self._end_try()

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
        seconds = self._times.seconds(Batch(n_decoding, beside, width > 0), width)
        return tokens[width] / max(seconds or 1.0, 1e-9)

    def _choose(self, n_decoding: int) -> tuple[int, bool]:
        """Return the width, and whether to draft beside the stages; begin a try if one is due."""
        if self._try is not None and self._try.n_decoding == n_decoding:
            return self._try.width, self._try.beside
        if n_decoding in self._choices:
            return self._choices[n_decoding]
        if not self._times.n_rounds(Batch(n_decoding, False, False), 0) and not self._times.known:
            return 0, False  # the first round of all shows what plain decoding takes
        tokens = self._tokens(0, self.max_drafts)
        options = [(width, False) for width in range(self.max_drafts + 1)]
        options += [(width, True) for width in range(1, self.max_drafts + 1)] if self.apart and n_decoding > 1 else []
        rates = {option: self._rate(n_decoding, *option, tokens) for option in options}
        best = max(options, key=rates.__getitem__)
        if rates[best] <= rates[0, False] * (1.0 if self._width else ON_GAIN):
            best = 0, False
        if (best[0] > 0) != (self._width > 0):
            self._try_interval = TRY_INTERVAL
        self._choices[n_decoding] = best
        self._width, self._chosen = best[0], True
        if self._n_steps < self._try_at:
            return best
        self._begin_try(n_decoding, best, rates)
        return self._choose(n_decoding)

    def _begin_try(self, n_decoding: int, best: tuple[int, bool], rates: dict[tuple[int, bool], float]) -> None:
        """Try the neighbour that was measured least, plain decoding included; without drafts the best width."""
        width, beside = best
        if width:
            near = [(width + 1, beside), (width - 1, beside and width > 1), (0, False), (width, not beside)]
            options = [option for option in near if option in rates and option != best]
            width, beside = min(options, key=lambda o: self._times.n_rounds(Batch(n_decoding, o[1], o[0] > 0), o[0]))
        else:
            self._fade()
            width, beside = max((option for option in rates if option[0]), key=rates.__getitem__)
        n_rounds = TRY_ROUNDS * (1 + (n_decoding == 1))
        self._try = Try(n_decoding, width, beside, n_rounds, n_steps=4 * n_rounds * self._n_groups)
        self._try_at = self._n_steps + self._try_interval
        self._try_interval = min(2 * self._try_interval, MAX_TRY_INTERVAL)

    def _end_try(self) -> None:
        self._try = None
        self._choices.clear()

    def _fade(self) -> None:
        for chance in self._drafted:
            chance.fade()


class DrafterSuspension:
    """Whether the drafter is suspended.

    A drafter that is not asked still costs: its context follows every step, and prompts go through its layers before
    the first decode.  While it is suspended it gets no steps at all.  It is resumed after a number of steps, which
    doubles each time that it was resumed in vain.  One that was used before is also resumed when a request comes while
    nothing is decoded, as its prompt is computed with the drafter then.
    """

    def __init__(self) -> None:
        self.suspended = False
        self._used = False  # since it was resumed last
        self._n_steps = 0  # since it was used, resumed or suspended
        self._interval = ACTIVE_STEPS

    def is_due(self, *, idle: bool) -> bool:
        """Whether it is to be resumed, or suspended if the controller wants no drafts; ``idle``: nothing is decoded."""
        if self.suspended:
            return self._n_steps >= self._interval or (idle and self._used)
        return self._n_steps >= ACTIVE_STEPS

    def toggle(self) -> None:
        """Suspend or resume."""
        self.suspended, self._n_steps = not self.suspended, 0
        if self.suspended:
            self._interval = ACTIVE_STEPS if self._used else min(2 * self._interval, MAX_SUSPEND_STEPS)
        else:
            self._used = False

    def record_step(self) -> None:
        """Count a step of decodes."""
        self._n_steps += 1

    def record_use(self) -> None:
        """Drafts are asked for, not for a try."""
        self._n_steps, self._used = 0, True

    def reset(self) -> None:
        """Start with another drafter, or the same one attached again."""
        self.suspended = self._used = False
        self._n_steps = 0
