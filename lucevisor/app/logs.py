"""Where log records go: structlog, console or JSON lines on standard error, and JSON lines in the run directory.

Daemon output and daemon log lines arrive here as records with the fields group, pid, shard, step; requests add request.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import IO, Literal

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger


class _Tee:
    """Writes each record to the terminal in its form and to the file as JSON."""

    def __init__(self, console: Processor, stream: IO[str] | None, file: IO[str] | None) -> None:
        self._console, self._json = console, structlog.processors.JSONRenderer(ensure_ascii=False)
        self._stream, self._file = stream, file

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> str:
        if self._file is not None:
            self._file.write(str(self._json(logger, name, dict(event))) + "\n")
            self._file.flush()
        if self._stream is None:
            raise structlog.DropEvent
        try:
            self._stream.write(str(self._console(logger, name, event)) + "\n")
            self._stream.flush()
        except (BrokenPipeError, ValueError):  # the terminal went away: the file still has it
            pass
        raise structlog.DropEvent


def configure(
    form: Literal["auto", "console", "json"], level: str, directory: Path | None = None, *, to_terminal: bool = True
) -> None:
    """Set up structlog for this process.  ``auto`` is console on a terminal, JSON elsewhere."""
    out = sys.stderr
    if form == "auto":
        form = "console" if out.isatty() else "json"
    renderer: Processor
    if form == "console":
        renderer = structlog.dev.ConsoleRenderer(
            colors=out.isatty(),
            pad_event_to=24,
            exception_formatter=structlog.dev.plain_traceback,  # the rich one shows local variables: prompts
        )
    else:
        renderer = structlog.processors.JSONRenderer(ensure_ascii=False)
    file = (directory / "supervisor.jsonl").open("a", encoding="utf-8") if directory is not None else None
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _Tee(renderer, out if to_terminal else None, file),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.WARNING, stream=out, format="%(levelname)s %(name)s %(message)s")
