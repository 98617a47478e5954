"""Reader of a supervisor's log file across rotations.  Returns every line whole and once, oldest first."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

from lucevisor.app.logs import N_OLD_FILES, parse_record

_POLL_S: Final = 0.2  # between reads with --follow
_READ_BYTES: Final = 64 * 2**10
_LINE_BYTES: Final = 16 * 2**20  # longer lines are not ours and are skipped


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
                time.sleep(_POLL_S)
    finally:
        reader.close()


class LogReader:
    """Call `lines` repeatedly, then `close`."""

    def __init__(self, path: Path) -> None:
        self._paths = [path.with_name(f"{path.name}.{n}") for n in range(N_OLD_FILES, 0, -1)] + [path]
        self._file: BinaryIO | None = None
        self._offset = 0  # of the first line that was not returned

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def lines(self) -> list[str]:
        """Return some of the next lines; an empty list when there are none yet."""
        while True:
            files = self._files()  # before the read: no line is added to an old file after it
            later = list(files)
            if self._file is not None:
                if lines := self._read(self._file):
                    return lines
                inode = os.fstat(self._file.fileno()).st_ino
                later = later[later.index(inode) + 1 :] if inode in files else later
            if not later:
                return []
            self._open(files[later[0]], later[0])  # if it was rotated meanwhile, look again

    def _read(self, file: BinaryIO) -> list[str]:
        """Return the whole lines of one block.

        An incomplete last line is read again, because the writer may truncate it.
        """
        n_bytes = _READ_BYTES
        while True:
            data = os.pread(file.fileno(), n_bytes, self._offset)
            end = data.rfind(b"\n") + 1
            if not end and len(data) >= _LINE_BYTES:  # not ours: skip it
                self._offset += len(data)
                return []
            if end or len(data) < n_bytes:
                break
            n_bytes *= 2
        self._offset += end
        return [line.decode("utf-8", "replace") + "\n" for line in data[:end].split(b"\n")[:-1]]

    def _open(self, path: Path, inode: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            file = path.open("rb")
            if os.fstat(file.fileno()).st_ino == inode:
                self.close()
                self._file, self._offset = file, 0
            else:
                file.close()

    def _files(self) -> dict[int, Path]:
        files, before = self._listed(), None
        while files != before:  # a file that is renamed meanwhile may be missing
            files, before = self._listed(), files
        return files

    def _listed(self) -> dict[int, Path]:
        files = {}
        for path in self._paths:
            with contextlib.suppress(OSError):
                files[path.stat().st_ino] = path
        return files


_SEVERITY: Final = logging.getLevelNamesMapping()


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
