"""What the configuration says about one group: devices and threads.  Pure, but for the cores of this process."""

from __future__ import annotations

import os

from lucevisor.config import Config


def group_devices(config: Config, name: str) -> list[int]:
    """Indices of the group's devices that the placement names."""
    return [device.index for device in config.placement.devices if device.group == name]


def group_threads(config: Config, name: str) -> int:
    """Compute threads of a cpu group; 0 elsewhere, because the host side of a GPU group has one thread of work."""
    if config.groups[name].backend != "cpu":
        return 0
    return config.threads_of(name, len(os.sched_getaffinity(0)))
