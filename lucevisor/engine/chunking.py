"""Chunked prefill: how many tokens of a long prompt a step carries while others share the pipeline, and when it goes.

Two bounds: the time to the first token of a short prompt that arrives next, and what smaller chunks cost the long ones.
The second is a budget over time: overhead is paid from a credit that every computed chunk earns.
Pure; ``now`` is an argument.  Knows neither requests nor pages.  The model behind it: docs/scheduling.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from lucevisor.engine.backlog import Backlog
from lucevisor.engine.step_times import StepCost, StepTimes
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.steps import Slice

MAX_SLOWDOWN: Final = 2.5
"""Worst time to the first token of a short prompt beside long ones, as a multiple of alone; measured: at most 3."""

MAX_OVERHEAD_SHARE: Final = 0.12
"""Share of their time that long prompts may lose to the overhead of smaller chunks.  Their throughput loses about a
tenth: where one ends and the next begins, small steps waste less.
"""

HORIZON_S: Final = 5.0
"""Seconds of work over which the budget is kept: after a while without loss, up to twice as much may be lost."""

RECENT_S: Final = 5.0
"""Seconds after the start of a short prompt in which long ones leave room: its client is likely to ask again."""

MAX_WAIT_SHARE: Final = 0.5
"""A long prompt's chunk is sent if it would wait at the last stage for at most this share of its own time there..."""

MAX_IDLE_SHARE: Final = 0.05
"""... or if sending it at the last stage's next answer would idle that stage for more than this share."""


def chunk_sizes(full: int) -> list[int]:
    """Return a whole chunk divided by 1, 2, 3, ..., rounded up to pages, smallest first.

    A chunk that is not a multiple of a page is not divided.
    """
    n_pages = full // PAGE_TOKENS
    return [full] if full % PAGE_TOKENS else sorted({-(-n_pages // n) * PAGE_TOKENS for n in range(1, n_pages + 1)})


@dataclass(slots=True)
class _FittedChunks:
    """What is derived from a fit.  ``by_start``: the largest quick chunk from a position, and a whole one's seconds."""

    cost: StepCost
    own_s: float  # a short prompt's step
    max_short_tokens: int = 0
    beside_short: int = 0
    by_start: dict[int, tuple[int, float]] = field(default_factory=dict)


class SharedChunks:
    """Chooses chunks from measured times."""

    def __init__(self, n_stages: int, full_chunk: int) -> None:
        self._times = StepTimes()
        self._n_stages = n_stages
        self._sizes = chunk_sizes(full_chunk)
        self._full = full_chunk
        self._half = self._sizes[max(0, len(self._sizes) - 2)]  # before anything is known
        self._short: deque[int] = deque(maxlen=32)
        self._credit_s = 0.0
        self._loss = MAX_OVERHEAD_SHARE  # allowed now
        self._short_until = -math.inf
        self._last: _FittedChunks | None = None

    # ---- inputs

    def measured(self, slices: Iterable[Slice], seconds: float) -> None:
        """Note how long the slowest stage of a step took."""
        self._times.add(slices, seconds)

    def started(self, n_tokens: int, now: float) -> None:
        """Note that a prompt starts with ``n_tokens`` to compute."""
        if n_tokens <= self.max_short_tokens:
            self._short.append(n_tokens)
            self._short_until = now + RECENT_S

    def charge(self, slices: Iterable[tuple[int, Slice]]) -> None:
        """Book the slices of a planned step, each with the tokens of its whole prompt.

        Slices of long prompts earn credit for their work, also whole chunks, and pay for overhead beyond that of whole
        chunks.  At most ``HORIZON_S`` of work is credited.
        """
        choice, max_short_tokens = self._fitted(), self.max_short_tokens
        pieces = [(len(piece.tokens), piece.start) for n_prefill, piece in slices if n_prefill > max_short_tokens]
        if choice is not None and pieces:
            overhead_s, part = choice.cost.overhead_s, sum(n for n, _ in pieces) / self._full
            whole_s = overhead_s * part + sum(choice.cost.work_s(n, start) for n, start in pieces)
            most = MAX_OVERHEAD_SHARE * HORIZON_S
            self._credit_s = self._credit_s + MAX_OVERHEAD_SHARE * whole_s - overhead_s * (1 - part)
            self._credit_s = min(most, max(-most, self._credit_s))
            if any((start + n) % self._full == 0 for n, start in pieces):
                self._loss = MAX_OVERHEAD_SHARE * (1 + self._credit_s / most)

    # ---- answers

    @property
    def max_short_tokens(self) -> int:
        """A prompt of at most so many tokens is short: it is computed in one step, which delays others by no more than
        a chunk.
        """
        choice = self._fitted()
        return self._half if choice is None else choice.max_short_tokens

    @property
    def beside_short(self) -> int:
        """Tokens of a step with short prompts that a long one may fill up to: what is left of their bound."""
        choice = self._fitted()
        return 0 if choice is None else choice.beside_short

    def expects_short(self, now: float) -> bool:
        """Whether a short prompt started recently.

        Not before whole chunks were measured: where sizes have kernels of their own, what small steps cost says little
        of them.
        """
        return now < self._short_until and self._times.measured_s(self._full) is not None

    def chunk(self, start: int) -> int:
        """Return the tokens of a long prompt's next chunk, which begins at position ``start``.

        The largest that keeps the time to the first token, but no smaller than the budget allows.  The budget is read
        once per whole chunk, because slices of equal size keep every stage busy.
        """
        choice = self._fitted()
        if choice is None:
            return self._half
        if start not in choice.by_start:
            choice.by_start[start] = self._quick(choice, start), choice.cost.step_s(self._full, start)
        quick, whole_s = choice.by_start[start]
        return max(quick, self._cheap(choice, self._loss * whole_s))

    def step_s(self, slices: Iterable[Slice]) -> float:
        """Return the estimated seconds of a stage for a step; 0 while unknown."""
        choice = self._fitted()
        return 0.0 if choice is None else choice.cost.seconds(slices)

    def may_follow(self, backlog: Backlog, now: float, start: int) -> bool:
        """Whether a long prompt's chunk from ``start`` may be sent now.

        Not while the first stage works, so that a short prompt finds at most one chunk there.  Nor before the last
        stage needs it: chunks that pile up before a slower stage would all be in front of a short prompt.
        """
        choice = self._fitted()
        if not backlog.first_stage_free or choice is None or backlog.empty:
            return backlog.first_stage_free
        n_tokens = min(self.chunk(start), self._full - start % self._full)
        seconds = choice.cost.step_s(n_tokens, start)
        return (
            backlog.wait_s(seconds, now) <= MAX_WAIT_SHARE * seconds
            or backlog.idle_s(seconds) > MAX_IDLE_SHARE * seconds
        )

    # ---- inside

    def _fitted(self) -> _FittedChunks | None:
        cost = self._times.fit()
        if cost is None:
            return None
        if self._last is None or self._last.cost is not cost:
            choice = _FittedChunks(cost, cost.step_s(median_low(self._short) if self._short else PAGE_TOKENS))
            quick = self._quick(choice, 0)
            choice.max_short_tokens = max(quick, self._cheap(choice, MAX_OVERHEAD_SHARE * cost.step_s(self._full)))
            left_s = self._n_stages * (MAX_SLOWDOWN * choice.own_s - cost.step_s(quick))
            choice.beside_short = max((size for size in self._sizes if cost.step_s(size) <= left_s), default=0)
            self._last = choice
        return self._last

    def _quick(self, choice: _FittedChunks, start: int) -> int:
        # n chunks and the own step within MAX_SLOWDOWN x n own steps
        most_s = (MAX_SLOWDOWN - 1 / self._n_stages) * choice.own_s
        return max((s for s in self._sizes if choice.cost.step_s(s, start) <= most_s), default=self._sizes[0])

    def _cheap(self, choice: _FittedChunks, most_s: float) -> int:
        """Return the smallest size whose steps cost at most ``most_s`` more than one whole chunk."""
        return next(s for s in self._sizes if (-(-self._full // s) - 1) * choice.cost.overhead_s <= most_s)
