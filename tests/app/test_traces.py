"""OpenTelemetry spans of requests, kept in memory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from lucevisor.api.contexts import RequestContext
from lucevisor.api.keys import ApiKeys
from lucevisor.app.traces import Traces, configured
from lucevisor.config import ApiKey
from tests.api.conftest import start  # noqa: F401  # a fixture
from tests.api.scripted_model import MODEL, Rig, say

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def client(start: Callable[..., Any], exporter: InMemorySpanExporter) -> Any:  # noqa: F811
    rig = Rig(trace=Traces(SimpleSpanProcessor(exporter)), keys=ApiKeys([ApiKey("secret", "ann")]))
    found = await start(rig)
    found.session.headers["x-api-key"] = "secret"
    return found


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_and_its_parts(client: Any, exporter: InMemorySpanExporter, stream: bool) -> None:
    client.rig.stage.script = say("one two three")
    client.rig.stage.step_s = 0.005
    before_ns = time.time_ns()
    with capture_logs() as logs:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": stream}
        async with client.session.post(client.url + "/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
    spans = by_name(exporter)
    whole = spans.pop("POST /v1/chat/completions")
    assert whole.context.trace_id == int(TRACE, 16)
    assert whole.parent is not None
    assert whole.parent.span_id == int(PARENT, 16)
    told = dict(whole.attributes or {})
    assert told["gen_ai.request.model"] == MODEL
    assert told["http.response.status_code"] == 200
    assert told["lucevisor.key"] == "ann"
    assert told["gen_ai.usage.output_tokens"] > 3
    assert list(spans) == ["queue", "prompt", "answer"]
    assert all(span.parent.span_id == whole.context.span_id for span in spans.values())
    times = [t for span in spans.values() for t in (span.start_time, span.end_time)]
    assert before_ns - 1_000_000 <= whole.start_time == times[0]
    assert times == sorted(times)
    assert times[-1] == whole.end_time
    assert spans["answer"].end_time - spans["answer"].start_time >= 5_000_000  # a step at least
    assert [line["trace_id"] for line in logs if line["event"] == "request"] == [TRACE]


async def test_a_refusal_has_a_status_and_no_parts(client: Any, exporter: InMemorySpanExporter) -> None:
    await client.chat(temperature=9)
    [span] = exporter.get_finished_spans()
    told = dict(span.attributes or {})
    assert (told["http.response.status_code"], told["error.type"]) == (400, "400")
    assert "temperature" in str(told["error.message"])
    assert span.parent is None


async def test_what_looks_at_the_server_is_not_traced(client: Any, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/ready", "/metrics", "/status", "/"):
        async with client.session.get(client.url + path) as answer:
            await answer.read()
    assert exporter.get_finished_spans() == ()


async def test_a_malformed_context_begins_a_trace(client: Any, exporter: InMemorySpanExporter) -> None:
    async with client.session.get(client.url + "/v1/models", headers={"traceparent": "x" * 5000}) as answer:
        assert answer.status == 200
    [span] = exporter.get_finished_spans()
    assert span.parent is None


def test_without_an_endpoint_there_are_none() -> None:
    assert configured({}) is None
    assert configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}) is None


def test_without_the_extra_there_are_none_and_a_warning_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with capture_logs() as logs:
        assert configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    assert "lucevisor[traces]" in logs[0]["reason"]


async def test_a_collector_that_hangs_does_not_hold_up_the_end() -> None:
    asked, released = threading.Event(), threading.Event()

    class Hangs(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            asked.set()
            released.wait(100)
            return super().export(spans)

    found = Traces(BatchSpanProcessor(Hangs()))
    found(RequestContext("", 0.0, method="GET", path="/v1/models", status=200, ended_s=1.0))
    try:
        await found.close(0.1)
        assert asked.wait(60), "it hung"
    finally:
        released.set()


def test_an_endpoint_turns_them_on() -> None:
    with capture_logs() as logs:
        assert configured({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is not None
    assert logs[0]["endpoint"] == "http://127.0.0.1:1"
