"""Chunked prefill: how many tokens of a long prompt a step carries while others share the pipeline, and when it goes.

Two bounds: the time to the first token of a short prompt that arrives next, and what smaller chunks cost the long ones.
The second is a budget over time: what smaller chunks lose is paid from a credit that every computed chunk earns.
Pure; ``now`` is an argument.  Knows neither requests nor pages.  The model behind it: docs/scheduling.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

from lucevisor.engine.scheduling.backlog import Backlog
from lucevisor.engine.scheduling.step_times import MeasuredCost, StepTimes
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.steps import Slice

MAX_SLOWDOWN: Final = 2.5
"""Worst time to the first token of a short prompt beside long ones, as a multiple of alone, where smaller chunks are
cheap..."""

PROMISED_SLOWDOWN: Final = 3.0
"""... and where they are not: the 95th percentile is to be at most that."""

MAX_OVERHEAD_SHARE: Final = 0.12
"""Share of their time that long prompts may lose to smaller chunks.  Their throughput loses about a tenth: where one
ends and the next begins, small steps waste less.
"""

HORIZON_S: Final = 5.0
"""Seconds of work over which the budget is kept: after a while without loss, up to twice as much may be lost."""

RECENT_S: Final = 8.0
"""Seconds after the start of a short prompt in which long ones leave room: its client is likely to ask again."""

MIN_GAIN: Final = 3.0
"""Where no chunk keeps the time to the first token, a smaller one must shorten a step by this times what it loses."""

BESIDE_DECODES: Final = 512
"""Tokens of a chunk while others decode or are computed, where longer ones take too long for a short prompt..."""

MAX_DECODE_LOSS: Final = 0.9
"""... and so many cost a long prompt at most this share of its time more than whole chunks."""

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
class _CostChoice:
    """What is derived from a cost.  ``sizes``: the chunk by position, neighbours and allowed loss."""

    cost: MeasuredCost
    own_s: float  # a short prompt's step
    max_short_tokens: int = 0
    beside_short: int = 0
    sizes: dict[tuple[int, bool, float], int] = field(default_factory=dict)


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
        self._base = full_chunk  # what the last chunk was chosen instead of
        self._short_until = -math.inf
        self._beside_until = -math.inf
        self._last: _CostChoice | None = None

    # ---- inputs

    def measured(self, slices: Iterable[Slice], seconds: float, *, cold: bool = False) -> None:
        """Note how long the slowest stage of a step took; ``cold`` as in StepResult."""
        self._times.add(slices, seconds, cold=cold)

    def started(self, n_tokens: int, now: float, *, beside_long: bool = False) -> None:
        """Note that a prompt starts with ``n_tokens`` to compute, perhaps while a long one is computed."""
        if n_tokens <= self.max_short_tokens:
            self._short.append(n_tokens)
            self._short_until = now + RECENT_S
            self._beside_until = self._short_until if beside_long else self._beside_until

    def charge(self, slices: Iterable[tuple[int, Slice]]) -> None:
        """Book the slices of a planned step, each with the tokens of its whole prompt.

        Slices of long prompts earn credit for their work, also whole chunks, and pay for what they take longer than
        whole chunks; sizes not measured yet pay what they may cost at most.  At most ``HORIZON_S`` of work is credited.
        """
        choice, max_short_tokens = self._chosen(), self.max_short_tokens
        pieces = [(len(piece.tokens), piece.start) for n_prefill, piece in slices if n_prefill > max_short_tokens]
        if choice is not None and pieces:
            cost, most, n_tokens = choice.cost, MAX_OVERHEAD_SHARE * HORIZON_S, sum(n for n, _ in pieces)
            start = max(start for _, start in pieces)
            whole_s = self._pieces_s(cost, self._base, start) * n_tokens / self._full
            lost_s = max(0.0, cost.flat_s(n_tokens) + cost.surplus_s(n_tokens, start) - whole_s)
            earned_s = MAX_OVERHEAD_SHARE * (whole_s + sum(cost.depth_s(n, start) for n, start in pieces))
            self._credit_s = min(most, max(-most, self._credit_s + earned_s - lost_s))
            if any((start + n) % self._full == 0 for n, start in pieces):
                self._loss = MAX_OVERHEAD_SHARE * (1 + self._credit_s / most)

    # ---- answers

    @property
    def cost(self) -> MeasuredCost | None:
        """What steps take by measured ones; None before steps of two sizes were."""
        return self._times.cost()

    @property
    def max_short_tokens(self) -> int:
        """A prompt of at most so many tokens is short: it is computed in one step, which delays others by no more than
        a chunk.
        """
        choice = self._chosen()
        return self._half if choice is None else choice.max_short_tokens

    @property
    def beside_short(self) -> int:
        """Tokens of a step with short prompts that a long one may fill up to: what is left of their bound."""
        choice = self._chosen()
        return 0 if choice is None else choice.beside_short

    def expects_short(self, now: float) -> bool:
        """Whether a short prompt started recently."""
        return now < self._short_until

    def came_beside_long(self, now: float) -> bool:
        """Whether a short prompt started recently while a long one was computed, so that more are likely to."""
        return now < self._beside_until

    def chunk(self, start: int, *, others: bool) -> int:
        """Return the tokens of a long prompt's next chunk, which begins at position ``start``.

        The largest that keeps the time to the first token, but no smaller than the budget allows.  ``others`` are there
        or came lately; else they are only expected.  Whole chunks are measured first, then one size after the other
        where measured ones promise a gain.  The budget is read once per whole chunk, because slices of equal size keep
        every stage busy.
        """
        choice = self._chosen()
        if choice is None or not choice.cost.measured(self._full):
            return self._full
        self._base = self._base_size(choice.cost, choice.own_s) if others else self._full
        key = start, others, self._loss
        if key not in choice.sizes:
            size = self._best(choice, start, self._base, self._loss)
            choice.sizes[key] = self._next_to_measure(choice.cost, size, tries=others)
        return choice.sizes[key]

    def step_s(self, slices: Iterable[Slice]) -> float:
        """Return the estimated seconds of a stage for a step; 0 while unknown."""
        choice = self._chosen()
        return 0.0 if choice is None else choice.cost.seconds([(len(piece.tokens), piece.start) for piece in slices])

    def may_follow(self, backlog: Backlog, now: float, start: int, *, others: bool) -> bool:
        """Whether a long prompt's chunk from ``start`` may be sent now.

        Not while the first stage works, so that a short prompt finds at most one chunk there.  Nor before the last
        stage needs it: chunks that pile up before a slower stage would all be in front of a short prompt.
        """
        choice = self._chosen()
        if not backlog.first_stage_free or choice is None or backlog.empty:
            return backlog.first_stage_free
        n_tokens = min(self.chunk(start, others=others), self._full - start % self._full)
        seconds = choice.cost.step_s(n_tokens, start)
        return (
            backlog.wait_s(seconds, now) <= MAX_WAIT_SHARE * seconds
            or backlog.idle_s(seconds) > MAX_IDLE_SHARE * seconds
        )

    @property
    def full(self) -> int:
        """Tokens of a whole chunk."""
        return self._full

    # ---- inside

    def _chosen(self) -> _CostChoice | None:
        cost = self.cost
        if cost is None:
            return None
        if self._last is None or self._last.cost is not cost:
            choice = _CostChoice(cost, cost.step_s(median_low(self._short) if self._short else PAGE_TOKENS))
            quick = self._best(choice, 0, self._base_size(cost, choice.own_s), MAX_OVERHEAD_SHARE)
            choice.max_short_tokens = quick
            left_s = self._n_stages * (MAX_SLOWDOWN * choice.own_s - cost.step_s(quick))
            choice.beside_short = max((size for size in self._sizes if cost.most_s(size) <= left_s), default=0)
            self._last = choice
        return self._last

    def _pieces_s(self, cost: MeasuredCost, size: int, start: int | None = None) -> float:
        """Return the seconds of a whole chunk in pieces of a size, without what positions before them cost; with what
        steps of the size take more from ``start`` on, if that is given.
        """
        n, rest = divmod(self._full, size)
        more_s = 0.0 if start is None else n * cost.surplus_s(size, start)
        return n * cost.flat_s(size) + (cost.flat_s(rest) if rest else 0.0) + more_s

    def _base_size(self, cost: MeasuredCost, own_s: float) -> int:
        """Return the largest chunk beside others: the largest that keeps the bound, else the smallest whose loss is
        bearable; from BESIDE_DECODES tokens.
        """
        sizes = [size for size in self._sizes if size >= min(BESIDE_DECODES, self._full)]
        most_s, quick_s = (1 + MAX_DECODE_LOSS) * cost.flat_s(self._full), self._quick_s(own_s, PROMISED_SLOWDOWN)
        bearable = next(size for size in sizes if self._pieces_s(cost, size) <= most_s)
        return max((size for size in sizes if size > bearable and cost.flat_s(size) <= quick_s), default=bearable)

    def _quick_s(self, own_s: float, slowdown: float) -> float:
        """Return the longest step of a long prompt that keeps the time to the first token: ``n`` of them and the own
        step take ``slowdown`` x ``n`` own steps.
        """
        return (slowdown - 1 / self._n_stages) * own_s

    def _best(self, choice: _CostChoice, start: int, base: int, loss: float) -> int:
        """Return the largest size that keeps the time to the first token, else the smallest that gains enough; of those
        that ``loss`` allows.
        """
        cost, whole_s = choice.cost, choice.cost.step_s(self._full, start)
        seconds = {size: cost.step_s(size, start) for size in self._sizes if size <= base}
        whole_flat_s = self._pieces_s(cost, self._full, start)
        lost = {size: (self._pieces_s(cost, size, start) - whole_flat_s) / whole_s for size in seconds}
        allowed = [size for size in seconds if size == base or lost[size] <= loss]
        quick_s = self._quick_s(choice.own_s, MAX_SLOWDOWN)
        quick = max((size for size in allowed if seconds[size] <= quick_s), default=None)
        gaining = (size for size in allowed if 1 - seconds[size] / seconds[base] >= MIN_GAIN * lost[size])
        return min(gaining, default=base) if quick is None else quick

    def _next_to_measure(self, cost: MeasuredCost, size: int, *, tries: bool) -> int:
        """Return ``size`` if steps of it were measured, else the size to measure first: half of the next measured one,
        so that one that gains nothing costs one more step like it; the measured one itself without ``tries``.
        """
        if cost.measured(size):
            return size
        measured = next(larger for larger in self._sizes if larger > size and cost.measured(larger))
        if not tries:
            return measured
        return max(size, *(smaller for smaller in self._sizes if 2 * smaller <= measured))
