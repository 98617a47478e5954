"""``lucevisor plan``: the placement, from the model's header and the devices' free memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from lucevisor.cli.options import config_argument
from lucevisor.config import load
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors, ExitCode


@click.command()
@config_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-probe", is_flag=True, help="Do not query the groups' interpreters for devices.")
@click.option("-v", "--verbose", is_flag=True, help="Show what is reserved for drafts, too.")
@click.option("--measure", is_flag=True, help="Measure the devices' speed for an automatic split, and store it.")
def plan(config: Path, overrides: tuple[str, ...], as_json: bool, no_probe: bool, measure: bool, verbose: bool) -> int:
    """Show shards, bytes of weights and state per device, what does not fit and by how much.  Loads no weights, but a
    few layers with --measure."""
    from lucevisor.app import logs
    from lucevisor.app.model_files import open_model
    from lucevisor.deployment.preflight import check_before_start
    from lucevisor.deployment.probe import inventory
    from lucevisor.deployment.speeds import read, speeds_for, wanted
    from lucevisor.placement.devices import with_target_devices
    from lucevisor.placement.planner import plan as make_plan
    from lucevisor.placement.report import as_json as plan_json
    from lucevisor.placement.report import text
    from lucevisor.placement.result import Infeasible

    if measure and no_probe:
        raise click.UsageError("--measure queries the groups' interpreters, --no-probe forbids it: use one of them")
    loaded = load(config, overrides)
    logs.configure(loaded.log.format, loaded.log.level)
    model = open_model(loaded, lambda what: click.echo(f"fetching {what}", err=True))
    if not no_probe:
        check_before_start(loaded, model)
    found, problems = ({}, {}) if no_probe else asyncio.run(inventory(loaded))
    if problems:
        hint = "`lucevisor doctor` says more; --no-probe plans without asking, with unknown memory"
        raise ConfigErrors(
            [ConfigError(f"groups.{name}", NO_VALUE, why, hint, file=str(config)) for name, why in problems.items()]
        )
    loaded = with_target_devices(loaded, found)
    if measure:
        speeds = asyncio.run(speeds_for(model.spec, model.files, loaded, found, fresh=True))
    else:
        request = wanted(model.spec, loaded, found)
        speeds = None if request is None else read(request, model.spec)
    result = make_plan(model.spec, loaded, found, speeds, model.draft_spec, model.scorer)
    click.echo(json.dumps(plan_json(result), indent=2) if as_json else text(result, verbose=verbose))
    for notice in loaded.notices:
        click.echo(f"notice: {notice}", err=True)
    return ExitCode.FAILED if isinstance(result, Infeasible) else ExitCode.DONE
