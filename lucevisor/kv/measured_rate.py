"""Measured rates: how long reading a prefix takes, and how long computing it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MeasuredRate:
    """Units a second.  With each measurement the earlier ones count a tenth less."""

    n: float = 0.0
    seconds: float = 0.0
    measured_at: float = 0.0

    def add(self, n: int, seconds: float, now: float) -> None:
        self.n, self.seconds, self.measured_at = 0.9 * self.n + n, 0.9 * self.seconds + seconds, now

    def seconds_for(self, n: int) -> float | None:
        """Return how long ``n`` units take; None if that is not known."""
        return n * self.seconds / self.n if self.n else None
