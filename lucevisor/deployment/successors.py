"""What a daemon's successor starts from: the state it held, in host memory, or what it computed, to be replayed.

Knows neither steps nor sequences.  Invariant: whatever lies in host memory for a group is given back when its next
daemon has read it, or there is none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from typing import Final

import structlog
from msgspec.structs import replace

from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.deployment.state_memory import StateMemory, export_state, import_state
from lucevisor.engine.freezer import FrozenState
from lucevisor.engine.recovery.replay import StateReplay
from lucevisor.errors import LucevisorError
from lucevisor.model.spec import LayerSpec
from lucevisor.placement.result import Placement
from lucevisor.protocol.loading import Load
from lucevisor.snapshots.transfers import ShardTransfers
from lucevisor.supervision.callbacks import LoadOrder

_SETTLE_S: Final = 1.0
"""How long a load waits for steps in flight to other stages, so that it may carry what is to be replayed."""

log = structlog.get_logger("deployment")


class Successors:
    """By group.  ``layers``: of the whole model."""

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        self._handed: dict[str, StateMemory] = {}
        self._rows: dict[str, int] = {}  # descriptors of the files that loads carry
        self._early: dict[str, asyncio.Task[StateReplay | None]] = {}  # prepared before a process can be sent its load

    async def order(self, group: str, load: Load, fds: Sequence[int], assembly: PipelineAssembly | None) -> LoadOrder:
        """Return a load, with what its daemon is to replay meanwhile.  It skips the warm-up, whose kernels are in
        caches: requests wait for it.
        """
        self._close_rows(group)
        if assembly is None or assembly.complete:
            self._forget([group])
            return LoadOrder(load, fds)
        early = self._early.pop(group, None)
        try:
            found = None if early is None else await early
        except asyncio.CancelledError:  # the process died before it was sent anything
            if early is not None:
                early.add_done_callback(_close_unread)
            raise
        if found is None:  # or steps on their way to others took longer then
            found = await self._replay(group, assembly)
        if found is None:
            return LoadOrder(replace(load, warm_up=not assembly.holding), fds)
        self._rows[group] = found.file
        return LoadOrder(replace(load, replay=[*found.stages], warm_up=False), [*fds, found.file])

    def lost(self, group: str, assembly: PipelineAssembly | None) -> None:
        """A daemon is gone, or about to be: prepare what the next one replays, which it would wait for."""
        lost = frozenset[str]() if assembly is None else assembly.lost_groups
        if lost and group not in lost:
            return  # it has no stages, so what was prepared for others holds
        self._forget([*self._early])
        if assembly is not None and group in lost:
            work = self._replay(group, assembly)
            self._early[group] = asyncio.get_running_loop().create_task(work, name=f"replay of {group}")

    async def _replay(self, group: str, assembly: PipelineAssembly) -> StateReplay | None:
        return None if group in self._handed else await assembly.replay(group, _SETTLE_S)

    async def keep(
        self,
        group: str,
        placement: Placement,
        transfers: ShardTransfers,
        frozen: FrozenState,
        draft_layers: Sequence[LayerSpec],
    ) -> None:
        """Export a group's state, and that of a drafter, for its next daemon, which computes what is missing again."""
        try:
            self._handed[group] = await export_state(self._layers, placement, transfers, frozen, [group], draft_layers)
        except LucevisorError as error:
            log.warning("state is not kept", group=group, reason=str(error))

    def loaded(self, group: str) -> StateMemory | None:
        """Return the state for a daemon that has loaded, if there is one; the caller lets it read that."""
        self._close_rows(group)
        return self._handed.pop(group, None)

    def drop(self, group: str) -> None:
        """Drop the state: the group will have no next daemon."""
        self._close_rows(group)
        self._forget([group])
        if group in self._handed:
            self._handed.pop(group).close()

    def close(self) -> None:
        """Give everything back."""
        for group in {*self._handed, *self._rows, *self._early}:
            self.drop(group)

    def _forget(self, groups: Iterable[str]) -> None:
        """Nobody will read what was prepared."""
        for group in groups:
            if (task := self._early.pop(group, None)) is not None:
                task.cancel()
                task.add_done_callback(_close_unread)

    def _close_rows(self, group: str) -> None:
        if group in self._rows:
            os.close(self._rows.pop(group))


def _close_unread(task: asyncio.Task[StateReplay | None]) -> None:
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        log.warning("a replay that is not needed any more failed", what=task.get_name(), reason=repr(error))
    elif (found := task.result()) is not None:
        os.close(found.file)


async def take_over(memory: StateMemory, transfers: ShardTransfers, group: str) -> bool:
    """Let a new daemon read what its predecessor held; return whether it did."""
    try:
        await import_state(memory, transfers, [group])
    except LucevisorError as error:
        log.warning("state is not kept", group=group, reason=str(error))
        return False
    return True
