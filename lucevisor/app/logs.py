"""Log sinks and log rotation: JSON lines in a rotating file that outlives the process, console or JSON lines on stderr.

Each sink has a bounded queue and a writer thread, so no caller waits for a disk, a terminal or a pipe, and no failed
write reaches a caller.  A record that cannot be queued or written is dropped and counted; the next one that is written
comes after a record that says how many are missing.
"""

from __future__ import annotations

import atexit
import contextlib
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

from lucevisor.app.log_lines import ConsoleLine

FILE: Final = "supervisor.jsonl"
FILE_BYTES: Final = 8 * 2**20
N_OLD_FILES: Final = 3
"""A file that reaches FILE_BYTES becomes FILE.1, and that FILE.2; the oldest of N_OLD_FILES is removed."""

REFUSALS_PER_S: Final = 10.0
REFUSALS_BURST: Final = 100.0
"""So many records of refused requests are written; the next one says how many were not."""

N_QUEUED: Final = 4096
CLOSING_S: Final = 1.0
"""How long `close` waits for each writer."""

Sink = Literal["file", "stderr"]


class Drops:
    """Counts the records that a sink never got.  Thread-safe."""

    def __init__(self) -> None:
        self.total = 0
        self.unreported = 0
        self.reason = ""
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        with self._lock:
            self.total += 1
            self.unreported += 1
            self.reason = reason

    def reported(self, n: int) -> None:
        with self._lock:
            self.unreported -= n


_drops: dict[Sink, Drops] = {"file": Drops(), "stderr": Drops()}  # of this process, over all calls of `configure`


class _Queue(QueueHandler):
    """Queues a record for a writer thread; drops it when the queue is full."""

    def __init__(self, drops: Drops) -> None:
        self.records: queue.Queue[Any] = queue.Queue(N_QUEUED)
        super().__init__(self.records)
        self.drops = drops

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave structlog's records to the writer thread; render others now, with arguments and traceback."""
        prepared: logging.LogRecord = record if isinstance(record.msg, dict) else super().prepare(record)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.drops.add(f"{N_QUEUED} records wait to be written")

    def handleError(self, record: logging.LogRecord) -> None:
        self.drops.add("the record cannot be rendered")


class _Writer(QueueListener):
    """The thread that feeds one sink.  A daemon thread: a write that hangs does not hold up the exit."""

    def __init__(self, records: queue.Queue[Any], handler: logging.Handler) -> None:
        super().__init__(records, handler)
        self._records = records

    def finish(self, deadline_s: float) -> None:
        """Write what is queued and end, or give up at the deadline."""
        thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._records.put(None, timeout=deadline_s)  # what `QueueListener` takes for the end
            thread.join(deadline_s)


class _SinkHandler(logging.Handler):
    """Renders and writes records, in the writer's thread; an error drops the record.  ``write`` takes all or raises."""

    def __init__(self, sink: Sink, write: Callable[[bytes], None], formatter: logging.Formatter) -> None:
        super().__init__()
        self.sink = sink
        self.drops = _drops[sink]
        self._write = write
        self.setFormatter(formatter)

    def handle(self, record: logging.LogRecord) -> bool:
        """Write without the handler's lock: `logging.shutdown` takes it, and would wait for a write that hangs."""
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        n_missing = self.drops.unreported
        try:
            text = self.format(record)
            if n_missing:
                text = f"{self._drop_notice(n_missing)}\n{text}"
            self._write(f"{text}\n".encode(errors="backslashreplace"))
        except OSError as error:
            self.drops.add(error.strerror or str(error))
        except Exception as error:  # a log record about this would end here as well
            self.drops.add(f"{type(error).__name__}: {error}")
        else:
            self.drops.reported(n_missing)

    def format(self, record: logging.LogRecord) -> str:
        return str(record.msg) if getattr(record, "plain", False) else super().format(record)

    def _drop_notice(self, n_missing: int) -> str:
        event = {
            "event": "log records dropped",
            "level": "warning",
            "timestamp": _iso(time.time()),
            "records": n_missing,
            "sink": self.sink,
            "reason": self.drops.reason,
        }
        record = logging.LogRecord("lucevisor", logging.WARNING, "", 0, event, None, None)
        record._logger, record._name = None, "warning"  # by which ProcessorFormatter knows records of structlog
        return self.format(record)


class _RotatingFile(RotatingFileHandler):
    """A file that rotates.  Unbuffered, so that a full disk leaves neither half a line nor a backlog."""

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
                self.stream = None  # should its directory be gone, too
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


class _Stderr:
    """Standard error, past its buffer and lock where nothing else shares it."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._fd: int | None = None
        if not stream.isatty():  # else progress bars may share it, through the stream
            with contextlib.suppress(OSError, ValueError, AttributeError):
                self._fd = stream.fileno()

    def write(self, data: bytes) -> None:
        if self._fd is not None:  # past the stream's lock: the interpreter takes that at exit
            _write_all(self._fd, data)
        else:
            self._stream.write(data.decode())
            self._stream.flush()


class RefusalLimit:
    """A processor that bounds the rate of records about requests that were refused or malformed, which anybody can
    send without end; all are counted in the metrics.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens, self._filled_s = REFUSALS_BURST, clock()
        self._n_left_out = 0

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        status = event.get("status")
        refused = isinstance(status, int) and 400 <= status < 500
        if event.get("event") != "malformed request" and not (refused and event.get("event") == "request"):
            return event
        now = self._clock()
        self._tokens = min(REFUSALS_BURST, self._tokens + (now - self._filled_s) * REFUSALS_PER_S)
        self._filled_s = now
        if self._tokens < 1.0:
            self._n_left_out += 1
            raise structlog.DropEvent
        self._tokens -= 1.0
        if self._n_left_out:
            event["left_out"], self._n_left_out = self._n_left_out, 0
        return event


class _Logs:
    """The open sinks, each with its queue and writer thread."""

    def __init__(self, handlers: list[_SinkHandler], file: _RotatingFile | None) -> None:
        self.file = file
        self.parts = {handler.sink: (_Queue(handler.drops), handler) for handler in handlers}
        self._writers = [_Writer(entry.records, handler) for entry, handler in self.parts.values()]
        for entry, _ in self.parts.values():
            logging.getLogger().addHandler(entry)
        for writer in self._writers:
            writer.start()

    def close(self) -> None:
        for entry, _ in self.parts.values():
            logging.getLogger().removeHandler(entry)
        for writer in self._writers:
            writer.finish(CLOSING_S)
        if self.file is not None:
            self.file.close()


_open: _Logs | None = None


def configure(
    form: Literal["auto", "console", "json"], level: str, directory: Path | None = None, *, to_terminal: bool = True
) -> None:
    """Set up structlog and logging for this process until `close`, which also runs at exit.

    ``auto`` is console on a terminal, JSON elsewhere.  Raises OSError when the file in ``directory`` cannot be opened.
    """
    global _open
    close()
    handlers: list[_SinkHandler] = []
    file = _RotatingFile(directory / FILE) if directory is not None else None
    if file is not None:
        json_lines = _formatter(structlog.processors.JSONRenderer(ensure_ascii=False))
        handlers.append(_SinkHandler("file", file.write, json_lines))
    if to_terminal:
        rendered = _formatter(_renderer(form, is_terminal=sys.stderr.isatty()))
        handlers.append(_SinkHandler("stderr", _Stderr(sys.stderr).write, rendered))
    logging.getLogger().setLevel(logging.WARNING)
    ours = logging.getLogger("lucevisor")
    ours.setLevel(logging.DEBUG)  # structlog filters by level before a record is made
    structlog.configure(
        processors=[
            RefusalLimit(),
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
    _open = _Logs(handlers, file)


def set_level(level: str) -> None:
    """Log from this level on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))


def close() -> None:
    """Write what is queued, within `CLOSING_S` for each sink, and close the file.  Idempotent."""
    global _open
    logs, _open = _open, None
    if logs is not None:
        logs.close()


atexit.register(close)


def print_line(line: str) -> None:
    """Show a line on standard error without waiting for it, in order with the records there."""
    part = _open.parts.get("stderr") if _open is not None else None
    if part is None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        return
    record = logging.LogRecord("lucevisor", logging.INFO, "", 0, line, None, None)
    record.plain = True
    part[0].enqueue(record)


def path() -> Path | None:
    """Return the file that is logged to."""
    return Path(_open.file.baseFilename) if _open is not None and _open.file is not None else None


def dropped() -> Mapping[str, int]:
    """Return how many records each sink has dropped since this process started."""
    return {sink: drops.total for sink, drops in _drops.items()}


def _renderer(form: str, *, is_terminal: bool) -> Processor:
    if form == "json" or (form == "auto" and not is_terminal):
        return structlog.processors.JSONRenderer(ensure_ascii=False)
    return ConsoleLine(colors=is_terminal)


def _formatter(renderer: Processor) -> ProcessorFormatter:
    """Return the formatter of our own records and of libraries that use the standard library's logging."""
    return ProcessorFormatter(
        processors=[ProcessorFormatter.remove_processors_meta, renderer], foreign_pre_chain=[_from_library]
    )


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
