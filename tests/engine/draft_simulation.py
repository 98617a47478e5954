"""Decoding with drafts on simulated steps: what a policy makes of a machine and a drafter, in tokens a second.

A ``Machine`` says what steps cost, a ``Drafter`` which drafts are accepted and what probability it reports; both are
seeded, so that a run repeats.  ``decode`` asks the policy as the scheduler does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lucevisor.engine.sequence import RequestRecord
from lucevisor.engine.speculation import Speculation
from lucevisor.protocol.steps import Drafted
from tests.engine.toy_engine import request


@dataclass(frozen=True)
class Machine:
    """``verify_s(rows, slices)`` and ``draft_s(slices, n_ahead)``; ``uneven``: factor for slices of unequal lengths,
    which no CUDA graph replays.  ``jitter``: a step takes up to this share more or less.  ``first_s``: what the first
    two steps of a shape take more, to compile and capture.
    """

    verify_s: Callable[[int, int], float]
    draft_s: Callable[[int, int], float]
    uneven: float = 1.0
    jitter: float = 0.0
    first_s: float = 0.0


def cpu_demo(jitter: float = 0.0) -> Machine:
    """A small model on a CPU: plain 16 ms, verifying 7 drafts (8 rows) 1.4 x, a draft 4 ms whatever its width."""
    return Machine(lambda rows, slices: 0.016 * (1 + 0.4 / 7 * (rows - 1)), lambda slices, n: 0.004, jitter=jitter)


def h200_dflash(jitter: float = 0.0) -> Machine:
    """27B on an H200: 8 rows 1.15 x, a block of drafts 0.13 x; past 32 rows GEMVs of more rows; no graph for uneven."""

    def verify(rows: int, slices: int) -> float:
        return 0.014 * (1 + 0.15 / 7 * (rows - 1) + (0.03 * (rows - 32) if rows > 32 else 0.0) + 0.005 * slices)

    return Machine(verify, lambda slices, n: 0.014 * (0.13 + 0.005 * slices), uneven=2.0, jitter=jitter, first_s=0.04)


def h200_mtp(jitter: float = 0.0) -> Machine:
    """The same with an MTP head: each draft reads a block and the output matrix."""
    verify = h200_dflash().verify_s
    return Machine(verify, lambda slices, n: 0.0009 * n + 0.0002, uneven=2.0, jitter=jitter, first_s=0.04)


@dataclass
class Drafter:
    """Each draft is accepted with a chance, drawn anew for every token: ``chances[position]`` on average, spread by
    ``spread`` (0: always that).  ``honest``: the probability reported is that chance, else always 0.9.
    ``at(n_tokens)`` gives other chances for a part of the text.
    """

    chances: Sequence[float]
    spread: float = 0.0
    honest: bool = True
    at: Callable[[int], Sequence[float]] | None = None

    def draft(self, n: int, n_tokens: int, rng: random.Random) -> tuple[list[float], list[bool]]:
        """Probabilities reported of n drafts, and whether each is accepted after those before it."""
        chances = self.at(n_tokens) if self.at is not None else self.chances
        means = [chances[min(i, len(chances) - 1)] for i in range(n)]
        drawn = [_spread(mean, self.spread, rng) for mean in means]
        return [c if self.honest else 0.9 for c in drawn], [rng.random() < c for c in drawn]


def _spread(mean: float, spread: float, rng: random.Random) -> float:
    if spread == 0.0 or not 0.0 < mean < 1.0:
        return mean
    weight = 1 / spread**2 - 1  # of a beta distribution; spread 1 would be all or nothing
    return rng.betavariate(mean * weight, (1 - mean) * weight)


@dataclass
class Run:
    """What a simulated decode came to."""

    n_tokens: int = 0
    seconds: float = 0.0
    plain_s: float = 0.0  # what the same tokens would have taken without drafts
    widths: list[int] = field(default_factory=list)  # drafts of the first slice, by step

    @property
    def rate(self) -> float:
        return self.n_tokens / self.seconds


@dataclass
class Simulation:
    """``n_slices`` requests decode for ever, each with its drafter."""

    machine: Machine
    drafters: list[Drafter]
    policy: Speculation
    seed: int = 0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.records: list[RequestRecord] = []
        self.drafts: dict[str, tuple[Drafted, list[bool]]] = {}
        self.n_tokens: list[int] = []
        self.run = Run()
        self.slowness = 1.0
        self.shapes: set[tuple[int, ...]] = set()  # widths of the steps
        self._seen: dict[object, int] = {}
        for drafter in self.drafters:
            self._join(drafter)

    def join(self, drafter: Drafter) -> None:
        """One more request decodes."""
        self.drafters.append(drafter)
        self._join(drafter)

    def replace(self, drafters: list[Drafter]) -> None:
        """The requests end, and as many others begin."""
        self.records, self.n_tokens, self.drafters = [], [], []
        self.drafts.clear()
        for drafter in drafters:
            self.join(drafter)

    def _join(self, drafter: Drafter) -> None:
        name = f"r{next(self._numbers)}"
        self.records.append(RequestRecord(request(name, range(10), n=100), 0, 100, 0.0))
        self.n_tokens.append(0)

    def decode(self, n_tokens: int) -> Run:
        """Until every request has on average so many tokens more; returns what they came to."""
        self.run = Run()
        while self.run.n_tokens < n_tokens * len(self.records):
            self._cycle()
        return self.run

    def _cycle(self) -> None:
        m, run = len(self.records), self.run
        none = (Drafted(0, []), list[bool]())
        drafts = [self.drafts.get(r.request.request_id, none)[0] for r in self.records]
        offered = [(r, self.policy.candidates(r, drafted)) for r, drafted in zip(self.records, drafts, strict=True)]
        chosen = self.policy.n_verify(offered, m) if self.drafts else {}
        widths = [chosen.get(r.request.request_id, 0) for r in self.records]
        ahead = [self.policy.n_ahead(r, m) for r in self.records]
        rows, uneven = m + sum(widths), len(set(widths)) > 1
        true_s = self.machine.verify_s(rows, m) * (self.machine.uneven if uneven else 1.0)
        seconds = self._timed(true_s, ("v", *widths))
        run.widths.append(widths[0])
        self.shapes.add(tuple(widths))
        self.policy.measured(rows, m, seconds)
        n_new = 0
        for i, (record, width) in enumerate(zip(self.records, widths, strict=True)):
            n_accepted = 0
            if width and record.request.request_id in self.drafts:  # else it is padding
                right = self.drafts[record.request.request_id][1][:width]
                n_accepted = [*right, False].index(False)
                self.policy.verified(record, len(right), n_accepted)
            self.n_tokens[i] += 1 + n_accepted
            n_new += 1 + n_accepted
        run.n_tokens += n_new
        run.plain_s += n_new / m * self.machine.verify_s(m, m) * self.slowness
        self.drafts.clear()
        if any(ahead):
            self._draft(ahead)

    def _draft(self, ahead: Sequence[int]) -> None:
        m, most = sum(n > 0 for n in ahead), max(ahead)
        seconds = self._timed(self.machine.draft_s(m, most), ("d", m, most))
        self.policy.measured_draft(m, most, seconds)
        for i, (record, n) in enumerate(zip(self.records, ahead, strict=True)):
            if n:
                probabilities, right = self.drafters[i].draft(n, self.n_tokens[i], self.rng)
                drafted = Drafted(i, [1] * n, probabilities)
                self.drafts[record.request.request_id] = drafted, right
                self.policy.drafted(record, drafted)

    def _timed(self, seconds: float, shape: tuple[object, ...]) -> float:
        """Let a step pass.  Returns what the policy is told; jitter is left out of the run's own time."""
        seconds *= self.slowness
        self._seen[shape] = self._seen.get(shape, 0) + 1
        warm = self._seen[shape] <= 2 and any(shape[1:])  # plain decoding was warmed up at load
        first_s = self.machine.first_s * (0.25 if shape[0] == "d" else 1.0)
        self.run.seconds += seconds + first_s * warm
        return seconds * (1 + self.machine.jitter * self.rng.uniform(-1, 1)) + first_s * warm


def fixed_rate(machine: Machine, drafters: list[Drafter], width: int, n_tokens: int = 20_000) -> float:
    """Tokens a second with always ``width`` drafts, without jitter or first steps; ``width`` 0: plain decoding."""
    m, rng, seconds, total = len(drafters), random.Random(1), 0.0, 0
    counts = [0] * m
    while total < n_tokens:
        for i, drafter in enumerate(drafters):
            _, right = drafter.draft(width, counts[i], rng)
            n_new = 1 + (right.index(False) if False in right else width)
            counts[i] += n_new
            total += n_new
        seconds += machine.verify_s(m * (1 + width), m) + (machine.draft_s(m, width) if width else 0.0)
    return total / seconds
