"""Middleware around every request: request id, access control, errors as JSON, metrics and one log line."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Awaitable, Callable

import msgspec
import structlog
from aiohttp import web

from lucevisor.api.access import (
    OLLAMA_PATHS,
    OPEN_PATHS,
    check_access,
    check_content_encoding,
    cors_headers,
    is_preflight,
    preflight,
)
from lucevisor.api.app_state import (
    ACTIVE,
    CONTEXT,
    METRICS,
    MODELS,
    SERVER,
    START_LIMIT,
    context_of,
    request_id_of,
    yield_to_loop,
)
from lucevisor.api.connections import HttpConnection
from lucevisor.api.contexts import RequestContext
from lucevisor.api.errors import CLIENT_CLOSED, ApiError, internal_error, unavailable
from lucevisor.api.sse import ClientGone

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = structlog.get_logger("lucevisor.api")

_QUIET = OPEN_PATHS | {"/metrics", "/status"}
_STATUS_MESSAGES = {
    404: ("no such path", "not_found"),
    405: ("the method is not allowed for this path", "method_not_allowed"),
}


@web.middleware
async def request_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve one request: aiohttp middleware."""
    connection = request.protocol
    if isinstance(connection, HttpConnection):
        connection.on_request_start()
    await yield_to_loop(request.app[START_LIMIT])
    models = request.app[MODELS]
    context = RequestContext(
        request_id_of(request),
        time.monotonic(),
        method=request.method,
        path=request.path,
        headers=request.headers,
        model=models.first.model.name if len(models) == 1 else "",
    )
    request[CONTEXT] = context
    active = request.app[ACTIVE]
    active.contexts.add(context)
    status = CLIENT_CLOSED
    with structlog.contextvars.bound_contextvars(request_id=context.request_id):
        try:
            status, response = await _serve(request, context, handler)
            return response
        finally:
            active.contexts.discard(context)
            if isinstance(connection, HttpConnection):
                connection.on_request_end()
                if connection.dropped:
                    context.fields["dropped"] = connection.dropped
            context.status, context.ended_s = status, time.monotonic()
            _account(request, context)


async def _serve(request: web.Request, context: RequestContext, handler: Handler) -> tuple[int, web.StreamResponse]:
    """Check access and handle a request; return the status to record, of a failed stream the error's, and
    the response."""
    try:
        server = request.app[SERVER]
        if is_preflight(request) and (answer := preflight(request, server.settings)) is not None:
            return answer.status, answer
        context.caller = check_access(request, server.settings, server.keys, server.admin_keys)
        if request.app[ACTIVE].draining and request.path not in _QUIET:
            raise unavailable("the server is shutting down", server.settings.retry_after_s, "shutting_down")
        check_content_encoding(request)
        response = await handler(request)
        return response.status, response
    except ClientGone as gone:
        context.fields["dropped"] = str(gone)
        stream = context.stream
        # aiohttp needs a response to return, although it is never sent.
        return CLIENT_CLOSED, stream.response if stream is not None and stream.started else web.Response(
            status=CLIENT_CLOSED
        )
    except ApiError as error:
        failure = error
    except web.HTTPException as error:
        failure = _from_http(request, error)
    except Exception:  # last resort: log the bug, and still send a complete response
        log.exception("request failed")
        failure = internal_error(context.request_id)
    context.fields["error"] = failure.message
    return await _fail(request, context, failure)


async def _fail(request: web.Request, context: RequestContext, failure: ApiError) -> tuple[int, web.StreamResponse]:
    stream = context.stream
    if stream is not None and stream.started:
        try:
            await stream.fail(failure)
        except ClientGone as gone:
            context.fields["dropped"] = str(gone)
        return failure.status, stream.response
    body = failure.ollama_body() if request.path.startswith(OLLAMA_PATHS) else failure.body()
    if _is_anthropic(request):
        body = failure.anthropic_body(context.request_id)
    response = web.Response(
        status=failure.status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers=failure.headers,
    )
    if failure.status in (408, 413, 415, 417, 431):
        response.force_close()  # do not read the rest of the body
    return failure.status, response


def _is_anthropic(request: web.Request) -> bool:
    return request.path == "/v1/messages" or request.path.startswith("/v1/messages/")


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    message, code = _STATUS_MESSAGES.get(error.status, (error.reason, "invalid_request"))
    headers = {}
    if error.status == 404:
        known = [r.canonical for r in request.app.router.resources() if "{" not in r.canonical and r.canonical != "/"]
        asked = request.path[:100]
        near = [path for path in known if path.endswith(asked) and len(asked) > 1]
        near = near or difflib.get_close_matches(asked, known, n=1, cutoff=0.8)
        message += f"; did you mean {near[0]}?" if near else "; GET /openapi.json lists all"
    if "Allow" in error.headers:
        headers = {"Allow": error.headers["Allow"]}
        message += f"; use {error.headers['Allow']}"
    return ApiError(error.status, f"{request.method} {request.path}: {message}", code=code, headers=headers)


def _account(request: web.Request, context: RequestContext) -> None:
    metrics = request.app[METRICS]
    metrics.answered(context)
    fields: dict[str, object] = {
        "method": context.method,
        "path": context.path,
        "status": context.status,
        "duration_s": round(context.ended_s - context.started_s, 6),
    }
    if context.handles:
        fields |= {
            "prompt_tokens": context.prompt_tokens,
            "cached_tokens": context.cached_tokens,
            "generated_tokens": context.generated_tokens,
            "accepted_tokens": context.accepted_tokens,
            "rejected_tokens": context.rejected_tokens,
            "queue_s": round(context.queue_s, 6),
            "first_token_s": None if context.first_token_s is None else round(context.first_token_s, 6),
        }
    if context.caller.name:
        fields["key"] = context.caller.name
    quiet = request.path in _QUIET
    if not quiet and (trace_id := request.app[SERVER].trace(context)):
        fields["trace_id"] = trace_id
    level = "debug" if quiet else "info" if context.status < 500 else "warning"
    getattr(log, level)("request", **fields, **context.fields)


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every response, streams included; aiohttp's on_response_prepare signal."""
    response.headers["Server"] = "lucevisor"
    if CONTEXT in request:
        response.headers["x-request-id"] = context_of(request).request_id
        if _is_anthropic(request):
            response.headers["request-id"] = context_of(request).request_id
    if request.app[ACTIVE].closing:
        response.headers["Connection"] = "close"
        response.force_close()
    response.headers.update(cors_headers(request.headers.get("Origin"), request.app[SERVER].settings))


async def wait_until_idle(active_count: Callable[[], int], deadline_s: float) -> bool:
    end = time.monotonic() + deadline_s
    while active_count():
        if time.monotonic() >= end:
            return False
        await asyncio.sleep(0.02)
    return True
