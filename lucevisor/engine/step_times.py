"""Measured times of prefill steps, and from them the chunk of a long prompt that leaves room for others.

Pure: sizes and seconds in.  A step costs ``overhead + tokens x rate``, where the overhead (weights read or dequantised,
kernels launched) is what small chunks pay more often.  Both are fitted to the medians of a few recent steps of each
size, so a step that compiled or was disturbed does not count.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from lucevisor.model.values import PAGE_TOKENS
from lucevisor.protocol.steps import Step

_KEPT: Final = 9  # steps of a size class: their median is not moved by a few outliers
_LEAST_STEPS: Final = 2
_LEAST_TOKENS: Final = 16  # of a slice: shorter ones run other kernels, as decodes do
MOST_LOSS: Final = 1.15
"""A prompt token in a smaller chunk may cost this much of what it costs in a whole one: the price of room."""


def chunk_sizes(full: int) -> list[int]:
    """Return the whole chunk and its halves down to a page, smallest first: equal steps keep every stage busy."""
    sizes = [full]
    while sizes[0] % 2 == 0 and sizes[0] // 2 >= PAGE_TOKENS:
        sizes.insert(0, sizes[0] // 2)
    return sizes


class StepTimes:
    """Recent prefill steps by size class (powers of two)."""

    def __init__(self, full_chunk: int) -> None:
        self._sizes = chunk_sizes(full_chunk)
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        self._chunk: int | None = None

    def add(self, step: Step, seconds: float) -> None:
        """Count a step if it computed a prompt; ``seconds``: of its slowest stage."""
        if seconds > 0 and max((len(piece.tokens) for piece in step.slices), default=0) >= _LEAST_TOKENS:
            n = step.n_tokens
            self._steps.setdefault(n.bit_length(), deque(maxlen=_KEPT)).append((n, seconds))
            self._chunk = None

    @property
    def shared_chunk(self) -> int:
        """The smallest chunk that costs a long prompt at most ``MOST_LOSS``; half of a whole one until it is known."""
        if self._chunk is None:
            self._chunk = self._find()
        return self._chunk

    def fit(self) -> tuple[float, float] | None:
        """Return (overhead in seconds, seconds a token); None before steps of two sizes were seen."""
        points = [
            (median(n for n, _ in steps), median(t for _, t in steps))
            for steps in self._steps.values()
            if len(steps) >= _LEAST_STEPS
        ]
        if len(points) < 2:
            return None
        weights = [1 / (t * t) for _, t in points]  # least squares of relative errors: small steps count as much
        total = sum(weights)
        n_mean = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
        t_mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
        spread = sum(w * (n - n_mean) ** 2 for w, (n, _) in zip(weights, points, strict=True))
        slope = sum(w * (n - n_mean) * (t - t_mean) for w, (n, t) in zip(weights, points, strict=True)) / spread
        rate = min(max(slope, 0.0), t_mean / n_mean)
        return t_mean - rate * n_mean, rate

    def _find(self) -> int:
        fitted, full = self.fit(), self._sizes[-1]
        if fitted is None:
            return self._sizes[max(0, len(self._sizes) - 2)]
        overhead, rate = fitted
        most = MOST_LOSS * (overhead / full + rate)
        return next(size for size in self._sizes if size == full or overhead / size + rate <= most)
