"""Decoding with drafts on simulated steps: what a policy makes of a machine and a drafter, in tokens a second.

A ``Machine`` says what steps cost, a ``Drafter`` which drafts are accepted and what probability it reports; both are
seeded, so that a run repeats.  ``decode`` asks the policy as the scheduler does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from lucevisor.engine.drafting.controller import SpecDecodeController
from lucevisor.engine.drafting.request import RequestDrafts
from lucevisor.protocol.steps import Drafted


@dataclass(frozen=True)
class Machine:
    """``verify_s(rows, slices)`` and ``draft_s(slices, n_ahead)``; ``uneven``: factor for slices of unequal lengths,
    which no CUDA graph replays.  ``jitter``: a step takes up to this share more or less.  ``first_s``: what the first
    two steps of a shape take more, to compile and capture.  ``upkeep_s``: what the draft stage takes for a step when it
    is not asked for drafts.  ``apart``: it works beside the stage, else in its place.  ``wait_s``: what lies between a
    step that asks for drafts and the next one, beside them; plain steps run ahead.  ``tells_cold``: the policy is told
    which steps those first two are.
    """

    verify_s: Callable[[int, int], float]
    draft_s: Callable[[int, int], float]
    uneven: float = 1.0
    jitter: float = 0.0
    first_s: float = 0.0
    upkeep_s: float = 0.0
    apart: bool = False
    wait_s: float = 0.0
    tells_cold: bool = False


def cpu_demo(jitter: float = 0.0) -> Machine:
    """A small model on a CPU: plain 16 ms, verifying 7 drafts (8 rows) 1.4 x, a draft 4 ms whatever its width."""
    return Machine(lambda rows, slices: 0.016 * (1 + 0.4 / 7 * (rows - 1)), lambda slices, n: 0.004, jitter=jitter)


def h200_dflash(jitter: float = 0.0) -> Machine:
    """27B on an H200: 8 rows 1.15 x, a block of drafts 0.13 x; past 32 rows GEMVs of more rows; no graph for uneven."""

    def verify(rows: int, slices: int) -> float:
        return 0.014 * (1 + 0.15 / 7 * (rows - 1) + (0.03 * (rows - 32) if rows > 32 else 0.0) + 0.005 * slices)

    return Machine(
        verify,
        lambda slices, n: 0.014 * (0.13 + 0.005 * slices),
        uneven=2.0,
        jitter=jitter,
        first_s=0.04,
        tells_cold=True,
    )


def h200_mtp(jitter: float = 0.0) -> Machine:
    """The same with an MTP head: each draft reads a block and the output matrix."""
    verify = h200_dflash().verify_s
    return Machine(
        verify, lambda slices, n: 0.0009 * n + 0.0002, uneven=2.0, jitter=jitter, first_s=0.04, tells_cold=True
    )


def h200_streams(drafts_s: Callable[[int], float], jitter: float = 0.0) -> Machine:
    """27B on an H200 as 16 streams find it: steps of 16 rows 9.5 ms, of 32 15 ms and of 48 30 ms, as their products are
    other kernels'; 2 ms between a step and the one behind its drafts; a graph has to be captured for each shape.

    ``drafts_s(n)``: seconds of ``n`` drafts of all.
    """

    def verify(rows: int, slices: int) -> float:
        drafts_s = 0.00034 * (rows - slices) + 0.0006 * max(0, rows - 32)
        return 0.0055 + 0.00026 * (slices - 1) + drafts_s

    def draft(slices: int, n: int) -> float:
        return drafts_s(n) * (0.25 + 0.75 * slices / 16)

    return Machine(verify, draft, uneven=4.0, jitter=jitter, first_s=0.045, wait_s=0.002, tells_cold=True)


def streams_mtp(jitter: float = 0.0) -> Machine:
    """With an MTP head: a draft of all 1 ms."""
    return h200_streams(lambda n: 0.00075 + 0.00025 * n, jitter)


def streams_dflash(jitter: float = 0.0) -> Machine:
    """With DFlash 2: a row of a block of all 0.9 ms."""
    return h200_streams(lambda n: 0.0006 + 0.0009 * n, jitter)


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
    asked: list[int] = field(default_factory=list)  # the same of those asked for behind it

    @property
    def rate(self) -> float:
        return self.n_tokens / self.seconds


@dataclass
class Simulation:
    """``n_slices`` requests decode for ever, each with its drafter, over a pipeline of one stage.

    ``groups``: micro-batches; None: as the policy chooses.
    """

    machine: Machine
    drafters: list[Drafter]
    policy: SpecDecodeController
    seed: int = 0
    groups: int | None = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.requests: list[RequestDrafts] = []
        self.drafts: dict[str, tuple[Drafted, list[bool]]] = {}
        self.n_tokens: list[int] = []
        self.run = Run()
        self.slowness = 1.0
        self.shapes: set[tuple[int, ...]] = set()  # widths of the steps
        self._seen: dict[object, int] = {}
        self._measured: list[Callable[[], None]] = []  # what the policy learns when the next step was sent
        self._waits = False  # the next step, for the drafts that the last one asked for
        self._ready_at: list[float] = []  # by request: when its next step may begin
        self._stage_free_at = self._drafter_free_at = 0.0
        self.policy.apart = self.machine.apart
        for drafter in self.drafters:
            self._join(drafter)

    def join(self, drafter: Drafter) -> None:
        """One more request decodes."""
        self.drafters.append(drafter)
        self._join(drafter)

    def replace(self, drafters: list[Drafter]) -> None:
        """The requests end, and as many others begin."""
        self.requests, self.n_tokens, self.drafters, self._ready_at = [], [], [], []
        self.drafts.clear()
        for drafter in drafters:
            self.join(drafter)

    def _join(self, drafter: Drafter) -> None:
        name = f"r{next(self._numbers)}"
        self.requests.append(RequestDrafts(name))
        self.n_tokens.append(0)
        self._ready_at.append(self._stage_free_at)

    def decode(self, n_tokens: int) -> Run:
        """Until every request has on average so many tokens more; returns what they came to."""
        self.run, began_at = Run(), self._stage_free_at
        while self.run.n_tokens < n_tokens * len(self.requests):
            self._cycle()
        self.run.seconds = self._stage_free_at - began_at
        return self.run

    def _cycle(self) -> None:
        """One step, of the requests that were ready first, and the draft stage's work for it."""
        m, run = len(self.requests), self.run
        n_groups = self.policy.n_groups = self.groups or self.policy.choose_groups(1)
        chosen = sorted(sorted(range(m), key=self._ready_at.__getitem__)[: -(-m // n_groups)])
        requests = [self.requests[i] for i in chosen]
        none = (Drafted(0, []), list[bool]())
        drafts = [self.drafts.get(r.request_id, none) for r in requests]
        offered = [(r, self.policy.candidates(r, drafted)) for r, (drafted, _) in zip(requests, drafts, strict=True)]
        wanted = self.policy.n_verify(offered, m) if any(drafted.tokens for drafted, _ in drafts) else 0
        widths = [wanted] * len(requests)
        ahead = [self.policy.n_ahead(r, m) for r in requests]
        while self._measured:
            self._measured.pop(0)()
        n, rows, uneven = len(chosen), len(chosen) + sum(widths), len(set(widths)) > 1
        true_s = self.machine.verify_s(rows, n) * (self.machine.uneven if uneven else 1.0)
        began_at = max(self._stage_free_at, *(self._ready_at[i] for i in chosen)) + self._gap()
        told_s, seconds, cold = self._timed(true_s, ("v", *widths))
        self._stage_free_at = done_at = began_at + seconds
        run.widths.append(widths[0])
        self.shapes.add(tuple(widths))
        self._learn(rows, n, told_s, cold=cold)
        self._waits = any(ahead)
        run.asked.append(ahead[0])
        n_new = 0
        for i, one, width, (_, accepted) in zip(chosen, requests, widths, drafts, strict=True):
            right = accepted[:width]  # what lacks is padding
            n_accepted = [*right, False].index(False)
            if right:
                self.policy.verified(one, len(right), n_accepted)
            self.n_tokens[i] += 1 + n_accepted
            n_new += 1 + n_accepted
            self.drafts.pop(one.request_id, None)
        run.n_tokens += n_new
        run.plain_s += n_new / m * self.machine.verify_s(m, m) * self.slowness
        drafted_at = self._work_of_drafter(chosen, ahead, done_at)
        for i, n_ahead in zip(chosen, ahead, strict=True):
            self._ready_at[i] = drafted_at if n_ahead else done_at

    def _gap(self) -> float:
        """Return what lies before the next step beside drafts, and tell the policy."""
        seconds = self.machine.wait_s if self._waits else 0.0
        if self.machine.wait_s:
            self.policy.measured_gap(seconds, drafted=self._waits)
        return seconds

    def _learn(self, rows: int, n: int, seconds: float, *, cold: bool) -> None:
        """Tell the policy what a step took, at once or, as the scheduler does, when the next one was sent."""
        if self.machine.tells_cold:
            self._measured.append(lambda: self.policy.measured(rows, n, seconds, cold=cold))
        else:
            self.policy.measured(rows, n, seconds)

    def _work_of_drafter(self, chosen: Sequence[int], ahead: Sequence[int], done_at: float) -> float:
        """Let the draft stage work on a step; returns when its answer is there."""
        began_at = max(done_at, self._drafter_free_at) if self.machine.apart else done_at
        if any(ahead):
            seconds = self._draft(chosen, ahead)
        else:
            seconds = self.machine.upkeep_s * self.slowness
            if seconds:
                self.policy.measured_upkeep(seconds)
        if self.machine.apart:
            self._drafter_free_at = began_at + seconds
        else:
            self._stage_free_at = began_at + seconds
        return began_at + seconds

    def _draft(self, chosen: Sequence[int], ahead: Sequence[int]) -> float:
        m, most = sum(n > 0 for n in ahead), max(ahead)
        told_s, seconds, cold = self._timed(self.machine.draft_s(m, most), ("d", m, most))
        cold = cold and self.machine.tells_cold
        self._measured.append(lambda: self.policy.measured_draft(m, most, told_s, cold=cold))
        if not self.machine.tells_cold:
            self._measured.pop()()
        for i, n in zip(chosen, ahead, strict=True):
            if n:
                one = self.requests[i]
                probabilities, right = self.drafters[i].draft(n, self.n_tokens[i], self.rng)
                self.drafts[one.request_id] = Drafted(i, [1] * n, probabilities), right
        return seconds

    def _timed(self, seconds: float, shape: tuple[object, ...]) -> tuple[float, float, bool]:
        """Return what the policy is told that a step takes, what it takes, which has no jitter, and whether it was
        cold.
        """
        seconds *= self.slowness
        self._seen[shape] = self._seen.get(shape, 0) + 1
        warm = self._seen[shape] <= 2 and any(shape[1:])  # plain decoding was warmed up at load
        first_s = self.machine.first_s * (0.25 if shape[0] == "d" else 1.0) * warm
        return seconds * (1 + self.machine.jitter * self.rng.uniform(-1, 1)) + first_s, seconds + first_s, bool(first_s)


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


def overlapped_rate(machine: Machine, drafters: list[Drafter], width: int, n_tokens: int = 4000) -> float:
    """The same with a drafter in a daemon of its own and as many micro-batches as are best, 1 or 2."""
    policies = [(groups, SpecDecodeController(width, fixed=True)) for groups in (1, 2)]
    runs = [Simulation(machine, [*drafters], policy, 1, groups).decode(n_tokens) for groups, policy in policies]
    return max(run.rate for run in runs)
