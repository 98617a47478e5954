"""The watchdog for hung steps: finds work that a daemon has been busy with for too long.

Invariant: work is overdue only when it was seen at every look for `limit_s`, on a clock that stands still while the
supervisor does: a result that waits in the socket of a stopped supervisor is not the daemon's fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from lucevisor.awake import AwakeClock

WATCH_S = 1.0

log = structlog.get_logger("watchdog")


@dataclass(frozen=True, slots=True)
class Work:
    """What a group's daemon works on. `what` is shown to people and identifies the work."""

    group: str
    what: str


class Watchdog:
    """Call `look` about once a second with all the work in hand."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._seen_at: dict[Work, float] = {}

    def look(self, in_hand: Iterable[Work]) -> dict[Work, float]:
        """Return what is overdue, and how many seconds ago it was first seen."""
        now = self._clock()
        self._seen_at = {work: self._seen_at.get(work, now) for work in in_hand}
        return {work: now - at for work, at in self._seen_at.items() if now - at > self._limit_s}


async def watch(limit_s: float, in_hand: Callable[[], Iterable[Work]], overdue: Callable[[Work, float], None]) -> None:
    """Look at `in_hand()` until cancelled, and pass work older than `limit_s` to `overdue`."""
    watchdog = Watchdog(limit_s, AwakeClock())
    while True:
        await asyncio.sleep(WATCH_S)
        try:
            for work, waited_s in watchdog.look(in_hand()).items():
                overdue(work, waited_s)
        except Exception:  # a bug elsewhere must not end the watch
            log.exception("looking for overdue work failed; the watchdog goes on")
