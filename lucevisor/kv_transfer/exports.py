"""Exports: the state of daemons in host memory, for their successors after a restart or reload.

Units are the supervisor's, so a reader may have other layers than the writer had.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

import structlog

from lucevisor.errors import LucevisorError
from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.kv_transfer.layout import unit_tensors
from lucevisor.kv_transfer.transfers import HostState, KvTransfer, Transfer
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.messages import SlotPlace

log = structlog.get_logger("lucevisor.kv_transfer")


class ExportedState:
    """The ``units`` of ``layers``, and of the drafter's if there are any (``with_draft``).  Raises HostMemoryShort."""

    def __init__(
        self,
        memory: HostMemory,
        layers: Sequence[LayerSpec],
        kv_dtype: Dtype,
        units: Mapping[KvGroup, Sequence[int]],
        draft_layers: Sequence[LayerSpec] = (),
    ) -> None:
        places = [(kv_group, place) for kv_group, ids in units.items() for place in _slot_places(kv_group, ids)]
        tensors = [unit_tensors(kv_group, place.n_tokens, layers, kv_dtype, draft_layers) for kv_group, place in places]
        self._state = HostState(memory, HostOwner.EXPORTS, "the state of running requests in host memory", tensors)
        self.with_draft, self.n_bytes = bool(draft_layers), self._state.n_bytes
        self.units = [(file, place) for file, (_, place) in zip(self._state.units, places, strict=True)]

    async def save(self, transfers: KvTransfer, groups: Collection[str]) -> None:
        """Let ``groups`` write their layers, once transfers of prefix slots are over, and refused.  Raises
        LucevisorError."""
        began = time.monotonic()
        await transfers.quiesce("its state is handed to another daemon")
        await self._moved(transfers.save(self.units, groups), "state exported", groups, began)

    async def load(self, transfers: KvTransfer, groups: Collection[str]) -> None:
        """Let ``groups`` read their layers, and release the memory.  Raises LucevisorError."""
        began = time.monotonic()
        try:
            await self._moved(transfers.load(self.units, groups), "state imported", groups, began)
        finally:
            self.close()

    async def _moved(self, end: asyncio.Future[Transfer], event: str, groups: Collection[str], began: float) -> None:
        transfer = await end
        if transfer.problem:
            raise LucevisorError(transfer.problem)
        log.info(event, groups=[*groups], n_bytes=self.n_bytes, seconds=round(time.monotonic() - began, 3))

    def close(self) -> None:
        self._state.close()


def _slot_places(kv_group: KvGroup, ids: Sequence[int]) -> list[SlotPlace]:
    """Return what holds these units: pages as if of one sequence, states one by one."""
    if kv_group is KvGroup.RECURRENT:
        return [SlotPlace(0, state=state) for state in ids]
    if not ids:
        return []
    n_tokens = PAGE_TOKENS * len(ids)
    return [SlotPlace(n_tokens, full=[*ids]) if kv_group is KvGroup.FULL else SlotPlace(n_tokens, window=[*ids])]
