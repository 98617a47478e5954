"""State of the aiohttp application by its keys: active requests, buffered bodies, and the context of a request."""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Final

from aiohttp import web

from lucevisor.api.contexts import ModelContext, RequestContext, ServedModels, ServerContext
from lucevisor.api.metrics import Metrics
from lucevisor.api.response_store import ResponseStore


async def yield_to_loop(limit: asyncio.Semaphore) -> None:
    """Wait until the event loop has an iteration with room: as many callers as ``limit`` says go on in each."""
    async with limit:
        await asyncio.sleep(0)


SERVER: Final = web.AppKey("server", ServerContext)
MODELS: Final = web.AppKey("models", ServedModels)
METRICS: Final = web.AppKey("metrics", Metrics)
_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


CONTEXT: Final = web.RequestKey("context", RequestContext)


class ActiveRequests:
    """Requests without a complete response. ``closing``: connections close after a response; ``draining``: new ones are
    refused."""

    def __init__(self) -> None:
        self.contexts: set[RequestContext] = set()
        self.closing = self.draining = False

    def generating(self, now: float) -> list[dict[str, object]]:
        """Return a row of the status for each request that generates, oldest first.  ``now``: monotonic clock."""
        contexts = sorted((c for c in self.contexts if c.handles), key=lambda c: c.started_s)
        return [
            {
                "id": c.request_id,
                "path": c.path,
                "model": c.model,
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
    """Bytes of the bodies in memory.  ``parse_limit``: one body is processed in each iteration of the event loop."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self.parse_limit = asyncio.Semaphore(1)


BUFFERED_BODIES: Final = web.AppKey("buffered_bodies", BufferedBodies)
RESPONSE_STORE: Final = web.AppKey("response_store", ResponseStore)
START_LIMIT: Final = web.AppKey("start_limit", asyncio.Semaphore)
"""Limits how many handlers start in one iteration of the event loop: each runs 0.1 ms before it first waits."""


def request_id_of(request: web.Request) -> str:
    """Return the client's x-request-id if it is 1 to 128 printable ASCII characters without spaces, else a new id."""
    sent = request.headers.get("x-request-id", "")
    return sent if _ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"


def context_of(request: web.Request) -> RequestContext:
    return request[CONTEXT]


def model_of(request: web.Request) -> ModelContext:
    """Return the context of the model that a prepared request is for."""
    return request.app[MODELS][context_of(request).model]
