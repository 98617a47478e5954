"""The operator's endpoint: JSON over HTTP on a Unix socket in the run directory, for the same user only.

The directory is 0700 and every connection's peer uid is checked besides (SO_PEERCRED), so a descriptor that leaked
out of the
directory is of no use to another user.  This file knows routes and JSON; what they do is the :class:`AdminPort`'s
business.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from lucevisor.errors import LucevisorError


class AdminPort(Protocol):
    """What an operator may ask of a supervisor."""

    def status(self) -> dict[str, Any]: ...

    async def wait_ready(self, timeout_s: float) -> bool: ...

    def stop(self, reason: str) -> None:
        """Begin to stop; any number of callers share one shutdown, each further call shortens its deadlines."""

    async def restart(self, groups: list[str], *, now: bool) -> None:
        """Restart groups one after the other; returns when the chain is READY again.  LucevisorError says why not."""

    def follow_log(self, group: str | None, *, follow: bool) -> AsyncIterator[str]: ...


class Restart(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[str]
    now: bool = False


def peer_uid(transport: object) -> int:
    """User id of the process at the other end of a Unix socket connection."""
    sock = transport.get_extra_info("socket")  # type: ignore[attr-defined]
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


@web.middleware
async def _own_user_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    uid = peer_uid(request.transport)
    if uid not in (os.geteuid(), 0):
        return _error(403, f"uid {uid} may not operate a supervisor of uid {os.geteuid()}")
    try:
        return await handler(request)
    except LucevisorError as e:
        return _error(409, str(e))
    except msgspec.ValidationError as e:
        return _error(400, str(e))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def create_admin_app(port: AdminPort) -> web.Application:
    """Routes: GET /status, GET /ready?timeout_s=, POST /stop, POST /restart, GET /logs?group=&follow=."""

    async def status(_: web.Request) -> web.Response:
        return web.json_response(port.status())

    async def ready(request: web.Request) -> web.Response:
        try:
            timeout_s = float(request.query.get("timeout_s", "0"))
        except ValueError:
            return _error(400, "timeout_s: not a number of seconds")
        return web.json_response({"ready": await port.wait_ready(timeout_s)})

    async def stop(_: web.Request) -> web.Response:
        port.stop("asked by an operator")
        return web.json_response({"stopping": True})

    async def restart(request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=Restart)
        await port.restart(order.groups, now=order.now)
        return web.json_response(port.status())

    async def logs(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        async for line in port.follow_log(request.query.get("group"), follow=request.query.get("follow") == "1"):
            await response.write(line.encode())
        await response.write_eof()
        return response

    app = web.Application(middlewares=[_own_user_only])
    app.add_routes(
        [
            web.get("/status", status),
            web.get("/ready", ready),
            web.post("/stop", stop),
            web.post("/restart", restart),
            web.get("/logs", logs),
        ]
    )
    return app


async def serve_admin(app: web.Application, path: Path) -> web.AppRunner:
    """Listen on ``path`` (made with mode 0600).  ``await runner.cleanup()`` ends it."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    old = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(path)).start()
    finally:
        os.umask(old)
    return runner
