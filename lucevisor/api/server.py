"""Application and server: routes, serving, draining.

Knows routes and sockets; handlers are in `routes`.  Invariant: after `drain` no request is in service.
"""

from __future__ import annotations

import socket
import ssl
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
from lucevisor.api.middleware import refuse_expectations, request_middleware, set_headers, wait_until_idle
from lucevisor.api.ports import Ports
from lucevisor.api.response_store import ResponseStore
from lucevisor.api.routes import anthropic, info, llamacpp, ollama, page, responses
from lucevisor.api.routes.chat import chat_completions
from lucevisor.api.routes.completions import completions
from lucevisor.api.routes.openapi import openapi
from lucevisor.api.routes.tokenize import apply_template, detokenize, tokenize

_CLOSING_S = 2.0
_LAST_EVENTS_S = 1.0
_LINGER_S = 1.0
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
            web.post("/v1/responses/input_tokens", responses.count_input_tokens),
            web.get("/v1/responses/{id}", responses.get_response),
            web.get("/v1/responses/{id}/input_items", responses.list_input_items),
            web.delete("/v1/responses/{id}", responses.delete_response),
            web.get("/v1/models", info.models),
            web.get("/v1/models/{id:.+}", info.model),
            web.post("/api/chat", ollama.chat),
            web.post("/api/generate", ollama.generate),
            web.post("/api/show", ollama.show),
            web.get("/api/tags", ollama.tags),
            web.get("/api/ps", ollama.running),
            web.get("/api/version", ollama.version),
            web.post("/chat/completions", chat_completions),  # llama.cpp has these without /v1, too
            web.post("/responses", responses.create_response),
            web.get("/models", info.models),
            web.get("/v1/health", info.health),  # and this one with it
            web.post("/completion", llamacpp.completion),
            web.post("/completions", llamacpp.completion),
            web.post("/infill", llamacpp.infill),
            web.post("/apply-template", apply_template),
            web.post("/tokenize", tokenize),
            web.post("/detokenize", detokenize),
            web.get("/props", info.props),
            web.get("/slots", info.slots),
            web.get("/health", info.health),
            web.get("/ready", info.ready),
            web.get("/metrics", info.metrics),
            web.get("/openapi.json", openapi),
            web.get("/", ollama.root),
            web.get("/status", page.status),
            web.post("/admin/restart", page.restart),
        ]
    )
    return app


async def _close_preprocessor(app: web.Application) -> None:
    if (preprocessor := app[PORTS].preprocessor) is not None:
        await preprocessor.close()


async def serve(
    app: web.Application, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, str]:
    """Serve on listening sockets; return the runner and the URL.  `await runner.cleanup()` ends it and closes them.

    `tls`: its certificate may be loaded again at any time, for the connections from then on.
    """
    runner = ConnectionRunner(app, app[PORTS].settings, app[METRICS], _CLOSING_S)
    await runner.setup()
    assert runner.server is not None
    runner.server.request_handler = refuse_expectations(runner.server.request_handler)
    for sock in sockets:
        await web.SockSite(runner, sock, ssl_context=tls, backlog=BACKLOG).start()
    return runner, url_of(sockets[0], "http" if tls is None else "https")


async def drain(runner: web.AppRunner, deadline_s: float) -> bool:
    """Accept no more connections, close those that are open after their next response, and wait until all requests have
    ended; return whether they did before the deadline.

    Clients with an open connection may still send a request while others run, and for a moment longer.  Requests that
    do not end in time are cancelled: their clients get an error event, or a 503 if nothing was sent yet.
    """
    active = runner.app[ACTIVE]
    if not active.closing:
        active.closing = True
        for site in list(runner.sites):
            await site.stop()
    started = time.monotonic()
    ended = await _wait_until_quiet(runner, deadline_s)
    active.draining = True
    for context in list(active.contexts):
        context.cancel()
    left_s = max(0.0, deadline_s - (time.monotonic() - started))
    await wait_until_idle(lambda: len(active.contexts), _LAST_EVENTS_S + left_s)
    return ended


async def _wait_until_quiet(runner: web.AppRunner, deadline_s: float) -> bool:
    """Wait until nothing is in service and no connection is open, or all have been idle for a moment."""
    end = time.monotonic() + deadline_s
    contexts, server = runner.app[ACTIVE].contexts, runner.server
    while await wait_until_idle(lambda: len(contexts), end - time.monotonic()):
        if server is None or not server.connections:
            return True
        await wait_until_idle(
            lambda: 0 if contexts else len(server.connections), min(_LINGER_S, end - time.monotonic())
        )
        if not contexts:
            return True
    return False
