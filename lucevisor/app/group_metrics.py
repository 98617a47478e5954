"""State, restarts and memory of the groups, for /metrics."""

from __future__ import annotations

from typing import Final

from lucevisor.api.app_context import DeviceMetrics, GroupMetrics
from lucevisor.app.status import devices
from lucevisor.deployment.service import Service
from lucevisor.supervision.group import GroupSupervisor

_RESTART_REASONS: Final = ("failure", "lack", "operator")
"""All there are: a counter that first appears with 1 hides that restart from Prometheus' increase()."""


def group_metrics(service: Service) -> list[GroupMetrics]:
    """Return the figures of all groups as of now."""
    return [
        GroupMetrics(
            name=name,
            state=group.state.name.lower(),
            restarts={reason: service.restart_reasons[name][reason] for reason in _RESTART_REASONS},
            spare_bytes=[spare.rss_bytes for spare in group.spares if spare.warm],
            rss_bytes=group.heartbeat.rss_bytes if group.heartbeat is not None else 0,
            devices=_device_metrics(group),
        )
        for name, group in service.groups.items()
    ]


def _device_metrics(group: GroupSupervisor) -> list[DeviceMetrics]:
    """Return one record a device; a device with several shards has the sum of their bytes."""
    found: dict[str, DeviceMetrics] = {}
    for shard in devices(group):
        name, before = shard["device"], found.get(shard["device"])
        found[name] = DeviceMetrics(
            name=name,
            weights=shard["weight_bytes"] + (before.weights if before is not None else 0),
            state=shard["state_bytes"] + (before.state if before is not None else 0),
            free=shard["free_bytes"],
            total=shard["total_bytes"],
        )
    return list(found.values())
