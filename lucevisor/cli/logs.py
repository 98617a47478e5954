"""``lucevisor logs``: rendered on a terminal, JSON lines elsewhere. Reads the file, also after the end, and across
rotations every line whole and once, oldest first."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import click

from lucevisor.app.logs import FILE, N_OLD_FILES, STARTED, ConsoleLine, parse_record
from lucevisor.app.rundir import check_name, find_supervisor, is_locked, log_path, run_path, running_supervisors
from lucevisor.cli.admin_client import AdminClient
from lucevisor.cli.options import target_options
from lucevisor.errors import ExitCode, NotRunningError, nearest

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SEVERITY: Final = logging.getLevelNamesMapping()
_READ_BYTES: Final = 2**20


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
@click.option("-n", "--lines", "last", type=click.IntRange(0, 1_000_000), help="Print only the last N lines.")
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


def follow_log(path: Path, query: LogQuery, ended: Callable[[], bool]) -> Iterator[str]:
    """Yield the wanted lines of the log at ``path``, oldest first; with ``query.follow`` later ones until ``ended``."""
    reader = LogReader(path)
    newest: deque[str] | None = None if query.last is None else deque(maxlen=query.last)
    try:
        while True:
            was_over = query.follow and ended()  # before the read: nothing is written after it
            lines = reader.lines()
            matching = [line for line in lines if matches_query(line, query)]
            if newest is not None:
                newest.extend(matching)  # until all that is there has been read
                matching, newest = ([], newest) if lines else (list(newest), None)
            yield from matching
            if not lines:
                if not query.follow or was_over:
                    return
                time.sleep(0.2)
    finally:
        reader.close()


class LogReader:
    """Call `lines` repeatedly, then `close`."""

    def __init__(self, path: Path) -> None:
        self._paths = [path, *(path.with_name(f"{path.name}.{n}") for n in range(1, N_OLD_FILES + 1))]
        self._file: BinaryIO | None = None
        self._offset = 0  # of the first line that was not returned

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> list[str]:
        """Return some of the next lines; an empty list when there are none yet."""
        while True:
            later = self._files()  # before the read: no line is added to an old file after it
            if self._file is not None:
                if lines := self._read(self._file):
                    return lines
                inodes = [inode for inode, _ in later]
                inode = os.fstat(self._file.fileno()).st_ino
                later = later[inodes.index(inode) + 1 :] if inode in inodes else later
            if not later:
                return []
            inode, path = later[0]
            with contextlib.suppress(FileNotFoundError):  # if it was rotated meanwhile, look again
                file = path.open("rb")
                if os.fstat(file.fileno()).st_ino == inode:
                    self.close()
                    self._file, self._offset = file, 0
                else:
                    file.close()

    def _read(self, file: BinaryIO) -> list[str]:
        """Return the whole lines of one block. An incomplete last line is read again, as the writer may truncate it."""
        data = os.pread(file.fileno(), _READ_BYTES, self._offset)
        end = data.rfind(b"\n") + 1
        self._offset += end or (len(data) if len(data) == _READ_BYTES else 0)
        return [line.decode("utf-8", "replace") + "\n" for line in data[:end].split(b"\n")[:-1]]

    def _files(self) -> list[tuple[int, Path]]:
        """Return inodes and paths, oldest first.  Listed from the newest on, as a rotation renames to older names."""
        files = {}
        for path in self._paths:
            with contextlib.suppress(OSError):
                files[path.stat().st_ino] = path
        return [*reversed(files.items())]


@dataclass(frozen=True, slots=True)
class LogQuery:
    """``last``: how many of the newest lines, None: all; ``since_s``: Unix time, 0: any."""

    group: str | None = None
    follow: bool = False
    last: int | None = None
    since_s: float = 0.0
    level: str = "debug"


def matches_query(line: str, query: LogQuery) -> bool:
    if query.group is None and query.since_s == 0 and query.level == "debug":
        return True
    record = parse_record(line)
    if record is None:
        return False
    if query.group is not None and record.get("group") != query.group:
        return False
    if _SEVERITY.get(str(record.get("level", "info")).upper(), logging.INFO) < _SEVERITY[query.level.upper()]:
        return False
    return query.since_s == 0 or timestamp_of(record) >= query.since_s


def timestamp_of(record: dict[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(record.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0
