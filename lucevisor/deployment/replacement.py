"""State for daemons that replace others: what theirs exported, or steps that they compute while they load."""

from __future__ import annotations

from collections.abc import Collection
from io import FileIO
from typing import Final, NamedTuple

from msgspec.structs import replace

from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.kv_transfer.exports import ExportedState
from lucevisor.protocol.loading import Load
from lucevisor.protocol.transport import Channel
from lucevisor.supervision.daemon import LoadOrder


class RestoredState(NamedTuple):
    """Links of daemons that have read what others held; ``with_draft``: the drafter's state, too."""

    links: Collection[Channel] = ()
    with_draft: bool = False


_SETTLE_S: Final = 1.0
"""Seconds that a load waits for steps in flight to other stages, to carry the steps to replay."""


class ReplacementState:
    """State for the next daemon of each group: exported state in host memory, or steps to replay while loading."""

    def __init__(self) -> None:
        self._exported: dict[str, ExportedState] = {}
        self._rows: dict[str, FileIO] = {}  # the files that loads carry

    async def load_order(
        self, group: str, load: Load, assembly: PipelineAssembly | None, *, replays: bool = True
    ) -> LoadOrder:
        """Return a load, without its boundary memory.  It carries the steps that its daemon is to replay meanwhile, if
        it ``replays``, and skips the warm-up, whose kernels are in caches, where requests wait for it.
        """
        self._close_rows(group)
        if assembly is None or assembly.complete:
            return LoadOrder(load)
        replay = None if group in self._exported or not replays else await assembly.replay(group, _SETTLE_S)
        if replay is None:
            return LoadOrder(replace(load, warm_up=not assembly.holding))
        self._rows[group] = replay.file
        return LoadOrder(replace(load, replay=[*replay.stages], warm_up=False), [replay.file.fileno()])

    def add(self, group: str, state: ExportedState) -> None:
        """Keep a group's state for its next daemon."""
        self.drop(group)  # of one that did not load
        self._exported[group] = state

    def take(self, group: str) -> ExportedState | None:
        """Return the state for a daemon that has loaded, if there is one; the caller lets it read that."""
        self._close_rows(group)
        return self._exported.pop(group, None)

    def drop(self, group: str) -> None:
        """Drop the state of a group that will have no next daemon."""
        self._close_rows(group)
        if group in self._exported:
            self._exported.pop(group).close()

    def close(self) -> None:
        for group in {*self._exported, *self._rows}:
            self.drop(group)

    def _close_rows(self, group: str) -> None:
        if group in self._rows:
            self._rows.pop(group).close()
