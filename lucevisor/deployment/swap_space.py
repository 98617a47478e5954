"""Swap space: host memory for the KV cache of preempted requests, which daemons write and read like snapshots.

One memfd for each request, of the tensors of its slot, so it is read under any layer split.  Invariant: never more than
``limit_bytes``, nor more than half of the host memory that is free; a copy is read only if every daemon has written its
part.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence

import psutil
import structlog

from lucevisor.deployment.served_model import ServedModel
from lucevisor.deployment.state_memory import with_offsets
from lucevisor.engine.sequence import RequestRecord, SwappedPrefix
from lucevisor.engine.shell import Engine
from lucevisor.kv.prefix_cache import Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.model.spec import LayerSpec
from lucevisor.model.values import Dtype, Space
from lucevisor.placement.result import Placement
from lucevisor.protocol.messages import SlotPlace, SnapshotTensor
from lucevisor.snapshots.file_format import slot_tensors
from lucevisor.snapshots.transfers import ShardTransfers, TransferFile

log = structlog.get_logger("deployment")


class _Copy(TransferFile):
    """The bytes of a slot.  Raises OSError."""

    def __init__(self, tensors: Sequence[SnapshotTensor]) -> None:
        fd = os.memfd_create("lucevisor-swap", os.MFD_CLOEXEC)
        with_draft = any(tensor.draft for tensor in tensors)
        super().__init__("what a preempted request has computed", fd, with_offsets(tensors), with_draft)
        self.total_bytes = self.n_bytes(tensors)
        self.busy = False  # daemons write or read it
        self.wanted = True


class HostSwapSpace:
    """The engine's ``SwapSpace``.  ``layers``: of the model; ``draft_layers``: of its drafter, if one is placed.
    ``transfers``: those of the present deployment."""

    def __init__(
        self,
        engine: Engine,
        layers: Sequence[LayerSpec],
        draft_layers: Sequence[LayerSpec],
        kv_dtype: Dtype,
        limit_bytes: int,
        transfers: Callable[[], ShardTransfers | None],
    ) -> None:
        self._engine, self._layers, self._draft_layers, self._kv_dtype = engine, layers, draft_layers, kv_dtype
        self._limit_bytes, self._transfers = limit_bytes, transfers
        self._copies: dict[SwappedPrefix, _Copy] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.n_writing = 0

    @property
    def n_bytes(self) -> int:
        return sum(copy.total_bytes for copy in self._copies.values())

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
        tensors = slot_tensors(self._layers, slot.n_tokens, self._kv_dtype)
        if self._draft_layers and self._engine.prefixes.drafted(slot):
            tensors += slot_tensors(self._draft_layers, slot.n_tokens, self._kv_dtype, draft=True)
        n_bytes = sum(tensor.n_bytes for tensor in tensors)
        available = psutil.virtual_memory().available
        if self.n_bytes + n_bytes > self._limit_bytes or 2 * n_bytes > available:
            reason = f"{self.n_bytes} of {self._limit_bytes} bytes of engine.swap_space are used, {available} are free"
            log.info("preempted request will be recomputed", n_bytes=n_bytes, reason=reason)
            return None
        try:
            return _Copy(tensors)
        except OSError as error:
            log.warning("preempted request will be recomputed", reason=str(error))
            return None

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
                swapped.whole = await self._move(copy, place, restore=False) is not None
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
        ids = reservation.ids
        full, window = ids.get(Space.FULL, []), ids.get(Space.WINDOW, [])
        place = SlotPlace(swapped.n_tokens, full, window, reservation.first_window, reservation.state)
        without = await self._move(copy, place, restore=True)
        if without is None:
            return None
        tokens = record.tokens[: swapped.n_tokens]
        return self._engine.slots.adopt(tokens, reservation, drafted=copy.with_draft and not without)

    async def _move(self, copy: _Copy, place: SlotPlace, *, restore: bool) -> bool | None:
        """Let the daemons write or read; return whether the drafter's part is missing, or None if it failed."""
        transfers = self._transfers()
        if transfers is None:
            return None
        begin = transfers.restore if restore else transfers.save
        done = await begin(copy, place)
        if done.problem:
            log.warning("preempted request will be recomputed", reason=done.problem)
            return None
        return bool(done.without)

    def _ended(self, swapped: SwappedPrefix, copy: _Copy) -> None:
        copy.busy = False
        if not copy.wanted:
            self._close(swapped)

    def _close(self, swapped: SwappedPrefix) -> None:
        os.close(self._copies.pop(swapped).fd)


def swap_space(
    engine: Engine, model: ServedModel, placement: Placement, transfers: Callable[[], ShardTransfers | None]
) -> HostSwapSpace | None:
    """Return the swap space that ``engine`` uses from now on; None if the placement has no room for one."""
    if not placement.swap_bytes:
        return None
    drafter = model.drafter.spec.model.layers if placement.draft is not None and model.drafter else ()
    swap = HostSwapSpace(engine, model.spec.layers, drafter, placement.kv_dtype, placement.swap_bytes, transfers)
    engine.use_swap_space(swap)
    return swap
