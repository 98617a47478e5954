"""Waiting for what no event tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 100.0) -> None:
    """Wait in the event loop until a condition holds; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - files, counters and other processes set no event
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], seconds: float = 100.0, what: str = "it holds") -> None:
    """Wait outside of an event loop until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
