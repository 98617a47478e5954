"""``lucevisor logs``: rendered on a terminal, JSON lines elsewhere.  Reads the file, so it works after the end, too."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from lucevisor.app.log_reader import LogQuery, follow_log, timestamp_of
from lucevisor.app.logs import FILE, STARTED, ConsoleLine, parse_record
from lucevisor.app.rundir import check_name, find_supervisor, is_locked, log_path, run_path, running_supervisors
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import target_options
from lucevisor.errors import ExitCode, NotRunningError, nearest

MAX_LINES = 1_000_000
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
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines until the supervisor ends.")
@click.option("-n", "--lines", "last", type=click.IntRange(0, MAX_LINES), help="Print only the last N lines.")
@click.option(
    "--since", "since_s", type=Since(), help="Print only records since 90s, 10m, 2h, 1d ago, or since 2026-11-22T21:00."
)
@click.option(
    "--level", type=click.Choice(["debug", "info", "warning", "error"]), default="debug", show_default=True,
    help="Print only this level and above.",
)  # fmt: skip
@click.option("--json", "form", flag_value="json", help="Print JSON lines also on a terminal.")
@click.option("--text", "form", flag_value="text", help="Print text also where the output is no terminal.")
@target_options
def logs(
    group: str | None, follow: bool, last: int | None, since_s: float | None, level: str, form: str | None,
    name: str | None, socket: Path | None,
) -> int:  # fmt: skip
    """Print the log, or only that of GROUP; without a running supervisor that of NAME, or of the last one that ended.

    It begins with the last start, or with --since.  Elsewhere than on a terminal the lines are JSON.
    """
    path, run_directory, groups = _find_log(name, socket)
    if group is not None and groups:
        _check_group(group, groups)
    is_terminal = sys.stdout.isatty()
    as_text = form == "text" or (is_terminal and form is None)
    render = ConsoleLine(colors=is_terminal).line if as_text else None
    query = LogQuery(group, follow, last, _last_start(path) if since_s is None else since_s, level)
    try:
        for line in follow_log(path, query, lambda: not is_locked(run_directory)):
            click.echo(render(line) if render is not None else line, nl=render is not None)
    except KeyboardInterrupt:
        pass
    return ExitCode.DONE


def _find_log(name: str | None, socket: Path | None) -> tuple[Path, Path, list[str]]:
    """Return the log file, the run directory and the groups of the supervisor that is meant; groups only if it runs."""
    try:
        target = find_supervisor(name, socket)
        status = AdminClient(target.socket).call("GET", "/status")
        return Path(status["log"]), target.socket.parent, [group["name"] for group in status["groups"]]
    except NotRunningError as error:
        if socket is not None or (name is None and running_supervisors()):
            raise
        path = log_path(check_name(name)) / FILE if name is not None else _newest()
        if path is None or not path.is_file():
            where = path or log_path("any").parent
            raise NotRunningError(f"{error}; {where}: there is no log of an earlier run either") from None
    return path, run_path(path.parent.name), _groups_of(path)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    return filter(None, map(parse_record, follow_log(path, LogQuery(), lambda: True)))


def _last_start(path: Path) -> float:
    """Return when the last run began; 0 when that is too long ago for the log."""
    return max((timestamp_of(record) for record in _records(path) if record.get("event") == STARTED), default=0.0)


def _newest() -> Path | None:
    files = log_path("any").parent.glob(f"*/{FILE}")
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _groups_of(path: Path) -> list[str]:
    return sorted({str(record["group"]) for record in _records(path) if "group" in record})


def _check_group(group: str, names: list[str]) -> None:
    if group not in names:
        near = nearest(group, names, 0.0)
        raise click.UsageError(f"there is no group {group!r}: the groups are {', '.join(names)}; nearest: {near}")
