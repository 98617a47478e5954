"""Measured times of decode, verify and draft steps by shape, and estimates for shapes not measured yet.

Pure: shapes and seconds in.  A shape is (rows, slices).  An estimate follows the nearest measured shapes: between two
row counts it is linear, outside them it grows with an assumed cost of a row, and another number of slices shifts it.
Invariant: a shape is estimated by its own steps alone once more than the first two, which warm it up, were measured.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_KEPT: Final = 32  # steps per shape: with 20 % of jitter their middle is known to 2 %
WARM_STEPS: Final = 2
"""First steps of a shape: they compile kernels and capture a CUDA graph, so they tell only what it takes at most."""
_SETTLED: Final = 8  # steps of a shape from which what it takes moves the level
_USE_STEPS: Final = 32  # steps over which the use of shapes is averaged


@dataclass(slots=True)
class _ShapeTimes:
    """Recent steps of a shape, divided by the level they were measured at and by ``scale``."""

    n_added: int = 0
    last_added: int = 0  # number of the last one among the steps of all shapes
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    typical: float = math.inf  # the middle of them, times ``scale``; while warming up, the least
    scale: float = 1.0
    use: float = 0.0  # its share in the steps of all shapes, lately

    def add(self, seconds: float, number: int) -> float:
        """Count a step, divided by the level; return by what the level moves."""
        self.use = 1 / _USE_STEPS + (1 - 1 / _USE_STEPS) ** (number - self.last_added) * self.use
        self.n_added += 1
        self.last_added = number
        if self.n_added <= WARM_STEPS:
            self.typical = min(self.typical, seconds)
            return 1.0
        before = self.typical
        self.steps.append(seconds / self.scale)
        self.typical = middle(self.steps) * self.scale
        if len(self.steps) <= _SETTLED:
            return 1.0
        moved = float((self.typical / before) ** min(1.0, self.use))
        self.scale /= moved
        self.typical /= moved
        return moved


class DecodeTimes:
    """Times by shape.  All of them move with the *level*: a machine that slows down, or longer contexts, show in the
    shapes that are in use, and the others are assumed to follow.

    What a step changes in the estimate of its shape is a change of the level by the share that the shape has in the
    steps lately, and of the shape alone by the rest.  So while one shape is used, the level is what that shape takes
    over what it took at first: it cannot drift, however times are distributed.
    """

    def __init__(self, row_share: float) -> None:
        """``row_share``: what one more row takes, of a step of one row, before it was measured."""
        self._row_share = row_share
        self._shapes: dict[tuple[int, int], _ShapeTimes] = {}
        self._rows: dict[int, list[int]] = {}  # row counts known, ascending, by slices
        self._level = 1.0
        self._n_added = 0

    def add(self, n_rows: int, n_slices: int, seconds: float) -> None:
        """Count a step."""
        if seconds <= 0:
            return
        self._n_added += 1
        shape = self._shapes.setdefault((n_rows, n_slices), _ShapeTimes())
        self._level *= shape.add(seconds / self._level, self._n_added)
        if len(shape.steps) == 1:
            rows = self._rows.setdefault(n_slices, [])
            if n_rows not in rows:
                insort(rows, n_rows)

    def age(self, n_rows: int, n_slices: int) -> int | None:
        """Return how many steps were counted since the last one of a shape; None before it is known."""
        shape = self._shapes.get((n_rows, n_slices))
        return self._n_added - shape.last_added if shape is not None and shape.steps else None

    def n_known(self, n_rows: int, n_slices: int) -> int:
        """Return how many steps an estimate for a shape rests on."""
        shape = self._shapes.get((n_rows, n_slices))
        return len(shape.steps) if shape is not None else 0

    def seconds(self, n_rows: int, n_slices: int) -> float | None:
        """Return what a step takes; None before anything was measured."""
        shape = self._shapes.get((n_rows, n_slices))
        if shape is not None and shape.steps:
            return shape.typical * self._level
        least = shape.typical if shape is not None else math.inf
        if self._rows:
            # Rows decide most of what a step costs, whatever slices they belong to.
            nearest = min(self._rows, key=lambda known: (abs(known - n_slices), known))
            least = min(least, self._near(n_rows, nearest))
        elif self._shapes:
            least = min(least, *(self._assumed(n_rows, rows, one.typical) for (rows, _), one in self._shapes.items()))
        return least * self._level if least < math.inf else None

    def _near(self, n_rows: int, n_slices: int) -> float:
        """Estimate by the shapes of ``n_slices`` slices; outside them, as others grow from there."""
        rows = self._rows[n_slices]
        if rows[0] <= n_rows <= rows[-1]:
            return self._between(n_rows, n_slices)
        edge = rows[0] if n_rows < rows[0] else rows[-1]
        at_edge = self._shapes[edge, n_slices].typical
        low, high = min(edge, n_rows), max(edge, n_rows)
        covering = [known for known, them in self._rows.items() if them[0] <= low and high <= them[-1]]
        if covering:
            other = min(covering, key=lambda known: (abs(known - n_slices), known))
            return at_edge * self._between(n_rows, other) / self._between(edge, other)
        return self._assumed(n_rows, edge, at_edge)

    def _assumed(self, n_rows: int, known_rows: int, seconds: float) -> float:
        return seconds * (1 + self._row_share * (n_rows - 1)) / (1 + self._row_share * (known_rows - 1))

    def _between(self, n_rows: int, n_slices: int) -> float:
        """Interpolate between the nearest measured row counts."""
        rows = self._rows[n_slices]
        at = bisect_left(rows, n_rows)
        if rows[at] == n_rows:
            return self._shapes[n_rows, n_slices].typical
        low, high = rows[at - 1], rows[at]
        below, above = self._shapes[low, n_slices].typical, self._shapes[high, n_slices].typical
        return below + (above - below) * (n_rows - low) / (high - low)


def middle(values: Iterable[float]) -> float:
    """Return the mean of the middle half: outliers do not count, and it is steadier than the median."""
    ordered = sorted(values)
    skipped = len(ordered) // 4
    middle = ordered[skipped : len(ordered) - skipped]
    return sum(middle) / len(middle)
