"""Ends requests that an engine has held for too long because a daemon did not come back.

Invariant: a hold is ended once it lasted ``hold_s`` of a clock that stands still while the supervisor does.
"""

from __future__ import annotations

from lucevisor import awake
from lucevisor.engine.core import Engine
from lucevisor.engine.request import RequestError


async def watch_holds(engine: Engine, hold_s: float) -> None:
    """Watch ``engine`` until cancelled."""
    recovery = engine.recovery
    while True:
        while (since := recovery.since) is None:
            recovery.changed.clear()
            await recovery.changed.wait()
        try:
            async with awake.timeout(hold_s):
                while recovery.since == since:
                    recovery.changed.clear()
                    await recovery.changed.wait()
        except TimeoutError:
            away = engine.statistics().reason
            text = f"{away}; the request was held for {hold_s:g} s (recovery.hold_s); send it again later"
            engine.detach(RequestError("shard_lost", text), permanent=True)
