"""Cache operations of a running supervisor, for the admin API: list slots and files; verify, prune and remove files.

Uses the same functions as ``lucevisor cache --dir``, in threads, so the event loop never waits for the disk.
Invariant: the running store rescans after files were removed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lucevisor.deployment.service import Service
from lucevisor.engine.core import Engine
from lucevisor.errors import LucevisorError
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot
from lucevisor.model.pages import pages_of
from lucevisor.model.values import Space
from lucevisor.snapshots import maintenance
from lucevisor.snapshots.maintenance import JsonObject
from lucevisor.snapshots.store import SnapshotStore


class CacheOperations:
    """The cache part of the admin API (lucevisor.api.admin.CachePort)."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def show(self) -> dict[str, Any]:
        """List slots in memory, most recently used first, and files; without snapshots ``dir`` and ``files`` are empty.

        ``bytes`` of a slot: its pages and states over all shards, shared ones included.
        """
        engine, store = self._service.engine, self.open_store()
        slots = sorted(engine.prefixes.slots, key=lambda s: (-s.used_at, -s.number)) if engine is not None else []
        files = await asyncio.to_thread(maintenance.files, store.directory) if store is not None else []
        return {
            "dir": str(store.directory.absolute()) if store is not None else "",
            "disk": store.budget if store is not None else self._service.config.cache.disk,
            "slots": [_slot(engine, slot) for slot in slots] if engine is not None else [],
            "files": files,
        }

    async def verify(self, files: Sequence[str], *, set_aside: bool) -> list[JsonObject]:
        """Compare all checksums of ``files``, or of all snapshots, one file after the other."""
        store = self._store()
        directory = store.directory
        checked, n_aside = [], 0
        try:
            for file in await asyncio.to_thread(maintenance.to_verify, directory, files):
                result = await asyncio.to_thread(maintenance.verify, directory, file, set_aside=set_aside)
                checked.append(result)
                n_aside += bool(result["set_aside"])
        finally:
            if n_aside:
                await self._scan(store)
        return checked

    async def prune(self, disk_bytes: int | None, *, refused: bool) -> list[JsonObject]:
        """Remove leftovers and files beyond ``disk_bytes`` (None: the configured budget)."""
        store = self._store()
        most = store.disk_bytes if disk_bytes is None else disk_bytes
        gone = await asyncio.to_thread(maintenance.prune, store.directory, most, refused=refused)
        await self._scan(store)
        return gone

    async def remove(self, files: Sequence[str], *, everything: bool) -> list[JsonObject]:
        """Remove files by name, or all."""
        store = self._store()
        try:
            return await asyncio.to_thread(maintenance.remove, store.directory, files, everything=everything)
        finally:  # some may be removed before one fails
            await self._scan(store)

    async def _scan(self, store: SnapshotStore) -> None:
        if self._service.state != "draining":  # or the store may be closed already
            await asyncio.to_thread(store.scan)

    def open_store(self) -> SnapshotStore | None:
        """Return the store; None while snapshots are off, or not open yet."""
        return self._service.snapshots.store if self._service.snapshots is not None else None

    def _store(self) -> SnapshotStore:
        store = self.open_store()
        if self._service.state == "draining":
            raise LucevisorError("the supervisor is stopping: use --dir when it has stopped")
        if store is not None:
            return store
        cache = self._service.config.cache
        if cache.dir and cache.prefix_slots:
            raise LucevisorError("snapshots are not open yet: the model is not placed; ask again when it is ready")
        key = "cache.prefix_slots is 0" if cache.dir else "cache.dir is not set"
        raise LucevisorError(f"snapshots are off: {key} in {self._service.config.file}")


def _slot(engine: Engine, slot: PrefixSlot) -> JsonObject:
    unit = Counter(engine.prefixes.settings.unit_bytes)  # 0 for a space that the model lacks
    n_pages = pages_of(slot.n_tokens)
    n_bytes = unit[Space.FULL] * n_pages + unit[Space.WINDOW] * (n_pages - slot.first_window)
    return {
        "n_tokens": slot.n_tokens,
        "origin": slot.origin,
        "pins": slot.pins,
        "uses": slot.n_uses,
        "bytes": n_bytes + (unit[Space.RECURRENT] if slot.state != NO_STATE else 0),
    }
