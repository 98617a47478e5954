"""``lucevisor init``: prints a configuration for a model on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from lucevisor.cli.options import python_option
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.errors import ConfigError, ExitCode


@click.command()
@click.argument("model")
@python_option
def init(model: str, pythons: tuple[str, ...]) -> int:
    """Print a configuration file that serves MODEL, a GGUF file or hf:OWNER/REPO[:QUANT], on the devices of this
    machine."""
    from lucevisor.app.discovery import choose_groups, write_config
    from lucevisor.app.model_source import find_hub_file

    if not model.startswith(HUB_PREFIX) and not Path(model).is_file():
        raise ConfigError("MODEL", model, "there is no such file", "name a GGUF file, or hf:OWNER/REPO[:QUANT]")
    model = find_hub_file(model)
    groups = choose_groups(model, pythons)
    for group in groups:
        click.echo(str(group), err=True)
    click.echo(write_config(model, groups), nl=False)
    return ExitCode.DONE
