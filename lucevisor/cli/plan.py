"""``lucevisor plan``, ``doctor`` and ``init``: checks and plans before a start."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lucevisor.cli.configured import configured
from lucevisor.cli.options import config_argument, python_option
from lucevisor.config import Config, load
from lucevisor.config.formats import HUB_PREFIX
from lucevisor.errors import NO_VALUE, ConfigError, ConfigErrors, ExitCode
from lucevisor.protocol.messages import Check
from lucevisor.source_tree import locate
from lucevisor.supervision.probe import Probe

if TYPE_CHECKING:
    from lucevisor.deployment.served_model import ServedModel
    from lucevisor.placement.devices import Inventory
    from lucevisor.placement.result import Infeasible, Placement


@click.command()
@config_argument
@python_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--no-probe", is_flag=True, help="Do not query the groups' interpreters for devices.")
@click.option("--measure", is_flag=True, help="Measure devices and links for an automatic split, and store that.")
def plan(
    config: Path, overrides: tuple[str, ...], pythons: tuple[str, ...], as_json: bool, no_probe: bool, measure: bool
) -> int:
    """Show shards, bytes of weights and state per device, what does not fit and by how much.  Loads no weights, but a
    few layers with --measure."""
    from lucevisor.app import logs
    from lucevisor.app.model_files import open_models, without_unusable
    from lucevisor.deployment.measurements import inventory
    from lucevisor.deployment.preflight import check_before_start
    from lucevisor.deployment.served_model import pipelines
    from lucevisor.placement.report import plan_json, plan_text
    from lucevisor.placement.result import Infeasible

    if measure and no_probe:
        raise click.UsageError("--measure queries the groups' interpreters, --no-probe forbids it: use one of them")
    config, _ = configured(config, pythons)
    loaded = load(config, overrides)
    logs.configure(loaded.log.format, loaded.log.level)
    loaded = without_unusable(loaded)
    models = open_models(loaded, lambda what: click.echo(f"fetching {what}", err=True))
    if not no_probe:
        check_before_start(loaded, models)
    found, problems = ({}, {}) if no_probe else asyncio.run(inventory(loaded))
    if problems:
        hint = "`lucevisor doctor` says more; --no-probe plans without asking, with unknown memory"
        raise ConfigErrors(
            [ConfigError(f"groups.{name}", NO_VALUE, why, hint, file=str(config)) for name, why in problems.items()]
        )
    results = {
        own.replica or model.name: _plan(own, model, found, measure=measure) for own, model in pipelines(loaded, models)
    }
    kind = "replicas" if loaded.replicas else "models" if loaded.models else ""
    if as_json:
        shown = {name: plan_json(result) for name, result in results.items()}
        click.echo(json.dumps({kind: shown} if kind else shown[models[0].name], indent=2))
    else:
        texts = {f"replica {name}" if loaded.replicas else name: plan_text(result) for name, result in results.items()}
        click.echo("\n\n".join(f"{name}\n{text}" if kind else text for name, text in texts.items()))
    for notice in loaded.notices:
        click.echo(f"notice: {notice}", err=True)
    fits = not any(isinstance(result, Infeasible) for result in results.values())
    return ExitCode.DONE if fits else ExitCode.FAILED


def _plan(config: Config, model: ServedModel, found: Inventory, *, measure: bool) -> Placement | Infeasible:
    from lucevisor.deployment.measurements import (
        measure_links,
        read_links,
        read_speeds,
        request_for_split,
        speeds_for,
    )
    from lucevisor.placement.devices import with_target_devices
    from lucevisor.placement.planner import plan as make_plan

    config = with_target_devices(config, found)
    if measure:
        speeds = asyncio.run(speeds_for(model.spec, model.files, config, found, fresh=True))
        links = asyncio.run(measure_links(config))
    else:
        links = read_links(config)
        request = request_for_split(model.spec, config, found)
        speeds = None if request is None else read_speeds(request)
    return make_plan(model.spec, config, found, speeds, model.draft_spec, model.scorer, links, model.encoder)


@click.command()
@click.argument("model", required=False)
@python_option
def init(model: str | None, pythons: tuple[str, ...]) -> int:
    """Print a configuration file that serves MODEL, a GGUF file or hf:OWNER/REPO[:QUANT], on the devices of this
    machine. Without MODEL: one with every key, which serves the bundled demo model on this machine's processor."""
    from lucevisor.app.discovery import choose_groups, write_config
    from lucevisor.app.model_files import find_hub_file

    if model is None:
        if pythons:
            raise click.UsageError("--python is for a configuration of MODEL: name one")
        click.echo(_sample(), nl=False)
        return ExitCode.DONE
    if not model.startswith(HUB_PREFIX) and not Path(model).is_file():
        raise ConfigError("MODEL", model, "there is no such file", "name a GGUF file, or hf:OWNER/REPO[:QUANT]")
    model = find_hub_file(model)
    groups = choose_groups(model, pythons)
    for group in groups:
        click.echo(str(group), err=True)
    click.echo(write_config(model, groups), nl=False)
    return ExitCode.DONE


def _sample() -> str:
    """Return etc/lucevisor.toml with the path of its model as it is from anywhere."""
    etc = locate("etc")
    text = (etc / "lucevisor.toml").read_text(encoding="utf-8")
    line = re.compile(r'^path = "(.*)"$', re.MULTILINE)
    return line.sub(lambda found: f"path = {json.dumps(str(etc / found[1]))}", text, count=1)


@click.command()
@config_argument
@python_option
@click.option("--layer", default=0, show_default=True, help="Layer whose numbers are compared.")
def doctor(config: Path, overrides: tuple[str, ...], pythons: tuple[str, ...], layer: int) -> int:
    """Check each group of CONFIG: imports, torch build, devices, arena mapping, one layer's numbers in the dtype that
    will run; then whether the model fits into the memory that is free."""
    from lucevisor.app.model_files import open_models, without_unusable
    from lucevisor.deployment.measurements import check_arena, inventory, probe_groups
    from lucevisor.deployment.served_model import pipelines
    from lucevisor.placement.devices import with_target_devices
    from lucevisor.placement.planner import plan
    from lucevisor.placement.result import Infeasible

    config, _ = configured(config, pythons)
    loaded = load(config, overrides)
    loaded = without_unusable(loaded)
    models = open_models(loaded, lambda what: click.echo(f"fetching {what}", err=True))
    for model in models:
        if not 0 <= layer < model.spec.n_layers:
            raise click.UsageError(f"--layer {layer}: {model.name} has layers 0 to {model.spec.n_layers - 1}")
    devices, _ = asyncio.run(inventory(loaded))
    served = {own.replica or model.name: (own, model) for own, model in pipelines(loaded, models)}
    plans = {
        name: plan(
            model.spec,
            with_target_devices(own, devices),
            devices,
            None,
            model.draft_spec,
            model.scorer,
            encoder=model.encoder,
        )
        for name, (own, model) in served.items()
    }
    dtypes = {
        name: placed.placement.dtype if isinstance(placed, Infeasible) else placed.dtype
        for name, placed in plans.items()
    }
    arena = check_arena()

    def check(group: str) -> tuple[Check, list[int]]:
        arenas = [arena] if loaded.groups[group].shares_memory else []
        # One layer's numbers: of the first model that the group is for.
        name, model = next((name, model) for name, (own, model) in served.items() if group in own.groups)
        request = Check([str(f) for f in model.files], layer, dtypes[name], [a.plan for a in arenas])
        return request, [a.fd for a in arenas]

    try:
        answers = asyncio.run(probe_groups(loaded, check))
    finally:
        arena.close()
    healthy = [_report(loaded, name, answer) for name, answer in answers.items()]
    for name, placed in plans.items():
        name = f"replica {name}" if loaded.replicas else name
        if isinstance(placed, Infeasible):
            healthy.append(_line(False, "plan", placed.message.replace("\n", "; ")))
        elif all(healthy):
            _line(True, "plan", f"{name} fits, in {placed.dtype}: `lucevisor plan` shows how")
    slow = any(answer.checked is not None and answer.checked.warnings for answer in answers.values())
    fit = "all groups can run" + (", but slower than they could be: see the lines marked slow" if slow else "")
    click.echo(fit if all(healthy) else "something is wrong: see the lines marked FAIL")
    return ExitCode.DONE if all(healthy) else ExitCode.FAILED


def _line(ok: bool, subject: str, detail: str) -> bool:
    click.echo(f"  {'ok  ' if ok else 'FAIL'} {subject}: {detail}")
    return ok


def _report(config: Config, name: str, answer: Probe) -> bool:
    group = config.groups[name]
    python = group.python or ("python3" if group.host else "the interpreter of the supervisor")
    click.echo(f"group {name} ({group.backend}){f' on {group.host}' if group.host else ''}, {python}")
    good = True
    if answer.hello is not None:
        h = answer.hello
        _line(True, "interpreter", f"Python {h.python} at {h.executable}")
        packages = ", ".join(f"{k} {v}" for k, v in h.packages.items() if v)
        _line(True, "imports", f"torch {h.torch}, {packages}")
        for device in h.devices:
            gib = f"{device.free_bytes / 2**30:.1f} of {device.total_bytes / 2**30:.1f} GiB free"
            _line(
                True,
                f"{h.backend}:{device.index}",
                f"{device.name} ({device.architecture}), {gib}, {', '.join(device.dtypes)}",
            )
    for line in answer.checked.lines if answer.checked is not None else []:
        good &= _line(line.ok, line.subject, line.detail)
    for warning in answer.checked.warnings if answer.checked is not None else []:
        click.echo(f"  slow {warning}")
    if answer.problem:
        good &= _line(False, "group", answer.problem)
    return good
