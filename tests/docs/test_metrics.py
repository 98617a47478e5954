"""docs/metrics.md lists every metric with its type and labels; the Grafana dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from lucevisor.api.contexts import ServedModels
from lucevisor.api.metrics import Metrics, _Families, _routing
from lucevisor.compression.compressor import CompressionSettings, Compressor
from lucevisor.compression.windows import WindowScorer
from lucevisor.config import DeviceRef
from lucevisor.deployment.extra_models import ScorerClient
from lucevisor.engine.router import Router
from lucevisor.model.values import Backend
from lucevisor.placement.result import PlacedScorer
from lucevisor.snapshots.policy import StoreStatistics
from tests.api.scripted_model import Rig, group_status

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
DASHBOARD = ROOT / "etc" / "grafana" / "lucevisor.json"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|(.*?)\| .+ \|$", re.MULTILINE)
SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "summary": ("_count", "_sum"),
    "histogram": ("_bucket", "_count", "_sum"),
}


@dataclass(frozen=True)
class Family:
    """A metric: its name as asked for, without the suffixes of summaries and histograms."""

    name: str
    kind: str
    labels: tuple[str, ...]


@pytest.fixture
async def registry() -> CollectorRegistry:
    """The registry of a server that has all there may be: an engine, groups with devices, snapshots, PFlash."""
    rig = Rig()
    store = SimpleNamespace(statistics=StoreStatistics(), entries=[])
    rig.context.snapshots = lambda: store  # type: ignore[assignment,return-value]
    device = {"device": "left:0", "weight_bytes": 1, "state_bytes": 2, "free_bytes": 3, "total_bytes": 6}
    memory = [{"owner": "prefixes", "limit_bytes": 2, "key": "cache.host", "bytes": 1}]
    residency = {"state": "loaded", "loads": 1, "load_s": 2.5, "parked_bytes": 0}
    rig.context.server.status = lambda: {
        "groups": [group_status("left", "ready", device, exited=1)],
        "cluster": {"listen": "10.0.0.1:7000", "refused": 0},
        "models": [{"name": rig.context.model.name, "host_memory": memory, "replica": "", "residency": residency}],
    }  # fmt: skip
    stage = ScorerClient(PlacedScorer(DeviceRef("left", 0), Backend.CPU, "scorer", 1024, 512))
    settings = CompressionSettings(threshold=1, keep_ratio=0.1)
    rig.context.compressor = Compressor(settings, WindowScorer(rig.context.tokenizer, stage))
    return Metrics(ServedModels([rig.context]))._registry


def families(registry: CollectorRegistry) -> set[Family]:
    counted = {family.name: family for family in registry.collect()}
    labels: dict[str, tuple[str, ...]] = {}
    for collector in registry._collector_to_names:
        if hasattr(collector, "_labelnames"):
            labels[collector._name] = tuple(collector._labelnames)
    found = set()
    for name, family in counted.items():
        if name.startswith("process_"):
            continue  # of prometheus-client
        names = labels.get(name) or tuple(getattr(family, "_labelnames", ()))
        found.add(Family(f"{name}_total" if family.type == "counter" else name, family.type, names))
    return found


def documented() -> set[Family]:
    return {
        Family(name, kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(PAGE.read_text())
    }


class Routing:
    """What a model with replicas has besides."""

    def collect(self) -> Iterator[Metric]:
        return _routing(_Families(model="demo"), Router("ab"))


async def test_every_metric_is_documented_and_no_other(registry: CollectorRegistry) -> None:
    routing = CollectorRegistry()
    routing.register(Routing())  # type: ignore[arg-type]
    assert documented() == families(registry) | families(routing)


def queries(panels: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for panel in panels:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]
        yield from queries(panel.get("panels", []))


def test_every_query_of_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    samples = {f.name + suffix: f for f in documented() for suffix in SUFFIXES[f.kind]}
    found = list(queries(dashboard["panels"]))
    assert len(found) >= 20
    for title, query in found:
        names = re.findall(r"\b(?:lucevisor|process)_\w+", query)
        assert names, title
        assert set(names) <= {*samples, "process_resident_memory_bytes"}, title
        labels = {name for listed in re.findall(r"\bby \(([^)]*)\)", query) for name in listed.split(", ")}
        labels |= {name for inside in re.findall(r"\{([^}]*)\}", query) for name in re.findall(r"(\w+)\s*[=!]", inside)}
        known = {label for name in names if name in samples for label in samples[name].labels} | {"le", "instance"}
        assert labels <= known, title
        assert query.count("(") == query.count(")"), title
