"""Prometheus metrics: counters and histograms of the HTTP side, and the state of the rest, read at each scrape.

Labels have few values (status codes, stages, spaces, groups, states, names of keys), and docs/metrics.md lists every
metric.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from lucevisor.api.app_context import AppContext, SnapshotMetrics
from lucevisor.compression.compressor import CompressionStatistics
from lucevisor.engine.recovery import RecoveryStatistics
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.engine.statistics import EngineStatistics
from lucevisor.model.values import Space
from lucevisor.supervision.states import State

PREFIX: Final = "lucevisor_"


class StateCollector(Collector):
    """Reads engine and groups at scrape time."""

    def __init__(self, ctx: AppContext) -> None:
        self._ctx = ctx

    def describe(self) -> list[Metric]:
        """Return no metrics; otherwise the registry would call collect for their names, before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        yield from self._groups()
        drops = CounterMetricFamily(
            PREFIX + "log_records_dropped", "Log records that were not written, by sink.", labels=["sink"]
        )
        for sink, n in self._ctx.log_drops().items():
            drops.add_metric([sink], n)
        yield drops
        if self._ctx.engine is not None:
            yield from _engine(self._ctx.engine.statistics(), self._ctx.boundary_row_bytes)
        if self._ctx.compressor is not None:
            yield from _compression(self._ctx.compressor.statistics)
        snapshots = self._ctx.snapshots()
        if snapshots is not None:
            yield from _snapshots(snapshots)

    def _groups(self) -> Iterator[Metric]:
        states = GaugeMetricFamily(
            PREFIX + "group_state", "1 for the state a backend group is in.", labels=["group", "state"]
        )
        restarts = CounterMetricFamily(
            PREFIX + "daemon_restarts", "Restarts of shard daemons by reason.", labels=["group", "reason"]
        )
        spares = GaugeMetricFamily(PREFIX + "spares", "Spare processes that are ready to take over.", labels=["group"])
        spare_bytes = GaugeMetricFamily(
            PREFIX + "spare_memory_bytes", "Resident host memory of spare processes.", labels=["group"]
        )
        memory = GaugeMetricFamily(
            PREFIX + "device_memory_bytes", "Memory of a device by use.", labels=["device", "use"]
        )
        resident = GaugeMetricFamily(
            PREFIX + "daemon_memory_bytes", "Resident host memory of a group's daemon.", labels=["group"]
        )
        for group in self._ctx.groups():
            resident.add_metric([group.name], group.rss_bytes)
            for device in group.devices:
                for use in ("weights", "state", "free", "total"):
                    memory.add_metric([device.name, use], getattr(device, use))
            spares.add_metric([group.name], len(group.spare_bytes))
            spare_bytes.add_metric([group.name], sum(group.spare_bytes))
            for state in State:
                states.add_metric([group.name, state.value], float(group.state == state.value))
            for reason, n in group.restarts.items():
                restarts.add_metric([group.name, reason], n)
        yield from (states, restarts, spares, spare_bytes, memory, resident)


def _engine(now: EngineStatistics, row_bytes: int) -> Iterator[Metric]:
    yield GaugeMetricFamily(PREFIX + "requests_running", "Requests that hold pages in the shards.", value=now.running)
    yield GaugeMetricFamily(PREFIX + "requests_queued", "Requests that wait in the queue.", value=now.queued)
    yield from _recovery(now.recovery)
    pages = GaugeMetricFamily(PREFIX + "pages", "Pages of a space by location.", labels=["space", "where"])
    for space, use in now.pages.items():
        pages.add_metric([space, "device"], use.used - use.evictable)
        pages.add_metric([space, "cached"], use.evictable)
        pages.add_metric([space, "free"], use.total - use.used)
    pages.add_metric([Space.FULL, "out"], now.pages_out)
    pages.add_metric([Space.FULL, "host"], now.host_pages.used)
    pages.add_metric([Space.FULL, "host_free"], now.host_pages.total - now.host_pages.used)
    yield pages
    step = SummaryMetricFamily(PREFIX + "step_seconds", "Time a stage computed on a step.", labels=["stage"])
    wait = SummaryMetricFamily(PREFIX + "stage_wait_seconds", "Time a stage waited for a step.", labels=["stage"])
    for index, stage in enumerate(now.steps.stages):
        step.add_metric([str(index)], stage.n_steps, stage.compute_s)
        wait.add_metric([str(index)], stage.n_steps, stage.wait_s)
    yield step
    yield wait
    hop = SummaryMetricFamily(
        PREFIX + "hop_seconds", "From the doorbell of the rows until the next stage took them.", labels=["boundary"]
    )
    hop_bytes = CounterMetricFamily(
        PREFIX + "hop_bytes", "Hidden states handed from a stage to the next.", labels=["boundary"]
    )
    for index, boundary in enumerate(now.steps.boundaries):
        hop.add_metric([str(index)], boundary.n_hops, boundary.seconds)
        hop_bytes.add_metric([str(index)], boundary.n_tokens * row_bytes)
    yield hop
    yield hop_bytes
    yield CounterMetricFamily(PREFIX + "steps", "Steps that all stages have computed.", value=now.steps.n_steps)
    yield CounterMetricFamily(PREFIX + "step_tokens", "Tokens of these steps.", value=now.steps.n_tokens)
    yield CounterMetricFamily(PREFIX + "preemptions", "Running requests that were preempted.", value=now.preemptions)
    yield CounterMetricFamily(
        PREFIX + "preemptions_swapped", "Preempted requests whose state went to host memory.", value=now.swapped
    )
    yield from _drafts(now.drafts)
    cached = CounterMetricFamily(
        PREFIX + "cached_prompt_tokens", "Prompt tokens taken from prefix slots, by tier.", labels=["tier"]
    )
    for tier in ("memory", "disk"):
        cached.add_metric([tier], now.cache.tokens.get(tier, 0))
    yield cached
    yield GaugeMetricFamily(PREFIX + "prefix_slots", "Prompt prefixes kept in memory.", value=now.cache.n_slots)
    yield GaugeMetricFamily(PREFIX + "prefix_bytes", "Pages and states held by slots only.", value=now.cache.n_bytes)
    yield CounterMetricFamily(PREFIX + "prefix_prompts", "Prompts that were started.", value=now.cache.n_prompts)
    yield CounterMetricFamily(
        PREFIX + "prefix_hits", "Prompts that started with a cached prefix.", value=now.cache.n_hits
    )
    yield CounterMetricFamily(PREFIX + "prefix_evictions", "Slots evicted for others.", value=now.cache.n_evictions)


def _drafts(now: DraftStatistics) -> Iterator[Metric]:
    total = now.total
    yield CounterMetricFamily(
        PREFIX + "draft_steps", "Steps for which the translation stage made drafts.", value=now.n_steps
    )
    yield CounterMetricFamily(
        PREFIX + "draft_tokens", "Tokens drafted, or looked up and verified.", value=total.n_drafted
    )
    yield CounterMetricFamily(
        PREFIX + "draft_upkeep_seconds", "Time of the translation stage for all but drafts.", value=now.upkeep_s
    )
    families = {
        name: CounterMetricFamily(PREFIX + name, text, labels=["origin", *more])
        for name, text, *more in (
            ("verify_slices", "Decodes that verified drafts, by origin of the sequence's prefix."),
            ("verified_tokens", "Drafts that were verified."),
            ("accepted_tokens", "Drafts that were accepted."),
            ("verified_tokens_per_position", "Drafts that were verified, by position in the slice.", "position"),
            ("accepted_tokens_per_position", "Drafts that were accepted, by position in the slice.", "position"),
            ("draft_seconds", "Time of the translation stage for drafts."),
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
    yield GaugeMetricFamily(PREFIX + "requests_held", "Requests that wait for a daemon that was lost.", value=now.held)
    pauses = SummaryMetricFamily(
        PREFIX + "pause_seconds",
        "From the loss of a daemon, or its restart, until requests were computed again.",
        labels=["reason"],
    )
    for reason, of_reason in now.pauses.items():
        pauses.add_metric([reason], of_reason.n, of_reason.seconds)
    yield pauses
    yield CounterMetricFamily(
        PREFIX + "recovered_sequences", "Requests that continued after the loss of a daemon.", value=now.n_sequences
    )
    tokens = CounterMetricFamily(
        PREFIX + "recovered_tokens",
        "Tokens of requests that continued: computed again by lost stages alone, by all, or kept.",
        labels=["how"],
    )
    tokens.add_metric(["rebuilt"], now.n_rebuilt)
    tokens.add_metric(["recomputed"], now.n_tokens)
    tokens.add_metric(["kept"], now.n_kept)
    yield tokens


def _compression(now: CompressionStatistics) -> Iterator[Metric]:
    prompts = CounterMetricFamily(PREFIX + "pflash_prompts", "Prompts by PFlash's outcome.", labels=["outcome"])
    for outcome, n in now.outcomes.items():
        prompts.add_metric([outcome], n)
    yield prompts
    tokens = CounterMetricFamily(
        PREFIX + "pflash_tokens", "Tokens of shortened prompts, and those kept.", labels=["which"]
    )
    tokens.add_metric(["prompt"], now.n_tokens)
    tokens.add_metric(["kept"], now.n_kept)
    yield tokens
    yield CounterMetricFamily(
        PREFIX + "pflash_scored_tokens", "Tokens that the scoring model read.", value=now.n_scored
    )
    yield CounterMetricFamily(
        PREFIX + "pflash_seconds", "Time spent shortening prompts, waiting included.", value=now.seconds
    )


def _snapshots(now: SnapshotMetrics) -> Iterator[Metric]:
    n_bytes = CounterMetricFamily(
        PREFIX + "snapshot_bytes", "Bytes of the snapshot files that were saved or restored.", labels=["op"]
    )
    seconds = CounterMetricFamily(
        PREFIX + "snapshot_seconds",
        "Time of successful saves and restores of snapshots.",
        labels=["op"],
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
        PREFIX + "snapshot_failures",
        "Slots that were not saved and files that were not used, by reason.",
        labels=["reason"],
    )
    for reason, n in now.failures.items():
        failures.add_metric([reason], n)
    yield failures
    yield GaugeMetricFamily(PREFIX + "snapshots", "Snapshot files that this model can use.", value=now.n_files)
    yield GaugeMetricFamily(PREFIX + "snapshot_disk_bytes", "Bytes of snapshot files on disk.", value=now.file_bytes)


_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_QUALITY: Final = re.compile(r"0(?:\.\d{0,3})?|1(?:\.0{0,3})?", re.ASCII)
_INTER_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """All metrics of one server.  Handlers update the public members; the rest is read at each scrape."""

    def __init__(self, ctx: AppContext) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        self.requests = counter("requests", "HTTP requests by status; 499: the client disconnected.", ("code",))
        self._prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of answered requests.")
        self._generated_tokens = counter("generated_tokens", "Tokens generated for answered requests.")
        self._key_requests = counter("key_requests", "HTTP requests with a named API key, by its name.", ("key",))
        self._key_prompt_tokens = counter(
            "key_prompt_tokens", "Prompt tokens of requests with a named API key.", ("key",)
        )
        self._key_generated_tokens = counter(
            "key_generated_tokens", "Tokens generated for requests with a named API key.", ("key",)
        )
        self.time_to_first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From the head of a request to its first token.",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self._request = Histogram(
            PREFIX + "request_seconds",
            "From the head of a request that generates to the end of its answer.",
            buckets=_REQUEST_S,
            registry=self._registry,
        )
        self.queue = Histogram(
            PREFIX + "queue_seconds",
            "From a sequence's arrival at the engine to its start.",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self.inter_token = Histogram(
            PREFIX + "inter_token_seconds",
            "Between two tokens of a choice.",
            buckets=_INTER_TOKEN_S,
            registry=self._registry,
        )
        self.connections = Gauge(PREFIX + "connections", "Open connections of clients.", registry=self._registry)
        self.connections_dropped = counter(
            "connections_dropped", "Connections closed by the server, by deadline or cap.", ("reason",)
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(StateCollector(ctx))

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
