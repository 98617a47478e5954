"""Measured times of prefill steps, and the cost of a step of any size by them.

Pure: sizes and seconds in.  A linear fit (an overhead a step, a cost a token, which grows with the tokens before it) is
used where it predicts all measured sizes.  Where it does not, because steps of some sizes run other kernels (on a GPU
one of 65 tokens dequantises all weights and costs what one of 512 does), the cost is the median of recent steps of
about a size, and a line between measured sizes.  Medians, so a step that was disturbed does not count; a cold one does
not either.
What steps of a size take longer from some position on (a GPU does not replay a graph there, and a short one waits for
its launches) is kept beside it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median_low
from typing import Final

from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.steps import Slice

NEAR: Final = 1.15
"""Sizes whose ratio is at most this cost about the same for each token; decodes beside a chunk add less."""

MAX_AGE: Final = 4096
"""Steps after which a size is forgotten that none had: what it cost says little then, and one that gained nothing may
be tried again."""

MAX_ERROR: Final = 0.1
"""The fit is used where it predicts every measured size within this share: made of all steps, it is less noisy."""

LEAST_SURPLUS: Final = 0.25
"""Steps are dearer from a position on if this share of their time is more than they cost; less may be noise."""

_KEPT: Final = 9  # steps per class: a few outliers do not move their median
_MOST_COLD: Final = 8  # steps of a class in a row that are not counted as they are cold; then that is what they cost
_LEAST_STEPS: Final = 2
_LEAST_TOKENS: Final = 16  # of a slice: shorter ones run other kernels, as decodes do
_DEPTH_CLASS: Final = 1024  # positions
_FIT_EVERY: Final = 8  # steps; fitting takes as long as planning some

_Step = tuple[int, float, float]
"""Tokens, tokens x positions before them, seconds."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step at the slowest stage: ``overhead_s``, each token ``token_s``, and ``depth_s`` more for each
    position before it.
    """

    overhead_s: float
    token_s: float
    depth_s: float = 0.0

    def step_s(self, n_tokens: int, start: int = 0) -> float:
        """Return the seconds of a step that carries one slice."""
        return self.overhead_s + n_tokens * (self.token_s + self.depth_s * (start + n_tokens / 2))


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Seconds of a step at the slowest stage.

    ``points``: measured sizes and their seconds at the start of a prompt; both rise.  ``fit`` gives the cost of a
    position, and of a token beyond the points.  ``surpluses``: seconds by depth class, rising, that steps of a size
    class take more than that.
    """

    fit: StepCost
    points: tuple[tuple[float, float], ...]
    surpluses: Mapping[tuple[bool, int], Sequence[tuple[int, float]]] = field(default_factory=dict)

    def step_s(self, n_tokens: int, start: int = 0) -> float:
        """Return the seconds of a step that carries one slice."""
        return self.flat_s(n_tokens) + self.depth_s(n_tokens, start) + self.surplus_s(n_tokens, start)

    def seconds(self, slices: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of a step with slices of (tokens, start)."""
        n_tokens = deepest = 0
        positions = 0.0
        for n, start in slices:
            n_tokens += n
            positions += n * (start + n / 2)
            if start > deepest and n >= _LEAST_TOKENS:  # as in ``add``: where a decode is says nothing of a chunk
                deepest = start
        return self.flat_s(n_tokens) + positions * self.fit.depth_s + self.surplus_s(n_tokens, deepest)

    def flat_s(self, n_tokens: int) -> float:
        """Return the seconds of a step without what the positions before its slices cost."""
        at = bisect_left(self.points, (n_tokens, -math.inf))
        if at == len(self.points):
            size, seconds = self.points[-1]
            return seconds + (n_tokens - size) * self.fit.token_s
        right, right_s = self.points[at]
        if not at:
            return max(0.0, right_s - (right - n_tokens) * self.fit.token_s)
        left, left_s = self.points[at - 1]
        return left_s + (right_s - left_s) * (n_tokens - left) / (right - left)

    def depth_s(self, n_tokens: int, start: int) -> float:
        """Return what the positions before a slice, and in it, cost."""
        return n_tokens * self.fit.depth_s * (start + n_tokens / 2)

    def surplus_s(self, n_tokens: int, start: int) -> float:
        """Return what steps of such a size take more at a position, by the deepest measured ones that are no deeper."""
        depth, size = _depth_class(start + n_tokens / 2), _size_class(max(1, n_tokens))
        found = [seconds for at, seconds in self.surpluses.get(size, ()) if at <= depth]
        return found[-1] if found else 0.0

    def measured(self, n_tokens: int) -> bool:
        """Return whether steps of about so many tokens were measured."""
        return any(max(size, n_tokens) <= NEAR * min(size, n_tokens) for size, _ in self.points)

    def most_s(self, n_tokens: int) -> float:
        """Return the seconds of a step at the start of a prompt; of the next larger measured size, if this was not."""
        if self.measured(n_tokens):
            return self.step_s(n_tokens)
        return self.step_s(next((math.ceil(size) for size, _ in self.points if size >= n_tokens), n_tokens))


@dataclass(slots=True)
class _SizeClass:
    """Recent steps of about one size, by depth class."""

    by_depth: dict[int, deque[_Step]] = field(default_factory=dict)
    last: int = 0  # number of the last step
    n_cold: int = 0  # since the last one that was not

    @property
    def n_steps(self) -> int:
        return sum(map(len, self.by_depth.values()))

    def point(self, depth_s: float) -> tuple[float, float]:
        """Return the median size, and the median seconds without ``depth_s`` a token and position."""
        steps = [step for found in self.by_depth.values() for step in found]
        return median_low(n for n, _, _ in steps), median_low(max(0.0, t - depth_s * depth) for _, depth, t in steps)

    def surpluses(self, depth_s: float) -> list[tuple[int, float]]:
        """Return by depth class what the median step takes more than those of all; 0 where that may be noise."""
        found, (_, flat_s) = list[tuple[int, float]](), self.point(depth_s)
        for at, steps in sorted(self.by_depth.items()):
            if len(steps) >= _LEAST_STEPS:
                _, depth, seconds = _middle(steps)
                more_s = seconds - flat_s - depth_s * depth
                found.append((at, more_s if more_s > LEAST_SURPLUS * seconds else 0.0))
        return found

    def slopes(self) -> tuple[float, float]:
        """Return sums of products and of squares, of seconds and positions by token between medians of depth classes:
        their ratio is the cost of a position.
        """
        middles = [_middle(steps) for steps in self.by_depth.values() if len(steps) >= _LEAST_STEPS]
        pairs = [(depth / n, seconds / n) for n, depth, seconds in middles]
        mean = [sum(values) / len(pairs) for values in zip(*pairs, strict=True)]
        return (
            sum((depth - mean[0]) * (seconds - mean[1]) for depth, seconds in pairs),
            sum((depth - mean[0]) ** 2 for depth, _ in pairs),
        )


class StepTimes:
    """Recent prefill steps by size and depth."""

    def __init__(self) -> None:
        self._classes: dict[tuple[bool, int], _SizeClass] = {}
        self._n_added = 0
        self._cost: MeasuredCost | None = None
        self._stale = False

    def add(self, slices: Iterable[Slice], seconds: float, *, cold: bool = False) -> None:
        """Count a step if it computed a prompt; ``seconds``: of its slowest stage, ``cold`` as in StepResult."""
        pieces = [(piece.start, len(piece.tokens)) for piece in slices]
        if seconds <= 0 or max((n for _, n in pieces), default=0) < _LEAST_TOKENS:
            return
        n_tokens = sum(n for _, n in pieces)
        depth = sum(n * (start + n / 2) for start, n in pieces if n >= _LEAST_TOKENS)
        found = self._classes.setdefault(_size_class(n_tokens), _SizeClass())
        found.n_cold = found.n_cold + 1 if cold else 0
        if 0 < found.n_cold <= _MOST_COLD:
            return
        steps = found.by_depth.setdefault(_depth_class(depth / n_tokens), deque(maxlen=_KEPT))
        steps.append((n_tokens, depth, seconds))
        self._n_added += 1
        found.last = self._n_added
        self._stale = self._stale or found.n_steps <= _KEPT or self._n_added % _FIT_EVERY == 0

    def cost(self) -> MeasuredCost | None:
        """Return the cost of steps, renewed every few steps; None before steps of two sizes were seen."""
        if self._stale:
            oldest = self._n_added - MAX_AGE
            # Short prompts may not come for long; what they cost does not depend on chunks.
            self._classes = {k: found for k, found in self._classes.items() if found.last > oldest or not k[0]}
            self._cost = self._measure()
            self._stale = False
        return self._cost

    def _measure(self) -> MeasuredCost | None:
        known = [found for found in self._classes.values() if found.n_steps >= _LEAST_STEPS]
        if len(known) < 2:
            return None
        depth_s = _slope(known)
        points = _rising(sorted(found.point(depth_s) for found in known))
        overhead_s, token_s = _fit(points)
        fitted = tuple((size, overhead_s + size * token_s) for size, _ in points)
        near = all(abs(a - b) <= MAX_ERROR * a for (_, a), (_, b) in zip(points, fitted, strict=True))
        surpluses = {size: found.surpluses(depth_s) for size, found in self._classes.items() if found.by_depth}
        return MeasuredCost(StepCost(overhead_s, token_s, depth_s), fitted if near else points, surpluses)


def _size_class(n_tokens: int) -> tuple[bool, int]:
    """Four classes from a power of two to the next; a page is the end of one, as GPUs have other kernels beyond it."""
    return n_tokens > PAGE_TOKENS, round(4 * math.log2(n_tokens))


def _slope(known: Iterable[_SizeClass]) -> float:
    """Return the seconds that a token costs for each position before it, 0 or more.

    By the longest steps if they were of several depths: what shorter ones take longer at a depth may be something else,
    and taken for a cost of every token it would be more than long steps take.
    """
    sums = [(found.point(0.0)[0], *found.slopes()) for found in known]
    longest = max(size for size, _, _ in sums)
    products, squares = (sum(one[i] for one in sums if 2 * one[0] >= longest) for i in (1, 2))
    return max(0.0, products / squares) if squares else 0.0


def _depth_class(position: float) -> int:
    return (int(position) // _DEPTH_CLASS).bit_length()


def _rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return the points with no size dearer than a larger one: steps are disturbed to be slower, seldom faster."""
    seconds = accumulate((s for _, s in reversed(points)), min)
    return tuple((size, s) for (size, _), s in zip(points, reversed([*seconds]), strict=True))


def _middle(steps: Iterable[_Step]) -> _Step:
    """Return the step of median time for its tokens, the faster one of two."""
    ordered = sorted(steps, key=lambda step: step[2] / step[0])
    return ordered[(len(ordered) - 1) // 2]


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return overhead and seconds a token, neither negative, with the least squares of relative errors, so that small
    steps count as much.
    """
    rows = [(1 / seconds, size / seconds) for size, seconds in points if seconds > 0]
    aa, ab, bb = (sum(r[i] * r[j] for r in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(r[0] for r in rows), sum(r[1] for r in rows)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return (0.0, b / bb) if rows else (0.0, 0.0)
    overhead_s, token_s = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if overhead_s >= 0 and token_s >= 0:
        return overhead_s, token_s
    return (0.0, b / bb) if overhead_s < 0 else (a / aa, 0.0)
