"""Handling of errors: the Failed message for the supervisor, and optional stages that fail to load.

Imports torch, so it is imported only once the process can be stopped and report.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from daemons.errors import DaemonError, DeviceError, LoadError, describe
from daemons.heartbeat import Reporter
from lucevisor.model.gguf_header import GgufError
from lucevisor.protocol.messages import Failed

T = TypeVar("T")


def try_to_load(what: str, reporter: Reporter, load: Callable[[Reporter], T], *, needed: bool) -> tuple[T | None, str]:
    """A stage that helps others, or None and why it cannot be loaded, which is logged.

    Raises what ``load`` does if it is ``needed``: the daemon has no other stages.
    """
    try:
        return load(reporter), ""
    except (GgufError, LoadError, DeviceError, OSError, MemoryError) as error:
        if needed:
            raise
        reporter.log("error", f"the {what} cannot be loaded", reason=str(error))
        return None, f"the {what} cannot be loaded: {error}"


def failure(what: str, error: Exception, group: str, where: str) -> Failed:
    """Return the Failed message for an error that is being handled, which happened in ``what``."""
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
