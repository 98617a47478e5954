"""Swap space: host memory for the KV cache of preempted requests, which daemons write and read like snapshots.

Invariant: never more than ``limit_bytes``; a copy is read only if every daemon has written its part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import structlog

from lucevisor.engine.sequence import RequestRecord, SwappedPrefix
from lucevisor.engine.shell import Engine
from lucevisor.kv.prefix_cache import Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv_transfer.host_memory import HostMemory, HostMemoryShort
from lucevisor.kv_transfer.layout import slot_tensors
from lucevisor.kv_transfer.transfers import HostState, KvTransfer, Transfer
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import Dtype
from lucevisor.placement.result import HostOwner
from lucevisor.protocol.messages import SlotPlace

log = structlog.get_logger("deployment")


@dataclass(slots=True, eq=False)
class _Copy:
    """``busy``: daemons write or read it.  ``with_draft``: it has the state of the drafter of now."""

    state: HostState
    with_draft: bool
    busy: bool = False
    wanted: bool = True


class HostSwapSpace:
    """The engine's ``SwapSpace``.  ``layers``: of the model; ``draft_layers``: of its drafter, if one is placed.
    ``transfers``: those of the present deployment."""

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[LayerSpec],
        draft_layers: Sequence[LayerSpec],
        kv_dtype: Dtype,
        memory: HostMemory,
        limit_bytes: int,
        transfers: Callable[[], KvTransfer | None],
    ) -> None:
        self._engine, self._layers, self._draft_layers, self._kv_dtype = engine, layers, draft_layers, kv_dtype
        self._memory, self._limit_bytes, self._transfers = memory, limit_bytes, transfers
        self._copies: dict[SwappedPrefix, _Copy] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.n_writing = 0

    def write(self, slot: PrefixSlot) -> SwappedPrefix | None:
        """Begin to copy a pinned slot, which is released when its bytes are written; None: no room, it is released
        now."""
        copy = self._room_for(slot)
        if copy is None:
            self._engine.prefixes.unpin(slot)
            return None
        swapped = SwappedPrefix(slot.n_tokens, slot.paged_out)
        self._copies[swapped] = copy
        self.n_writing += 1
        self._begin(copy, self._write(slot, swapped, copy))
        return swapped

    def read(self, record: RequestRecord, swapped: SwappedPrefix, reservation: Reservation) -> None:
        """Begin to copy a request's state back into reserved ids; then adopt them and resume the request."""
        copy = self._copies[swapped]
        self._begin(copy, self._read(record, swapped, copy, reservation))

    def drop(self, swapped: SwappedPrefix) -> None:
        """Release the memory when no daemon uses it any more."""
        copy = self._copies[swapped]
        copy.wanted = False
        if not copy.busy:
            self._close(swapped)

    async def close(self) -> None:
        """Release all memory, when all daemons have exited."""
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for swapped in [*self._copies]:
            self._close(swapped)

    # ---- inside

    def _room_for(self, slot: PrefixSlot) -> _Copy | None:
        draft_layers = self._draft_layers if self._draft_layers and self._engine.prefixes.drafted(slot) else ()
        tensors = slot_tensors(self._layers, slot.n_tokens, self._kv_dtype, draft_layers)
        what = "what a preempted request has computed"
        try:
            state = HostState(self._memory, HostOwner.SWAP, what, [tensors], self._limit_bytes)
        except HostMemoryShort as error:
            log.info("preempted request will be recomputed", reason=str(error))
            return None
        return _Copy(state, bool(draft_layers))

    def _begin(self, copy: _Copy, work: Coroutine[object, object, None]) -> None:
        copy.busy = True
        task = asyncio.create_task(work, name="swap")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, slot: PrefixSlot, swapped: SwappedPrefix, copy: _Copy) -> None:
        try:
            place = await self._engine.slots.export(slot)
            if place is None:
                return
            try:
                copy.with_draft &= self._engine.prefixes.drafted(slot)  # by the drafter of now
                swapped.whole = await self._move(copy, place, load=False) is not None and slot.alive
            finally:
                self._engine.prefixes.unpin(slot)
        finally:
            self.n_writing -= 1
            self._ended(swapped, copy)
            self._engine.slots.release(slot)

    async def _read(self, record: RequestRecord, swapped: SwappedPrefix, copy: _Copy, reservation: Reservation) -> None:
        """Restore a request.

        If that fails, or the request cannot start from the restored slot, it is computed again and never read twice.
        """
        slot = None
        try:
            if await self._engine.slots.synchronize():
                swapped.whole = False
                slot = await self._restored(record, swapped, copy, reservation)
        finally:
            self._engine.slots.cancel_reservation(reservation)
            self._engine.resume(record.request.request_id)
            self._ended(swapped, copy)
        if slot is not None:
            try:
                await self._engine.slots.synchronize()  # until a step was planned, for until then it may be evicted
            finally:
                self._engine.slots.release(slot)

    async def _restored(
        self, record: RequestRecord, swapped: SwappedPrefix, copy: _Copy, reservation: Reservation
    ) -> PrefixSlot | None:
        """Return the slot that a copy was read to, pinned; None if that failed."""
        copy.with_draft &= reservation.drafted
        done = await self._move(copy, reservation.place, load=True)
        if done is None:
            return None
        tokens = record.tokens[: swapped.n_tokens]
        return self._engine.slots.adopt(tokens, reservation, drafted=copy.with_draft and not done.without)

    async def _move(self, copy: _Copy, place: SlotPlace, *, load: bool) -> Transfer | None:
        """Let the daemons write or read; None if that failed."""
        transfers, [unit] = self._transfers(), copy.state.units
        if transfers is None:
            return None
        unit.with_draft = copy.with_draft
        done = await (transfers.load if load else transfers.save)([(unit, place)])
        if done.problem:
            log.warning("preempted request will be recomputed", reason=done.problem)
            return None
        return done

    def _ended(self, swapped: SwappedPrefix, copy: _Copy) -> None:
        copy.busy = False
        if not copy.wanted:
            self._close(swapped)

    def _close(self, swapped: SwappedPrefix) -> None:
        self._copies.pop(swapped).state.close()
