"""Errors of a daemon with a place and advice; they reach the supervisor as ``Failed``.

Invariant: ``where``, ``reason`` and ``advice`` suffice to act, without a traceback.
"""

from __future__ import annotations

import traceback
from pathlib import Path

_OUR_DIRECTORY = Path(__file__).parent


class DaemonError(Exception):
    """Base class.  ``configuration``: the same start would fail again, so a retry is useless."""

    def __init__(self, where: str, reason: str, advice: str, *, configuration: bool = False) -> None:
        super().__init__(f"{where}: {reason}; {advice}")
        self.where, self.reason, self.advice, self.configuration = where, reason, advice, configuration


class StateError(DaemonError):
    """An operation or slice contradicts this daemon's tables: supervisor and daemon disagree."""

    def __init__(
        self, where: str, reason: str, advice: str = "reset the daemon; if it happens again, report it with the log"
    ) -> None:
        super().__init__(where, reason, advice)


class LoadError(DaemonError):
    """A tensor cannot be read, decoded or placed."""


class DeviceError(DaemonError):
    """A device is missing, out of memory or failing."""


def describe(error: BaseException) -> str:
    """Return type, first line and place of any error: torch adds lines of hints, and the place that matters is the
    innermost frame in this package.
    """
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((f for f in reversed(frames) if _OUR_DIRECTORY in Path(f.filename).parents), None)
    if ours is None:
        return text
    return f"{text} (at daemons/{Path(ours.filename).relative_to(_OUR_DIRECTORY)}:{ours.lineno} in {ours.name})"
