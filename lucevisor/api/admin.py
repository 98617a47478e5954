"""The admin endpoint: JSON over HTTP on a Unix socket in the run directory, for the same user only.

The directory has mode 0700, and the peer uid of every connection is checked as well (SO_PEERCRED), so a leaked
descriptor is useless to another user.  Knows routes and JSON; an :class:`AdminPort` does the work.  Invariant: every
response is JSON without NaN, and an invalid request is a 400 that names the fault.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web

from lucevisor.api.errors import ApiError
from lucevisor.errors import AdminError, ConfigError, LucevisorError, show

log = structlog.get_logger("lucevisor.admin")

MAX_WAIT_S: Final = 86_400.0
"""Longest `timeout_s` of GET /ready."""
MAX_COMMAND_BYTES: Final = 1 << 20
MAX_SHOWN_CHARS: Final = 300
MAX_NAMES: Final = 10_000
"""Groups or files in one command."""

Command = TypeVar("Command", bound=msgspec.Struct)
Names = Annotated[list[str], msgspec.Meta(max_length=MAX_NAMES)]


class CachePort(Protocol):
    """Operations on prefix slots and snapshots.  All but ``show`` raise LucevisorError when snapshots are off."""

    async def show(self) -> dict[str, Any]:
        """Slots in memory and files on disk."""

    async def verify(self, files: Sequence[str], *, set_aside: bool) -> list[dict[str, Any]]: ...

    async def prune(self, disk_bytes: int | None, *, refused: bool) -> list[dict[str, Any]]: ...

    async def remove(self, files: Sequence[str], *, everything: bool) -> list[dict[str, Any]]: ...


class AdminPort(Protocol):
    """Operations on a running supervisor."""

    @property
    def cache(self) -> CachePort: ...

    def status(self) -> dict[str, Any]: ...

    async def wait_ready(self, timeout_s: float) -> bool: ...

    def stop(self, reason: str) -> None:
        """Begin the shutdown.  All callers share one; each further call shortens its deadlines."""

    async def restart(self, groups: list[str], *, now: bool) -> None:
        """Restart groups one by one; return when the pipeline is READY again.  Raises LucevisorError."""

    async def reload(self, overrides: list[str]) -> dict[str, object]:
        """Read the configuration again, with further KEY=VALUE overrides, and go on with it; return the keys that
        changed.  Raises LucevisorError, after which all is as it was.
        """


class Restart(msgspec.Struct, forbid_unknown_fields=True):
    groups: Names
    now: bool = False


class Reload(msgspec.Struct, forbid_unknown_fields=True):
    """``set``: KEY=VALUE overrides."""

    set: Names = []


class CacheVerify(msgspec.Struct, forbid_unknown_fields=True):
    """Without files, all snapshots are verified."""

    files: Names = []
    set_aside: bool = False


class CachePrune(msgspec.Struct, forbid_unknown_fields=True):
    """``to``: bytes that may stay in use; null: cache.disk."""

    to: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    refused: bool = False


class CacheRemove(msgspec.Struct, forbid_unknown_fields=True):
    """Names files, or sets ``all``."""

    files: Names = []
    all: bool = False


def peer_uid(transport: object) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
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
    except (ConfigError, AdminError) as e:
        return _error(400, str(e))
    except LucevisorError as e:
        return _error(409, str(e))
    except ApiError as e:
        return _error(e.status, e.message)
    except web.HTTPException as e:
        return _error(e.status, f"{request.method} {request.path}: {e.reason}")
    except Exception as e:  # last resort: the operator sees the error, the log has the traceback
        log.exception("admin request failed", path=request.path)
        return _error(500, f"{type(e).__name__}: {e}; see the log")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def _json(answer: dict[str, Any]) -> web.Response:
    """Return a JSON response; non-finite numbers, as a broken device may report, become null."""
    try:
        text = json.dumps(answer, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(answer), allow_nan=False)
    return web.Response(text=text, content_type="application/json")


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


async def _read_command(request: web.Request, kind: type[Command], default: bytes = b"") -> Command:
    """Decode the body; raises ApiError naming the fault."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without Content-Encoding")
    try:
        return msgspec.json.decode(await request.read() or default, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, f"the body is invalid: {str(e)[:MAX_SHOWN_CHARS]}") from None


def _seconds(request: web.Request, name: str) -> float:
    """Return a query parameter in seconds, 0 if absent; raises ApiError when it is not finite or out of range."""
    sent = request.query.get(name, "0")
    try:
        value = float(sent)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_WAIT_S:  # false for nan too
        raise ApiError(400, f"{name} = {show(sent)}: is not a number of seconds from 0 to {MAX_WAIT_S:.0f}")
    return value


def create_admin_app(port: AdminPort) -> web.Application:
    """Routes: GET /status, GET /ready?timeout_s=, POST /stop, /restart, /reload, GET /cache, POST /cache/verify,
    /cache/prune, /cache/rm."""

    async def status(_: web.Request) -> web.Response:
        return _json(port.status())

    async def ready(request: web.Request) -> web.Response:
        return _json({"ready": await port.wait_ready(_seconds(request, "timeout_s"))})

    async def stop(_: web.Request) -> web.Response:
        port.stop("requested by an operator")
        return _json({"stopping": True})

    async def restart(request: web.Request) -> web.Response:
        command = await _read_command(request, Restart)
        await port.restart(command.groups, now=command.now)
        return _json(port.status())

    async def reload(request: web.Request) -> web.Response:
        command = await _read_command(request, Reload, b"{}")
        changed = await port.reload(command.set)
        return _json({**port.status(), "changed": changed})

    app = web.Application(middlewares=[_own_user_only], client_max_size=MAX_COMMAND_BYTES)
    app.add_routes(
        [
            web.get("/status", status),
            web.get("/ready", ready),
            web.post("/stop", stop),
            web.post("/restart", restart),
            web.post("/reload", reload),
            *_cache_routes(port),
        ]
    )
    return app


def _cache_routes(port: AdminPort) -> list[web.RouteDef]:
    """Return the routes below /cache.  A body may be omitted where every field has a default."""

    async def show(_: web.Request) -> web.Response:
        return _json(await port.cache.show())

    async def verify(request: web.Request) -> web.Response:
        command = await _read_command(request, CacheVerify, b"{}")
        return _json({"checked": await port.cache.verify(command.files, set_aside=command.set_aside)})

    async def prune(request: web.Request) -> web.Response:
        command = await _read_command(request, CachePrune, b"{}")
        return _json({"removed": await port.cache.prune(command.to, refused=command.refused)})

    async def remove(request: web.Request) -> web.Response:
        command = await _read_command(request, CacheRemove, b"{}")
        if bool(command.files) == command.all:
            return _error(400, "files, all: name files, or set all to true")
        return _json({"removed": await port.cache.remove(command.files, everything=command.all)})

    return [
        web.get("/cache", show),
        web.post("/cache/verify", verify),
        web.post("/cache/prune", prune),
        web.post("/cache/rm", remove),
    ]


async def serve_admin(app: web.Application, path: Path) -> web.AppRunner:
    """Listen on ``path`` (mode 0600), also where another supervisor listens, until ``runner.cleanup()``."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, auto_decompress=False)
    await runner.setup()
    new = path.with_suffix(".new")
    old = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(new)).start()
    finally:
        os.umask(old)
    new.replace(path)
    return runner
