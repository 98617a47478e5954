"""Commands that control a running supervisor: stop, status, restart, reload, load, unload."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from lucevisor.app.rundir import RunningSupervisor, find_supervisor, is_locked
from lucevisor.cli.admin_client import AdminClient, call_and_watch
from lucevisor.cli.options import SECONDS, target_options
from lucevisor.errors import ExitCode, LucevisorError, NotRunningError


@click.command()
@target_options
@click.option("--timeout", "timeout_s", type=SECONDS, default=30.0, show_default=True, help="Seconds to wait.")
def stop(name: str | None, socket: Path | None, timeout_s: float) -> int:
    """Stop a supervisor and its daemons.  Run it twice to shorten the deadlines."""
    target = find_supervisor(name, socket)
    try:
        AdminClient(target.socket).call("POST", "/stop")
    except NotRunningError:
        if is_locked(target.socket.parent):
            raise
    deadline = time.monotonic() + timeout_s
    while is_locked(target.socket.parent):
        if time.monotonic() > deadline:
            raise LucevisorError(
                f"{target.name} (pid {target.pid}) still runs after {timeout_s:.0f} s; run stop again to hurry it"
            )
        time.sleep(0.02)
    click.echo(f"{target.name} is stopped")
    return ExitCode.DONE


@click.command()
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--kernels", is_flag=True, help="Show what each device selected, by operation and quant type.")
@click.option("-v", "--verbose", is_flag=True, help="Show how drafts are verified, too.")
def status(name: str | None, socket: Path | None, as_json: bool, kernels: bool, verbose: bool) -> int:
    """Show groups, devices, memory and speed."""
    answer = AdminClient(find_supervisor(name, socket).socket).call("GET", "/status")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        from rich.console import Console

        from lucevisor.cli.status_view import kernel_table, status_view

        console = Console() if sys.stdout.isatty() else Console(width=80)
        folds = console.is_terminal
        view = kernel_table(answer) if kernels else status_view(answer, folds=folds, verbose=verbose)
        console.print(view, soft_wrap=not folds)
    return ExitCode.DONE


@click.command()
@click.argument("group", required=False)
@click.option("--rolling", is_flag=True, help="Restart all groups, one by one.")
@click.option("--now", is_flag=True, help="Do not wait for the steps in flight, and save no prefix slots.")
@target_options
def restart(group: str | None, rolling: bool, now: bool, name: str | None, socket: Path | None) -> int:
    """Restart GROUP's daemon (or all, --rolling); returns when the endpoint serves again."""
    if (group is None) == (not rolling):
        raise click.UsageError("name a GROUP, or give --rolling for all of them")
    target = find_supervisor(name, socket)
    answer, summary = _change(target, "restart", {"groups": [] if rolling else [group], "now": now})
    for entry in answer["groups"]:
        if rolling or entry["name"] == group:
            click.echo(f"group {entry['name']} is {entry['state']}, pid {entry['pid']}, restarts {entry['restarts']}")
    click.echo(summary)
    return ExitCode.DONE


@click.command()
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a key until the next reload, beside those given to start.",
)
@target_options
def reload(overrides: tuple[str, ...], name: str | None, socket: Path | None) -> int:
    """Read the configuration again and go on with it: layers move between groups, and no request fails.

    Keys that cannot change while requests run are refused by name, and nothing changes.
    """
    answer, summary = _change(find_supervisor(name, socket), "reload", {"set": overrides})
    for key, value in answer["changed"].items():
        click.echo(f"{key} = {json.dumps(value)}" if value is not None else f"{key} is gone")
    if not answer["changed"]:
        click.echo("nothing has changed")
        return ExitCode.DONE
    for group in answer["groups"]:
        layers = ", ".join(
            f"{device['device']} [{device['layers'][0]},{device['layers'][1]})" for device in group["devices"]
        )
        click.echo(f"group {group['name']} is {group['state']}, pid {group['pid']}: {layers or 'no layers'}")
    click.echo(summary)
    return ExitCode.DONE


@click.command()
@click.argument("model")
@target_options
def load(model: str, name: str | None, socket: Path | None) -> int:
    """Load MODEL, which others may have to make room for; returns when it is loaded."""
    return _swap("load", model, name, socket)


@click.command()
@click.argument("model")
@target_options
def unload(model: str, name: str | None, socket: Path | None) -> int:
    """Free the memory of MODEL when its requests have ended; the next request for it loads it again."""
    return _swap("unload", model, name, socket)


def _swap(what: str, model: str, name: str | None, socket: Path | None) -> int:
    target, began = find_supervisor(name, socket), time.monotonic()
    answer = call_and_watch(AdminClient(target.socket), what, f"/{what}", {"model": model}, timeout_s=3600.0)
    for part in answer["models"]:
        click.echo(f"{part['name']} is {part['residency']['state']}")
    click.echo(f"{target.name} did this in {time.monotonic() - began:.1f} s")
    return ExitCode.DONE


def _change(target: RunningSupervisor, what: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Have a supervisor carry out an order; return its status, and how long it and the requests took."""
    client = AdminClient(target.socket)
    before, began = client.call("GET", "/status"), time.monotonic()
    answer = call_and_watch(client, what, f"/{what}", body, timeout_s=3600.0)
    summary = f"{target.name} is {answer['state']} after {time.monotonic() - began:.1f} s"
    return answer, f"{summary}\n{_recovered(_recovery(before), _recovery(answer))}"


def _recovery(status: dict[str, Any]) -> list[float]:
    """Return the seconds of pauses, and counts of what continued: of the first model, or of all replicas."""
    engines = [part["engine"] for part in status["models"] if part["replica"]] or [status["engine"]]
    parts = [engine["recovery"] for engine in engines]
    names = ("sequences", "kept_tokens", "rebuilt_tokens", "recomputed_tokens")
    return [
        sum(sum(part["pause_s"].values()) for part in parts),
        *(sum(part[name] for part in parts) for name in names),
    ]


def _recovered(before: list[float], now: list[float]) -> str:
    paused_s, sequences, kept, rebuilt, recomputed = (
        later - earlier for earlier, later in zip(before, now, strict=True)
    )
    if not sequences:
        return f"no request was running; new ones waited {paused_s:.1f} s"
    done = f"{kept} tokens kept, {rebuilt} computed again by the restarted groups alone, {recomputed} by all"
    return f"requests paused {paused_s:.1f} s in all; sequences that continued: {sequences}; {done}"
