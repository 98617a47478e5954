"""Errors of a daemon with a place and advice; they reach the supervisor as ``Failed``.

Invariant: ``where``, ``reason`` and ``advice`` suffice to act, without a traceback.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from lucevisor.model.gguf_header import GgufError
from lucevisor.protocol.messages import Failed

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


def failure(what: str, error: Exception, group: str, where: str) -> Failed:
    """What the supervisor is told of an error that is being handled, in ``what`` the daemon of ``group`` was at."""
    if isinstance(error, DaemonError):
        where, reason, advice, configuration = error.where, error.reason, error.advice, error.configuration
    else:
        # Only loading reads configured files; a compiler's own files may be missing for a moment.
        configuration = what == "load" and isinstance(error, GgufError | FileNotFoundError | PermissionError)
        reason, advice = describe(error), _advice(error, configuration)
    return Failed(
        what=what,
        where=f"{group} {where}".strip(),
        reason=reason,
        advice=advice,
        configuration=configuration,
        details=traceback.format_exc(),
    )


def _advice(error: Exception, configuration: bool) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return (
            "the device is full: give it fewer layers (placement.target_layer_split) or fewer pages (engine.pages), "
            "or free it"
        )
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "the machine's memory is full: give the group fewer layers or pages, or free it"
    if configuration:
        return "correct the file or the configuration, then `lucevisor restart GROUP`"
    return "the daemon is restarted; if this repeats, the log holds the traceback"
