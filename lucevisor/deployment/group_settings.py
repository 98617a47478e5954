"""Groups of a configuration: those with layers, their devices and threads."""

from __future__ import annotations

import os
from dataclasses import replace

from lucevisor.config import Config, DeviceRef


def usable_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def group_devices(config: Config, name: str) -> list[int]:
    """Indices of the group's devices that a model's placement, drafter, scoring model or vision encoder names."""
    devices: list[DeviceRef | None] = []
    for model in config.each_model:
        devices += model.placement.devices or [DeviceRef(group, 0) for group in model.groups]  # the first at least
        devices.append(model.draft.device if model.draft.kind not in ("off", "lookup") else None)
        devices.append(model.pflash.device if model.scores else None)
        devices.append(model.vision.device if model.vision.path else None)
    return list(dict.fromkeys(device.index for device in devices if device is not None and device.group == name))


def target_groups(config: Config) -> list[str]:
    """Groups that hold layers of the model, in layer order: those that serving needs."""
    return list(dict.fromkeys(device.group for device in config.placement.devices)) or list(config.groups)


def group_threads(config: Config, name: str) -> int:
    """Compute threads of a cpu group; 0 elsewhere, where the host has one thread of work."""
    if config.groups[name].backend != "cpu":
        return 0
    return config.threads_of(name, len(usable_cores()))


def spin_s(config: Config) -> float:
    """Return how long daemons poll for rows: 0 unless every compute thread and the supervisor have a core here."""
    n_cores = len(usable_cores())
    groups = {name: group for other in config.neighbours for name, group in other.config.groups.items()}
    everywhere = replace(config, groups={**groups, **config.groups})  # other replicas are busy, too
    here = [name for name, group in everywhere.groups.items() if not group.host]
    n_busy = 1 + sum(max(1, group_threads(everywhere, name)) for name in here)
    return 0.02 if n_busy <= n_cores else 0.0  # most stages decode in less
