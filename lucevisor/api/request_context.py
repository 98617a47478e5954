"""The requests in service, and the keys under which the application keeps its state."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from typing import Final

from aiohttp import web

from lucevisor.api.app_context import AppContext, RequestContext
from lucevisor.api.metrics import Metrics
from lucevisor.api.response_store import ResponseStore


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


APP_CONTEXT: Final = web.AppKey("app_context", AppContext)
METRICS: Final = web.AppKey("metrics", Metrics)
_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


_KEY: Final = web.RequestKey("context", RequestContext)


class ActiveRequests:
    """The requests in service, and whether the server accepts more.

    ``closing``: each connection is closed after its response.  ``draining``: new requests are refused.
    """

    def __init__(self) -> None:
        self.contexts: set[RequestContext] = set()
        self.closing = self.draining = False

    def generating(self, now: float) -> list[dict[str, object]]:
        """Return those that wait for tokens or get them, the oldest first: ``requests`` of the status JSON."""
        contexts = sorted((c for c in self.contexts if c.handles), key=lambda c: c.started_s)
        return [
            {
                "id": c.request_id,
                "path": c.path,
                "key": c.caller.name,
                "elapsed_s": round(now - c.started_s, 3),
                "first_token_s": None if c.first_token_s is None else round(c.first_token_s, 3),
                "prompt_tokens": c.prompt_tokens,
                "generated_tokens": c.generated_tokens,
                "accepted_tokens": c.accepted_tokens,
            }
            for c in contexts
        ]


ACTIVE: Final = web.AppKey("active", ActiveRequests)


class BufferedBodies:
    """Bytes of the bodies in memory, and the limiter for bodies processed on the event loop."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.limiter = LoopLimiter(1)


BUFFERED_BODIES: Final = web.AppKey("buffered_bodies", BufferedBodies)
RESPONSE_STORE: Final = web.AppKey("response_store", ResponseStore)
START_LIMITER: Final = web.AppKey("start_limiter", LoopLimiter)
"""Limits how many handlers start per iteration of the loop: each runs 0.1 ms before it first waits."""


IGNORED_BEFORE: Final = web.AppKey("ignored_before", set[str])
"""Names of parameters without effect that were logged."""


def request_id_of(request: web.Request) -> str:
    """Return the client's x-request-id if it is 1 to 128 printable ASCII characters without spaces, else a new id."""
    sent = request.headers.get("x-request-id", "")
    return sent if _ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"


def attach(request: web.Request, context: RequestContext) -> None:
    """Attach a context to a request."""
    request[_KEY] = context


def context_of(request: web.Request) -> RequestContext:
    """Return the context that the middleware attached to the request."""
    return request[_KEY]


def has_context(request: web.Request) -> bool:
    """Return whether the middleware has seen this request."""
    return _KEY in request
