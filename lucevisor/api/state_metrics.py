"""Prometheus metrics of engine, groups, devices, PFlash and snapshots, read at each scrape.

Counts nothing itself.  Invariant: labels have few values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from lucevisor.api.ports import Ports, SnapshotMetrics
from lucevisor.compression.compressor import CompressionStatistics
from lucevisor.engine.recovery import RecoveryStatistics
from lucevisor.engine.spec_decode.statistics import DraftStatistics
from lucevisor.engine.statistics import EngineStatistics
from lucevisor.model.values import Space
from lucevisor.supervision.states import State

PREFIX: Final = "lucevisor_"
_P: Final = PREFIX


class StateCollector(Collector):
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
            yield from _engine(self._ports.engine.statistics(), self._ports.boundary_row_bytes)
        if self._ports.compressor is not None:
            yield from _compression(self._ports.compressor.statistics)
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
        memory = GaugeMetricFamily(_P + "device_memory_bytes", "Memory of a device by use.", labels=["device", "use"])
        resident = GaugeMetricFamily(
            _P + "daemon_memory_bytes", "Resident host memory of a group's daemon.", labels=["group"]
        )
        for group in self._ports.groups():
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
        _P + "hop_seconds", "From the doorbell of the rows until the next stage took them.", labels=["boundary"]
    )
    hop_bytes = CounterMetricFamily(
        _P + "hop_bytes", "Hidden states handed from a stage to the next.", labels=["boundary"]
    )
    for index, boundary in enumerate(now.steps.boundaries):
        hop.add_metric([str(index)], boundary.n_hops, boundary.seconds)
        hop_bytes.add_metric([str(index)], boundary.n_tokens * row_bytes)
    yield hop
    yield hop_bytes
    yield CounterMetricFamily(_P + "steps", "Steps that all stages have computed.", value=now.steps.n_steps)
    yield CounterMetricFamily(_P + "step_tokens", "Tokens of these steps.", value=now.steps.n_tokens)
    yield CounterMetricFamily(
        _P + "preemptions", "Running requests that gave their pages up for others.", value=now.preemptions
    )
    yield CounterMetricFamily(
        _P + "preemptions_swapped", "Of them, those whose state went to host memory.", value=now.swapped
    )
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
        name: CounterMetricFamily(PREFIX + name, text, labels=["origin", *more])
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
        _P + "recovered_tokens",
        "Their tokens: computed again by lost stages alone (prefix slots included) or by all, or kept.",
        labels=["how"],
    )
    tokens.add_metric(["rebuilt"], now.n_rebuilt)
    tokens.add_metric(["recomputed"], now.n_tokens)
    tokens.add_metric(["kept"], now.n_kept)
    yield tokens


def _compression(now: CompressionStatistics) -> Iterator[Metric]:
    prompts = CounterMetricFamily(_P + "pflash_prompts", "Prompts by what PFlash made of them.", labels=["outcome"])
    for outcome, n in now.outcomes.items():
        prompts.add_metric([outcome], n)
    yield prompts
    tokens = CounterMetricFamily(_P + "pflash_tokens", "Tokens of shortened prompts, and those kept.", labels=["which"])
    tokens.add_metric(["prompt"], now.n_tokens)
    tokens.add_metric(["kept"], now.n_kept)
    yield tokens
    yield CounterMetricFamily(_P + "pflash_scored_tokens", "Tokens that the scoring model read.", value=now.n_scored)
    yield CounterMetricFamily(_P + "pflash_seconds", "Time that shortening took, with waiting.", value=now.seconds)


def _snapshots(now: SnapshotMetrics) -> Iterator[Metric]:
    n_bytes = CounterMetricFamily(
        _P + "snapshot_bytes", "Bytes of the snapshot files that were saved or restored.", labels=["op"]
    )
    seconds = CounterMetricFamily(
        _P + "snapshot_seconds",
        "Time that saves and restores of snapshots took, those that succeeded.",
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
        _P + "snapshot_failures",
        "Slots that were not saved and files that were not used, by reason.",
        labels=["reason"],
    )
    for reason, n in now.failures.items():
        failures.add_metric([reason], n)
    yield failures
    yield GaugeMetricFamily(_P + "snapshots", "Snapshot files that this model can use.", value=now.n_files)
    yield GaugeMetricFamily(_P + "snapshot_disk_bytes", "What those files take on disk.", value=now.file_bytes)
