"""The snapshot store for asyncio: every call runs in a thread pool, so the event loop never waits for a disk.

Knows nothing beyond the store.  Invariant: a cancelled call still runs to completion, and whatever it opened is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from lucevisor.snapshots.layout import SlotRecord
from lucevisor.snapshots.policy import SnapshotEntry
from lucevisor.snapshots.store import OpenSnapshot, SnapshotStore
from lucevisor.snapshots.writer import PendingSnapshot

P = ParamSpec("P")
T = TypeVar("T")

N_THREADS = 3  # one save waiting for fsync, one restore, one for the rest


class AsyncSnapshotStore:
    """Coroutine versions of the blocking methods of :class:`SnapshotStore`, with the same errors."""

    def __init__(self, store: SnapshotStore, n_threads: int = N_THREADS) -> None:
        self.store = store
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="snapshots")

    async def scan(self) -> list[SnapshotEntry]:
        return await self._run(self.store.scan)

    async def renew(self) -> None:
        await self._run(self.store.renew)

    async def begin(self, slot: SlotRecord) -> PendingSnapshot:
        return await self._run_or_undo(lambda w: self.store.abort(w, "the save was cancelled"), self.store.begin, slot)

    async def finish(self, pending: PendingSnapshot, n_bytes: int) -> SnapshotEntry:
        return await self._run(self.store.finish, pending, n_bytes)

    async def abort(self, pending: PendingSnapshot, reason: str) -> None:
        await self._run(self.store.abort, pending, reason)

    async def open_for_restore(self, entry: SnapshotEntry, n_tokens: int | None = None) -> OpenSnapshot:
        return await self._run_or_undo(self.store.close_snapshot, self.store.open_for_restore, entry, n_tokens)

    async def check(self, opened: OpenSnapshot) -> None:
        await self._run(self.store.check, opened)

    async def discard(self, entry: SnapshotEntry, reason: str) -> None:
        await self._run(self.store.discard, entry, reason)

    def close(self) -> None:
        """Wait for running calls and end the threads.  Blocks as long as the disk does."""
        self._pool.shutdown()
        self.store.close()

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    async def _run_or_undo(
        self, undo: Callable[[T], None], work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``work``; if the caller is cancelled before it returns, undo the result."""
        under_way = self._pool.submit(work, *args, **kwargs)
        try:
            return await asyncio.shield(asyncio.wrap_future(under_way))
        except asyncio.CancelledError:
            under_way.add_done_callback(lambda done: None if done.exception() else undo(done.result()))
            raise
