"""OpenTelemetry: a span for each request, with spans for its time in the queue, its prompt and its answer.

On if OTEL_EXPORTER_OTLP_ENDPOINT (or ..._TRACES_ENDPOINT) is set and the extra `traces` is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import structlog

from lucevisor import __version__
from lucevisor.api.contexts import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import Span

log = structlog.get_logger("lucevisor.app")

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Traces:
    """Makes spans and gives them to a processor.  Needs the extra `traces`."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", "lucevisor")
        resource = Resource.create({"service.name": name, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("lucevisor", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, request: RequestContext) -> str:
        """Make the spans of a request that is over; return its trace id."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context

        epoch_s = time.time() - time.monotonic()
        span = self._tracer.start_span(
            f"{request.method} {request.path}",
            context=self._propagator.extract(request.headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(request),
            start_time=_ns(epoch_s + request.started_s),
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            for name, begin_s, end_s in _parts(request):
                part: Span = self._tracer.start_span(name, context=inside, start_time=_ns(epoch_s + begin_s))
                part.end(_ns(epoch_s + end_s))
            if request.status >= 500:
                span.set_status(Status(StatusCode.ERROR, request.error))
        span.end(_ns(epoch_s + request.ended_s))
        return format_trace_id(span.get_span_context().trace_id)

    async def close(self, seconds: float = 2.0) -> None:
        # A thread of its own: an exporter tries again for 10 s or more, and the loop's executor would wait for it.
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # too late: the loop is closed
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="last traces", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await sent.wait()


def configured(environ: Mapping[str, str] = os.environ) -> Traces | None:
    """Return the tracer that the environment configures, if any."""
    if not any(environ.get(name) for name in _ENDPOINTS) or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("no traces", reason="OpenTelemetry is not installed: pip install 'lucevisor[traces]'")
        return None
    log.info("requests are traced", endpoint=next(environ[name] for name in _ENDPOINTS if environ.get(name)))
    return Traces(BatchSpanProcessor(OTLPSpanExporter()))


def _attributes(request: RequestContext) -> dict[str, str | int]:
    """Attributes by OpenTelemetry's semantic conventions; ours begin with `lucevisor.`."""
    attributes: dict[str, str | int] = {
        "http.request.method": request.method,
        "url.path": request.path,
        "http.response.status_code": request.status,
        "lucevisor.request_id": request.request_id,
    }
    if request.caller.name:
        attributes["lucevisor.key"] = request.caller.name
    if request.error:
        attributes["error.type"] = str(request.status)
        attributes["error.message"] = request.error
    if request.handles:
        attributes |= {
            "gen_ai.provider.name": "lucevisor",
            "gen_ai.request.model": request.model,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": request.generated_tokens,
            "lucevisor.cached_tokens": request.cached_tokens,
            "lucevisor.accepted_tokens": request.accepted_tokens,
        }
    return attributes


def _parts(request: RequestContext) -> list[tuple[str, float, float]]:
    """Return name, begin and end of the parts of a request that generates, on the monotonic clock."""
    if not request.handles or request.first_token_s is None:
        return []
    first_s = request.started_s + request.first_token_s
    started_s = min(first_s, request.started_s + request.queue_s)
    return [
        ("queue", request.started_s, started_s),
        ("prompt", started_s, first_s),
        ("answer", first_s, request.ended_s),
    ]


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)
