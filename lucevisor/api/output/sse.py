"""A response of server-sent events, begun as late as possible.

Knows HTTP, no JSON shape.  Invariant: the head is sent with the first event, so an error before it can still be an
error status; after it an error is the last event, and `[DONE]` is sent by a stream that is complete only.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web


class ClientGone(Exception):
    """The client closed the connection, or took nothing for so long that it was closed."""


class EventStream:
    """Writes events to one client; one that takes nothing for `write_timeout_s` is dropped."""

    def __init__(self, request: web.Request, write_timeout_s: float) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self._encoder = msgspec.json.Encoder()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would gather events otherwise
            }
        )

    @property
    def started(self) -> bool:
        """Whether the head was sent, so that the status can no longer change."""
        return self.response.prepared

    async def send(self, event: object) -> None:
        """Send one event with JSON data; raises ClientGone."""
        await self._write(b"data: " + self._encoder.encode(event) + b"\n\n")

    async def comment(self) -> None:
        """Send a line that clients skip, so that nobody on the way takes the connection for dead."""
        await self._write(b": waiting\n\n")

    async def finish(self) -> None:
        """End a complete stream."""
        await self._write(b"data: [DONE]\n\n")
        await self._end()

    async def fail(self, body: object) -> None:
        """End a stream that has begun with an error as its last event and no `[DONE]`; raises ClientGone."""
        await self.send(body)
        await self._end()

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                await self.response.write(data)
        except TimeoutError:
            self._drop()
            raise ClientGone(f"the client took nothing for {self._timeout_s:g} s") from None
        except ConnectionError as error:
            raise ClientGone(str(error)) from None

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write_eof()
        except TimeoutError:
            self._drop()
            raise ClientGone(f"the client took nothing for {self._timeout_s:g} s") from None
        except ConnectionError as error:
            raise ClientGone(str(error)) from None

    def _drop(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
