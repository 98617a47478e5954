"""State of layers in host memory: written by the daemons that hold it, read by those that are to hold it next.

One memfd of all pages and recurrent states in use, by layer and unit; every daemon writes or reads its own layers, with
the messages that snapshots use.  Units are the supervisor's, so the reader may have other layers than the writer had.
Knows neither sequences nor steps.  Invariant: nothing is read that was not written whole.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
from msgspec.structs import replace

from lucevisor.errors import LucevisorError
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space
from lucevisor.protocol.transfers import SlotPlace, SnapshotTensor
from lucevisor.snapshots.layout import unit_tensors
from lucevisor.snapshots.shard_transfers import ShardTransfers
from lucevisor.snapshots.transfers import Transfer

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
        return [tensor for tensor in self.tensors_ if tensor.layer in layers]

    def draft_tensors(self) -> list[SnapshotTensor]:
        return []

    def n_bytes(self, tensors: Sequence[SnapshotTensor]) -> int:
        return sum(tensor.n_bytes for tensor in tensors)


class StateMemory:
    """Room for the ``units`` of ``layers``.  Raises LucevisorError if host memory has none."""

    def __init__(self, layers: Sequence[LayerSpec], kv_dtype: Dtype, units: Mapping[Space, Sequence[int]]) -> None:
        self._parts = [
            _Part(place, unit_tensors([layer for layer in layers if layer.space is space], place.n_tokens, kv_dtype))
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


def _places(space: Space, ids: Sequence[int]) -> list[SlotPlace]:
    """Return what holds these units: all pages as if of one sequence, states one by one."""
    if space is Space.RECURRENT:
        return [SlotPlace(0, state=state) for state in ids]
    if not ids:
        return []
    n_tokens = PAGE_TOKENS * len(ids)
    return [SlotPlace(n_tokens, full=[*ids]) if space is Space.FULL else SlotPlace(n_tokens, window=[*ids])]
