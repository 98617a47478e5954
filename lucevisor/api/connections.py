"""Connection limits that aiohttp does not have: a deadline for heads, one for unread answers, and a cap, at which a new
connection replaces the one that has been idle longest, never one with a request in service."""

from __future__ import annotations

import asyncio
import socket
import struct
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from lucevisor.api.contexts import ApiSettings
from lucevisor.api.errors import ApiError, unavailable
from lucevisor.api.metrics import Metrics

_MIN_WRITE_BYTES: Final = 16 * 1024
"""Bytes of a response that a client must read within `write_timeout_s`, if so many are buffered."""

_BYTES_ACKED: Final = struct.Struct("=120xQ")  # of Linux's tcp_info

log = structlog.get_logger("lucevisor.api")


class Connections:
    """The connections of one server, checked about once a second while there are any."""

    def __init__(self, settings: ApiSettings, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        self.settings, self.metrics, self.loop = settings, metrics, loop
        self._all: set[HttpConnection] = set()
        self.waiting: dict[HttpConnection, float] = {}  # deadlines of those without a request, longest idle first
        self._check_s = min(1.0, settings.head_timeout_s / 4, settings.idle_timeout_s / 4)
        self._timer: asyncio.TimerHandle | None = None
        metrics.connections.set_function(lambda: len(self._all))

    def admit(self, connection: HttpConnection) -> bool:
        if len(self._all) >= self.settings.max_connections:
            oldest = next(iter(self.waiting), None)
            self.count("refused" if oldest is None else "replaced")
            if oldest is None:
                return False
            oldest.abort()
            self.forget(oldest)  # connection_lost comes later
        self._all.add(connection)
        self.wait(connection, self.settings.head_timeout_s)
        self._timer = self._timer or self.loop.call_later(self._check_s, self._check)
        return True

    def wait(self, connection: HttpConnection, seconds: float) -> None:
        if connection in self._all:
            deadline = self.loop.time() + seconds
            self.waiting[connection] = min(deadline, self.waiting.get(connection, deadline))

    def forget(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        self.waiting.pop(connection, None)

    def count(self, reason: str) -> None:
        self.metrics.connections_dropped.labels(reason).inc()

    def _check(self) -> None:
        now = self.loop.time()
        for connection in list(self._all):
            connection.check_write(now)
            if now >= self.waiting.get(connection, now + 1):
                connection.end_wait()
        self._timer = self.loop.call_later(self._check_s, self._check) if self._all else None


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, with deadlines."""

    def __init__(self, manager: web.Server, pool: Connections, **options: Any) -> None:
        super().__init__(manager, loop=pool.loop, **options)
        self._pool = pool
        self._link: asyncio.Transport | None = None  # aiohttp drops its own reference at a close, before it is lost
        self._has_part_of_head = False
        self._n_acked, self._write_due_s = 0, pool.loop.time() + pool.settings.write_timeout_s
        self.dropped = ""
        """The reason why the server closed the connection in the middle of a response."""

    # ---- callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._link = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        if self._pool.admit(self):
            super().connection_made(transport)
            return
        self._force_close = True
        transport.write(_raw(unavailable("too many connections are open; try again later", 1, "overloaded")))
        transport.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._pool.forget(self)
        self._link = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes.  aiohttp calls this without any when its parser goes on after a full buffer has been read."""
        if data and not self._has_part_of_head and self in self._pool.waiting:
            self._has_part_of_head = True
            self._pool.wait(self, self._pool.settings.head_timeout_s)
        super().data_received(data)

    # ---- callbacks of the middleware and aiohttp

    def on_request_start(self) -> None:
        self._has_part_of_head = False
        self._pool.waiting.pop(self, None)

    def on_request_end(self) -> None:
        """Record that the request is answered, but for what waits to be written."""
        self._pool.wait(self, self._pool.settings.idle_timeout_s)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a malformed request with a JSON error, and log it in one line."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        reason = _first_line(message or str(exc))
        self._pool.metrics.requests.labels(str(status)).inc()
        log.info("malformed request", status=status, reason=reason, remote=request.remote)
        error = ApiError(status, f"invalid HTTP request: {reason}", code="invalid_http")
        response = web.Response(
            status=status,
            body=msgspec.json.encode(error.body()),
            content_type="application/json",
            headers={"Server": "lucevisor"},
        )
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log a truncated or badly encoded body in one line, as it is the client's fault."""
        error = kw.get("exc_info")
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            log.info("malformed request", reason=_first_line(str(error)))
        else:
            super().log_exception(*args, **kw)

    # ---- deadlines

    def check_write(self, now: float) -> None:
        if self._link is None:
            return
        # The kernel may accept nothing for long although the client reads, because its buffers are large.
        info = self._link.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
        (n_acked,) = _BYTES_ACKED.unpack(info)
        if self._link.get_write_buffer_size() == 0 or n_acked - self._n_acked >= _MIN_WRITE_BYTES:
            self._n_acked, self._write_due_s = n_acked, now + self._pool.settings.write_timeout_s
        elif now >= self._write_due_s:
            self._pool.count("write")
            seconds = self._pool.settings.write_timeout_s
            self.dropped = f"the client read less than {_MIN_WRITE_BYTES // 1024} KiB in {seconds:g} s"
            self.abort()

    def end_wait(self) -> None:
        if self._link is None or self._force_close or self._link.get_write_buffer_size():
            return
        self._pool.count("head" if self._has_part_of_head or self._request_count == 0 else "idle")
        if self._has_part_of_head:
            seconds = self._pool.settings.head_timeout_s
            self._link.write(
                _raw(ApiError(408, f"the head did not arrive within {seconds:g} s", code="request_timeout"))
            )
        self.force_close()

    def abort(self) -> None:
        if self._link is not None:
            self._link.abort()


class _HttpServer(web.Server):
    """Makes an HttpConnection for each client."""

    def __init__(self, plain: web.Server, pool: Connections, options: dict[str, Any]) -> None:
        super().__init__(
            plain.request_handler,
            request_factory=plain.request_factory,
            handler_cancellation=plain.handler_cancellation,
            loop=pool.loop,
        )
        self._pool, self._options = pool, options

    def __call__(self) -> HttpConnection:
        return HttpConnection(self, self._pool, **self._options)


class ConnectionRunner(web.AppRunner):
    """aiohttp's AppRunner, over connections with deadlines."""

    def __init__(self, app: web.Application, settings: ApiSettings, metrics: Metrics, shutdown_timeout: float) -> None:
        super().__init__(app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_timeout)
        self._limits, self._metrics = settings, metrics

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        pool = Connections(self._limits, self._metrics, asyncio.get_running_loop())
        # access.py rejects compressed bodies; aiohttp would decompress them first.
        return _HttpServer(plain, pool, {"access_log": None, "lingering_time": 2.0, "auto_decompress": False})


def _raw(error: ApiError) -> bytes:
    body = msgspec.json.encode(error.body())
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nServer: lucevisor\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    return head.encode() + b"\r\n" + body


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(":").strip()[:200]
