"""Asks groups' interpreters which devices they see, and checks them, without loading a model: for `plan` and `doctor`.

A probe is a real daemon that says hello, may run a check, and is shut down.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from lucevisor.config import Config
from lucevisor.deployment.group_settings import group_devices
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan, DeviceInfo
from lucevisor.protocol.messages import Check, Checked
from lucevisor.supervision.launcher import LocalLauncher
from lucevisor.supervision.probe import Probe, probe
from lucevisor.supervision.staging import stage_packages

HELLO_S = 60.0
CHECK_S = 300.0


async def inventory(config: Config) -> tuple[dict[str, list[DeviceInfo]], dict[str, str]]:
    """Return the devices of every group whose interpreter answers, and the problem of each other group."""
    results = await each_group(config, None)
    return {g: r.hello.devices for g, r in results.items() if r.hello is not None and not r.problem}, {
        g: r.problem for g, r in results.items() if r.problem
    }


async def each_group(config: Config, check: Callable[[str], tuple[Check, list[int]]] | None) -> dict[str, Probe]:
    """Probe all groups at once; ``check(group)`` returns the Check to run there and its descriptors."""
    directory = Path(tempfile.mkdtemp(prefix="lucevisor-probe-"))
    try:
        launcher = LocalLauncher(stage_packages(directory))
        names = list(config.groups)
        answers = await asyncio.gather(
            *(
                probe(
                    config.groups[name], launcher, group_devices(config, name),
                    check(name) if check is not None else None, HELLO_S, CHECK_S,
                )
                for name in names
            )
        )  # fmt: skip
        return dict(zip(names, answers, strict=True))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def check_arena() -> Arena:
    """Create a small arena whose first bytes a checked daemon must see."""
    arena = Arena.create(ArenaPlan(boundary=0, region_bytes=4096, n_regions=1))
    arena.region(0)[:8] = b"lucevisr"
    return arena


__all__ = ["Checked", "check_arena", "each_group", "inventory"]
