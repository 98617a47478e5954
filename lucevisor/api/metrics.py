"""Prometheus metrics: counters of the HTTP API, and the engine's statistics read at each scrape (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from lucevisor.api.contexts import ModelContext, RequestContext, ServedModels
from lucevisor.compression.compressor import CompressionStatistics
from lucevisor.engine.recovery import RecoveryStatistics
from lucevisor.engine.replicas import ReplicatedEngine
from lucevisor.engine.router import Router
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.engine.statistics import EngineStatistics
from lucevisor.model.values import KvGroup
from lucevisor.snapshots.file_format import Fault
from lucevisor.snapshots.store import FAILED_SAVES, NOT_RESTORED, SnapshotStore
from lucevisor.supervision.events import State

PREFIX: Final = "lucevisor_"


_Values = Iterable[tuple[Sequence[str], float]]


class _Families:
    """Makes families whose samples begin with ``labels``."""

    def __init__(self, **labels: str) -> None:
        self._names, self._values = list(labels), list(labels.values())

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return self.gauges(name, text, (), [((), value)])

    def counter(self, name: str, text: str, value: float) -> Metric:
        return self.counters(name, text, (), [((), value)])

    def gauges(self, name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
        return self._filled(GaugeMetricFamily, name, text, labels, values)

    def counters(self, name: str, text: str, labels: Sequence[str], values: _Values) -> Metric:
        return self._filled(CounterMetricFamily, name, text, labels, values)

    def summaries(self, name: str, text: str, label: str, values: Iterable[tuple[str, int, float]]) -> Metric:
        """``values``: label, count and sum."""
        summed = (([label_value], n, total) for label_value, n, total in values)
        return self._filled(SummaryMetricFamily, name, text, [label], summed)

    def _filled(
        self, kind: Any, name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Any, ...]]
    ) -> Metric:
        family: Metric = kind(PREFIX + name, text, labels=[*self._names, *labels])
        for own, *numbers in values:
            family.add_metric([*self._values, *own], *numbers)  # type: ignore[attr-defined]  # of each kind
        return family


def _joined(families: Iterable[Metric]) -> Iterable[Metric]:
    """Return families with the samples of all that have the same name."""
    joined: dict[str, Metric] = {}
    for family in families:
        if (known := joined.setdefault(family.name, family)) is not family:
            known.samples += family.samples
    return joined.values()


class StateCollector(Collector):
    """Reads engines and groups at scrape time."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        """Return no metrics; otherwise the registry would call collect for their names, before there is an engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        server = self._models.server
        status = server.status()
        yield from _groups(status["groups"])
        yield from _cluster(status["cluster"])
        yield from _joined(family for model in status["models"] for family in _host_memory(model))
        yield from _joined(family for model in status["models"] for family in _load_state(model))
        drops = [([sink], n) for sink, n in server.log_drops().items()]
        text = "Log records that were not written, by sink."
        yield _Families().counters("log_records_dropped", text, ["sink"], drops)
        yield from _joined(family for model in self._models for family in _model(model))


def _model(ctx: ModelContext) -> Iterator[Metric]:
    out = _Families(model=ctx.model.name)
    for replica, engine in ctx.engine.replicas.items() if ctx.engine is not None else ():
        own = _Families(model=ctx.model.name, replica=replica) if replica else out
        yield from _engine(own, engine.statistics(), ctx.boundary_row_bytes)
    if isinstance(ctx.engine, ReplicatedEngine):
        yield from _routing(out, ctx.engine.router)
    if ctx.compressor is not None:
        yield from _compression(out, ctx.compressor.statistics)
    snapshots = ctx.snapshots()
    if snapshots is not None:
        yield from _snapshots(out, snapshots)


def _load_state(model: Mapping[str, Any]) -> Iterator[Metric]:
    now = model.get("residency")
    if now is None or model["replica"]:
        return
    out = _Families(model=model["name"])
    yield out.gauge("model_loaded", "1 while the model is loaded.", float(now["state"] in ("loaded", "leaving")))
    yield out.counter("model_loads", "Loads of the model.", now["loads"])
    yield out.gauge("model_load_seconds", "Time that the last load took.", now["load_s"])
    yield out.gauge("model_parked_bytes", "Weights in host memory of a model that is parked.", now["parked_bytes"])


def _groups(groups: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    out = _Families()
    states = [([g["name"], state.value], float(g["state"] == state.value)) for g in groups for state in State]
    yield out.gauges("group_state", "1 for the state a backend group is in.", ["group", "state"], states)
    restarts = [([g["name"], reason], n) for g in groups for reason, n in g["restart_reasons"].items()]
    yield out.counters("daemon_restarts", "Restarts of shard daemons by reason.", ["group", "reason"], restarts)
    spares = {g["name"]: [spare["rss_bytes"] for spare in g["spares"] if spare["warm"]] for g in groups}
    ready = [([name], len(rss_bytes)) for name, rss_bytes in spares.items()]
    yield out.gauges("spares", "Spare processes that are ready to take over.", ["group"], ready)
    spare_bytes = [([name], sum(rss_bytes)) for name, rss_bytes in spares.items()]
    yield out.gauges("spare_memory_bytes", "Resident host memory of spare processes.", ["group"], spare_bytes)
    memory: dict[tuple[str, str], int] = {}
    for device in (device for g in groups for device in g["devices"]):
        name = device["device"]
        for use in ("weights", "state"):  # summed over the shards of a device
            n_bytes = device["weight_bytes" if use == "weights" else "state_bytes"]
            memory[name, use] = memory.get((name, use), 0) + n_bytes
        memory[name, "free"], memory[name, "total"] = device["free_bytes"], device["total_bytes"]
    yield out.gauges("device_memory_bytes", "Memory of a device by use.", ["device", "use"], memory.items())
    resident = [([g["name"]], g["rss_bytes"]) for g in groups]
    yield out.gauges("daemon_memory_bytes", "Resident host memory of a group's daemon.", ["group"], resident)
    hosts = [([g["name"], g["backend"], g["host"]], 1) for g in groups]
    yield out.gauges("group_info", "Backend and host of a group; 1.", ["group", "backend", "host"], hosts)
    trips = [([g["name"]], g["path"]["round_trip_s"]) for g in groups if g["path"] is not None]
    yield out.gauges("path_round_trip_seconds", "Round trip to the daemon of a group over TCP.", ["group"], trips)


def _cluster(cluster: Mapping[str, Any] | None) -> Iterator[Metric]:
    refused: list[tuple[list[str], float]] = [] if cluster is None else [([], cluster["refused"])]
    text = "Connections to the port for daemons that were refused."
    yield _Families().counters("daemon_connections_refused", text, [], refused)


def _host_memory(model: Mapping[str, Any]) -> Iterator[Metric]:
    replica = {"replica": model["replica"]} if model.get("replica") else {}
    out, uses = _Families(model=model["name"], **replica), model["host_memory"]
    used = [([use["owner"]], use["bytes"]) for use in uses]
    yield out.gauges("host_memory_bytes", "Host memory of state and activations by owner.", ["owner"], used)
    limits = [([use["owner"]], use["limit_bytes"]) for use in uses if use["limit_bytes"] is not None]
    yield out.gauges("host_memory_limit_bytes", "The most that an owner takes.", ["owner"], limits)


def _engine(out: _Families, now: EngineStatistics, row_bytes: int) -> Iterator[Metric]:
    yield out.gauge("requests_running", "Requests that hold pages in the shards.", now.running)
    yield out.gauge("requests_queued", "Requests that wait in the queue.", now.queued)
    yield from _recovery(out, now.recovery)
    pages: list[tuple[Sequence[str], int]] = []
    for kv_group, use in now.pages.items():
        pages.append(([kv_group, "sequences"], use.used - use.evictable))
        pages.append(([kv_group, "cached"], use.evictable))
        pages.append(([kv_group, "free"], use.free))
    pages.append(([KvGroup.FULL, "host"], now.host_pages.used))
    pages.append(([KvGroup.FULL, "host_free"], now.host_pages.total - now.host_pages.used))
    yield out.gauges("pages", "Pages of a KV group by owner.", ["space", "where"], pages)
    yield out.gauge("pages_paged_out", "Pages of running sequences that KV Flash paged out.", now.pages_out)
    stages, boundaries = now.steps.stages, now.steps.boundaries
    times = [(str(index), stage.n_steps, stage.compute_s) for index, stage in enumerate(stages)]
    yield out.summaries("step_seconds", "Time a stage computed on a step.", "stage", times)
    waits = [(str(index), stage.n_steps, stage.wait_s) for index, stage in enumerate(stages)]
    yield out.summaries("stage_wait_seconds", "Time a stage waited for a step.", "stage", waits)
    hops = [(str(index), boundary.n_hops, boundary.seconds) for index, boundary in enumerate(boundaries)]
    text = "From the doorbell of the rows until the next stage took them."
    yield out.summaries("boundary_wait_seconds", text, "boundary", hops)
    boundary_bytes = [([str(index)], boundary.n_tokens * row_bytes) for index, boundary in enumerate(boundaries)]
    yield out.counters("boundary_bytes", "Hidden states handed from a stage to the next.", ["boundary"], boundary_bytes)
    yield out.counter("steps", "Steps that all stages have computed.", now.steps.n_steps)
    yield out.counter("step_tokens", "Tokens of these steps.", now.steps.n_tokens)
    yield out.counter("preemptions", "Running requests that were preempted.", now.preemptions)
    yield from _drafts(out, now.drafts)
    cached = [([tier], now.cache.tokens.get(tier, 0)) for tier in ("device", "host", "disk")]
    yield out.counters("cached_prompt_tokens", "Prompt tokens taken from prefix slots, by tier.", ["tier"], cached)
    yield out.gauge("prefix_slots", "Prompt prefixes kept in memory.", now.cache.n_slots)
    yield out.gauge("prefix_bytes", "Bytes of pages and states that only prefix slots hold.", now.cache.n_bytes)
    yield out.counter("prefix_lookups", "Prompts whose prefix was looked up.", now.cache.n_prompts)
    yield out.counter("prefix_hits", "Prompts that started with a cached prefix.", now.cache.n_hits)
    yield out.counter("prefix_evictions", "Slots evicted for others.", now.cache.n_evictions)


def _routing(out: _Families, router: Router) -> Iterator[Metric]:
    targets = router.targets()
    serving = [([name], float(name in targets)) for name in router.health]
    yield out.gauges("replica_serving", "1 for a replica that takes requests.", ["replica"], serving)
    routed = [([name], n) for name, n in router.n_routed.items()]
    yield out.counters(
        "routed_requests", "Requests that a replica took, those that moved included.", ["replica"], routed
    )
    moved = [([name], n) for name, n in router.n_moved.items()]
    text = "Requests that a replica went on with when another one was lost or drained."
    yield out.counters("moved_requests", text, ["replica"], moved)


def _drafts(out: _Families, now: DraftStatistics) -> Iterator[Metric]:
    yield out.counter("draft_steps", "Steps for which the draft stage made drafts.", now.n_steps)
    yield out.counter("draft_tokens", "Tokens drafted, or looked up and verified.", now.n_drafted)
    yield out.counter("draft_upkeep_seconds", "Time of the draft stage for all but drafts.", now.upkeep_s)
    for name, text, field in (
        ("verify_slices", "Decodes that verified drafts.", "n_verify"),
        ("verified_tokens", "Drafts that were verified.", "n_verified"),
        ("accepted_tokens", "Drafts that were accepted.", "n_accepted"),
        ("draft_seconds", "Time of the draft stage for drafts.", "draft_s"),
        ("verify_seconds", "Time of all other stages for slices with drafts.", "verify_s"),
    ):
        yield out.counter(name, text, getattr(now, field))
    for field in ("verified", "accepted"):
        by_position = [([str(position)], n) for position, n in enumerate(getattr(now, field))]
        text = f"Drafts that were {field}, by position in the slice."
        yield out.counters(f"{field}_tokens_per_position", text, ["position"], by_position)


def _recovery(out: _Families, now: RecoveryStatistics) -> Iterator[Metric]:
    yield out.gauge("requests_held", "Requests that wait for a daemon that was lost.", now.held)
    pauses = [(reason, pause.n, pause.seconds) for reason, pause in now.pauses.items()]
    text = "From the loss of a daemon, or its restart, until requests were computed again."
    yield out.summaries("pause_seconds", text, "reason", pauses)
    yield out.counter("recovered_sequences", "Requests that continued after the loss of a daemon.", now.n_continued)
    tokens = [(["rebuilt"], now.n_rebuilt), (["recomputed"], now.n_recomputed), (["kept"], now.n_kept)]
    text = "Tokens of requests that continued: computed again by lost stages alone, by all, or kept."
    yield out.counters("recovered_tokens", text, ["how"], tokens)


def _compression(out: _Families, now: CompressionStatistics) -> Iterator[Metric]:
    outcomes = [([outcome], n) for outcome, n in now.outcomes.items()]
    yield out.counters("pflash_prompts", "Prompts by PFlash's outcome.", ["outcome"], outcomes)
    tokens = [(["prompt"], now.n_tokens), (["kept"], now.n_kept)]
    yield out.counters("pflash_tokens", "Tokens of shortened prompts, and those kept.", ["which"], tokens)
    yield out.counter("pflash_scored_tokens", "Tokens that the scoring model read.", now.n_scored)
    yield out.counter("pflash_seconds", "Time spent shortening prompts, waiting included.", now.seconds)


def _snapshots(out: _Families, store: SnapshotStore) -> Iterator[Metric]:
    now, entries = store.statistics, store.entries
    n_bytes = [(["save"], now.saved_bytes), (["restore"], now.restored_bytes)]
    yield out.counters("snapshot_bytes", "Bytes of the snapshot files that were saved or restored.", ["op"], n_bytes)
    seconds = [(["save"], now.save_s), (["restore"], now.restore_s)]
    yield out.counters("snapshot_seconds", "Time of successful saves and restores of snapshots.", ["op"], seconds)
    reasons = (*FAILED_SAVES, *(fault.value for fault in Fault), NOT_RESTORED)  # all: a counter begins with 0
    failures = [([reason], now.failures.get(reason, 0)) for reason in reasons]
    text = "Slots that were not saved and files that were not used, by reason."
    yield out.counters("snapshot_failures", text, ["reason"], failures)
    yield out.gauge("snapshots", "Snapshot files that this model can use.", len(entries))
    yield out.gauge("snapshot_disk_bytes", "Bytes of snapshot files on disk.", sum(entry.n_bytes for entry in entries))


_FIRST_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_INTER_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class ModelMetrics:
    """The metrics that the requests of one model update."""

    prompt_tokens: Counter
    generated_tokens: Counter
    pooled_texts: Counter
    time_to_first_token: Histogram
    request: Histogram
    queue: Histogram
    inter_token: Histogram


class Metrics:
    """All metrics of one server.  Handlers update the public members; the rest is read at each scrape."""

    def __init__(self, models: ServedModels) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        self.requests = counter("requests", "HTTP requests by status; 499: the client disconnected.", ("code",))
        self._key_requests = counter("key_requests", "HTTP requests with a named API key, by its name.", ("key",))
        self._key_prompt_tokens = counter(
            "key_prompt_tokens", "Prompt tokens of requests with a named API key.", ("key",)
        )
        self._key_generated_tokens = counter(
            "key_generated_tokens", "Tokens generated for requests with a named API key.", ("key",)
        )

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, ("model",), buckets=buckets, registry=self._registry)

        prompt_tokens = counter("prompt_tokens", "Tokens of the prompts of answered requests.", ("model",))
        generated_tokens = counter("generated_tokens", "Tokens generated for answered requests.", ("model",))
        pooled_texts = counter("pooled_texts", "Texts that were pooled, for embeddings and rankings.", ("model",))
        first_token = histogram(
            "time_to_first_token_seconds", "From the head of a request to its first token.", _FIRST_TOKEN_S
        )
        request = histogram(
            "request_seconds", "From the head of a request that generates to the end of its answer.", _REQUEST_S
        )
        queue = histogram("queue_seconds", "From a request's arrival at the engine to its start.", _FIRST_TOKEN_S)
        inter_token = histogram("inter_token_seconds", "Between two tokens of a choice.", _INTER_TOKEN_S)

        def of_model(model: str) -> ModelMetrics:
            counters = prompt_tokens.labels(model), generated_tokens.labels(model), pooled_texts.labels(model)
            return ModelMetrics(*counters, *(one.labels(model) for one in (first_token, request, queue, inter_token)))

        self._models = {ctx.model.name: of_model(ctx.model.name) for ctx in models}
        for ctx in models:  # adapters count as their model
            self._models |= {card.name: self._models[ctx.model.name] for card in ctx.model.adapters}
        self.connections = Gauge(PREFIX + "connections", "Open connections of clients.", registry=self._registry)
        self.connections_dropped = counter(
            "connections_dropped", "Connections closed by the server, by deadline or cap.", ("reason",)
        )
        ProcessCollector(registry=self._registry)
        self._registry.register(StateCollector(models))

    def of_model(self, name: str) -> ModelMetrics:
        return self._models[name]

    def answered(self, request: RequestContext) -> None:
        n_prompt, n_generated, key_name = request.prompt_tokens, request.generated_tokens, request.caller.name
        self.requests.labels(str(request.status)).inc()
        if key_name:
            self._key_requests.labels(key_name).inc()
            self._key_prompt_tokens.labels(key_name).inc(n_prompt)
            self._key_generated_tokens.labels(key_name).inc(n_generated)
        if request.handles:
            model = self.of_model(request.model)
            model.prompt_tokens.inc(n_prompt)
            model.generated_tokens.inc(n_generated)
            model.request.observe(request.ended_s - request.started_s)

    def render(self, accept: str) -> tuple[bytes, str]:
        # prometheus_client's own choose_encoder raises on versions that are not numbers.
        if "application/openmetrics-text" in accept.lower():
            text: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return text, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4
