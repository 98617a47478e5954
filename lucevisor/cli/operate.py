"""Commands that control a running supervisor: stop, status, restart, logs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from lucevisor.app.rundir import Running, find, is_locked
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import Seconds, target_options
from lucevisor.errors import ExitCode, LucevisorError, NotRunningError


@click.command()
@target_options
@click.option("--timeout", "timeout_s", type=Seconds(), default=30.0, show_default=True, help="Seconds to wait.")
def stop(name: str | None, socket: Path | None, timeout_s: float) -> int:
    """Stop a supervisor and its daemons.  Run it twice to shorten the deadlines."""
    target = find(name, socket)
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
def status(name: str | None, socket: Path | None, as_json: bool) -> int:
    """Show groups, devices, memory and speed."""
    answer = AdminClient(find(name, socket).socket).call("GET", "/status")
    if as_json:
        click.echo(json.dumps(answer, indent=2))
    else:
        _print_status(answer)
    return ExitCode.DONE


@click.command()
@click.argument("group", required=False)
@click.option("--rolling", is_flag=True, help="Restart all groups, one by one.")
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
@target_options
def restart(group: str | None, rolling: bool, now: bool, name: str | None, socket: Path | None) -> int:
    """Restart GROUP's daemon (or all, --rolling); returns when the endpoint serves again."""
    if (group is None) == (not rolling):
        raise click.UsageError("name a GROUP, or give --rolling for all of them")
    target = find(name, socket)
    began = time.monotonic()
    order: dict[str, Any] = {"groups": [] if rolling else [group], "now": now}
    answer = AdminClient(target.socket).call("POST", "/restart", order, timeout_s=3600.0)
    done = [g for g in answer["groups"] if rolling or g["name"] == group]
    for one in done:
        click.echo(f"group {one['name']} is {one['state']}, pid {one['pid']}, restarts {one['restarts']}")
    click.echo(f"{target.name} is {answer['state']} after {time.monotonic() - began:.1f} s")
    return ExitCode.DONE


@click.command()
@click.argument("group", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@target_options
def logs(group: str | None, follow: bool, name: str | None, socket: Path | None) -> int:
    """Print the log, or only that of GROUP."""
    target: Running = find(name, socket)
    query = f"?follow={int(follow)}" + (f"&group={quote(group, safe='')}" if group else "")
    try:
        for line in AdminClient(target.socket).lines(f"/logs{query}"):
            click.echo(line, nl=False)
    except KeyboardInterrupt:
        pass
    return ExitCode.DONE


NO_DEVICE: dict[str, Any] = {"device": "", "layers": None, "weight_bytes": 0, "state_bytes": 0, "free_bytes": 0}


def _print_status(s: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(f"[bold]{s['name']}[/bold] {s['state']}  {s['url']}  pid {s['pid']}", highlight=False)
    if s["reason"]:
        console.print(f"reason: {s['reason']}", highlight=False)
    m, e = s["model"], s["engine"]
    console.print(f"{m['name']} ({m['architecture']}, {m['layers']} layers, {m['quant']})", highlight=False)
    table = Table("group", "backend", "state", "pid", "restarts", "device", "layers", "weights", "state bytes", "free")
    for g in s["groups"]:
        for d in g["devices"] or [NO_DEVICE]:
            layers = f"[{d['layers'][0]},{d['layers'][1]})" if d["layers"] else ""
            sizes = [_size(d[k]) for k in ("weight_bytes", "state_bytes", "free_bytes")]
            table.add_row(
                g["name"], g["backend"], g["state"], str(g["pid"]), str(g["restarts"]), d["device"], layers, *sizes
            )
    console.print(table)
    p = e["pages"]
    pages = f"pages {p['used']} of {p['total']}"
    work = f"running {e['running']}, queued {e['queued']}, {e['tokens_per_s']} tokens/s, {pages}"
    console.print(work, highlight=False)
    for line in [*_draft_lines(s["draft"]), *_cache_lines(s["cache"])]:
        console.print(line, highlight=False)


SHOWN_POSITIONS = 8


def _draft_lines(d: dict[str, Any]) -> list[str]:
    """The drafter and, once drafts were verified, what became of them; each line fits 80 columns, names aside."""
    lines = []
    if d["state"] != "none":
        where, why = f" on {d['device']}" if d["device"] else "", f": {d['reason']}" if d["reason"] else ""
        lines.append(f"drafter {d['name']} ({d['kind']}){where} is {d['state']}{why}")
    if d.get("paused"):
        lines.append(f"  paused: {d['paused']}")
    if not d.get("verify_slices"):
        return lines
    n_looked_up = d["lookups"]["slices"]
    positions = " ".join(f"{share:.2f}" for share in d["acceptance_by_position"][:SHOWN_POSITIONS])
    apart = [
        f"{origin} {one['acceptance_length']:.2f} ({one['verify_slices']} slices)"
        for origin, one in d["origins"].items()
        if one["verify_slices"]
    ]
    return [
        *lines,
        f"  {d['acceptance_length']:.2f} tokens a verify slice ({d['tokens_per_step']:.2f} with plain ones), "
        f"width {d['width']}",
        f"  accepted {d['accepted']} of {d['verified']} verified, of {d['drafted']} drafted; "
        f"looked up {n_looked_up} slices",
        f"  accepted by position: {positions}",
        f"  tokens a verify slice, {', '.join(apart)}",
        f"  drafting took {_seconds(d['draft_s'])}, verifying {_seconds(d['verify_s'])}, "
        f"the drafter's context {_seconds(d['upkeep_s'])}",
    ]


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _cache_lines(c: dict[str, Any]) -> list[str]:
    """What is remembered of prompts; the second line when snapshots are on."""
    lines = []
    if c["max_slots"]:
        lines.append(
            f"prefix slots {c['prefix_slots']} of {c['max_slots']}, {_size(c['bytes'])} of {_size(c['memory'])}; "
            f"{c['hits']} of {c['prompts']} prompts began with one, {sum(c['tokens'].values())} tokens not computed"
        )
    if c["dir"]:
        failed = "".join(f", {n} {reason}" for reason, n in c["failures"].items())
        lines.append(
            f"snapshots {c['snapshots']}, {_size(c['snapshot_bytes'])} of {_size(c['disk'])} in {c['dir']}; "
            f"saved {c['saved']}, restored {c['restored']}{failed}"
        )
    return lines


def _size(n: int) -> str:
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""
