"""Connection limits that aiohttp does not have: a deadline for heads, one for unread answers, and a cap.

At the cap a new connection replaces the one that has been idle longest; one with a request in service is never closed
to make room.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
import structlog
from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from lucevisor.api.app_context import ApiSettings
from lucevisor.api.errors import ApiError, unavailable
from lucevisor.api.metrics import Metrics

_END_OF_HEAD: Final = b"\r\n\r\n"
_MIN_WRITE_BYTES: Final = 16 * 1024
"""Bytes of a response that a client must read within `write_timeout_s`, if so many are buffered."""

_BYTES_ACKED: Final = struct.Struct("=120xQ")  # of Linux's tcp_info

log = structlog.get_logger("lucevisor.api")


class Connections:
    """The connections of one server, checked about once a second while there are any."""

    def __init__(self, settings: ApiSettings, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        self.settings, self.metrics, self.loop = settings, metrics, loop
        self._all: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, float] = {}  # deadlines of those without a request, longest idle first
        self._check_s = min(1.0, settings.head_timeout_s / 4, settings.idle_timeout_s / 4)
        self._timer: asyncio.TimerHandle | None = None
        metrics.connections.set_function(lambda: len(self._all))

    def admit(self, connection: HttpConnection) -> bool:
        if len(self._all) >= self.settings.max_connections:
            oldest = next(iter(self._waiting), None)
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
            self._waiting[connection] = min(deadline, self._waiting.get(connection, deadline))

    def serve(self, connection: HttpConnection) -> bool:
        return self._waiting.pop(connection, None) is not None

    def is_waiting(self, connection: HttpConnection) -> bool:
        return connection in self._waiting

    def forget(self, connection: HttpConnection) -> None:
        self._all.discard(connection)
        self._waiting.pop(connection, None)

    def count(self, reason: str) -> None:
        self.metrics.connections_dropped.labels(reason).inc()

    def _check(self) -> None:
        now = self.loop.time()
        for connection in list(self._all):
            connection.check_write(now)
            if now >= self._waiting.get(connection, now + 1):
                connection.end_wait()
        self._timer = self.loop.call_later(self._check_s, self._check) if self._all else None


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, with deadlines and without upgrades."""

    def __init__(self, manager: web.Server, pool: Connections, **options: Any) -> None:
        super().__init__(manager, loop=pool.loop, **options)
        self._pool = pool
        self._link: asyncio.Transport | None = None  # aiohttp drops its own reference at a close, before it is lost
        self._has_part_of_head = False
        self._n_body_left = 0  # of a body with Content-Length that is being parsed
        self._last_body: StreamReader | None = None  # of the head that was parsed last
        self._last_bytes = b""  # of the head that is being parsed, in case its end comes in two parts
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
        """Parse in parts that end where a head or body ends: aiohttp loses what follows a request with `Upgrade`.

        aiohttp calls this without data when a full buffer has been read, as its parser goes on with what it kept.
        """
        if data and self._pool.is_waiting(self) and not self._has_part_of_head:
            self._has_part_of_head = True
            self._pool.wait(self, self._pool.settings.head_timeout_s)
        while True:
            n_bytes = self._n_body_left
            if not n_bytes:
                end = (self._last_bytes + data).find(_END_OF_HEAD)
                n_bytes = len(data) if end < 0 else end + len(_END_OF_HEAD) - len(self._last_bytes)
            self._parse(data[:n_bytes])
            data = data[n_bytes:]
            if not data:
                return

    def _parse(self, part: bytes) -> None:
        n_requests = self._request_count
        super().data_received(part)
        if self._n_body_left:
            self._n_body_left -= len(part)
        else:
            self._last_bytes = (self._last_bytes + part)[1 - len(_END_OF_HEAD) :]
            if self._request_count > n_requests and self._messages:
                self._on_message(*self._messages[-1])
        if self._upgraded and not self._request_in_progress and not self._messages:
            # The request was answered before its body ended.  aiohttp would wait for ever for its handler to upgrade.
            self._upgraded, tail, self._message_tail = False, self._message_tail, b""
            if self._parser is not None:
                self._parser.set_upgraded(False)
            super().data_received(tail)

    def _on_message(self, message: Any, body: StreamReader) -> None:
        """Read the length of a body from its head.  An error in the body of an earlier request ends that body."""
        before, self._last_body, self._last_bytes = self._last_body, body, b""
        error = getattr(message, "exc", None)
        if error is not None and before is not None and not before.is_eof():
            self._messages.pop()
            before.set_exception(web.RequestPayloadError(_first_line(str(error))))
            self._last_body = None
        elif not body.is_eof():
            self._n_body_left = int(message.headers.get("Content-Length", 0))

    # ---- callbacks of the middleware and aiohttp

    def on_request_start(self) -> None:
        self._has_part_of_head = False
        self._pool.serve(self)

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
