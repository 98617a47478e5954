"""The `[log]` section: what is logged, and in which format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from lucevisor.config.sections import Key
from lucevisor.config.strict import AUTO, Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Logging to standard error and to a file that outlives the supervisor."""

    format: Annotated[
        Literal["auto", "console", "json"],
        Key(Choice((AUTO, "console", "json")), "`auto`: console on a terminal, JSON otherwise."),
    ] = "auto"
    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Key(Choice(("debug", "info", "warning", "error")), "Lowest level that is logged."),
    ] = "info"
