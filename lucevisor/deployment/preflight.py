"""What can be refused before any daemon is started: interpreters, cores, the layer split.

Loads nothing and imports no torch: an interpreter is asked whether it finds the packages, not to import them.
Invariant: what passes here may still fail at the hello, which knows versions, builds and devices.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from lucevisor.config import Config, GroupConfig
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.planner import configured_ranges
from lucevisor.protocol.handshake import MIN_PACKAGES
from lucevisor.supervision.child import SpawnError, find_python
from lucevisor.supervision.environment import environment

_PACKAGES: Final = ("torch", *sorted(MIN_PACKAGES))
_SCRIPT: Final = (
    "import importlib.util as u, sys; print('missing:', *(n for n in sys.argv[1:] if u.find_spec(n) is None))"
)
_ASK_S: Final = 30.0
"""An interpreter that is silent for so long, on a disk that hangs for example, is left to the daemon's own deadline."""


def check_before_start(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigErrors naming every key whose value cannot work on this machine, with this model."""
    errors = [*_check_split(config, spec), *_check_cores(config), *_check_interpreters(config)]
    if errors:
        raise ConfigErrors(errors)


def _check_split(config: Config, spec: ModelSpec) -> Iterator[ConfigError]:
    try:
        configured_ranges(config, spec.n_layers)
    except ConfigError as error:
        yield error


def _check_cores(config: Config) -> Iterator[ConfigError]:
    usable = sorted(os.sched_getaffinity(0))
    for name, group in config.groups.items():
        if wrong := sorted(set(group.cores) - set(usable)):
            near = [min(usable, key=lambda core, of=wanted: abs(core - of)) for wanted in wrong]  # type: ignore[misc]
            why = f"core {wrong[0]} does not exist here or may not be used: usable are {_ranges(usable)}"
            hint = f"nearest: {sorted(set(group.cores) - set(wrong) | set(near))}"
            yield ConfigError(f"groups.{name}.cores", list(group.cores), why, hint, file=str(config.file))


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as `0-3, 6`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _check_interpreters(config: Config) -> Iterator[ConfigError]:
    asked: dict[tuple[str, tuple[tuple[str, str], ...]], list[str]] = {}
    for name, group in config.groups.items():
        try:
            python = find_python(group.python, {**os.environ, **group.environment()}.get("PATH"))
        except SpawnError as error:
            why = error.reason.removeprefix(f"python = {group.python!r} ")
            yield ConfigError(f"groups.{name}.python", group.python, why, file=str(config.file))
            continue
        asked.setdefault((python, tuple(sorted(group.env.items()))), []).append(name)
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        answers = pool.map(lambda item: missing_packages(item[0][0], config.groups[item[1][0]]), asked.items())
        for (key, names), missing in zip(asked.items(), answers, strict=True):
            if not missing:
                continue
            for name in names:
                value = config.groups[name].python or NO_VALUE
                why = f"{key[0]} has no {', '.join(missing)}"
                hint = f"{key[0]} -m pip install {' '.join(missing)}, or name an interpreter that has them"
                yield ConfigError(f"groups.{name}.python", value, why, hint, file=str(config.file))


def missing_packages(python: str, group: GroupConfig) -> list[str]:
    """Return which of the daemon's packages an interpreter does not find in the group's environment."""
    if python == sys.executable and not group.env:
        return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    env: Mapping[str, str] = environment(group, 0, Path(os.devnull), os.environ)
    try:
        done = subprocess.run(
            [python, "-c", _SCRIPT, *_PACKAGES], env=env, capture_output=True, text=True, timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    first, _, found = done.stdout.partition("missing:")
    return found.split() if not first and done.returncode == 0 else []
