"""Keeps the latest load progress of each group, and since when it has been in its state.

Invariant: bytes are shown only while their group loads.
"""

from __future__ import annotations

import time
from typing import Any

from lucevisor.deployment.service import Observer, Service
from lucevisor.protocol.messages import Progress
from lucevisor.supervision.states import State


class KeptProgress:
    """An observer that passes everything on to another one."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.announced = True
        """Whether the observer is told that requests are served."""
        self._since: dict[str, float] = {}
        self._loading: set[str] = set()
        self._shards: dict[str, dict[tuple[int, int], Progress]] = {}

    def state(self, group: str, state: State, reason: str) -> None:
        """Called when a group changes its state."""
        self._since[group] = time.monotonic()
        self._shards.pop(group, None)
        if state is State.LOADING:
            self._loading.add(group)
        else:
            self._loading.discard(group)
        self._observer.state(group, state, reason)

    def progress(self, group: str, progress: Progress) -> None:
        """Called when a shard has loaded more bytes."""
        if group in self._loading:  # reports have a channel of their own and may come after READY
            self._shards.setdefault(group, {})[progress.stage, progress.device] = progress
        self._observer.progress(group, progress)

    def ready(self, service: Service) -> None:
        """Called when the endpoint is ready."""
        if self.announced:
            self._observer.ready(service)

    def state_s(self, group: str) -> float:
        """Return for how many seconds a group has been in its state."""
        since = self._since.get(group)
        return 0.0 if since is None else time.monotonic() - since

    def loading(self, group: str) -> dict[str, Any] | None:
        """Return phase and bytes of a group that loads, all its shards together; None for others."""
        shards = list(self._shards.get(group, {}).values())
        if not shards:
            return None
        last = min(shards, key=lambda one: one.done_bytes / max(1, one.total_bytes))
        return {
            "phase": last.phase,
            "done_bytes": sum(one.done_bytes for one in shards),
            "total_bytes": sum(one.total_bytes for one in shards),
        }
