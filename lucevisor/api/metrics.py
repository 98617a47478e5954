"""Prometheus metrics: counters and histograms of the HTTP side, and the state of engine and groups at each scrape.

Has its own registry, so several servers fit into one process.  Invariant: labels have few values (status codes, stages,
spaces, groups, states).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from lucevisor.api.ports import Ports, SnapshotMetrics
from lucevisor.engine.draft_statistics import DraftStatistics
from lucevisor.engine.recovery import RecoveryStatistics
from lucevisor.engine.statistics import EngineStatistics
from lucevisor.model.values import Space
from lucevisor.supervision.states import State

_P: Final = "lucevisor_"
_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
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
        self._registry.register(_StateCollector(ports))

    def answered(self, status: int, key_name: str, n_prompt: int, n_generated: int) -> None:
        """Count a request that is over, with its prompt and generated tokens."""
        self.requests.labels(str(status)).inc()
        self._prompt_tokens.inc(n_prompt)
        self._generated_tokens.inc(n_generated)
        if key_name:
            self._key_requests.labels(key_name).inc()
            self._key_prompt_tokens.labels(key_name).inc(n_prompt)
            self._key_generated_tokens.labels(key_name).inc(n_generated)

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


class _StateCollector(Collector):
    """Reads engine and groups at scrape time."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports

    def describe(self) -> list[Metric]:
        """Return no metrics; otherwise the registry would call collect for their names, before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from self._groups()
        drops = CounterMetricFamily(
            _P + "log_records_dropped", "Log records that were not written, by sink.", labels=["sink"]
        )
        for sink, n in self._ports.log_drops().items():
            drops.add_metric([sink], n)
        yield drops
        if self._ports.engine is not None:
            yield from _engine(self._ports.engine.statistics())
        snapshots = self._ports.snapshots()
        if snapshots is not None:
            yield from _snapshots(snapshots)

    def _groups(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            _P + "group_state", "1 for the state a backend group is in.", labels=["group", "state"]
        )
        restarts = CounterMetricFamily(
            _P + "daemon_restarts", "Restarts of shard daemons by reason.", labels=["group", "reason"]
        )
        spares = GaugeMetricFamily(_P + "spares", "Warm processes that wait to take over.", labels=["group"])
        spare_bytes = GaugeMetricFamily(_P + "spare_memory_bytes", "Their resident host memory.", labels=["group"])
        for group in self._ports.groups():
            spares.add_metric([group.name], len(group.spare_bytes))
            spare_bytes.add_metric([group.name], sum(group.spare_bytes))
            for state in State:
                states.add_metric([group.name, state.value], float(group.state == state.value))
            for reason, n in group.restarts.items():
                restarts.add_metric([group.name, reason], n)
        yield from (states, restarts, spares, spare_bytes)


def _engine(now: EngineStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily(_P + "requests_running", "Requests that hold pages in the shards.", value=now.running)
    yield GaugeMetricFamily(_P + "requests_queued", "Requests that wait in the queue.", value=now.queued)
    yield from _recovery(now.recovery)
    pages = GaugeMetricFamily(_P + "pages", "Pages of a space by location.", labels=["space", "where"])
    for space, use in now.pages.items():
        pages.add_metric([space, "device"], use.used - use.evictable)
        pages.add_metric([space, "cached"], use.evictable)
        pages.add_metric([space, "free"], use.total - use.used)
    pages.add_metric([Space.FULL, "out"], now.pages_out)
    pages.add_metric([Space.FULL, "host"], now.host_pages.used)
    pages.add_metric([Space.FULL, "host_free"], now.host_pages.total - now.host_pages.used)
    yield pages
    step = SummaryMetricFamily(_P + "step_seconds", "Time a stage computed on a step.", labels=["stage"])
    wait = SummaryMetricFamily(_P + "stage_wait_seconds", "Time a stage waited for a step.", labels=["stage"])
    for index, stage in enumerate(now.steps.stages):
        step.add_metric([str(index)], stage.n_steps, stage.compute_s)
        wait.add_metric([str(index)], stage.n_steps, stage.wait_s)
    yield step
    yield wait
    hop = SummaryMetricFamily(
        _P + "hop_seconds", "From the result of a stage to the step sent to the next.", labels=["boundary"]
    )
    for index, boundary in enumerate(now.steps.boundaries):
        hop.add_metric([str(index)], boundary.n_hops, boundary.seconds)
    yield hop
    yield from _drafts(now.drafts)
    cached = CounterMetricFamily(
        _P + "cached_prompt_tokens", "Prompt tokens taken from prefix slots, by tier.", labels=["tier"]
    )
    for tier in ("memory", "disk"):
        cached.add_metric([tier], now.cache.tokens.get(tier, 0))
    yield cached
    yield GaugeMetricFamily(_P + "prefix_slots", "Prompt prefixes kept in memory.", value=now.cache.n_slots)
    yield GaugeMetricFamily(_P + "prefix_bytes", "Pages and states held by slots only.", value=now.cache.n_bytes)
    yield CounterMetricFamily(_P + "prefix_prompts", "Prompts that were started.", value=now.cache.n_prompts)
    yield CounterMetricFamily(_P + "prefix_hits", "Prompts that started with a cached prefix.", value=now.cache.n_hits)
    yield CounterMetricFamily(_P + "prefix_evictions", "Slots evicted for others.", value=now.cache.n_evictions)


def _drafts(now: DraftStatistics) -> Iterator[Metric]:
    total = now.total
    yield CounterMetricFamily(_P + "draft_steps", "Steps for which the draft stage made drafts.", value=now.n_steps)
    yield CounterMetricFamily(_P + "draft_tokens", "Tokens drafted, or looked up and verified.", value=total.n_drafted)
    yield CounterMetricFamily(
        _P + "draft_upkeep_seconds", "Time of the draft stage for all but drafts.", value=now.upkeep_s
    )
    families = {
        name: CounterMetricFamily(_P + name, text, labels=["origin", *more])
        for name, text, *more in (
            ("verify_slices", "Decodes that verified drafts, by origin of the sequence's prefix."),
            ("verified_tokens", "Drafts that were verified."),
            ("accepted_tokens", "Drafts that were accepted."),
            ("verified_tokens_per_position", "Drafts that were verified, by position in the slice.", "position"),
            ("accepted_tokens_per_position", "Drafts that were accepted, by position in the slice.", "position"),
            ("draft_seconds", "Time of the draft stage for drafts."),
            ("verify_seconds", "Time of all other stages for slices with drafts."),
        )
    }
    for origin, counts in now.by_origin.items():
        for name, value in (
            ("verify_slices", counts.n_verify),
            ("verified_tokens", counts.n_verified),
            ("accepted_tokens", counts.n_accepted),
            ("draft_seconds", counts.draft_s),
            ("verify_seconds", counts.verify_s),
        ):
            families[name].add_metric([origin], value)
        for position, (n_verified, n_accepted) in enumerate(zip(counts.verified, counts.accepted, strict=True)):
            families["verified_tokens_per_position"].add_metric([origin, str(position)], n_verified)
            families["accepted_tokens_per_position"].add_metric([origin, str(position)], n_accepted)
    yield from families.values()


def _recovery(now: RecoveryStatistics) -> Iterator[Metric]:
    yield GaugeMetricFamily(_P + "requests_held", "Requests that wait for a daemon that was lost.", value=now.held)
    pauses = SummaryMetricFamily(
        _P + "pause_seconds",
        "From the loss of a daemon, or its restart, until requests were computed again.",
        labels=["reason"],
    )
    for reason, of_reason in now.pauses.items():
        pauses.add_metric([reason], of_reason.n, of_reason.seconds)
    yield pauses
    yield CounterMetricFamily(
        _P + "recovered_sequences", "Requests that were running at a loss and went on.", value=now.n_sequences
    )
    tokens = CounterMetricFamily(
        _P + "recovered_tokens", "Their tokens: computed again by lost stages alone or by all, or kept.", labels=["how"]
    )
    tokens.add_metric(["rebuilt"], now.n_rebuilt)
    tokens.add_metric(["recomputed"], now.n_tokens)
    tokens.add_metric(["kept"], now.n_kept)
    yield tokens


def _snapshots(now: SnapshotMetrics) -> Iterator[Metric]:
    n_bytes = CounterMetricFamily(
        _P + "snapshot_bytes", "Bytes of the snapshot files that were saved or restored.", labels=["op"]
    )
    seconds = CounterMetricFamily(
        _P + "snapshot_seconds", "Time that saves and restores of snapshots took, those that succeeded.", labels=["op"]
    )
    for op, taken_bytes, taken_s in (
        ("save", now.saved_bytes, now.save_s),
        ("restore", now.restored_bytes, now.restore_s),
    ):
        n_bytes.add_metric([op], taken_bytes)
        seconds.add_metric([op], taken_s)
    yield n_bytes
    yield seconds
    failures = CounterMetricFamily(
        _P + "snapshot_failures",
        "Slots that were not saved and files that were not used, by reason.",
        labels=["reason"],
    )
    for reason, n in now.failures.items():
        failures.add_metric([reason], n)
    yield failures
    yield GaugeMetricFamily(_P + "snapshots", "Snapshot files that this model can use.", value=now.n_files)
    yield GaugeMetricFamily(_P + "snapshot_disk_bytes", "What those files take on disk.", value=now.file_bytes)
