"""Measured times of prefill steps, and a cost model fitted to them.

Pure: sizes and seconds in.  The overhead of a step (weights read or dequantised, kernels launched) is what small chunks
pay more often; a token costs more the more tokens are before it.  Fitted to medians of recent steps of about the same
size and position, so a step that compiled or was disturbed does not count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from lucevisor.protocol.steps import Slice

_KEPT: Final = 9  # steps per class: a few outliers do not move their median
_LEAST_STEPS: Final = 2
_LEAST_TOKENS: Final = 16  # of a slice: shorter ones run other kernels, as decodes do
_DEPTH_CLASS: Final = 1024  # positions
_FIT_EVERY: Final = 8  # steps; fitting takes as long as planning some

_Point = tuple[tuple[float, float, float], float]
"""(1, tokens, tokens x positions before them), seconds."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step at the slowest stage: ``overhead_s``, each token ``token_s``, and ``depth_s`` more for each
    position before it.
    """

    overhead_s: float
    token_s: float
    depth_s: float = 0.0

    def work_s(self, n_tokens: int, start: int = 0) -> float:
        """Return the seconds of a slice from position ``start``, without the overhead of its step."""
        return n_tokens * (self.token_s + self.depth_s * (start + n_tokens / 2))

    def step_s(self, n_tokens: int, start: int = 0) -> float:
        """Return the seconds of a step that carries one slice."""
        return self.overhead_s + self.work_s(n_tokens, start)

    def seconds(self, slices: Iterable[Slice]) -> float:
        """Return the seconds of a step."""
        return self.overhead_s + sum(self.work_s(len(piece.tokens), piece.start) for piece in slices)


class StepTimes:
    """Recent prefill steps by size (powers of two) and depth."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], deque[_Point]] = {}
        self._n_added = 0
        self._cost: StepCost | None = None
        self._stale = False

    def add(self, slices: Iterable[Slice], seconds: float) -> None:
        """Count a step if it computed a prompt; ``seconds``: of its slowest stage."""
        pieces = [(piece.start, len(piece.tokens)) for piece in slices]
        if seconds <= 0 or max((n for _, n in pieces), default=0) < _LEAST_TOKENS:
            return
        n_tokens = sum(n for _, n in pieces)
        depth = sum(n * (start + n / 2) for start, n in pieces if n >= _LEAST_TOKENS)
        key = n_tokens.bit_length(), (int(depth / n_tokens) // _DEPTH_CLASS).bit_length()
        self._steps.setdefault(key, deque(maxlen=_KEPT)).append(((1.0, float(n_tokens), depth), seconds))
        self._n_added += 1
        self._stale = self._stale or self._n_added < 4 * _FIT_EVERY or self._n_added % _FIT_EVERY == 0

    def fit(self) -> StepCost | None:
        """Return the cost of steps, renewed every few steps; None before steps of two sizes were seen."""
        if self._stale:
            points = [_middle(steps) for steps in self._steps.values() if len(steps) >= _LEAST_STEPS]
            self._cost = _fit(points) if len({features[1] for features, _ in points}) > 1 else None
            self._stale = False
        return self._cost

    def measured_s(self, n_tokens: int) -> float | None:
        """Return the median seconds of steps of about so many tokens near the start of a prompt; None while unknown."""
        steps = self._steps.get((n_tokens.bit_length(), 0), ())
        return _middle(steps)[1] if len(steps) >= _LEAST_STEPS else None


def _middle(steps: Iterable[_Point]) -> _Point:
    """Return the step of median time for its tokens, the faster one of two."""
    ordered = sorted(steps, key=lambda point: point[1] / point[0][1])
    return ordered[(len(ordered) - 1) // 2]


def _fit(points: Sequence[_Point]) -> StepCost:
    """Return the least squares of relative errors, so that small steps count as much, without negative terms."""
    best, least = StepCost(0.0, 0.0), float("inf")
    for terms in (terms for n in (1, 2, 3) for terms in combinations(range(3), n)):
        found = _solve([[features[term] / seconds for term in terms] for features, seconds in points])
        if found is None or min(found) < 0.0:
            continue
        values = [0.0, 0.0, 0.0]
        for term, value in zip(terms, found, strict=True):
            values[term] = value
        errors = (sum(v * x for v, x in zip(values, features, strict=True)) / t - 1 for features, t in points)
        error = sum(e * e for e in errors)
        if error < least - 1e-9:
            best, least = StepCost(*values), error
    return best


def _solve(rows: list[list[float]]) -> list[float] | None:
    """Return x with the least ``|rows x - 1|`` by normal equations; None where the rows leave it open."""
    n = len(rows[0])
    scale = [max(row[i] for row in rows) or 1.0 for i in range(n)]
    rows = [[value / most for value, most in zip(row, scale, strict=True)] for row in rows]
    matrix = [[sum(r[i] * r[j] for r in rows) for j in range(n)] + [sum(r[i] for r in rows)] for i in range(n)]
    for i in range(n):  # symmetric and positive: pivots on the diagonal are enough
        if matrix[i][i] < 1e-6:
            return None
        for j in range(n):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][n] / matrix[i][i] / scale[i] for i in range(n)]
