"""State of layers in host memory: written by the daemons that hold it, read by those that are to hold it next.

One memfd of all pages and recurrent states in use, by layer and unit; every daemon writes or reads its own layers, with
the messages that snapshots use.  Units are the supervisor's, so the reader may have other layers than the writer had.
Knows neither sequences nor steps.  Invariant: nothing is read that was not written whole.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import structlog
from msgspec.structs import replace

from lucevisor.engine.freezer import FrozenState
from lucevisor.errors import LucevisorError
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space
from lucevisor.placement.result import Placement
from lucevisor.protocol.messages import SlotPlace, SnapshotTensor
from lucevisor.protocol.transport import Link
from lucevisor.snapshots.file_format import unit_tensors
from lucevisor.snapshots.transfers import ShardTransfers, Transfer

log = structlog.get_logger("deployment")


class Kept(NamedTuple):
    """Links of daemons that have read what others held; ``with_draft``: the drafter's state, too."""

    links: Collection[Link] = ()
    with_draft: bool = False


_AT_ONCE = 16
"""Transfers that a daemon has at once; it takes 64, and snapshots send it some, too."""


@dataclass(slots=True)
class _Part:
    """Units of one space, as one place and its tensors: a ``TransferFile``."""

    place: SlotPlace
    tensors_: list[SnapshotTensor]
    fd: int = -1
    file: str = field(default="the state of running requests in host memory")

    def tensors(self, layers: LayerRange) -> list[SnapshotTensor]:
        return [tensor for tensor in self.tensors_ if tensor.layer in layers and not tensor.draft]

    def draft_tensors(self) -> list[SnapshotTensor]:
        return [tensor for tensor in self.tensors_ if tensor.draft]

    def n_bytes(self, tensors: Sequence[SnapshotTensor]) -> int:
        return sum(tensor.n_bytes for tensor in tensors)


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
            own, drafts = ([one for one in some if one.space is space] for some in (layers, draft_layers))
            return unit_tensors(own, n_tokens, kv_dtype) + unit_tensors(drafts, n_tokens, kv_dtype, draft=True)

        self._parts = [
            _Part(place, tensors(space, place.n_tokens))
            for space, ids in units.items()
            for place in _places(space, ids)
        ]
        self.n_bytes = 0
        for part in self._parts:
            part.tensors_ = [self._placed(tensor) for tensor in part.tensors_]
        available = psutil.virtual_memory().available
        if 2 * self.n_bytes > available:
            raise LucevisorError(f"the state takes {self.n_bytes} bytes, {available} of host memory are free")
        self._fd = os.memfd_create("lucevisor-state", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.n_bytes)
        for part in self._parts:
            part.fd = self._fd

    def _placed(self, tensor: SnapshotTensor) -> SnapshotTensor:
        at, self.n_bytes = self.n_bytes, self.n_bytes + tensor.n_bytes
        return replace(tensor, offset=at)

    async def save(self, transfers: ShardTransfers, groups: Collection[str]) -> None:
        """Let ``groups`` write the units of their layers.  Raises LucevisorError."""
        await self._all(lambda part: transfers.save(part, part.place, groups))

    async def restore(self, transfers: ShardTransfers, groups: Collection[str]) -> None:
        """Let ``groups`` read the units of their layers.  Raises LucevisorError."""
        await self._all(lambda part: transfers.restore(part, part.place, groups))

    async def _all(self, begin: Callable[[_Part], Awaitable[Transfer]]) -> None:
        for first in range(0, len(self._parts), _AT_ONCE):
            parts = self._parts[first : first + _AT_ONCE]
            for transfer in await asyncio.gather(*(begin(part) for part in parts)):
                if transfer.problem:
                    raise LucevisorError(transfer.problem)

    def close(self) -> None:
        """Give the memory back; idempotent."""
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
    """Copy what the layers of ``groups`` hold to host memory; ``layers``: of the whole model, ``draft_layers``: of a
    drafter that is attached and runs in one of the groups.  Snapshots are refused from now on, and those in progress
    awaited.  Raises LucevisorError.
    """
    ranges = [stage.layers for group in groups for stage in placement.stages_of(group)]
    own = [layer for layer in layers if any(layer.index in one for one in ranges)]
    began = time.monotonic()
    await transfers.quiesce("its state is handed to another daemon")
    try:
        memory = StateMemory(own, placement.kv_dtype, frozen.units, draft_layers)
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


async def import_state(memory: StateMemory, transfers: ShardTransfers, groups: Collection[str]) -> None:
    """Let ``groups`` read what the daemons of their layers held, and give the memory back.  Raises LucevisorError."""
    began = time.monotonic()
    try:
        await memory.restore(transfers, groups)
    finally:
        memory.close()
    seconds = round(time.monotonic() - began, 3)
    log.info("state imported", groups=[*groups], n_bytes=memory.n_bytes, seconds=seconds)


def _places(space: Space, ids: Sequence[int]) -> list[SlotPlace]:
    """Return what holds these units: all pages as if of one sequence, states one by one."""
    if space is Space.RECURRENT:
        return [SlotPlace(0, state=state) for state in ids]
    if not ids:
        return []
    n_tokens = PAGE_TOKENS * len(ids)
    return [SlotPlace(n_tokens, full=[*ids]) if space is Space.FULL else SlotPlace(n_tokens, window=[*ids])]
