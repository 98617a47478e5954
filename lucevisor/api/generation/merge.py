"""Merges the events of several sequences into one stream.

Knows neither JSON nor HTTP.  Invariant: however the block is left, none of its tasks remains and every sequence is
cancelled or finished.  The queue is short: for a slow reader, events wait in the handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lucevisor.api.ports import HandlePort
from lucevisor.engine.request import Event

_QUEUE = 64

IndexedEvent = tuple[int, Event]


class MergedEvents:
    """The merged stream: index of the sequence and its event."""

    def __init__(self, queue: asyncio.Queue[IndexedEvent]) -> None:
        self._queue = queue

    async def next(self, timeout_s: float) -> IndexedEvent | None:
        """Return the next event, or None if there is none for `timeout_s`."""
        if not self._queue.empty():
            return self._queue.get_nowait()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._queue.get()
        except TimeoutError:
            return None


@asynccontextmanager
async def merged(handles: Sequence[HandlePort]) -> AsyncIterator[MergedEvents]:
    """Read all handles concurrently while the block runs."""
    queue: asyncio.Queue[IndexedEvent] = asyncio.Queue(_QUEUE)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_pump(index, handle, queue)) for index, handle in enumerate(handles)]
            yield MergedEvents(queue)
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as errors:
        # A single cause ended the block: its own error or a bug in a pump.
        raise errors.exceptions[0] from None
    finally:
        for handle in handles:
            handle.cancel()


async def _pump(index: int, handle: HandlePort, queue: asyncio.Queue[IndexedEvent]) -> None:
    async for event in handle:
        await queue.put((index, event))
