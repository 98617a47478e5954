"""Application and server: routes, serving, draining.

Knows routes and sockets; handlers are in `routes`.  Invariant: after `drain` no request is in service.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from aiohttp import web

from lucevisor.api.connections import ConnectionRunner
from lucevisor.api.context import (
    ACTIVE,
    BUFFERED_BODIES,
    IGNORED_BEFORE,
    METRICS,
    PORTS,
    RESPONSE_STORE,
    START_LIMITER,
    ActiveRequests,
    BufferedBodies,
)
from lucevisor.api.limiter import LoopLimiter
from lucevisor.api.listening import BACKLOG, url_of
from lucevisor.api.metrics import Metrics
from lucevisor.api.middleware import request_middleware, set_headers, wait_until_idle
from lucevisor.api.ports import Ports
from lucevisor.api.response_store import ResponseStore
from lucevisor.api.routes import anthropic, info, page, responses
from lucevisor.api.routes.chat import chat_completions
from lucevisor.api.routes.completions import completions
from lucevisor.api.routes.openapi import openapi
from lucevisor.api.routes.tokenize import detokenize, tokenize

_CLOSING_S = 2.0
_LAST_EVENTS_S = 1.0
_STARTS_PER_ITERATION = 16


def create_app(ports: Ports) -> web.Application:
    """Return the application; fields of `ports` that are set later take effect immediately."""
    app = web.Application(middlewares=[request_middleware], client_max_size=ports.settings.max_body_bytes)
    app[PORTS] = ports
    app[METRICS] = Metrics(ports)
    app[ACTIVE] = ActiveRequests()
    app[BUFFERED_BODIES] = BufferedBodies()
    app[IGNORED_BEFORE] = set()
    app[RESPONSE_STORE] = ResponseStore(ports.settings.stored_responses, ports.settings.stored_bytes)
    app[START_LIMITER] = LoopLimiter(_STARTS_PER_ITERATION)
    app.on_response_prepare.append(set_headers)
    app.on_shutdown.append(_close_preprocessor)
    app.add_routes(
        [
            web.post("/v1/chat/completions", chat_completions),
            web.post("/v1/completions", completions),
            web.post("/v1/messages", anthropic.messages),
            web.post("/v1/messages/count_tokens", anthropic.count_tokens),
            web.post("/v1/responses", responses.create_response),
            web.get("/v1/responses/{id}", responses.get_response),
            web.delete("/v1/responses/{id}", responses.delete_response),
            web.get("/v1/models", info.models),
            web.get("/v1/models/{id:.+}", info.model),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/props", info.props),
            web.get("/health", info.health),
            web.get("/ready", info.ready),
            web.get("/metrics", info.metrics),
            web.get("/openapi.json", openapi),
            web.get("/", page.page),
            web.get("/status", page.status),
            web.post("/admin/restart", page.restart),
        ]
    )
    return app


async def _close_preprocessor(app: web.Application) -> None:
    if (preprocessor := app[PORTS].preprocessor) is not None:
        await preprocessor.close()


async def serve(app: web.Application, sockets: Sequence[socket.socket]) -> tuple[web.AppRunner, str]:
    """Serve on listening sockets; return the runner and the URL.  `await runner.cleanup()` ends it and closes them."""
    runner = ConnectionRunner(app, app[PORTS].settings, app[METRICS], _CLOSING_S)
    await runner.setup()
    for sock in sockets:
        await web.SockSite(runner, sock, backlog=BACKLOG).start()
    return runner, url_of(sockets[0])


async def drain(runner: web.AppRunner, deadline_s: float) -> bool:
    """Accept no more requests and wait for running ones; return whether all ended before the deadline.

    Requests that did not are cancelled: their clients get an error event, or a 503 if nothing was sent yet.
    """
    if runner.app[ACTIVE].draining is False:
        runner.app[ACTIVE].draining = True
        for site in list(runner.sites):
            await site.stop()
    started = time.monotonic()
    active = runner.app[ACTIVE].contexts
    if await wait_until_idle(lambda: len(active), deadline_s):
        return True
    for context in list(active):
        context.cancel()
    await wait_until_idle(lambda: len(active), _LAST_EVENTS_S + max(0.0, deadline_s - (time.monotonic() - started)))
    return False
