"""Prometheus metrics: counters and histograms of the HTTP side; state_metrics.py adds the state of the rest.

Has its own registry, so several servers fit into one process.  Invariant: labels have few values (status codes, stages,
spaces, groups, states, names of keys), and docs/metrics.md lists every metric.
"""

from __future__ import annotations

import re
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from lucevisor.api.ports import Ports
from lucevisor.api.state_metrics import PREFIX, StateCollector

_P: Final = PREFIX
_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_QUALITY: Final = re.compile(r"0(?:\.\d{0,3})?|1(?:\.0{0,3})?", re.ASCII)
_INTER_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """All metrics of one server.  Handlers update the public members; the rest is read at each scrape."""

    def __init__(self, ports: Ports) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(_P + name, text, labels, registry=self._registry)

        self.requests = counter("requests", "HTTP requests by status; 499: the client disconnected.", ("code",))
        self._prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of answered requests.")
        self._generated_tokens = counter("generated_tokens", "Tokens generated for answered requests.")
        self._key_requests = counter("key_requests", "HTTP requests with a named API key, by its name.", ("key",))
        self._key_prompt_tokens = counter("key_prompt_tokens", "Tokens of their prompts.", ("key",))
        self._key_generated_tokens = counter("key_generated_tokens", "Tokens generated for them.", ("key",))
        self.time_to_first_token = Histogram(
            _P + "time_to_first_token_seconds",
            "From the head of a request to its first token.",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self._request = Histogram(
            _P + "request_seconds",
            "From the head of a request that generates to the end of its answer.",
            buckets=_REQUEST_S,
            registry=self._registry,
        )
        self.queue = Histogram(
            _P + "queue_seconds",
            "From a sequence's arrival at the engine to its start.",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            _P + "inter_token_seconds",
            "Between two tokens of a choice.",
            buckets=_INTER_TOKEN_S,
            registry=self._registry,
        )
        self.connections = Gauge(_P + "connections", "Open connections of clients.", registry=self._registry)
        self.connections_dropped = counter(
            "connections_dropped", "Connections closed by the server, by deadline or cap.", ("reason",)
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(StateCollector(ports))

    def answered(self, status: int, key_name: str, n_prompt: int, n_generated: int) -> None:
        """Count a request that is over, with its prompt and generated tokens."""
        self.requests.labels(str(status)).inc()
        self._prompt_tokens.inc(n_prompt)
        self._generated_tokens.inc(n_generated)
        if key_name:
            self._key_requests.labels(key_name).inc()
            self._key_prompt_tokens.labels(key_name).inc(n_prompt)
            self._key_generated_tokens.labels(key_name).inc(n_generated)

    def generated(self, seconds: float) -> None:
        """Count the duration of a request that generated."""
        self._request.observe(seconds)

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics in the exposition format that an Accept header prefers, and the content type."""
        if wants_openmetrics(accept):
            text: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


def wants_openmetrics(accept: str) -> bool:
    """Return whether an Accept header prefers OpenMetrics to plain text; malformed parts are ignored.

    prometheus_client's own choose_encoder raises on versions that are not numbers and echoes them into the response.
    """
    quality = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for media_range in accept.split(","):
        media_type, *parameters = (part.strip().lower() for part in media_range.split(";"))
        named = dict(parameter.partition("=")[::2] for parameter in parameters)
        shown = named.get("q", "1")
        if media_type in quality and _QUALITY.fullmatch(shown):
            quality[media_type] = max(quality[media_type], float(shown))
    return 0 < quality["application/openmetrics-text"] >= quality["text/plain"]
