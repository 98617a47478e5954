"""Checks before any daemon is started: interpreters, their torch, cores, and settings that make a plan impossible.

Loads nothing and imports no torch: interpreters list their packages without importing them.  The hello of a daemon
checks versions, builds and devices later.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec

from lucevisor.config import Config, GroupConfig, renamed_errors
from lucevisor.deployment.group_settings import usable_cores
from lucevisor.deployment.installed import installed
from lucevisor.deployment.served_model import ServedModel, model_configs
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors
from lucevisor.placement.devices import with_target_devices
from lucevisor.placement.planner import plan
from lucevisor.protocol.handshake import MIN_PACKAGES, MIN_PYTHON, MIN_TORCH, older
from lucevisor.supervision.child import SpawnError, environment, find_python

_PACKAGES: Final = ("torch", *sorted(MIN_PACKAGES))
_BUILDS: Final = {"cuda": ("cuda", "a CUDA"), "hip": ("hip", "a ROCm")}
"""By backend, the constant of torch/version.py that it needs, and the build's name; cpu groups run with any build."""
_ANOTHER: Final = f"name an interpreter of Python {MIN_PYTHON} or later that has {', '.join(_PACKAGES)}"
_ASK_S: Final = 30.0
"""Seconds to wait for an interpreter.

A slower one, on a hanging disk for example, is left to the daemon's deadline.
"""


class Installed(msgspec.Struct, frozen=True):
    """Contents of an interpreter's environment; see installed.py."""

    python: str
    missing: list[str]
    torch: dict[str, str | None]


def check_before_start(config: Config, models: Sequence[ServedModel]) -> None:
    """Raise ConfigErrors naming every key whose value cannot work on this machine, with these models."""
    errors = [*_check_cores(config), *_check_interpreters(config)]
    for own, model in zip(reversed(model_configs(config, models)), reversed(models), strict=True):
        errors = [*_check_plan(own, model), *errors]
    if errors:
        raise ConfigErrors(errors)


def _check_plan(config: Config, model: ServedModel) -> Iterator[ConfigError]:
    """Yield settings that the plan refuses for any free memory, which is not known yet."""
    try:
        plan(model.spec, with_target_devices(config, {}), {}, None, model.draft_spec, model.scorer)
    except ConfigError as error:
        yield from renamed_errors(error, config)


def _check_cores(config: Config) -> Iterator[ConfigError]:
    usable = usable_cores()
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
        answers = pool.map(lambda item: inspect_interpreter(item[0][0], config.groups[item[1][0]]), asked.items())
        for ((python, _), names), found in zip(asked.items(), answers, strict=True):
            for name in names:
                problem = None if found is None else _problem(python, config.groups[name], found)
                if problem is not None:
                    value = config.groups[name].python or NO_VALUE
                    yield ConfigError(f"groups.{name}.python", value, *problem, file=str(config.file))


def _problem(python: str, group: GroupConfig, found: Installed | str) -> tuple[str, str] | None:
    """Return why an interpreter cannot run a group, and a hint; None if it can."""
    if isinstance(found, str):
        return f"{python} does not work as a Python interpreter: {found}", _ANOTHER
    if older(found.python, MIN_PYTHON):
        return f"{python} is Python {found.python}, older than {MIN_PYTHON}", _ANOTHER
    if found.missing:
        names = " ".join(found.missing)
        why = f"{python} has no {', '.join(found.missing)}"
        return why, f"{python} -m pip install {names}, or name an interpreter that has them"
    version = found.torch.get("__version__")
    if version is None:
        return None  # not a release of torch: checked at the hello
    if older(version, MIN_TORCH):
        return f"torch {version} of {python} is older than {MIN_TORCH}", f"{python} -m pip install --upgrade torch"
    needed, build = _BUILDS.get(group.backend, ("", ""))
    if not needed or found.torch.get(needed):
        return None
    why = f"torch {version} of {python} is not built for {group.backend}"
    url = "URL: see https://pytorch.org/get-started/locally"
    return why, f"{python} -m pip install torch --index-url URL ({url}), or name an interpreter with {build} build"


def inspect_interpreter(python: str, group: GroupConfig) -> Installed | str | None:
    """Return an interpreter's packages in the group's environment, or why it does not run; None at the timeout."""
    if python == sys.executable and not group.env:
        return msgspec.convert(installed(list(_PACKAGES)), Installed)
    env: Mapping[str, str] = environment(group, 0, Path(os.devnull), os.environ)
    script = str(Path(__file__).with_name("installed.py"))
    try:
        done = subprocess.run(
            [python, script, *_PACKAGES],
            env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return error.strerror or str(error)
    _, _, result = done.stdout.rpartition(b"installed:")
    with contextlib.suppress(msgspec.DecodeError):
        return msgspec.json.decode(result, type=Installed)
    stderr_lines = done.stderr.decode(errors="replace").strip().splitlines()
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"code {done.returncode}"
    return f"it ended with {how}: {stderr_lines[-1] if stderr_lines else 'nothing on standard error'}"
