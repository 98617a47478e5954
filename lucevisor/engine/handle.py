"""The client's end of a request: an async iterator of its events that can cancel it.

Knows nothing of scheduling.  Invariant: the iteration ends right after the FinishedEvent, which always comes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType

from lucevisor.engine.request import Event, FinishedEvent


class RequestHandle:
    """Events of one request, for one reader.

    ``with engine.submit(request) as handle: async for event in handle: ...`` cancels what still runs when the block is
    left, so a reader that goes away frees the pages.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], None]) -> None:
        self.request_id = request_id
        self.finished: FinishedEvent | None = None  # set by the engine before the reader gets there
        self._cancel = cancel
        self._events: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for an event
        self._read_all = False

    def push(self, event: Event) -> None:
        """Add an event; for the engine."""
        if type(event) is FinishedEvent:
            self.finished = event
        self._events.append(event)
        if (reader := self._reader) is not None and not reader.done():
            reader.set_result(None)

    def cancel(self) -> None:
        """End the request and free its pages; a FinishedEvent follows the events already queued.

        Does nothing if it is over already.
        """
        if self.finished is None:
            self._cancel(self.request_id)

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> Event:
        if self._read_all:
            raise StopAsyncIteration
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        event = self._events.popleft()
        self._read_all = event is self.finished
        return event

    def __enter__(self) -> RequestHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
