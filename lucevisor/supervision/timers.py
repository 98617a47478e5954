"""The deadlines of one group: which run, until when, and whether one that fired is really over.

Pure. Invariants: at most one of each name runs; one that fires early, because the clock stood still while the
supervisor was stopped, runs on for the rest of its time.
"""

from __future__ import annotations

from collections.abc import Iterator

from lucevisor.supervision.events import CancelTimer, StartTimer, Timer

_EARLY_S = 0.01  # event loops count milliseconds


class Timers:
    """Each change returns the instructions that carry it out."""

    def __init__(self) -> None:
        self._due: dict[Timer, float] = {}
        self._looked: set[Timer] = set()

    def due(self, timer: Timer) -> float | None:
        """Return when `timer` is over; None when it does not run."""
        return self._due.get(timer)

    def due_after(self, timer: Timer, at: float) -> bool:
        """Return whether `timer` runs, and longer than until `at`."""
        return timer in self._due and at < self._due[timer]

    def arm(self, timer: Timer, now: float, after_s: float) -> StartTimer:
        """Start or restart a timer."""
        self._looked.discard(timer)
        self._due[timer] = now + after_s
        return StartTimer(timer, after_s)

    def disarm(self, *timers: Timer) -> Iterator[CancelTimer]:
        """Cancel those of `timers` that run."""
        for timer in timers:
            self._looked.discard(timer)
            if self._due.pop(timer, None) is not None:
                yield CancelTimer(timer)

    def fired(self, timer: Timer, now: float) -> StartTimer | bool:
        """Take a timer that fired: True when it is over, False when none runs, else the instruction to restart it."""
        due = self._due.get(timer)
        if due is None:
            return False
        if now < due - _EARLY_S:
            return StartTimer(timer, due - now)
        del self._due[timer]
        return True

    def look_again(self, timer: Timer, now: float, after_s: float) -> StartTimer | None:
        """Return the instruction that starts an expired timer once more; None when this was the second time."""
        if timer in self._looked:
            return None
        started = self.arm(timer, now, after_s)
        self._looked.add(timer)
        return started
