"""``lucevisor doctor``: checks each group's interpreter, devices and numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from lucevisor.cli.options import config_argument
from lucevisor.config import Config, load
from lucevisor.errors import ExitCode
from lucevisor.protocol.messages import Check
from lucevisor.supervision.probe import Probe


@click.command()
@config_argument
@click.option("--layer", default=0, show_default=True, help="Layer whose numbers are compared.")
def doctor(config: Path, overrides: tuple[str, ...], layer: int) -> int:
    """Check each group of CONFIG: imports, torch build, devices, arena mapping, one layer's numbers in the dtype that
    will run; then whether the model fits into the memory that is free."""
    from lucevisor.app.model_files import open_model
    from lucevisor.deployment.probe import check_arena, each_group, inventory
    from lucevisor.placement.devices import with_target_devices
    from lucevisor.placement.planner import plan
    from lucevisor.placement.result import Infeasible

    loaded = load(config, overrides)
    model = open_model(loaded, lambda what: click.echo(f"fetching {what}", err=True))
    if not 0 <= layer < model.spec.n_layers:
        raise click.UsageError(f"--layer {layer}: the model has layers 0 to {model.spec.n_layers - 1}")
    devices, _ = asyncio.run(inventory(loaded))
    placed = plan(model.spec, with_target_devices(loaded, devices), devices, None, model.draft_spec, model.scorer)
    dtype = placed.placement.dtype if isinstance(placed, Infeasible) else placed.dtype
    arena = check_arena()

    def check(_: str) -> tuple[Check, list[int]]:
        return Check([str(f) for f in model.files], layer, dtype, [arena.plan]), [arena.fd]

    try:
        answers = asyncio.run(each_group(loaded, check))
    finally:
        arena.close()
    healthy = [_report(loaded, name, answer) for name, answer in answers.items()]
    if isinstance(placed, Infeasible):
        healthy.append(_line(False, "plan", placed.message.replace("\n", "; ")))
    elif all(healthy):
        _line(True, "plan", f"{model.name} fits, in {dtype}: `lucevisor plan` shows how")
    slow = any(answer.checked is not None and answer.checked.warnings for answer in answers.values())
    fit = "all groups can run" + (", but slower than they could be: see the lines marked slow" if slow else "")
    click.echo(fit if all(healthy) else "something is wrong: see the lines marked FAIL")
    return ExitCode.DONE if all(healthy) else ExitCode.FAILED


def _line(ok: bool, subject: str, detail: str) -> bool:
    click.echo(f"  {'ok  ' if ok else 'FAIL'} {subject}: {detail}")
    return ok


def _report(config: Config, name: str, answer: Probe) -> bool:
    group = config.groups[name]
    click.echo(f"group {name} ({group.backend}), {group.python or 'the interpreter of the supervisor'}")
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
