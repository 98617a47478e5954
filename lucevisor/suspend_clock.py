"""Time in which this process ran, for deadlines that a pause of the supervisor must not use up.

While the supervisor is stopped (SIGSTOP, a frozen container, swapping) it reads nothing, so silence proves nothing
about a daemon; and uvloop runs timers that expired meanwhile before it reads what arrived. Invariant: a stretch in
which the event loop did not run counts as at most `LONGEST_GAP_S`; so time passes, if slowly, however long the loop is
held up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import AsyncIterator, Callable

TICK_S = 0.5
LONGEST_GAP_S = 1.0


class SuspendAwareClock:
    """A monotonic clock that stands still while the process does. Call it to read the seconds.

    Create it in a running loop, which updates it every `TICK_S` while it is referenced and not paused.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._touched = clock()
        self._paused_s = 0.0
        self._is_paused = False
        _tick(weakref.ref(self), asyncio.get_running_loop())

    def __call__(self) -> float:
        now = self._clock()
        self._paused_s += max(now - self._touched - LONGEST_GAP_S, 0.0)
        self._touched = now
        return now - self._paused_s

    def pause(self) -> None:
        """Let nobody be woken for it while no deadline is measured: until `resume` it stands still."""
        self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            _tick(weakref.ref(self), asyncio.get_running_loop())

    @property
    def paused(self) -> bool:
        return self._is_paused


def _tick(held: weakref.ref[SuspendAwareClock], loop: asyncio.AbstractEventLoop) -> None:
    clock = held()
    if clock is not None and not clock.paused:
        clock()
        loop.call_later(TICK_S, _tick, held, loop)


@contextlib.asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout` in seconds of an SuspendAwareClock. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    clock = SuspendAwareClock()
    end = clock() + seconds
    timer: asyncio.Handle
    async with asyncio.timeout(None) as scope:

        def look() -> None:
            nonlocal timer
            left_s = end - clock()
            if left_s > 0:
                timer = loop.call_later(min(left_s, TICK_S), look)
            elif not scope.expired():
                scope.reschedule(loop.time())

        timer = loop.call_soon(look)
        try:
            yield
        finally:
            timer.cancel()
            clock.pause()  # the collector may take its time
