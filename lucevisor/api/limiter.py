"""Limits how many tasks proceed in one iteration of the event loop, so that a burst does not block it.

Knows no request.  Invariant: first come, first served; at most `n` tasks proceed between two polls of the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque


class LoopLimiter:
    """`n`: tasks that may proceed in one iteration of the loop."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._n_started = 0  # in this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> None:
        """Wait for this task's turn; return immediately if no task waits and this iteration has room."""
        loop = asyncio.get_running_loop()
        if self._n_started < self._n and not self._waiting:
            if not self._n_started:
                loop.call_soon(self._next_iteration, loop)
            self._n_started += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._n_started = 0
        while self._waiting and self._n_started < self._n:
            turn = self._waiting.popleft()
            if not turn.done():  # otherwise the waiter was cancelled
                turn.set_result(None)
                self._n_started += 1
        if self._n_started:
            loop.call_soon(self._next_iteration, loop)
