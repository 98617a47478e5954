"""Connection limits: deadlines for heads, bodies, writes and idle connections, and a cap on open connections.

aiohttp has a deadline for idle connections only.  Knows HTTP/1.1 style, no routes.  Invariants: a connection without
a complete head is closed after `head_timeout_s`, one whose client reads less than `min_read_rate` after
`write_timeout_s`; at the cap a new connection replaces the one that has been idle longest, else one whose body arrives
too slowly; a connection whose request arrived whole is never closed to make room.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
import structlog
from aiohttp import StreamReader, web
from aiohttp.http import HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError

from lucevisor.api.errors import ApiError, SlowBody, head_too_large, unavailable
from lucevisor.api.metrics import Metrics
from lucevisor.api.ports import ApiSettings
from lucevisor.api.read_rate import ReadRate

_CHECK_S: Final = 1.0
_PROBE_S: Final = 0.1
_GRACE_S: Final = 1.0  # in which a body may pause although others want its connection
_END_OF_HEAD: Final = b"\r\n\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

log = structlog.get_logger("lucevisor.api")


class Connections:
    """The connections of one server.  Checks each about once a second, while there are any."""

    def __init__(self, settings: ApiSettings, metrics: Metrics, loop: asyncio.AbstractEventLoop) -> None:
        self.settings = settings
        self.loop = loop
        self._metrics = metrics
        self._all: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, None] = {}  # no request in service; longest idle first
        self._receiving: dict[HttpConnection, None] = {}  # in service, maybe without the end of its body; oldest first
        self._check_s = min(_CHECK_S, min(settings.head_timeout_s, settings.idle_timeout_s, settings.body_rate_s) / 4)
        self._timer: asyncio.TimerHandle | None = None
        metrics.connections.set_function(lambda: len(self._all))

    def admit(self, connection: HttpConnection) -> bool:
        """Register a new connection; return False if there is no room for it."""
        if len(self._all) >= self.settings.max_connections:
            if (oldest := next(iter(self._waiting), None)) is not None:
                oldest.abort()
            elif (oldest := self._slow_body()) is not None:
                oldest.give_up_body("too slowly while others wait for a connection")
                self.loop.call_later(_GRACE_S, oldest.abort)
            else:
                self.count("refused")
                return False
            self.count("replaced")
            self.forget(oldest)  # connection_lost comes later
        self._all.add(connection)
        if self._timer is None:
            self._timer = self.loop.call_later(self._check_s, self._check_all)
        return True

    def mark_waiting(self, connection: HttpConnection) -> None:
        """Mark a connection as having no request in service."""
        if connection in self._all:
            self._waiting[connection] = None
            self._receiving.pop(connection, None)

    def mark_serving(self, connection: HttpConnection) -> None:
        """Mark a connection as having a request in service."""
        self._waiting.pop(connection, None)
        self._receiving.pop(connection, None)
        if connection in self._all:
            self._receiving[connection] = None

    def forget(self, connection: HttpConnection) -> None:
        """Remove a connection that has ended; idempotent."""
        self._all.discard(connection)
        self._waiting.pop(connection, None)
        self._receiving.pop(connection, None)

    def _slow_body(self) -> HttpConnection | None:
        """Return a connection whose body does not arrive at the least rate, the oldest one."""
        now = self.loop.time()
        for connection in list(self._receiving):
            if connection.has_body:
                del self._receiving[connection]
            elif connection.body_is_slow(now):
                return connection
        return None

    def count(self, reason: str) -> None:
        """Count a connection that the server closed."""
        self._metrics.connections_dropped.labels(reason).inc()

    def malformed(self, status: int, why: str, remote: str | None) -> None:
        """Count and log bytes that are not a valid request."""
        self._metrics.requests.labels(str(status)).inc()
        log.info("malformed request", status=status, reason=why, remote=remote)

    def _check_all(self) -> None:
        now = self.loop.time()
        for connection in list(self._all):
            connection.check_deadlines(now, connection in self._waiting)
        self._timer = self.loop.call_later(self._check_s, self._check_all) if self._all else None


class HttpConnection(web.RequestHandler):
    """aiohttp's protocol of one connection, with deadlines.

    Detects new requests in `_messages`, where aiohttp queues parsed heads, because it has no hook for that.
    """

    __slots__ = (
        "_answering",
        "_body",
        "_body_due_s",
        "_due_s",
        "_half_closed",
        "_last_bytes",
        "_link",
        "_n_body_bytes",
        "_n_body_left",
        "_n_head_bytes",
        "_parsed_body",
        "_pool",
        "_rate",
        "_speaks_11",
        "_unread",
    )

    def __init__(self, manager: web.Server, pool: Connections, **options: Any) -> None:
        super().__init__(manager, loop=pool.loop, **options)
        self._pool = pool
        self._link: asyncio.Transport | None = None  # until it is lost; aiohttp drops its own reference at a close
        self._due_s = 0.0  # while it waits: when that ends
        self._n_head_bytes = 0
        self._body: StreamReader | None = None  # of the request in service
        self._unread: StreamReader | None = None  # of a request that was answered before its body was read
        self._body_due_s = 0.0
        self._n_body_bytes = 0  # since the rate was last looked at
        self._n_body_left = 0  # of a body with Content-Length that is being parsed
        self._parsed_body: StreamReader | None = None  # of the head that was parsed last
        self._last_bytes = b""  # of the head that is being parsed, in case its end comes in two pieces
        self._rate = ReadRate()
        self._half_closed = self._answering = self._speaks_11 = False

    # ---- callbacks of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = self._link = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        if not self._pool.admit(self):
            self._force_close = True
            transport.write(_raw(unavailable("too many connections are open; try again later", 1, "overloaded")))
            transport.close()
            return
        super().connection_made(transport)
        self._due_s = self._pool.loop.time() + self._pool.settings.head_timeout_s
        self._pool.mark_waiting(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._pool.forget(self)
        self._link = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse in pieces that end where a head or a body ends: of what follows a request with `Upgrade` in the same
        piece, aiohttp's parser loses all.
        """
        end = self._end_of_part(data)
        while end < len(data):
            self._parse(data[:end])
            data = data[end:]
            end = self._end_of_part(data)
        self._parse(data)

    def _end_of_part(self, data: bytes) -> int:
        """Return how many bytes of ``data`` belong to the present head or body, as far as that is known."""
        if self._n_body_left:
            return self._n_body_left
        kept = self._last_bytes
        found = (kept + data).find(_END_OF_HEAD)
        return len(data) if found < 0 else found + len(_END_OF_HEAD) - len(kept)

    def _parse(self, data: bytes) -> None:
        """Parse a piece of a head or a body."""
        n_before = self._request_count
        of_a_body = self._unread is not None and not self._unread.is_eof()
        super().data_received(data)
        if self._n_body_left:
            self._n_body_left -= len(data)
        else:
            self._last_bytes = (self._last_bytes + data)[1 - len(_END_OF_HEAD) :]
            if self._request_count > n_before and self._messages:
                self._on_message(*self._messages[-1])
        if self._upgraded and not self._request_in_progress and not self._messages:
            self._decline_upgrade()
        now = self._pool.loop.time()
        if self._request_count > n_before:
            self._on_request(now)
        elif self._in_service:
            self._n_body_bytes += len(data)
        elif data and not self._force_close and not of_a_body:
            if self._n_head_bytes == 0:
                self._due_s = min(self._due_s, now + self._pool.settings.head_timeout_s)
            self._n_head_bytes += len(data)
            if self._n_head_bytes > self._pool.settings.max_head_bytes:
                self._refuse(head_too_large(self._pool.settings.max_head_bytes))

    def _on_message(self, message: Any, body: StreamReader) -> None:
        """Note what a head says of its body.  An error in the body of an earlier one ends that body."""
        before, self._parsed_body, self._last_bytes = self._parsed_body, body, b""
        if (error := getattr(message, "exc", None)) is not None and before is not None and not before.is_eof():
            self._messages.pop()
            before.set_exception(web.RequestPayloadError(_first_line(str(error))))
            self._parsed_body = None
        elif not body.is_eof():
            self._n_body_left = int(message.headers.get("Content-Length", 0))

    def _decline_upgrade(self) -> None:
        """Go on with HTTP behind a request that was answered before its body ended; aiohttp would wait for ever."""
        self._upgraded, tail, self._message_tail = False, self._message_tail, b""
        if self._parser is not None:
            self._parser.set_upgraded(False)
        if tail:
            super().data_received(tail)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio allows None
        """Keep the connection for the response if the client shut down its side after a complete request.

        A client that closed both sides looks the same until something is sent to it.  So send an interim response,
        which HTTP/1.1 clients skip: a closed socket answers with a reset.
        """
        of_tls = self._link is not None and self._link.get_extra_info("sslcontext") is not None
        if self._body is None or not self._speaks_11 or not self._body.is_eof() or of_tls:
            return None  # a side of TLS cannot be shut down alone
        self._half_closed = True
        self._probe()
        return True

    # ---- callbacks of aiohttp

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._answering = False
            if not self._messages:
                self._on_idle()

    def answering(self) -> None:
        """Note that the head of the response is about to be sent: no interim response may follow."""
        self._answering = True

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a malformed request with a JSON error, and log it in one line."""
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        why = _first_line(message or str(exc))
        self._pool.malformed(status, why, request.remote)
        self.answering()
        error = ApiError(status, f"invalid HTTP request: {why}", code="invalid_http")
        response = web.Response(
            status=status, body=msgspec.json.encode(error.body()), content_type="application/json",
            headers={"Server": "lucevisor"},
        )  # fmt: skip
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

    def check_deadlines(self, now: float, waiting: bool) -> None:
        """End the connection if one of its deadlines has passed."""
        assert self._link is not None
        settings = self._pool.settings
        window_s = settings.write_timeout_s + 2 * _CHECK_S  # streams have their own timeout
        if self._rate.is_slow(now, self._link, window_s, settings.min_read_rate):
            self._pool.count("write")
            self.abort()
            return
        if waiting:
            if now >= self._due_s and not self._force_close:
                self._end_wait()
        elif self._half_closed:
            self._probe()
        elif self._body is not None and self._link.is_reading() and now >= self._body_due_s:
            self._check_body_rate(self._body, now)

    def abort(self) -> None:
        """Close without sending buffered data."""
        if self._link is not None:
            self._link.abort()

    @property
    def has_body(self) -> bool:
        """Whether the body of the request in service has arrived whole."""
        return self._body is None or self._body.is_eof()

    def body_is_slow(self, now: float) -> bool:
        """Return whether a body is behind the least rate, and its request the only one in service."""
        settings = self._pool.settings
        seconds = now - (self._body_due_s - settings.body_rate_s) - _GRACE_S
        behind = self._n_body_bytes < seconds * settings.min_body_rate
        return behind and not self._messages and self._link is not None and self._link.is_reading()

    def give_up_body(self, why: str) -> None:
        """Refuse the request in service, as its body does not arrive."""
        if self._body is not None:
            self._body.set_exception(SlowBody(why))

    @property
    def _in_service(self) -> bool:
        return self._body is not None

    def _on_request(self, now: float) -> None:
        settings = self._pool.settings
        self._n_head_bytes = self._n_body_bytes = 0
        self._body_due_s = now + settings.body_rate_s
        if self._messages:  # empty if the loop has started the handler already
            message, self._body = self._messages[-1]
            self._speaks_11 = getattr(message, "version", None) == HttpVersion11
        self._pool.mark_serving(self)

    def _on_idle(self) -> None:
        self._unread, self._body = self._body, None
        self._due_s = self._pool.loop.time() + self._pool.settings.idle_timeout_s
        self._pool.mark_waiting(self)
        if self._half_closed:
            self.close()

    def _end_wait(self) -> None:
        if self._n_head_bytes == 0:
            self._pool.count("head" if self._request_count == 0 else "idle")
            self.force_close()
            return
        self._pool.count("head")
        seconds = self._pool.settings.head_timeout_s
        self._refuse(ApiError(408, f"the head did not arrive within {seconds:g} s", code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer an incomplete head, and close."""
        if self._link is not None:
            self._link.write(_raw(error))
        self.force_close()

    def _check_body_rate(self, body: StreamReader, now: float) -> None:
        """Abandon a body that arrives too slowly; only while reading, as a full buffer is not the client's fault."""
        settings = self._pool.settings
        if not body.is_eof() and self._n_body_bytes < settings.body_rate_s * settings.min_body_rate:
            self._pool.count("body")
            self.give_up_body(f"at less than {settings.min_body_rate:g} bytes/s")
        self._n_body_bytes = 0
        self._body_due_s = now + settings.body_rate_s

    def _probe(self) -> None:
        """Find out whether the client of a half-closed connection is still there: the write after a reset fails."""
        if self._link is None or self._answering or not self._in_service:
            return
        if self._link.get_write_buffer_size() == 0:
            self._link.write(_CONTINUE)
            self._pool.loop.call_later(_PROBE_S, self._probe_again)

    def _probe_again(self) -> None:
        if self._link is not None and not self._answering and self._in_service:
            self._link.write(_CONTINUE)


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
    """Return a complete response for a connection without a request."""
    body = msgspec.json.encode(error.body())
    phrase = HTTPStatus(error.status).phrase
    head = (
        f"HTTP/1.1 {error.status} {phrase}\r\nServer: lucevisor\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n"
    )
    head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    return head.encode() + b"\r\n" + body


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0].rstrip(":").strip()[:200]
