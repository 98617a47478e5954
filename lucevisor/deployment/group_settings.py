"""What the configuration says about groups: which hold layers, their devices and threads.

Pure, but for the cores of this process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

from lucevisor.config import Config, DeviceRef
from lucevisor.config.draft import DRAFTER_CHOICES
from lucevisor.config.sections import GroupConfig
from lucevisor.deployment.affinity import usable_cores

SPIN_S: Final = 0.02
"""How long a daemon polls for the rows of a step where a core is free: longer than most stages take for a decode."""


def group_devices(config: Config, name: str) -> list[int]:
    """Indices of the group's devices that the placement, the drafter or the scoring model names."""
    drafter = config.draft.device if config.draft.kind in DRAFTER_CHOICES else None
    scorer = config.pflash.device if config.scores else None
    targets = config.placement.devices or [DeviceRef(name, 0)]  # all devices that it has: the first at least
    devices = [*targets, *(each for each in (drafter, scorer) if each is not None)]
    return list(dict.fromkeys(device.index for device in devices if device.group == name))


def target_groups(config: Config) -> list[str]:
    """Groups that hold layers of the model, in layer order: those that serving needs."""
    return list(dict.fromkeys(device.group for device in config.placement.devices)) or list(config.groups)


def group_threads(config: Config, name: str) -> int:
    """Compute threads of a cpu group; 0 elsewhere, because the host side of a GPU group has one thread of work."""
    if config.groups[name].backend != "cpu":
        return 0
    return config.threads_of(name, len(usable_cores()))


def spin_s(config: Config) -> float:
    """How long a daemon polls for rows: not at all unless every compute thread and the supervisor have a core."""
    n_cores = len(usable_cores())
    n_busy = 1 + sum(max(1, group_threads(config, name)) for name in config.groups)
    return SPIN_S if n_busy <= n_cores else 0.0


class CorePlan(NamedTuple):
    """Cores of this process, and of its daemons by group; empty: all."""

    supervisor: tuple[int, ...]
    daemons: dict[str, tuple[int, ...]]


def core_plan(config: Config) -> CorePlan:
    """Return which cores are whose where all compute threads have one, and the supervisor has none.

    It keeps off those of the output stage, for which everything waits: woken there, it takes 0.3 ms from a step.  The
    other daemons run where they find a core: nobody waits for them while the output stage is at work.  Beside a group
    that `groups.NAME.cores` pins, or a GPU, nothing is pinned.
    """
    targets = [device.group for device in config.placement.devices] or list(config.groups)
    usable, last = usable_cores(), targets[-1]
    n_own, n_busy = group_threads(config, last), sum(group_threads(config, name) for name in config.groups)
    alike = all(group.backend == "cpu" and not group.cores for group in config.groups.values())
    if not alike or len(target_groups(config)) < 2 or spin_s(config) or n_busy > len(usable):
        return CorePlan((), {})
    rest, own = tuple(usable[:-n_own]), tuple(usable[-n_own:])
    return CorePlan(rest, {name: own if name == last else tuple(usable) for name in config.groups})


def with_cores(config: Config) -> dict[str, GroupConfig]:
    """Return the groups with the cores that their daemons run on."""
    cores = core_plan(config).daemons
    return {name: replace(group, cores=cores.get(name, group.cores)) for name, group in config.groups.items()}
