"""Failures of a daemon that have a place and an advice; they travel to the supervisor as ``Failed``.

Invariant: whoever reads ``where``, ``reason`` and ``advice`` needs no traceback to act.
"""

from __future__ import annotations

import traceback
from pathlib import Path

_OUR_DIRECTORY = Path(__file__).parent


class DaemonError(Exception):
    """Something could not be done.  ``configuration``: the same start would fail again, so a retry is useless."""

    def __init__(self, where: str, reason: str, advice: str, *, configuration: bool = False) -> None:
        super().__init__(f"{where}: {reason}; {advice}")
        self.where, self.reason, self.advice, self.configuration = where, reason, advice, configuration


class StateError(DaemonError):
    """An operation or a slice that contradicts the tables of this daemon: supervisor and daemon no longer agree."""

    def __init__(
        self, where: str, reason: str, advice: str = "reset the daemon; if it happens again, report it with the log"
    ) -> None:
        super().__init__(where, reason, advice)


class LoadError(DaemonError):
    """A tensor could not be read, understood or placed."""


class DeviceError(DaemonError):
    """A device is missing, out of memory or refuses to work."""


def describe(error: BaseException) -> str:
    """Return type, first line and place of an error of somebody else's code: torch adds lines of hints, and the place
    that matters is the innermost one in this package.
    """
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    ours = next((f for f in reversed(frames) if _OUR_DIRECTORY in Path(f.filename).parents), None)
    if ours is None:
        return said
    return f"{said} (at daemons/{Path(ours.filename).relative_to(_OUR_DIRECTORY)}:{ours.lineno} in {ours.name})"
