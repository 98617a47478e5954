"""A response of server-sent events, or of lines. The head is sent with the first event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final, Literal

import msgspec
from aiohttp import web

from lucevisor.api.errors import ApiError

StreamStyle = Literal["data", "unended", "named", "lines"]
"""`data`: server-sent events without names, ended by `[DONE]`.  `unended`: the same without `[DONE]`.  `named`: each
carries its `type` as its name, and the last one ends the stream.  `lines`: no events, but JSON objects, one a line
(Ollama's)."""


class ClientGone(Exception):
    """The client disconnected."""


@contextmanager
def client_errors() -> Iterator[None]:
    try:
        yield
    except ConnectionError as error:
        raise ClientGone(str(error)) from None


_EVENTS: Final = "text/event-stream"
CONTENT_TYPES: Final[dict[StreamStyle, str]] = {
    "data": _EVENTS,
    "unended": _EVENTS,
    "named": _EVENTS,
    "lines": "application/x-ndjson",
}


class EventFormat:
    """Format of the streams of an API."""

    style: ClassVar[StreamStyle] = "data"

    def failure(self, error: ApiError) -> Sequence[object]:
        """Return the events that end a stream that fails."""
        return [error.body()]


class EventStream:
    """Writes events to one client. While its buffer is full, events wait in the handles of its sequences."""

    def __init__(self, request: web.Request, headers: Mapping[str, str], event_format: EventFormat) -> None:
        self._request = request
        self._format = event_format
        self._encoder = msgspec.json.Encoder()
        is_lines = event_format.style == "lines"
        self.response = web.StreamResponse(
            headers={
                "Content-Type": CONTENT_TYPES[event_format.style] + ("" if is_lines else "; charset=utf-8"),
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would buffer events
                **headers,
            }
        )

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, events: Sequence[object]) -> None:
        """Send events with JSON data, in one write; raises ClientGone."""
        if events:
            await self._write(b"".join(map(self._encoded, events)))

    async def comment(self) -> None:
        if self._format.style != "lines":
            await self._write(b": waiting\n\n")

    async def finish(self) -> None:
        if self._format.style == "data":
            await self._write(b"data: [DONE]\n\n")
        await self._end()

    async def fail(self, error: ApiError) -> None:
        """End a started stream with an error and no `[DONE]`; raises ClientGone."""
        await self.send(self._format.failure(error))
        await self._end()

    def _encoded(self, event: object) -> bytes:
        if self._format.style == "lines":
            return self._encoder.encode(event) + b"\n"
        data = b"data: " + self._encoder.encode(event) + b"\n\n"
        if self._format.style == "named" and isinstance(event, dict):
            return f"event: {event['type']}\n".encode() + data
        return data

    async def _write(self, data: bytes) -> None:
        with client_errors():
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)

    async def _end(self) -> None:
        with client_errors():
            await self.response.write_eof()
