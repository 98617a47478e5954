"""Measured times of decode, verify and draft steps by shape, and estimates for shapes not measured yet.

Pure: shapes and seconds in.  A shape is (rows, slices).  An estimate follows the nearest measured shapes: between two
row counts it is linear, outside them it grows with an assumed cost of a row, and another number of slices shifts it.
Invariant: a shape is estimated by its own steps alone once more than the first two, which warm it up, were measured;
a few steps of one between others that are well known count beside what those say.
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
_WELL_KNOWN: Final = 8  # steps from which a shape is known by its own alone
_WEIGHT: Final = 4  # steps that what others say counts for until then
_IN_USE_STEPS: Final = 32  # steps of all shapes since its last one after which a shape is no longer in use


@dataclass(slots=True)
class _ShapeTimes:
    """Recent steps of a shape, and its cost relative to others: ``relative`` times the level is what it takes."""

    n_added: int = 0
    last_added: int = 0  # number of the last one among the steps of all shapes
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # seconds
    typical: float = math.inf  # the middle of them; while warming up, the least
    relative: float = math.inf

    def in_use(self, number: int) -> bool:
        """Whether it is at step ``number``."""
        return number - self.last_added <= _IN_USE_STEPS

    def add(self, seconds: float, number: int, level: float, *, warm: bool) -> None:
        self.n_added = max(self.n_added, WARM_STEPS if warm else 0) + 1
        if self.n_added <= WARM_STEPS:
            self.typical = min(self.typical, seconds)
        else:
            if self.steps and not self.in_use(number):  # what it took then is not what it takes now
                moved = self.relative * level / self.typical
                self.steps = deque((one * moved for one in self.steps), maxlen=_KEPT)
            self.steps.append(seconds)
            self.typical = middle(self.steps)
        self.last_added = number
        self.relative = self.typical / level


class DecodeTimes:
    """Times by shape.  All of them move with the *level*: a machine that slows down, or longer contexts, show in the
    shapes that are in use, and the others are assumed to follow.

    The level is what one of the shapes in use, the reference, takes over what it took when it became that.  Costs of
    the others relative to it are corrected while they are in use.  So the level cannot drift, however times are
    distributed.
    """

    def __init__(self, row_share: float) -> None:
        """``row_share``: what one more row takes, of a step of one row, before it was measured."""
        self._row_share = row_share
        self._shapes: dict[tuple[int, int], _ShapeTimes] = {}
        self._rows: dict[int, list[int]] = {}  # row counts known, ascending, by slices
        self._level = 1.0
        self._reference: _ShapeTimes | None = None
        self._n_added = 0

    def add(self, n_rows: int, n_slices: int, seconds: float, *, warm: bool = False) -> None:
        """Count a step; ``warm``: it is known to have compiled and captured nothing."""
        if seconds <= 0:
            return
        self._n_added += 1
        shape = self._shapes.setdefault((n_rows, n_slices), _ShapeTimes())
        if (self._reference is None or not self._reference.in_use(self._n_added)) and len(shape.steps) == _KEPT:
            self._reference = shape
        relative = shape.relative
        shape.add(seconds, self._n_added, self._level, warm=warm)
        if shape is self._reference:
            self._level, shape.relative = shape.typical / relative, relative
        if len(shape.steps) == 1:
            rows = self._rows.setdefault(n_slices, [])
            if n_rows not in rows:
                insort(rows, n_rows)

    def _typical(self, shape: _ShapeTimes) -> float:
        """What a step of a shape takes."""
        return shape.typical if shape.in_use(self._n_added) else shape.relative * self._level

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
            return self._own(shape, n_rows, n_slices)
        least = self._typical(shape) if shape is not None else math.inf
        if self._rows:
            # Rows decide most of what a step costs, whatever slices they belong to.
            nearest = min(self._rows, key=lambda known: (abs(known - n_slices), known))
            least = min(least, self._near(n_rows, nearest))
        elif self._shapes:
            known = self._shapes.items()
            least = min(least, *(self._assumed(n_rows, rows, self._typical(one)) for (rows, _), one in known))
        return least if least < math.inf else None

    def _own(self, shape: _ShapeTimes, n_rows: int, n_slices: int) -> float:
        """What its own steps say; a few weigh as much as the well-known shapes on both sides."""
        own, n = self._typical(shape), len(shape.steps)
        if n >= _WELL_KNOWN:
            return own
        rows = [known for known in self._rows[n_slices] if len(self._shapes[known, n_slices].steps) >= _WELL_KNOWN]
        at = bisect_left(rows, n_rows)
        if not 0 < at < len(rows):
            return own
        low, high = rows[at - 1], rows[at]
        return (n * own + _WEIGHT * self._linear(n_rows, n_slices, low, high)) / (n + _WEIGHT)

    def _near(self, n_rows: int, n_slices: int) -> float:
        """Estimate by the shapes of ``n_slices`` slices; outside them, as others grow from there."""
        rows = self._rows[n_slices]
        if rows[0] <= n_rows <= rows[-1]:
            return self._between(n_rows, n_slices)
        edge = rows[0] if n_rows < rows[0] else rows[-1]
        at_edge = self._typical(self._shapes[edge, n_slices])
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
            return self._typical(self._shapes[n_rows, n_slices])
        return self._linear(n_rows, n_slices, rows[at - 1], rows[at])

    def _linear(self, n_rows: int, n_slices: int, low: int, high: int) -> float:
        below, above = (self._typical(self._shapes[at, n_slices]) for at in (low, high))
        return below + (above - below) * (n_rows - low) / (high - low)


def middle(values: Iterable[float]) -> float:
    """Return the mean of the middle half: outliers do not count, and it is steadier than the median."""
    ordered = sorted(values)
    skipped = len(ordered) // 4
    middle = ordered[skipped : len(ordered) - skipped]
    return sum(middle) / len(middle)
