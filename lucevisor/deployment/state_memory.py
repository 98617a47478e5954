"""KV transfer through host memory from the daemons that hold the state to their successors.

One memfd of all pages and recurrent states in use, by layer and unit; every daemon writes or reads its own layers, with
the messages that snapshots use.  Units are the supervisor's, so the reader may have other layers than the writer had.
Invariant: nothing is read that was not written whole.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import psutil
import structlog
from msgspec.structs import replace

from lucevisor.deployment.assembly import PipelineAssembly
from lucevisor.engine.core import FrozenState
from lucevisor.errors import LucevisorError
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, Space
from lucevisor.placement.result import Placement
from lucevisor.protocol.loading import Load
from lucevisor.protocol.messages import SlotPlace, SnapshotTensor
from lucevisor.protocol.transport import Channel
from lucevisor.snapshots.file_format import unit_tensors
from lucevisor.snapshots.transfers import ShardTransfers, Transfer, TransferFile
from lucevisor.supervision.daemon import LoadOrder

log = structlog.get_logger("deployment")


class RestoredState(NamedTuple):
    """Links of daemons that have read what others held; ``with_draft``: the drafter's state, too."""

    links: Collection[Channel] = ()
    with_draft: bool = False


_AT_ONCE = 16
"""Concurrent transfers per daemon.  A daemon accepts 64, of which snapshots need some."""


def with_offsets(tensors: Sequence[SnapshotTensor], start: int = 0) -> list[SnapshotTensor]:
    """Return the tensors one after the other, from an offset on."""
    offsets = accumulate((tensor.n_bytes for tensor in tensors), initial=start)
    return [replace(tensor, offset=offset) for tensor, offset in zip(tensors, offsets, strict=False)]


class StateMemory:
    """Room for the ``units`` of ``layers``, and of the drafter's if there are any (``with_draft``).  Raises
    LucevisorError if host memory has none."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        kv_dtype: Dtype,
        units: Mapping[Space, Sequence[int]],
        draft_layers: Sequence[LayerSpec] = (),
    ) -> None:
        self.with_draft = bool(draft_layers)

        def tensors(space: Space, n_tokens: int) -> list[SnapshotTensor]:
            of_model, of_drafter = (
                [layer for layer in specs if layer.space is space] for specs in (layers, draft_layers)
            )
            return unit_tensors(of_model, n_tokens, kv_dtype) + unit_tensors(of_drafter, n_tokens, kv_dtype, draft=True)

        parts: list[tuple[SlotPlace, list[SnapshotTensor]]] = []
        self.n_bytes = 0
        for space, ids in units.items():
            for place in _slot_places(space, ids):
                parts.append((place, with_offsets(tensors(space, place.n_tokens), self.n_bytes)))
                self.n_bytes += sum(tensor.n_bytes for tensor in parts[-1][1])
        available = psutil.virtual_memory().available
        if 2 * self.n_bytes > available:
            raise LucevisorError(f"the state takes {self.n_bytes} bytes, {available} of host memory are free")
        self._fd = os.memfd_create("lucevisor-state", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.n_bytes)
        name = "the state of running requests in host memory"
        self.parts = [(place, TransferFile(name, self._fd, contents)) for place, contents in parts]

    async def save(self, transfers: ShardTransfers, groups: Collection[str]) -> None:
        """Let ``groups`` write the units of their layers.  Raises LucevisorError."""
        await self._all(lambda place, file: transfers.save(file, place, groups))

    async def restore(self, transfers: ShardTransfers, groups: Collection[str]) -> None:
        """Let ``groups`` read the units of their layers, and release the memory.  Raises LucevisorError."""
        began = time.monotonic()
        try:
            await self._all(lambda place, file: transfers.restore(file, place, groups))
        finally:
            self.close()
        seconds = round(time.monotonic() - began, 3)
        log.info("state imported", groups=[*groups], n_bytes=self.n_bytes, seconds=seconds)

    async def _all(self, begin: Callable[[SlotPlace, TransferFile], Awaitable[Transfer]]) -> None:
        for first in range(0, len(self.parts), _AT_ONCE):
            parts = self.parts[first : first + _AT_ONCE]
            for transfer in await asyncio.gather(*(begin(*part) for part in parts)):
                if transfer.problem:
                    raise LucevisorError(transfer.problem)

    def close(self) -> None:
        """Release the memory; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


async def export_state(
    layers: Sequence[LayerSpec],
    placement: Placement,
    transfers: ShardTransfers,
    frozen: FrozenState,
    groups: Collection[str],
    draft_layers: Sequence[LayerSpec] = (),
) -> StateMemory:
    """Copy the state of the layers of ``groups`` to host memory; ``layers``: of the whole model, ``draft_layers``: of a
    drafter that is attached and runs in one of the groups.  Snapshots are refused from now on, and those in progress
    awaited.  Raises LucevisorError.
    """
    ranges = [stage.layers for group in groups for stage in placement.stages_of(group)]
    exported = [layer for layer in layers if any(layer.index in range_ for range_ in ranges)]
    began = time.monotonic()
    await transfers.quiesce("its state is handed to another daemon")
    try:
        memory = StateMemory(exported, placement.kv_dtype, frozen.units, draft_layers)
    except OSError as error:
        raise LucevisorError(f"no host memory for the state: {error}") from error
    try:
        await memory.save(transfers, groups)
    except BaseException:
        memory.close()
        raise
    seconds = round(time.monotonic() - began, 3)
    log.info("state exported", groups=[*groups], n_bytes=memory.n_bytes, seconds=seconds)
    return memory


def _slot_places(space: Space, ids: Sequence[int]) -> list[SlotPlace]:
    """Return what holds these units: all pages as if of one sequence, states one by one."""
    if space is Space.RECURRENT:
        return [SlotPlace(0, state=state) for state in ids]
    if not ids:
        return []
    n_tokens = PAGE_TOKENS * len(ids)
    return [SlotPlace(n_tokens, full=[*ids]) if space is Space.FULL else SlotPlace(n_tokens, window=[*ids])]


_SETTLE_S: Final = 1.0
"""Seconds that a load waits for steps in flight to other stages, to carry the steps to replay."""


class ReplacementState:
    """State for the next daemon of each group: exported state in host memory, or steps to replay while loading.

    ``layers``: of the whole model.
    """

    def __init__(self, layers: Sequence[LayerSpec]) -> None:
        self._layers = layers
        self._exported: dict[str, StateMemory] = {}
        self._rows: dict[str, int] = {}  # descriptors of the files that loads carry

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
        return LoadOrder(replace(load, replay=[*replay.stages], warm_up=False), [replay.file])

    async def export(
        self,
        group: str,
        placement: Placement,
        transfers: ShardTransfers,
        frozen: FrozenState,
        draft_layers: Sequence[LayerSpec],
    ) -> None:
        """Export a group's state, and that of a drafter, for its next daemon, which computes what is missing again."""
        try:
            memory = await export_state(self._layers, placement, transfers, frozen, [group], draft_layers)
        except LucevisorError as error:
            log.warning("state is not saved for the next daemon", group=group, reason=str(error))
        else:
            self._exported[group] = memory

    def take(self, group: str) -> StateMemory | None:
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
            os.close(self._rows.pop(group))
