"""Devices and checks of the groups' interpreters without loading a model, for `plan` and `doctor`.

A probe is a daemon that sends hello, may run a check, and is shut down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from lucevisor.config import Config
from lucevisor.deployment.group_settings import group_devices, group_threads, target_groups
from lucevisor.errors import LucevisorError
from lucevisor.model.values import Dtype
from lucevisor.placement.planner import model_options
from lucevisor.protocol.arena import Arena
from lucevisor.protocol.loading import ArenaPlan, DeviceInfo
from lucevisor.protocol.messages import Check, CheckLine, Tune
from lucevisor.supervision.probe import Probe, launching, probe

CHECK_S = 300.0
TUNE_S = 600.0


async def inventory(config: Config) -> tuple[dict[str, list[DeviceInfo]], dict[str, str]]:
    """Return the devices of every group whose interpreter answers, and the problem of each other group."""
    results = await probe_groups(config, None)
    return {g: r.hello.devices for g, r in results.items() if r.hello is not None and not r.problem}, {
        g: r.problem for g, r in results.items() if r.problem
    }


async def probe_groups(config: Config, check: Callable[[str], tuple[Check, list[int]]] | None) -> dict[str, Probe]:
    """Probe all groups at once; ``check(group)`` returns the Check to run there and its descriptors."""
    with launching() as launcher:

        async def ask(name: str) -> Probe:
            request = check(name) if check is not None else None
            return await probe(config.groups[name], launcher, group_devices(config, name), request, CHECK_S)

        return dict(zip(config.groups, await asyncio.gather(*map(ask, config.groups)), strict=True))


def check_arena() -> Arena:
    """Create a small arena whose first bytes a checked daemon must see."""
    arena = Arena.create(ArenaPlan(boundary=0, region_bytes=4096, n_regions=1))
    arena.region(0)[:8] = b"lucevisr"
    return arena


async def tune(files: Sequence[Path], config: Config) -> list[CheckLine]:
    """Tune the groups that hold layers, one after the other so that they do not disturb each other.

    Raises LucevisorError when a group does not answer, or something could not be measured.
    """
    lines: list[CheckLine] = []
    with launching() as launcher:
        for group in target_groups(config):
            on_cpu = config.groups[group].backend == "cpu"
            indices = [0] if on_cpu else group_devices(config, group)  # all indices of a cpu group are one device
            request = Tune(indices, group_threads(config, group), model_options(config))
            check = Check([str(f) for f in files], 0, Dtype.BFLOAT16, tune=request)
            answer = await probe(config.groups[group], launcher, indices, (check, []), TUNE_S)
            if answer.checked is None:
                raise LucevisorError(f"groups.{group} was not tuned: {answer.problem}")
            failed = [line for line in answer.checked.lines if not line.ok]
            if failed:
                raise LucevisorError(f"groups.{group} was not tuned: {failed[0].subject}: {failed[0].detail}")
            lines += [CheckLine(f"{group} {line.subject}", True, line.detail) for line in answer.checked.lines]
    return lines
