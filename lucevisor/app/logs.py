"""Log sinks: JSON lines in a rotating file that outlives the process, console or JSON lines on stderr.

Each has a bounded queue and a thread.  Records that cannot be queued or written are dropped, counted and reported.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener, RotatingFileHandler
from pathlib import Path
from typing import IO, Any, Final, Literal

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

FILE: Final = "supervisor.jsonl"
FILE_BYTES: Final = 8 * 2**20
N_OLD_FILES: Final = 3
"""A file that reaches FILE_BYTES becomes FILE.1, and that FILE.2; the oldest of N_OLD_FILES is removed."""


STARTED: Final = "supervisor starts"
"""The first record of a run."""

_SHORT: Final = ("method", "path", "status", "duration_s", "prompt_tokens", "generated_tokens", "first_token_s")
_ZERO_UNLESS: Final = ("cached_tokens", "accepted_tokens", "rejected_tokens", "queue_s")
_ALWAYS: Final = ("event", "level", "timestamp")

N_QUEUED: Final = 4096
CLOSING_S: Final = 1.0
"""Seconds that `close` waits for each writer."""

_dropped = {"file": 0, "stderr": 0}  # records of this process, over all calls of `configure`
_sinks: dict[str, _Sink] = {}
_file: _RotatingFile | None = None


class _Queue(QueueHandler):
    """Queues a record for the thread of a sink, or drops it."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink.records)
        self._sink = sink

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave structlog's records to the thread; render others now, with arguments and traceback."""
        prepared: logging.LogRecord = record if isinstance(record.msg, dict) else super().prepare(record)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        self._sink.put(record)

    def handleError(self, record: logging.LogRecord) -> None:
        self._sink.drop("the record cannot be rendered")


class _Sink(QueueListener):
    """Renders and writes records in a daemon thread: a write that hangs does not hold up the exit."""

    def __init__(self, name: Literal["file", "stderr"], write: Callable[[bytes], None], renderer: Processor) -> None:
        self.records: queue.Queue[Any] = queue.Queue(N_QUEUED)
        super().__init__(self.records)
        self._name, self._write = name, write
        self._formatter = ProcessorFormatter(
            processors=[ProcessorFormatter.remove_processors_meta, renderer], foreign_pre_chain=[_from_library]
        )
        self._n_unreported, self._reason, self._lock = 0, "", threading.Lock()
        self._entry = _Queue(self)
        logging.getLogger().addHandler(self._entry)
        self.start()

    def put(self, record: logging.LogRecord) -> None:
        try:
            self.records.put_nowait(record)
        except queue.Full:
            self.drop(f"{N_QUEUED} records wait to be written")

    def drop(self, reason: str) -> None:
        with self._lock:
            _dropped[self._name] += 1
            self._n_unreported += 1
            self._reason = reason

    def handle(self, record: logging.LogRecord) -> None:
        n_missing = self._n_unreported
        try:
            text = str(record.msg) if getattr(record, "plain", False) else self._formatter.format(record)
            if n_missing:
                text = f"{self._drop_notice(n_missing)}\n{text}"
            self._write(f"{text}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self.drop(error.strerror or str(error))
        except Exception as error:  # a log record about this would end here as well
            self.drop(f"{type(error).__name__}: {error}")
        else:
            with self._lock:
                self._n_unreported -= n_missing

    def _drop_notice(self, n_missing: int) -> str:
        event = {"event": "log records dropped", "level": "warning", "timestamp": _iso(time.time())}
        more = {"records": n_missing, "sink": self._name, "reason": self._reason}
        record = logging.LogRecord("lucevisor", logging.WARNING, "", 0, event | more, None, None)
        record._logger, record._name = None, "warning"  # mark it as structlog's for ProcessorFormatter
        return self._formatter.format(record)

    def close(self) -> None:
        """Write what is queued, or give up after CLOSING_S."""
        logging.getLogger().removeHandler(self._entry)
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self.records.put(None, timeout=CLOSING_S)  # the end marker of `QueueListener`
            thread.join(CLOSING_S)


class _RotatingFile(RotatingFileHandler):
    """Unbuffered, so that a full disk leaves neither half a line nor a backlog."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=FILE_BYTES, backupCount=N_OLD_FILES)

    def _open(self) -> Any:
        Path(self.baseFilename).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return open(self.baseFilename, "ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append whole lines.  Raises OSError, and then nothing of them is in the file."""
        stream: Any = self.stream
        if stream is None or os.fstat(stream.fileno()).st_nlink == 0:  # closed by a failed rotation, or removed
            if stream is not None:
                stream.close()
                self.stream = None  # in case its directory was removed, too
            stream = self.stream = self._open()
        size = os.fstat(stream.fileno()).st_size
        if size and size + len(data) > self.maxBytes:
            self.doRollover()
            stream, size = self.stream, 0
        try:
            _write_all(stream.fileno(), data)
        except OSError:
            with contextlib.suppress(OSError):
                stream.truncate(size)
            raise


def _stderr_writer(stream: IO[str]) -> Callable[[bytes], None]:
    if not stream.isatty():  # the interpreter acquires the stream's lock at exit
        with contextlib.suppress(OSError, ValueError, AttributeError):
            fd = stream.fileno()
            return lambda data: _write_all(fd, data)

    def write(data: bytes) -> None:
        stream.write(data.decode())
        stream.flush()

    return write


def configure(
    form: Literal["auto", "console", "json"], level: str, directory: Path | None = None, *, to_terminal: bool = True
) -> None:
    """Set up structlog and logging until `close`, which also runs at exit.  Raises OSError.

    ``auto`` is console on a terminal, JSON elsewhere.
    """
    global _file
    close()
    if directory is not None:
        _file = _RotatingFile(directory / FILE)
        _sinks["file"] = _Sink("file", _file.write, structlog.processors.JSONRenderer(ensure_ascii=False))
    if to_terminal:
        renderer = _renderer(form, is_terminal=sys.stderr.isatty())
        _sinks["stderr"] = _Sink("stderr", _stderr_writer(sys.stderr), renderer)
    logging.getLogger().setLevel(logging.WARNING)
    ours = logging.getLogger("lucevisor")
    ours.setLevel(logging.DEBUG)  # structlog filters by level before a record is made
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=lambda *_: ours,
        cache_logger_on_first_use=False,
    )
    set_level(level)


def set_level(level: str) -> None:
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))


def close() -> None:
    """Write what is queued, and close the file.  Idempotent."""
    global _file
    while _sinks:
        _sinks.popitem()[1].close()
    if _file is not None:
        _file.close()
        _file = None


atexit.register(close)


def print_line(line: str) -> None:
    """Queue a line for standard error, in order with the log records."""
    if sink := _sinks.get("stderr"):
        record = logging.LogRecord("lucevisor", logging.INFO, "", 0, line, None, None)
        record.plain = True
        sink.put(record)
        return
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def log_file() -> Path | None:
    return Path(_file.baseFilename) if _file is not None else None


def dropped_records() -> Mapping[str, int]:
    return dict(_dropped)


def _renderer(form: str, *, is_terminal: bool) -> Processor:
    if form == "json" or (form == "auto" and not is_terminal):
        return structlog.processors.JSONRenderer(ensure_ascii=False)
    return ConsoleLine(colors=is_terminal)


def _from_library(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    record: logging.LogRecord = event["_record"]
    event.update(level=record.levelname.lower(), timestamp=_iso(record.created), logger=record.name)
    return event


def _iso(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:  # another process made the pipe non-blocking
            select.select([], [fd], [])


# ---- text for a terminal


def parse_record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


class ConsoleLine:
    """Renders records for a terminal: time of day, level, event, fields; requests and states as short lines."""

    def __init__(self, *, colors: bool) -> None:
        self._render = structlog.dev.ConsoleRenderer(
            colors=colors,
            pad_event_to=24,
            exception_formatter=structlog.dev.plain_traceback,  # the rich one shows local variables: prompts
        )

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> str:
        if event.get("event") == "request" and "path" in event:
            event = short_request(event)
        elif event.get("event") == "group state" and {"group", "state"} <= event.keys():
            event = short_state(event)
        try:
            at = datetime.fromisoformat(str(event.get("timestamp"))).astimezone()
            event["timestamp"] = at.strftime("%H:%M:%S.%f")[:-3]
        except ValueError:
            pass
        return str(self._render(logger, method, event))

    def line(self, line: str) -> str:
        record = parse_record(line)
        if record is None or not all(isinstance(record.get(key), str) for key in _ALWAYS):
            return line.rstrip("\n")
        return self(None, "", record)


def short_state(event: EventDict) -> EventDict:
    """Return the record of a group's state as a sentence: ``group left is loading: hello``."""
    rest = {k: v for k, v in event.items() if k not in ("group", "state", "reason") and v is not None}
    why = f": {event['reason']}" if event.get("reason") else ""
    return {**rest, "event": f"group {event['group']} is {event['state']}{why}"}


def short_request(event: EventDict) -> EventDict:
    """Return a request's record with its figures in the event: ``POST /v1/chat 200 4.1s 19→127 tok 31 tok/s``."""
    rest = {k: v for k, v in event.items() if k not in _SHORT and not (k in _ZERO_UNLESS and not v)}
    parts = [str(event.get("method", "")), str(event["path"]), str(event.get("status", ""))]
    duration_s = float(event.get("duration_s", 0.0))
    parts.append(f"{duration_s:.1f}s" if duration_s >= 0.1 else f"{1e3 * duration_s:.0f}ms")
    if (n := event.get("generated_tokens")) is not None:
        parts.append(f"{event.get('prompt_tokens', 0)}→{n} tok")
        decode_s = duration_s - (event.get("first_token_s") or 0.0)
        if n > 1 and decode_s > 0:
            parts.append(f"{(n - 1) / decode_s:.0f} tok/s")
    return {**rest, "event": " ".join(parts)}
