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
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from aiohttp import web

from lucevisor.errors import LucevisorError


class CachePort(Protocol):
    """What an operator may ask of prefix slots and snapshots.  All but ``show`` raise LucevisorError when snapshots are
    off."""

    async def show(self) -> dict[str, Any]:
        """Slots in memory and files on disk."""

    async def verify(self, files: Sequence[str], *, set_aside: bool) -> list[dict[str, Any]]: ...

    async def prune(self, disk_bytes: int | None, *, refused: bool) -> list[dict[str, Any]]: ...

    async def remove(self, files: Sequence[str], *, everything: bool) -> list[dict[str, Any]]: ...


class AdminPort(Protocol):
    """What an operator may ask of a supervisor."""

    @property
    def cache(self) -> CachePort: ...

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


class CacheVerify(msgspec.Struct, forbid_unknown_fields=True):
    """No files: all snapshots."""

    files: list[str] = []
    set_aside: bool = False


class CachePrune(msgspec.Struct, forbid_unknown_fields=True):
    """``to``: bytes that may stay in use; null: the budget of the configuration."""

    to: Annotated[int, msgspec.Meta(ge=0)] | None = None
    refused: bool = False


class CacheRemove(msgspec.Struct, forbid_unknown_fields=True):
    """Either files or all."""

    files: list[str] = []
    all: bool = False


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
    except msgspec.DecodeError as e:
        return _error(400, str(e))


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def create_admin_app(port: AdminPort) -> web.Application:
    """Routes: GET /status, GET /ready?timeout_s=, POST /stop, POST /restart, GET /logs?group=&follow=, GET /cache, POST
    /cache/verify, /cache/prune, /cache/rm."""

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
            *_cache_routes(port),
        ]
    )
    return app


def _cache_routes(port: AdminPort) -> list[web.RouteDef]:
    """Bodies may be left out where every field has a default that says something."""

    async def show(_: web.Request) -> web.Response:
        return web.json_response(await port.cache.show())

    async def verify(request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read() or b"{}", type=CacheVerify)
        return web.json_response({"checked": await port.cache.verify(order.files, set_aside=order.set_aside)})

    async def prune(request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read() or b"{}", type=CachePrune)
        return web.json_response({"removed": await port.cache.prune(order.to, refused=order.refused)})

    async def remove(request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read() or b"{}", type=CacheRemove)
        if bool(order.files) == order.all:
            return _error(400, "files, all: name files, or set all to true")
        return web.json_response({"removed": await port.cache.remove(order.files, everything=order.all)})

    return [
        web.get("/cache", show),
        web.post("/cache/verify", verify),
        web.post("/cache/prune", prune),
        web.post("/cache/rm", remove),
    ]


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
