"""Acceptance rates: how likely drafts are to be accepted, by position and by what the drafter says of them.

Pure.  The chance of a draft is its probability of being accepted, given that those before it were.  Counts forget
exponentially, so a text that becomes easier or harder shows within a few verifications.  What was not seen yet is
estimated from what was: a request from all requests, a position from the one before it, the first position from the
kind of drafter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Final

REQUEST_MEMORY: Final = 24
"""Observations of a position that a request remembers: some 100 tokens, about a paragraph or a function."""
ALL_MEMORY: Final = 96
"""The same over all requests: a few answers."""
PRIOR_WEIGHT: Final = 4.0
"""Observations that a prior counts as: after four of its own a request weighs as much as all others."""
POSITION_DECAY: Final = 0.97
"""A draft behind an accepted one is a little less likely to be accepted, before it was ever seen: published rates by
position fall by 0 to 10 % from one to the next."""
FADED_WEIGHT: Final = 6.0
"""Observations that are left of what was learned once drafting has been off for a while."""
SURPRISE: Final = 0.01
"""Chance of a run of equal verdicts on first drafts that shows that the text has changed: what was learned fades."""
_BIN_EDGES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
_LOSS_MEMORY: Final = 200
_LEAST: Final = 0.01  # chances are kept this far from 0 and 1: one surprise must not outweigh hundreds of hits


@dataclass(slots=True)
class Rate:
    """Accepted of tried drafts, forgetting with every new one."""

    accepted: float = 0.0
    tried: float = 0.0

    def add(self, accepted: float, memory: int) -> None:
        keep = 1 - 1 / memory
        self.accepted = self.accepted * keep + accepted
        self.tried = self.tried * keep + 1

    def fade(self, weight: float) -> None:
        share = min(1.0, weight / self.tried) if self.tried else 1.0
        self.accepted *= share
        self.tried *= share

    def mean(self, prior: float) -> float:
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


class Rates(list[Rate]):
    """Rates by position."""

    def add(self, position: int, accepted: float, memory: int) -> None:
        while len(self) <= position:
            self.append(Rate())
        self[position].add(accepted, memory)

    def mean(self, position: int, prior: float) -> float:
        return self[position].mean(prior) if position < len(self) else prior


@dataclass(slots=True)
class PositionRates:
    """Rates by position, of a request or of all requests.  ``verdicts``: of verified drafts.  ``offered``: the chances
    that reported probabilities promised, of all drafts, verified or not.
    """

    verdicts: Rates = field(default_factory=Rates)
    offered: Rates = field(default_factory=Rates)
    _run: tuple[bool, float] = (False, 1.0)  # the last verdict on a first draft, and the chance of its run

    def fade(self, weight: float = FADED_WEIGHT) -> None:
        for rate in (*self.verdicts, *self.offered):
            rate.fade(weight)

    def surprised(self, accepted: bool, chance: float) -> bool:
        """Count a verdict on a first draft of that chance; return whether the run of such verdicts is a surprise."""
        likely = chance if accepted else 1 - chance
        likely *= self._run[1] if accepted == self._run[0] else 1.0
        self._run = accepted, 1.0 if likely < SURPRISE else likely
        return likely < SURPRISE


class AcceptanceModel:
    """What was accepted of one source of drafts, over all requests.

    Predicts by position and by reported probability, and uses whichever predicted better lately.
    """

    def __init__(self, first_chance: float, *, trusted: bool = False) -> None:
        """``first_chance``: the chance of a first draft before any verdict.  ``trusted``: begin with reported
        probabilities.
        """
        self._first_chance = first_chance
        self._all = PositionRates()
        self._bins = [Rate() for _ in range(len(_BIN_EDGES) + 1)]
        self._loss_by_position, self._loss_by_probability = float(trusted), 0.0

    @property
    def by_probability(self) -> bool:
        """Whether reported probabilities predict better than positions."""
        return self._loss_by_probability < self._loss_by_position

    def fade(self, own: PositionRates, weight: float = FADED_WEIGHT) -> None:
        """Trust what was learned less: it was long ago, or turned out wrong; ``weight``: what is left of its own."""
        self._all.fade()
        own.fade(weight)

    def chances(self, own: PositionRates, n: int) -> list[float]:
        """Return the chances of ``n`` drafts of a request before they are made."""
        if self.by_probability:
            return self._means(self._all.offered, own.offered, n)
        return self._means(self._all.verdicts, own.verdicts, n)

    def offered(self, own: PositionRates, n: int, probabilities: Sequence[float]) -> list[float]:
        """Return the chances of ``n`` drafts; ``probabilities``: as the drafter reported them, or none."""
        if len(probabilities) >= n and self.by_probability:
            return self._by_probability(probabilities[:n])
        return self._means(self._all.verdicts, own.verdicts, n)

    def drafted(self, own: PositionRates, probabilities: Sequence[float], n_left_out: int = 0) -> None:
        """Learn what probabilities a request's drafts have, whether or not they are verified; of those left out 0."""
        for position, chance in enumerate(self._by_probability(probabilities) + [0.0] * n_left_out):
            own.offered.add(position, chance, REQUEST_MEMORY)
            self._all.offered.add(position, chance, ALL_MEMORY)

    def verified(
        self, own: PositionRates, probabilities: Sequence[float], n_drafts: int, n_accepted: int, n_left_out: int = 0
    ) -> None:
        """Learn from the verdict on a request's drafts; ``n_left_out``: unsure ones that would have followed."""
        if n_left_out and n_accepted == n_drafts == len(probabilities):
            n_drafts += 1  # the next one had no chance
        n_seen = min(n_drafts, n_accepted + 1)
        by_position = self._means(self._all.verdicts, own.verdicts, n_seen)
        by_probability = self._by_probability(probabilities[:n_seen]) if len(probabilities) >= n_seen else None
        if own.surprised(n_accepted > 0, by_position[0]):
            self.fade(own)
        for position in range(n_seen):
            accepted = position < n_accepted
            if by_probability is not None:
                self._score(by_position[position], by_probability[position], accepted)
                self._bins[_bin(probabilities[position])].add(accepted, ALL_MEMORY)
            own.verdicts.add(position, accepted, REQUEST_MEMORY)
            self._all.verdicts.add(position, accepted, ALL_MEMORY)

    def _means(self, of_all: Rates, own: Rates, n: int) -> list[float]:
        found, before = [], self._first_chance / POSITION_DECAY
        for position in range(n):
            before = of_all.mean(position, before * POSITION_DECAY)
            found.append(own.mean(position, before))
        return found

    def _by_probability(self, probabilities: Sequence[float]) -> list[float]:
        return [self._bins[_bin(p)].mean(p) for p in probabilities]

    def _score(self, by_position: float, by_probability: float, accepted: bool) -> None:
        keep = 1 - 1 / _LOSS_MEMORY
        self._loss_by_position = keep * self._loss_by_position + _loss(by_position, accepted)
        self._loss_by_probability = keep * self._loss_by_probability + _loss(by_probability, accepted)


class DraftLengths:
    """How many drafts are left where unsure ones are left out (``Slice.p_min``)."""

    def __init__(self) -> None:
        self._rates, self._any_left_out = Rates(), False

    def add(self, n_made: int, n_left_out: int) -> None:
        """Count drafts; all that were made before any were left out add nothing to what is assumed."""
        self._any_left_out = self._any_left_out or n_left_out > 0
        for position in range(n_made + n_left_out if self._any_left_out else 0):
            self._rates.add(position, position < n_made, ALL_MEMORY)

    @property
    def shares(self) -> Sequence[float]:
        """Of the drafts asked for, how often each is made, by position; empty where all are."""
        return [rate.mean(1.0) for rate in self._rates] if self._any_left_out else ()


def expected_tokens(chances: Sequence[float]) -> list[float]:
    """Return the tokens a verify slice yields on average with its first 0, 1, ... len(chances) drafts."""
    return list(accumulate(accumulate(chances, mul), initial=1.0))


def _bin(probability: float) -> int:
    return bisect_right(_BIN_EDGES, probability)


def _loss(chance: float, accepted: bool) -> float:
    chance = min(1 - _LEAST, max(_LEAST, chance))
    return -math.log(chance if accepted else 1 - chance)
