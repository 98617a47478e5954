"""A response of server-sent events, started as late as possible.

Knows HTTP, no JSON schema.  Invariant: the head is sent with the first event, so an earlier error still sets the
status; a later error is the last event, and only a complete stream ends with `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from aiohttp import web


class ClientGone(Exception):
    """The client disconnected, or read nothing for so long that it was disconnected."""


class EventStream:
    """Writes events to one client, and disconnects it if it reads nothing for `write_timeout_s`."""

    def __init__(self, request: web.Request, write_timeout_s: float, headers: Mapping[str, str]) -> None:
        self._request = request
        self._timeout_s = write_timeout_s
        self._encoder = msgspec.json.Encoder()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would buffer events
                **headers,
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
        """Send a comment, which clients skip, so that proxies keep the connection open."""
        await self._write(b": waiting\n\n")

    async def finish(self) -> None:
        """End a complete stream."""
        await self._write(b"data: [DONE]\n\n")
        await self._end()

    async def fail(self, body: object) -> None:
        """End a started stream with an error event and no `[DONE]`; raises ClientGone."""
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
            raise ClientGone(f"the client read nothing for {self._timeout_s:g} s") from None
        except ConnectionError as error:
            raise ClientGone(str(error)) from None

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self.response.write_eof()
        except TimeoutError:
            self._drop()
            raise ClientGone(f"the client read nothing for {self._timeout_s:g} s") from None
        except ConnectionError as error:
            raise ClientGone(str(error)) from None

    def _drop(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
