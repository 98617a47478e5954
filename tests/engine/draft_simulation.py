"""Decoding with drafts on simulated machines: tokens a second with a controller, and with fixed widths."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lucevisor.engine.spec_decode.controller import RequestDrafts, SpecDecodeController
from lucevisor.protocol.steps import Drafted


@dataclass(frozen=True)
class Machine:
    """``verify_s(rows, slices)``, ``draft_s(n)``: seconds of a step, and of ``n`` drafts of each slice.

    ``jitter``: measured times vary by up to this share.  ``first_s``: what the first two steps of a shape take more, to
    compile and capture.  ``apart``: drafts are made beside the stage.  ``wait_s``: between a step that asks for drafts
    and the next one, beside them; plain steps run ahead.
    """

    verify_s: Callable[[int, int], float]
    draft_s: Callable[[int], float]
    jitter: float = 0.0
    first_s: float = 0.0
    apart: bool = False
    wait_s: float = 0.0


def cpu_demo(jitter: float = 0.0) -> Machine:
    """A small model on a cpu: a plain step 16 ms, one of 8 rows 1.4 x, drafts 4 ms."""
    return Machine(lambda rows, slices: 0.016 * (1 + 0.4 / 7 * (rows - 1)), lambda n: 0.004, jitter)


def h200_dflash(jitter: float = 0.0) -> Machine:
    """27B on an H200: 8 rows 1.15 x, more than 32 rows other kernels, a block of drafts 0.13 x."""

    def verify(rows: int, slices: int) -> float:
        return 0.014 * (1 + 0.15 / 7 * (rows - 1) + (0.03 * (rows - 32) if rows > 32 else 0.0) + 0.005 * slices)

    return Machine(verify, lambda n: 0.0019, jitter, first_s=0.04, wait_s=0.001)


def h200_mtp(jitter: float = 0.0) -> Machine:
    """The same with an MTP head: each draft reads a block and the output matrix."""
    return Machine(h200_dflash().verify_s, lambda n: 0.0009 * n + 0.0002, jitter, first_s=0.04, wait_s=0.001)


@dataclass
class Run:
    """Tokens and seconds of a simulated decode; ``plain_s``: of the same tokens without drafts."""

    n_tokens: int = 0
    seconds: float = 0.0
    plain_s: float = 0.0
    widths: list[int] = field(default_factory=list)  # drafts of a slice, by step

    @property
    def rate(self) -> float:
        return self.n_tokens / self.seconds


class Simulation:
    """Requests that decode for ever over one stage; ``chances[i]``: of a draft at position i of any request, given that
    all before it were accepted.
    """

    def __init__(
        self, machine: Machine, chances: Sequence[float], n: int, controller: SpecDecodeController, seed: int = 0
    ) -> None:
        self.machine, self.chances, self.controller, self.rng = machine, chances, controller, random.Random(seed)
        controller.apart = machine.apart
        self.requests: list[RequestDrafts] = []
        self._drafts: dict[int, list[bool]] = {}
        self._ready_at: list[float] = []
        self._done: dict[frozenset[int], tuple[float, int, int, bool]] = {}  # result, asked, verified, cold
        self._seen: dict[object, int] = {}
        self._now = self._drafter_free_at = 0.0
        self.join(n)

    def join(self, n: int) -> None:
        """So many requests more decode."""
        for _ in range(n):
            self.requests.append(RequestDrafts())
            self._ready_at.append(self._now)

    def decode(self, n_tokens: int) -> Run:
        """Until every request has on average so many tokens more."""
        run, began_at = Run(), self._now
        while run.n_tokens < n_tokens * len(self.requests):
            self._step(run)
        run.seconds = self._now - began_at
        return run

    def _step(self, run: Run) -> None:
        m, controller = len(self.requests), self.controller
        n_groups = controller.choose_groups(1)
        chosen = sorted(sorted(range(m), key=self._ready_at.__getitem__)[: -(-m // n_groups)])
        n = len(chosen)
        requests = [self.requests[i] for i in chosen]
        right = [self._drafts.pop(i, []) for i in chosen]
        offers = [
            (r, controller.candidates(r, Drafted(0, [1] * len(own)))) for r, own in zip(requests, right, strict=True)
        ]
        width = controller.num_verify_tokens(offers, m) if any(right) else 0
        asked, *_ = [controller.num_draft_tokens(r, m) for r in requests]
        step_s, cold = self._timed(self.machine.verify_s(n * (1 + width), n), ("verify", n, width))
        batch = frozenset(chosen)
        before = self._done.pop(batch, None)
        wait_s = self.machine.wait_s if before is not None and before[1] else 0.0
        self._now = max(self._now, *(self._ready_at[i] for i in chosen)) + wait_s + step_s
        controller.record_step()
        self._done = {other: done for other, done in self._done.items() if other.isdisjoint(batch)}
        if before is not None and before[1] == width and (width or not before[2]):
            jitter = 1 + self.machine.jitter * self.rng.uniform(-1, 1)
            seconds = (self._now - before[0]) * jitter
            controller.record_round(width, seconds, asked=width > 0, cold=cold or before[3])
        for i, own in zip(chosen, right, strict=True):
            n_accepted = [*own[:width], False].index(False)
            if width:
                controller.record_verdict(self.requests[i], width, n_accepted)
            run.n_tokens += 1 + n_accepted
            run.plain_s += (1 + n_accepted) / m * self.machine.verify_s(m, m)
        run.widths.append(width)
        cold = self._draft(chosen, asked)
        self._done[batch] = self._result_at, asked, width, cold

    def _draft(self, chosen: Sequence[int], asked: int) -> bool:
        self._result_at = self._now
        if not asked:
            for i in chosen:
                self._ready_at[i] = self._now
            return False
        seconds, cold = self._timed(self.machine.draft_s(asked), ("draft", len(chosen), asked), 0.25)
        if self.machine.apart:
            self._drafter_free_at = ready_at = max(self._now, self._drafter_free_at) + seconds
        else:
            self._now = ready_at = self._now + seconds
        for i in chosen:
            self._ready_at[i] = ready_at
            chances = [self.chances[min(at, len(self.chances) - 1)] for at in range(asked)]
            self._drafts[i] = [self.rng.random() < chance for chance in chances]
        return cold

    def _timed(self, seconds: float, shape: tuple[object, ...], share: float = 1.0) -> tuple[float, bool]:
        """Return what a step takes, and whether it was cold; plain decoding was warmed up at load."""
        self._seen[shape] = self._seen.get(shape, 0) + 1
        cold = self._seen[shape] <= 2 and self.machine.first_s > 0 and shape[2] != 0
        return seconds + cold * share * self.machine.first_s, cold


def fixed_rate(machine: Machine, chances: Sequence[float], n: int, width: int) -> float:
    """Tokens a second with always ``width`` drafts, on average and without first steps; 0: plain decoding."""
    tokens, product = 1.0, 1.0
    for at in range(width):
        product *= chances[min(at, len(chances) - 1)]
        tokens += product
    drafts_s = machine.draft_s(width) + machine.wait_s if width else 0.0
    alone = n * tokens / (machine.verify_s(n * (1 + width), n) + drafts_s)
    if not machine.apart or n == 1 or not width:
        return alone
    half = -(-n // 2)
    step_s = machine.verify_s(half * (1 + width), half)
    return max(alone, n * tokens / max(step_s + drafts_s, 2 * step_s, 2 * drafts_s))
