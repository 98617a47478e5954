"""Failures of a daemon that have a place and an advice; they travel to the supervisor as ``Failed``.

Invariant: whoever reads ``where``, ``reason`` and ``advice`` needs no traceback to act.
"""

from __future__ import annotations


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
