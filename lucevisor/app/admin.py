"""The admin socket of a supervisor, in the run directory: JSON over HTTP, for the same user only (SO_PEERCRED)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web

from lucevisor.api.bodies import json_response
from lucevisor.api.errors import ApiError
from lucevisor.api.schemas import convert
from lucevisor.errors import AdminError, ConfigError, LucevisorError

log = structlog.get_logger("lucevisor.app")


Command = TypeVar("Command", bound=msgspec.Struct)
Names = Annotated[list[str], msgspec.Meta(max_length=10_000)]


class AdminPort(Protocol):
    """Operations on a running supervisor."""

    def status(self) -> dict[str, Any]: ...

    async def wait_ready(self, timeout_s: float) -> bool: ...

    def stop(self, reason: str) -> None:
        """Begin the shutdown; each further call shortens its deadlines."""

    async def restart(self, groups: list[str], *, now: bool) -> None:
        """Restart groups one by one; return when all are READY again.  Raises LucevisorError."""

    async def load(self, model: str) -> None:
        """Load a model; return when it is loaded.  Raises LucevisorError."""

    async def unload(self, model: str) -> None:
        """Unload a model; return when its memory is free.  Raises LucevisorError."""

    async def reload(self, overrides: list[str]) -> dict[str, object]:
        """Reload the configuration with KEY=VALUE overrides; return the changed keys.  Raises LucevisorError."""


class ReadyQuery(msgspec.Struct):
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class Restart(msgspec.Struct, forbid_unknown_fields=True):
    groups: Names
    now: bool = False


class ModelCommand(msgspec.Struct, forbid_unknown_fields=True):
    model: str


class Reload(msgspec.Struct, forbid_unknown_fields=True):
    """``set``: KEY=VALUE overrides."""

    set: Names = []


def peer_uid(transport: object) -> int:
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
    return json_response({"error": message}, status)


async def _read_command(request: web.Request, kind: type[Command], default: bytes = b"") -> Command:
    """Decode the body; raises ApiError naming the fault."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise ApiError(415, "send the body without Content-Encoding")
    try:
        return msgspec.json.decode(await request.read() or default, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ApiError(400, f"the body is invalid: {str(e)[:300]}") from None


def create_admin_app(port: AdminPort) -> web.Application:
    async def status(_: web.Request) -> web.Response:
        return json_response(port.status())

    async def ready(request: web.Request) -> web.Response:
        query = convert(ReadyQuery, dict(request.query), strict=False)
        return json_response({"ready": await port.wait_ready(query.timeout_s)})

    async def stop(_: web.Request) -> web.Response:
        port.stop("requested by an operator")
        return json_response({"stopping": True})

    async def restart(request: web.Request) -> web.Response:
        command = await _read_command(request, Restart)
        await port.restart(command.groups, now=command.now)
        return json_response(port.status())

    async def load(request: web.Request) -> web.Response:
        await port.load((await _read_command(request, ModelCommand)).model)
        return json_response(port.status())

    async def unload(request: web.Request) -> web.Response:
        await port.unload((await _read_command(request, ModelCommand)).model)
        return json_response(port.status())

    async def reload(request: web.Request) -> web.Response:
        command = await _read_command(request, Reload, b"{}")
        changed = await port.reload(command.set)
        return json_response({**port.status(), "changed": changed})

    app = web.Application(middlewares=[_own_user_only], client_max_size=1 << 20)
    app.add_routes([web.get("/status", status), web.get("/ready", ready)])
    app.add_routes([web.post(f"/{command.__name__}", command) for command in (stop, restart, reload, load, unload)])
    return app


async def serve_admin(app: web.Application, path: Path) -> web.AppRunner:
    """Listen on ``path`` (mode 0600), also where another supervisor listens."""
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
