"""One placement for all groups, computed once every group has said hello.

Knows neither daemons nor how a placement is computed.  Invariant: all groups get the same placement, and it is never
computed from the hello of a process that died before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from lucevisor.errors import LucevisorError
from lucevisor.placement.result import Placement
from lucevisor.protocol.loading import Hello


class PlacementOnce:
    """Made in a running loop.  ``place`` gets the hellos of all ``n_groups``."""

    def __init__(self, n_groups: int, place: Callable[[Mapping[str, Hello]], Awaitable[Placement]]) -> None:
        self._n_groups = n_groups
        self._place = place
        self._hellos: dict[str, Hello] = {}
        self._placed = _new_future()
        self._placing = asyncio.Lock()

    async def wait(self, group: str, hello: Hello) -> Placement:
        """Add a group's hello and return the placement.  Raises LucevisorError when there is none."""
        self._hellos[group] = hello
        if self._placed.done() and self._placed.exception() is not None:
            self._placed = _new_future()  # a restart: what did not fit may fit now
        if len(self._hellos) == self._n_groups:
            async with self._placing:  # measuring takes a while, in which a daemon may come a second time
                if not self._placed.done():
                    try:
                        self._placed.set_result(await self._place(self._hellos))
                    except LucevisorError as e:
                        self._placed.set_exception(e)
        return await asyncio.shield(self._placed)

    def forget(self, group: str) -> None:
        """The process that said hello is gone."""
        self._hellos.pop(group, None)

    def cancel(self) -> None:
        """Nobody needs a placement any more; whoever waits for one is cancelled."""
        if not self._placed.done():
            self._placed.cancel()


def _new_future() -> asyncio.Future[Placement]:
    future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
    future.add_done_callback(_retrieve)
    return future


def _retrieve(future: asyncio.Future[Placement]) -> None:
    """Mark an exception as seen: whoever awaits the future still gets it."""
    if not future.cancelled():
        future.exception()
