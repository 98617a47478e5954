"""``lucevisor doctor``: checks each group's interpreter, devices and numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from lucevisor.cli.options import config_argument
from lucevisor.config import Config, load
from lucevisor.errors import ExitCode
from lucevisor.model.values import Dtype
from lucevisor.protocol.checks import Check
from lucevisor.supervision.probe import Probe


@click.command()
@config_argument
@click.option("--layer", default=0, show_default=True, help="Layer whose numbers are compared.")
def doctor(config: Path, overrides: tuple[str, ...], layer: int) -> int:
    """Check each group of CONFIG: imports, torch build, devices, memory, arena mapping, one layer's numbers."""
    from lucevisor.app.model_files import open_model
    from lucevisor.deployment.probe import check_arena, each_group

    loaded = load(config, overrides)
    model = open_model(loaded, lambda what: click.echo(f"fetching {what}", err=True))
    if not 0 <= layer < model.spec.n_layers:
        raise click.UsageError(f"--layer {layer}: the model has layers 0 to {model.spec.n_layers - 1}")
    arena = check_arena()

    def check(_: str) -> tuple[Check, list[int]]:
        return Check([str(f) for f in model.files], layer, _dtype(loaded), [arena.plan]), [arena.fd]

    try:
        answers = asyncio.run(each_group(loaded, check))
    finally:
        arena.close()
    healthy = [_report(loaded, name, answer) for name, answer in answers.items()]
    click.echo("all groups are fit" if all(healthy) else "something is wrong: see the lines marked FAIL")
    return ExitCode.DONE if all(healthy) else ExitCode.FAILED


def _dtype(config: Config) -> Dtype:
    return Dtype.FLOAT32 if config.engine.dtype == "auto" else Dtype(config.engine.dtype)


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
    if answer.problem:
        good &= _line(False, "group", answer.problem)
    return good
