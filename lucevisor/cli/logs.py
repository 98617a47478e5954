"""``lucevisor logs``: rendered on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import difflib
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from lucevisor.api.log_query import MAX_LINES
from lucevisor.app.rundir import find
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import target_options
from lucevisor.errors import ExitCode

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class Since(click.ParamType[float]):
    """An age such as 90s, 10m, 2h, 1d, or a local time such as 2026-11-22T21:00; becomes Unix time."""

    name = "age or time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        if age := re.fullmatch(r"(\d{1,9})([smhd])", text):
            return max(0.0, time.time() - int(age[1]) * _UNITS_S[age[2]])
        try:
            return max(0.0, datetime.fromisoformat(text).timestamp())
        except (ValueError, OverflowError, OSError):
            self.fail(f"{text!r} is neither an age such as 10m nor a time such as 2026-11-22T21:00", param, ctx)


@click.command()
@click.argument("group", required=False)
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines.")
@click.option("-n", "--lines", "last", type=click.IntRange(0, MAX_LINES), help="Of those there are, the last so many.")
@click.option("--since", "since_s", type=Since(), help="Only later ones: 90s, 10m, 2h, 1d, or 2026-11-22T21:00.")
@click.option(
    "--level", type=click.Choice(["debug", "info", "warning", "error"]), default="debug", show_default=True,
    help="Only this level and above.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines on a terminal too.")
@target_options
def logs(
    group: str | None, follow: bool, last: int | None, since_s: float | None, level: str, as_json: bool,
    name: str | None, socket: Path | None,
) -> int:  # fmt: skip
    """Print the log, or only that of GROUP.  Elsewhere than on a terminal the lines are JSON."""
    client = AdminClient(find(name, socket).socket)
    if group is not None:
        _check_group(client, group)
    query = {"group": group, "follow": int(follow), "last": last, "since_s": since_s, "level": level}
    target = "/logs?" + urlencode({key: value for key, value in query.items() if value is not None})
    render = None
    if sys.stdout.isatty() and not as_json:
        from lucevisor.app.log_lines import ConsoleLine

        render = ConsoleLine(colors=True).line
    try:
        for line in client.lines(target):
            click.echo(render(line) if render is not None else line, nl=render is not None)
    except KeyboardInterrupt:
        pass
    return ExitCode.DONE


def _check_group(client: AdminClient, group: str) -> None:
    names = [one["name"] for one in client.call("GET", "/status")["groups"]]
    if group not in names:
        near = difflib.get_close_matches(group, names, 1, 0.0)
        raise click.UsageError(f"there is no group {group!r}: the groups are {', '.join(names)}; nearest: {near[0]}")
