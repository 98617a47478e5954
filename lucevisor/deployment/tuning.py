"""Lets each group measure which kernels are the fastest for the model, for ``lucevisor bench --tune``.

The daemons keep what they find and read it at each load (``daemons/ops/handovers.py``); this module only asks them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from lucevisor.config import Config
from lucevisor.deployment.group_settings import group_devices, group_threads, target_groups
from lucevisor.errors import LucevisorError
from lucevisor.model.values import Dtype
from lucevisor.placement.planner import model_options
from lucevisor.protocol.messages import Check, CheckLine, Tune
from lucevisor.supervision.launcher import LocalLauncher
from lucevisor.supervision.probe import probe
from lucevisor.supervision.staging import stage_packages

HELLO_S = 60.0
TUNE_S = 600.0


async def tune(files: Sequence[Path], config: Config) -> list[CheckLine]:
    """Tune the groups that hold layers, one after the other so that they do not disturb each other.

    Raises LucevisorError when a group does not answer, or something could not be measured.
    """
    lines: list[CheckLine] = []
    with tempfile.TemporaryDirectory(prefix="lucevisor-tune-") as directory:
        launcher = LocalLauncher(stage_packages(Path(directory)))
        for group in target_groups(config):
            on_cpu = config.groups[group].backend == "cpu"
            indices = [0] if on_cpu else group_devices(config, group)  # all indices of a cpu group are one device
            order = Tune(indices, group_threads(config, group), model_options(config))
            check = Check([str(f) for f in files], 0, Dtype.BFLOAT16, tune=order)
            answer = await probe(config.groups[group], launcher, indices, (check, []), HELLO_S, TUNE_S)
            if answer.checked is None:
                raise LucevisorError(f"groups.{group} was not tuned: {answer.problem}")
            failed = [line for line in answer.checked.lines if not line.ok]
            if failed:
                raise LucevisorError(f"groups.{group} was not tuned: {failed[0].subject}: {failed[0].detail}")
            lines += [CheckLine(f"{group} {line.subject}", True, line.detail) for line in answer.checked.lines]
    return lines
