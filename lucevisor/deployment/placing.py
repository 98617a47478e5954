"""One placement for all groups, computed once every group that it cannot do without has said hello.

Knows neither daemons nor how a placement is computed.  Invariant: all groups get the same placement, and it is never
computed from the hello of a process that died before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping

from lucevisor import awake
from lucevisor.errors import LucevisorError
from lucevisor.placement.result import Placement
from lucevisor.protocol.loading import Hello

PATIENCE_S = 5.0
"""How long to wait for optional groups, once all others have said hello."""


class PlacementOnce:
    """Made in a running loop.  ``place`` gets the hellos of all ``groups``, and of those of ``others`` that came in
    time."""

    def __init__(
        self,
        groups: Collection[str],
        place: Callable[[Mapping[str, Hello]], Awaitable[Placement]],
        others: Collection[str] = (),
    ) -> None:
        self._groups, self._others = frozenset(groups), frozenset(others)
        self._place = place
        self._hellos: dict[str, Hello] = {}
        self._failed: set[str] = set()  # others that will not come soon
        self._news = asyncio.Event()  # a hello, or one that will not come
        self._placed = _new_future()
        self._placing = asyncio.Lock()

    async def wait(self, group: str, hello: Hello) -> Placement:
        """Add a group's hello and return the placement.  Raises LucevisorError when there is none."""
        self._hellos[group] = hello
        self._failed.discard(group)
        self._news.set()
        if self._placed.done() and self._placed.exception() is not None:
            self._placed = _new_future()  # a restart: what did not fit may fit now
        if self._groups <= self._hellos.keys():
            async with self._placing:  # measuring takes a while, in which a daemon may come a second time
                if not self._placed.done():
                    await self._wait_for_others()
                if not self._placed.done() and self._groups <= self._hellos.keys():
                    try:
                        self._placed.set_result(await self._place(self._hellos))
                    except LucevisorError as e:
                        self._placed.set_exception(e)
        return await asyncio.shield(self._placed)

    async def _wait_for_others(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with awake.timeout(PATIENCE_S):
                while self._others - self._hellos.keys() - self._failed:
                    self._news.clear()
                    await self._news.wait()

    def forget(self, group: str) -> None:
        """The process that said hello, or should have, is gone."""
        self._hellos.pop(group, None)
        self._failed.add(group)
        self._news.set()

    def cancel(self) -> None:
        """Cancel the wait for a placement."""
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
