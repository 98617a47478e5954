"""Which log lines are wanted.  In a file of its own, so that rendering lines imports no server."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

MAX_LINES: Final = 1_000_000


class LogQuery(msgspec.Struct, frozen=True):
    """GET /logs.  ``last``: how many of the newest lines, None: all; ``since_s``: Unix time, 0: any."""

    group: str | None = None
    follow: bool = False
    last: Annotated[int, msgspec.Meta(ge=0, le=MAX_LINES)] | None = None
    since_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    level: Literal["debug", "info", "warning", "error"] = "debug"
