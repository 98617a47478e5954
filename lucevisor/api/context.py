"""What is known of one HTTP request while it is served: its id, its stream, its sequences, and what the log will say.

Knows no endpoint.  Invariant: whoever ends a request (a drain, the boundary after an error) finds here what has to end.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from aiohttp import web

from lucevisor.api.limiter import LoopLimiter
from lucevisor.api.metrics import Metrics
from lucevisor.api.output.sse import EventStream
from lucevisor.api.ports import HandlePort, Ports

PORTS: Final = web.AppKey("ports", Ports)
METRICS: Final = web.AppKey("metrics", Metrics)
_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request in service.  Times in seconds, `started_s` on the monotonic clock."""

    request_id: str
    started_s: float
    stream: EventStream | None = None
    handles: Sequence[HandlePort] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float | None = None
    fields: dict[str, object] = field(default_factory=dict)  # more for the log line

    def cancel(self) -> None:
        """End the request's sequences; its handler then sees them end and tells the client."""
        for handle in self.handles:
            handle.cancel()


_KEY: Final = web.RequestKey("context", RequestContext)


class ActiveRequests:
    """The requests in service, and whether the server takes more."""

    def __init__(self) -> None:
        self.contexts: set[RequestContext] = set()
        self.draining = False


ACTIVE: Final = web.AppKey("active", ActiveRequests)


class BufferedBodies:
    """The bodies in hand: their bytes, and whose turn it is to be read in the event loop."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.limiter = LoopLimiter(1)


BUFFERED_BODIES: Final = web.AppKey("buffered_bodies", BufferedBodies)
START_LIMITER: Final = web.AppKey("start_limiter", LoopLimiter)
"""What every request passes first: a handler takes 0.1 ms before it waits for anything."""


def request_id_of(request: web.Request) -> str:
    """Return the client's x-request-id if it is 1 to 128 printable ASCII characters without blanks, else a new id."""
    sent = request.headers.get("x-request-id", "")
    return sent if _ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"


def attach(request: web.Request, context: RequestContext) -> None:
    """Give a request its context."""
    request[_KEY] = context


def context_of(request: web.Request) -> RequestContext:
    """Return the context that the boundary gave this request."""
    return request[_KEY]


def has_context(request: web.Request) -> bool:
    """Say whether the boundary has seen this request."""
    return _KEY in request
