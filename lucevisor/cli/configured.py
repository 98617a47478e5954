"""A model in place of a configuration file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from lucevisor.app.rundir import check_name
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.errors import ConfigError


def configured(argument: Path, pythons: Sequence[str] = (), name: str | None = None) -> tuple[Path, str | None]:
    """Return the configuration file that CONFIG means, or one made for a model in its place and all devices of this
    machine, and the name of its supervisor."""
    if not _is_model(argument):
        if pythons:
            raise click.UsageError("--python is for a model in place of CONFIG; groups name their interpreters in it")
        return argument, name
    model = str(argument)
    # `start --daemon` would import the first for nothing, and the second imports most of the supervisor.
    from lucevisor.app.discovery import choose_groups, model_name, save_config

    if not model.startswith(HUB_PREFIX) and not Path(model).is_file():
        raise ConfigError("CONFIG", model, "there is no such file", "name a configuration file, or a model's GGUF file")
    name = check_name(name if name is not None else model_name(model))
    source = model
    if model.startswith(HUB_PREFIX):
        from lucevisor.app.model_files import find_hub_file

        source = find_hub_file(model)
    groups = choose_groups(source, pythons)
    path = save_config(source, groups, name)
    click.echo(f"{source} on all devices that this machine has, named {name}", err=True)
    for group in groups:
        click.echo(f"  {group}", err=True)
    click.echo(f"  as {path} says; to change it: lucevisor init {model} > box.toml", err=True)
    return path, name


def _is_model(argument: Path) -> bool:
    if str(argument).startswith(HUB_PREFIX) or argument.suffix.lower() == ".gguf":
        return True
    try:
        with argument.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False
