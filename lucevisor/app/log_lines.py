"""What a line of the log says: whether it is wanted, and how it reads on a terminal.

Knows the fields of our records, no file.  Invariant: any other line is shown unchanged.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import structlog
from structlog.typing import EventDict, WrappedLogger

STARTED: Final = "supervisor starts"
"""The first record of a run."""

_SHORT: Final = ("method", "path", "status", "duration_s", "prompt_tokens", "generated_tokens", "first_token_s")
_ZERO_UNLESS: Final = ("cached_tokens", "accepted_tokens", "rejected_tokens", "queue_s")
_ALWAYS: Final = ("event", "level", "timestamp")
_SEVERITY: Final = logging.getLevelNamesMapping()


@dataclass(frozen=True, slots=True)
class LogQuery:
    """``last``: how many of the newest lines, None: all; ``since_s``: Unix time, 0: any."""

    group: str | None = None
    follow: bool = False
    last: int | None = None
    since_s: float = 0.0
    level: str = "debug"


def wanted(line: str, query: LogQuery) -> bool:
    """Return whether a line of the log is of the group, level and time that the query names."""
    if query.group is None and query.since_s == 0 and query.level == "debug":
        return True
    record = record_of(line)
    if record is None:
        return False
    if query.group is not None and record.get("group") != query.group:
        return False
    if _SEVERITY.get(str(record.get("level", "info")).upper(), logging.INFO) < _SEVERITY[query.level.upper()]:
        return False
    return query.since_s == 0 or seconds_of(record) >= query.since_s


def record_of(line: str) -> dict[str, Any] | None:
    """Return the record of a line, or None if it is not one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def seconds_of(record: dict[str, Any]) -> float:
    """Return when a record was made, in Unix time; 0 when it does not say."""
    try:
        return datetime.fromisoformat(str(record.get("timestamp"))).timestamp()
    except ValueError:
        return 0.0


class ConsoleLine:
    """Renders records for a terminal: local time of day, level, event, fields; requests and states as short lines."""

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
        """Render a line of the log file."""
        record = record_of(line)
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
