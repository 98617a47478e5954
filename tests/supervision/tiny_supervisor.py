"""A supervisor process of its own, to be killed: starts one group for each argument after the run directory, prints
their pids, waits.

The argument is the daemon's behaviour; a group that will not become ready is printed as soon as it loads.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from lucevisor.config import GroupConfig
from lucevisor.supervision.events import State
from lucevisor.supervision.group import GroupSupervisor
from lucevisor.supervision.launcher import Launcher
from tests.supervision.real_groups import FAST, Owner, stage_tiny


async def main(run_dir: str, *behaviours: str) -> None:
    staging = stage_tiny(Path(run_dir))
    groups = []
    for i, how in enumerate(behaviours):
        config = GroupConfig(name=f"g{i}", backend="cpu", env={"TINY": how})
        groups.append(GroupSupervisor(config, 1, Launcher(staging), [Owner().callbacks()], limits=FAST))
    for group, how in zip(groups, behaviours, strict=True):
        await group.start()
        slow = "sleep at load" in how
        await group.wait(State.LOADING if slow else State.READY, timeout_s=100)
    await asyncio.sleep(0.3)  # a moment inside the load
    print(json.dumps([group.pid for group in groups]), flush=True)
    await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))
