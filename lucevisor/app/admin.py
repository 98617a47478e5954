"""Listening sockets of a supervisor: its HTTP endpoint, and the admin socket in the run directory.

The latter speaks JSON over HTTP, for the same user only: the peer uid of each of its connections is checked
(SO_PEERCRED), so a leaked descriptor is useless to another user.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
import structlog
from aiohttp import web

from lucevisor.api import server
from lucevisor.api.bodies import json_response
from lucevisor.api.errors import ApiError
from lucevisor.api.schemas import convert
from lucevisor.deployment.service import ModelService, Service
from lucevisor.engine.shell import Engine
from lucevisor.errors import AdminError, ConfigError, LucevisorError, unusable
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot
from lucevisor.model.pages import pages_of
from lucevisor.model.values import Space
from lucevisor.snapshots import maintenance
from lucevisor.snapshots.maintenance import JsonObject
from lucevisor.snapshots.store import SnapshotStore

log = structlog.get_logger("lucevisor.admin")


Command = TypeVar("Command", bound=msgspec.Struct)
Names = Annotated[list[str], msgspec.Meta(max_length=10_000)]


class CacheOperations:
    """Prefix slots and snapshots of a running supervisor.  Raises LucevisorError when snapshots are off."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def show(self) -> dict[str, Any]:
        """List slots in memory, most recently used first, and files; ``dir`` is empty without snapshots."""
        engine, store = self._model.engine, self.open_store()
        slots = sorted(engine.prefixes.slots, key=lambda s: (-s.used_at, -s.number)) if engine is not None else []
        files = await asyncio.to_thread(maintenance.files, store.directory) if store is not None else []
        return {
            "dir": str(store.directory.absolute()) if store is not None else "",
            "disk": store.budget if store is not None else self._service.config.cache.disk,
            "slots": [_slot(engine, slot) for slot in slots] if engine is not None else [],
            "files": files,
        }

    async def verify(self, files: Sequence[str], *, set_aside: bool) -> list[JsonObject]:
        store = self._store()
        directory = store.directory
        checked, n_aside = [], 0
        try:
            for file in await asyncio.to_thread(maintenance.to_verify, directory, files):
                result = await asyncio.to_thread(maintenance.verify, directory, file, set_aside=set_aside)
                checked.append(result)
                n_aside += bool(result["set_aside"])
        finally:
            if n_aside:
                await self._scan(store)
        return checked

    async def prune(self, disk_bytes: int | None, *, refused: bool) -> list[JsonObject]:
        """Remove leftovers and files beyond ``disk_bytes`` (None: the configured budget)."""
        store = self._store()
        most = store.disk_bytes if disk_bytes is None else disk_bytes
        removed = await asyncio.to_thread(maintenance.prune, store.directory, most, refused=refused)
        await self._scan(store)
        return removed

    async def remove(self, files: Sequence[str], *, everything: bool) -> list[JsonObject]:
        store = self._store()
        try:
            return await asyncio.to_thread(maintenance.remove, store.directory, files, everything=everything)
        finally:  # some may be removed before one fails
            await self._scan(store)

    async def _scan(self, store: SnapshotStore) -> None:
        if self._service.state != "draining":  # or the store may be closed already
            await asyncio.to_thread(store.scan)

    def open_store(self) -> SnapshotStore | None:
        return self._model.snapshot_store

    @property
    def _model(self) -> ModelService:
        """The only model, because files are named without one."""
        if len(self._service.models) == 1:
            return self._service.only
        names = ", ".join(self._service.models)
        raise AdminError(f"this supervisor serves several models ({names}): use --dir DIR, a directory for each model")

    def _store(self) -> SnapshotStore:
        store = self.open_store()
        if self._service.state == "draining":
            raise LucevisorError("the supervisor is stopping: use --dir when it has stopped")
        if store is not None:
            return store
        cache = self._service.config.cache
        if cache.dir and cache.prefix_slots:
            raise LucevisorError("snapshots are not open yet: the model is not placed; ask again when it is ready")
        key = "cache.prefix_slots is 0" if cache.dir else "cache.dir is not set"
        raise LucevisorError(f"snapshots are off: {key} in {self._service.config.file}")


def _slot(engine: Engine, slot: PrefixSlot) -> JsonObject:
    unit = Counter(engine.prefixes.settings.unit_bytes)  # 0 for a space that the model lacks
    n_pages = pages_of(slot.n_tokens)
    n_bytes = unit[Space.FULL] * n_pages + unit[Space.WINDOW] * (n_pages - slot.first_window)
    return {
        "n_tokens": slot.n_tokens,
        "origin": slot.origin,
        "pins": slot.pins,
        "uses": slot.n_uses,
        "bytes": n_bytes + (unit[Space.RECURRENT] if slot.state != NO_STATE else 0),
    }


class AdminPort(Protocol):
    """Operations on a running supervisor."""

    @property
    def cache(self) -> CacheOperations: ...

    def status(self) -> dict[str, Any]: ...

    async def wait_ready(self, timeout_s: float) -> bool: ...

    def stop(self, reason: str) -> None:
        """Begin the shutdown.  All callers share one; each further call shortens its deadlines."""

    async def restart(self, groups: list[str], *, now: bool) -> None:
        """Restart groups one by one; return when the pipeline is READY again.  Raises LucevisorError."""

    async def reload(self, overrides: list[str]) -> dict[str, object]:
        """Reload the configuration with further KEY=VALUE overrides; return the changed keys.

        Raises LucevisorError, and then changes nothing.
        """


class ReadyQuery(msgspec.Struct):
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


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
    """Return the admin application."""

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

    async def reload(request: web.Request) -> web.Response:
        command = await _read_command(request, Reload, b"{}")
        changed = await port.reload(command.set)
        return json_response({**port.status(), "changed": changed})

    app = web.Application(middlewares=[_own_user_only], client_max_size=1 << 20)
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
        return json_response(await port.cache.show())

    async def verify(request: web.Request) -> web.Response:
        command = await _read_command(request, CacheVerify, b"{}")
        return json_response({"checked": await port.cache.verify(command.files, set_aside=command.set_aside)})

    async def prune(request: web.Request) -> web.Response:
        command = await _read_command(request, CachePrune, b"{}")
        return json_response({"removed": await port.cache.prune(command.to, refused=command.refused)})

    async def remove(request: web.Request) -> web.Response:
        command = await _read_command(request, CacheRemove, b"{}")
        if bool(command.files) == command.all:
            return _error(400, "files, all: name files, or set all to true")
        return json_response({"removed": await port.cache.remove(command.files, everything=command.all)})

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


class Endpoint:
    """``open`` it once."""

    def __init__(
        self, app: web.Application, port: AdminPort, admin_socket: Path, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url = ""
        self._tls = tls
        self._app, self._port, self._admin_socket = app, port, admin_socket
        self._http: web.AppRunner | None = None
        self._admin: web.AppRunner | None = None
        self._sockets: list[socket.socket] = []

    async def open_admin(self) -> None:
        """Listen on the admin socket, also when it was removed; raises ConfigError."""
        if self._admin is not None:
            await self._admin.cleanup()
        try:
            self._admin = await serve_admin(create_admin_app(self._port), self._admin_socket)
        except OSError as error:
            raise unusable(self._admin_socket.parent, error) from error

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Serve clients on listening sockets, which it closes."""
        self._sockets = [sock.dup() for sock in sockets]
        self._http, self.url = await server.serve(self._app, sockets, self._tls)

    @property
    def sockets(self) -> list[int]:
        return [sock.fileno() for sock in self._sockets]

    async def drain(self, deadline_s: float) -> bool:
        """Accept nothing more; return whether all requests ended in time."""
        self._stop_listening()
        return self._http is None or await server.drain(self._http, deadline_s)

    async def close(self) -> None:
        self._stop_listening()
        if self._http is not None:
            await self._http.cleanup()
        if self._admin is not None:
            await self._admin.cleanup()

    def _stop_listening(self) -> None:
        for sock in self._sockets:
            sock.close()
        self._sockets = []
