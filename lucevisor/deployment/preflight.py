"""Checks before any daemon is started: interpreters, cores, and settings that make a plan impossible."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from lucevisor.config import Config, renamed_errors
from lucevisor.deployment.group_settings import usable_cores
from lucevisor.deployment.served_model import ServedModel, pipelines
from lucevisor.errors import ConfigError, ConfigErrors
from lucevisor.placement.devices import with_target_devices
from lucevisor.placement.planner import plan
from lucevisor.supervision.child import SpawnError, find_python


def check_before_start(config: Config, models: Sequence[ServedModel]) -> None:
    """Raise ConfigErrors naming every key whose value cannot work on this machine, with these models."""
    errors = [*_check_cores(config), *_check_interpreters(config)]
    for own, model in reversed(pipelines(config, models)):
        errors = [*_check_plan(own, model), *errors]
    if errors:
        raise ConfigErrors(errors)


def _check_plan(config: Config, model: ServedModel) -> Iterator[ConfigError]:
    try:
        plan(
            model.spec, with_target_devices(config, {}), {}, None, model.draft_spec, model.scorer, encoder=model.encoder
        )
    except ConfigError as error:
        yield from renamed_errors(error, config)


def _check_cores(config: Config) -> Iterator[ConfigError]:
    usable = usable_cores()
    for name, group in config.groups.items():
        if group.host:
            continue  # its daemon checks this on its host
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
    for name, group in config.groups.items():
        if group.host:
            continue
        try:
            find_python(group.python, {**os.environ, **group.environment()}.get("PATH"))
        except SpawnError as error:
            why = error.reason.removeprefix(f"python = {group.python!r} ")
            yield ConfigError(f"groups.{name}.python", group.python, why, file=str(config.file))
