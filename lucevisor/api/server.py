"""The HTTP application and server: listening sockets, routes, serving, graceful drain."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Final

from aiohttp import web

from lucevisor.api.app_state import (
    ACTIVE,
    BUFFERED_BODIES,
    METRICS,
    MODELS,
    RESPONSE_STORE,
    SERVER,
    START_LIMIT,
    ActiveRequests,
    BufferedBodies,
)
from lucevisor.api.connections import ConnectionRunner
from lucevisor.api.contexts import ModelContext, ServedModels
from lucevisor.api.metrics import Metrics
from lucevisor.api.middleware import request_middleware, set_headers, wait_until_idle
from lucevisor.api.openapi import ROUTES
from lucevisor.api.response_store import ResponseStore
from lucevisor.errors import ConfigError, LucevisorError

BACKLOG: Final = 1024
"""Connections that wait to be accepted; the kernel caps it at net.core.somaxconn."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for each address of `host`; `port` 0 is any free one.  Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        for family, address in _addresses(host):
            sock = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address, port))
            sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        for sock in sockets:
            sock.close()
        raise _cannot_bind(host, port, error) from None
    return sockets


def adopt(sockets: Sequence[socket.socket], host: str, port: int) -> list[socket.socket]:
    """Listen on sockets that were handed over; raises ConfigError when one is bound elsewhere than `host`:`port`."""
    for sock in sockets:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            raise ConfigError("server.host", host, "the socket that was handed over is not a TCP socket")
        bound_host, bound_port = sock.getsockname()[:2]
        if bound_host not in [address for _, address in _addresses(host)] or port not in (0, bound_port):
            where = f"{host}:{port}"
            raise ConfigError(
                "server.port", port,
                f"the socket that was handed over listens on {bound_host}:{bound_port}, the configuration says {where}",
                "use the same address at both, or stop the other one first",
            )  # fmt: skip
        sock.listen(BACKLOG)
    return list(sockets)


def url_of(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _addresses(host: str) -> list[tuple[int, str]]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), str(address[0])) for family, _, _, _, address in found))


def _cannot_bind(host: str, port: int, error: Exception) -> LucevisorError:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ConfigError(
            "server.port",
            port,
            f"is taken on {host}",
            "stop the process that listens there, or use another port, or 0 for any free one",
        )
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError("server.port", port, "cannot be bound by this user", "use a port above 1023")
    if isinstance(error, OverflowError):
        return ConfigError("server.port", port, "is not a port", "use 0 to 65535")
    return ConfigError(
        "server.host", host, f"cannot be bound: {error}", "use an address of this machine, such as 127.0.0.1"
    )


def create_app(*contexts: ModelContext) -> web.Application:
    """Return the application of models; fields of the contexts that are set later take effect immediately."""
    models = ServedModels(contexts)
    settings = models.server.settings
    app = web.Application(middlewares=[request_middleware], client_max_size=settings.max_body_bytes)
    app[SERVER] = models.server
    app[MODELS] = models
    app[METRICS] = Metrics(models)
    app[ACTIVE] = ActiveRequests()
    app[BUFFERED_BODIES] = BufferedBodies()
    app[RESPONSE_STORE] = ResponseStore(settings.stored_responses, settings.stored_bytes)
    app[START_LIMIT] = asyncio.Semaphore(16)
    app.on_response_prepare.append(set_headers)
    if (preprocessor := models.server.preprocessor) is not None:
        app.on_shutdown.append(lambda _: preprocessor.close())
    for route in ROUTES:
        app.router.add_route(route.method, route.path, route.handler)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, route.handler)
    return app


async def serve(
    app: web.Application, sockets: Sequence[socket.socket], tls: ssl.SSLContext | None = None
) -> tuple[web.AppRunner, str]:
    """Serve on listening sockets; return the runner, whose `cleanup()` ends it, and the URL. The certificate of `tls`
    may be loaded again at any time."""
    runner = ConnectionRunner(app, app[SERVER].settings, app[METRICS], 2.0)
    await runner.setup()
    for sock in sockets:
        await web.SockSite(runner, sock, ssl_context=tls, backlog=BACKLOG).start()
    return runner, url_of(sockets[0], "http" if tls is None else "https")


async def drain(runner: web.AppRunner, deadline_s: float) -> bool:
    """Accept no more connections, close those that are open after their next response, and wait until all requests have
    ended; return whether they did before the deadline. The others are cancelled."""
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
    await wait_until_idle(lambda: len(active.contexts), 1.0 + left_s)
    return ended


async def _wait_until_quiet(runner: web.AppRunner, deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    contexts, server = runner.app[ACTIVE].contexts, runner.server
    while await wait_until_idle(lambda: len(contexts), end - time.monotonic()):
        if server is None or not server.connections:
            return True
        await wait_until_idle(lambda: 0 if contexts else len(server.connections), min(1.0, end - time.monotonic()))
        if not contexts:
            return True
    return False
