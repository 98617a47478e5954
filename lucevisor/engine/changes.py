"""Waiting for a condition that entries to the engine bring about: ``asyncio.Condition.wait_for`` without its lock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lucevisor import suspend_clock


class Changes:
    """The engine calls ``notify`` after every entry."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiters, which check their conditions again."""
        self._changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def holds_within(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until ``condition`` holds; False if it takes longer."""
        try:
            async with suspend_clock.timeout(timeout_s):
                await self.wait_for(condition)
        except TimeoutError:
            return False
        return True
