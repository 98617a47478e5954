"""Snapshot manager: saves prefix slots (KV cache) to disk and restores them.

Joins engine, store and daemons; ``policy`` decides by numbers, the daemons and the store move the bytes.  If a file
covers more of a request's prompt than the slots in memory, the request is held while the file is read into reserved
pages and checksummed; then the slot is published and the request resumes.  After any failure the request resumes
without it.  Invariant: a slot is published only if every daemon restored its part and all checksums match; pages and
descriptors are kept until every daemon is done with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import structlog

from lucevisor import suspend_clock
from lucevisor.config import CacheConfig
from lucevisor.engine.request import GenerationRequest
from lucevisor.engine.shell import Engine
from lucevisor.errors import ConfigError
from lucevisor.kv.prefix_cache import PrefixHooks, Reservation
from lucevisor.kv.prefix_tree import PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.kv_transfer.transfers import KvTransfer, Transfer
from lucevisor.model.fingerprint import fingerprint
from lucevisor.model.spec import ModelSpec
from lucevisor.placement.result import Placement
from lucevisor.snapshots.file_format import DraftModel, SlotRecord, StateModel, max_file_bytes
from lucevisor.snapshots.policy import (
    Backoff,
    Candidate,
    SavePolicy,
    SaveTrigger,
    SnapshotMatch,
    plan_shutdown_saves,
    reject_save_reason,
)
from lucevisor.snapshots.store import (
    DISK_FAILURES,
    OpenSnapshot,
    PendingSnapshot,
    SaveFailed,
    SnapshotRefused,
    SnapshotStore,
)

TRANSFER_S = 60.0
"""Timeout of a save or restore in seconds; after it the disk is considered hung."""

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger("snapshots")


async def open_snapshots(
    engine: Engine,
    cache: CacheConfig,
    spec: ModelSpec,
    digests: Mapping[str, str],
    placement: Placement,
    transfers: KvTransfer,
    draft: DraftModel | None = None,
) -> SnapshotManager:
    """Open and scan ``cache.dir``; call ``start`` next.  ``digests``: of all tensors; ``draft``: of the drafter that is
    placed.  Raises ConfigError."""
    mark = await asyncio.to_thread(fingerprint, spec, digests, placement.options)
    model = StateModel(mark, spec.architecture, spec.name, placement.dtype, placement.kv_dtype, spec.layers, draft)
    store = SnapshotStore(Path(cache.dir), model, cache.disk)
    await asyncio.to_thread(store.scan)
    return SnapshotManager(engine, store, transfers, SavePolicy(cache.min_tokens, cache.disk))


@dataclass(slots=True, eq=False)
class _Restoring:
    """A restore in progress and the requests waiting for it.  ``late``: it timed out, so none waits any more."""

    match: SnapshotMatch
    waiting: list[str] = field(default_factory=list)
    late: bool = False


class SnapshotManager:
    """Created with the engine; ``start`` installs its hooks, ``close`` ends it."""

    def __init__(self, engine: Engine, store: SnapshotStore, transfers: KvTransfer, policy: SavePolicy) -> None:
        self.store, self.transfers = store, transfers
        self._engine, self._limits = engine, policy
        self._backoff = Backoff()
        self._restoring: dict[tuple[str, int], _Restoring] = {}
        self._candidates: dict[int, PrefixSlot] = {}
        self._disk = ThreadPoolExecutor(3, thread_name_prefix="snapshots")  # a save, a restore, and the rest
        self._wake = asyncio.Event()
        self._saving = asyncio.Lock()  # one file at a time
        self._tasks: set[asyncio.Task[object]] = set()

    # ---- lifecycle

    def start(self) -> None:
        """Install the engine hooks and start saving turns."""
        hooks = self._engine.prefixes.hooks
        hooks.on_slot, hooks.on_evict = self._on_slot, self._on_evict
        self._engine.on_submit = self._on_submit
        self._spawn(self._save_turns(), "save snapshots at turns")

    async def save_all(self, deadline_s: float) -> int:
        """Save all slots in memory that are worth it, most recently used first; return the number of files written.

        Call before the shards lose their state.  No save starts after the deadline.
        """
        end, n_saved = time.monotonic() + deadline_s, 0
        await self._renew()
        by_use = sorted(self._engine.prefixes.slots, key=lambda slot: (slot.used_at, slot.number), reverse=True)
        saved = [self._shortest_alike(slot) for slot in by_use if slot.origin != "preempted"]
        slots = {slot.number: slot for slot in saved}
        candidates = [self._candidate(slot) for slot in slots.values()]
        for candidate in plan_shutdown_saves(candidates, self._policy):
            left = end - time.monotonic()
            slot = slots[candidate.slot]
            if left <= 0:
                log.warning("snapshots not saved in time", deadline_s=deadline_s, n_saved=n_saved)
                break
            if slot.alive and not reject_save_reason(self._candidate(slot), SaveTrigger.SHUTDOWN, self._policy):
                n_saved += await self._save(slot, left)
            if self._backoff.left_s(time.monotonic()):  # others would fail as well
                break
        return n_saved

    async def close(self) -> None:
        """End all tasks and wait for the disk.  Call after the last daemon is gone, when every transfer has ended."""
        self._engine.on_submit = lambda _: False
        hooks, nothing = self._engine.prefixes.hooks, PrefixHooks()
        hooks.on_slot, hooks.on_evict = nothing.on_slot, nothing.on_evict
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # _done has logged what failed
        await asyncio.to_thread(self._disk.shutdown)  # as long as the disk takes
        await asyncio.to_thread(self.store.close)

    # ---- restore

    def _on_submit(self, request: GenerationRequest) -> bool:
        """Return whether a request must wait for a restore, starting it if need be."""
        match = self._better(request)
        if match is None:
            return False
        key = (match.entry.file, match.n_tokens)
        under_way = self._restoring.get(key)
        if under_way is None:
            under_way = self._restoring[key] = _Restoring(match)
            self._spawn(self._restore_for(key, under_way), f"restore {match.entry.file}")
        if not under_way.late:
            under_way.waiting.append(request.request_id)
        return not under_way.late

    def _better(self, request: GenerationRequest) -> SnapshotMatch | None:
        prefixes = self._engine.prefixes
        if not prefixes.enabled or not self.store.n_files:
            return None  # the usual case: nothing is packed for it
        prompt = TokenBuffer.of(request.prompt)
        match = self.store.find(prompt, len(prompt) - 1)
        if match is None:
            return None
        if not self._engine.slots.can_restore(match.n_tokens, match.entry.n_tokens, match.entry.snapshot.paged_out):
            return None
        gain = match.n_tokens - prefixes.match(prompt).position
        return match if gain >= max(1, self._limits.min_tokens) else None

    async def _restore_for(self, key: tuple[str, int], under_way: _Restoring) -> None:
        slot = None
        try:
            slot = await self._restore(under_way)
        finally:
            del self._restoring[key]
            self._resume(under_way)
            if slot is not None:
                self._engine.slots.release(slot)

    def _resume(self, under_way: _Restoring) -> None:
        under_way.late = True
        for request_id in under_way.waiting:
            self._engine.resume(request_id)
        under_way.waiting.clear()

    async def _restore(self, under_way: _Restoring) -> PrefixSlot | None:
        """Return the restored slot, pinned, or None."""
        match, started = under_way.match, time.monotonic()
        reservation = await self._engine.slots.reserve(match.n_tokens, match.entry.snapshot.paged_out)
        if reservation is None:
            log.info("snapshot not restored", file=match.entry.file, reason="not enough free pages or states")
            return None
        slot = None
        try:
            opened = await self._on_disk(self.store.open_for_restore, match.entry, match.n_tokens)
            opened.with_draft = opened.with_draft and reservation.drafted
            try:
                transfer = await self._fill(opened, reservation, lambda: self._resume(under_way))
            finally:
                self.store.close_snapshot(opened)
            drafted, problem = opened.with_draft and not transfer.without, transfer.problem
            if not problem and (slot := self._engine.slots.adopt(opened.tokens, reservation, drafted=drafted)) is None:
                problem = "a daemon was lost in the meantime"
        except SnapshotRefused:  # logged and counted by the store
            return None
        finally:
            self._engine.slots.cancel_reservation(reservation)
        seconds = time.monotonic() - started
        if problem:
            self.store.not_restored(match.entry, problem)
            return None
        self.store.restored(opened, seconds)
        log.info("snapshot restored", file=match.entry.file, n_tokens=match.n_tokens, seconds=round(seconds, 4),
                 converted=transfer.converted, with_draft=drafted)  # fmt: skip
        return slot

    async def _fill(self, opened: OpenSnapshot, reservation: Reservation, late: Callable[[], None]) -> Transfer:
        """Read and checksum the file.  Raises SnapshotRefused.

        ``late`` is called on timeout; the pages stay reserved until the daemons are done.
        """
        check = asyncio.create_task(self._on_disk(self.store.check, opened))
        try:
            transfer = await self._await(self.transfers.load([(opened, reservation.place)]), TRANSFER_S, late)
        finally:
            await asyncio.wait({check})  # it reads the descriptor that the caller closes
        check.result()
        for group, reason in transfer.without.items():
            log.warning("snapshot restored without the drafter's state", file=opened.file, group=group, reason=reason)
        return transfer

    # ---- save

    def _on_slot(self, slot: PrefixSlot) -> None:
        if slot.origin not in ("disk", "preempted"):
            if self._backoff.left_s(time.monotonic()):  # no candidate is saved now
                self._candidates = {n: known for n, known in self._candidates.items() if known.alive}
            self._candidates[slot.number] = slot
            self._wake.set()

    def _on_evict(self, slot: PrefixSlot) -> None:
        """Delay an eviction to save the slot, if it is worth a file and no other save is running.

        The slot of a preempted request is not saved: its memory is needed at once, and its answer is incomplete.
        """
        if slot.origin == "preempted" or self._saving.locked() or self._reject_reason(slot, SaveTrigger.EVICTION):
            return
        self._engine.prefixes.pin(slot)
        self._spawn(self._save_evicted(slot), "save an evicted slot")

    async def _save_evicted(self, slot: PrefixSlot) -> None:
        try:
            await self._save(slot, TRANSFER_S)
        finally:
            self._engine.slots.release(slot)

    async def _save_turns(self) -> None:
        """Save new slots, longest first, while no request is queued."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._candidates:
                await self._engine.slots.wait_for_capacity()
                if pause_s := self._backoff.left_s(time.monotonic()):
                    await asyncio.sleep(pause_s)
                    continue
                await self._renew()
                longest = max(self._candidates.values(), key=lambda slot: slot.n_tokens)
                del self._candidates[longest.number]
                slot = self._shortest_alike(longest)
                if slot.alive and not self._reject_reason(slot, SaveTrigger.TURN):
                    saving = self._spawn(self._save(slot, TRANSFER_S), "save a turn")
                    await asyncio.wait({saving})  # an exception is logged and does not end this loop

    async def _renew(self) -> None:
        """Make the directory again if it was removed."""
        try:
            await self._on_disk(self.store.renew)
        except ConfigError as error:
            log.warning("snapshot directory cannot be used", reason=str(error))
            self._backoff.failed(time.monotonic())

    @property
    def _policy(self) -> SavePolicy:
        return replace(self._limits, disk_bytes=self.store.budget)

    def _shortest_alike(self, slot: PrefixSlot) -> PrefixSlot:
        """Return the shortest slot that has all but a few tokens of another one: its file serves more prompts, such as
        the same prompt again beside the next turn.
        """
        shortest = slot
        while (parent := shortest.parent) is not None and slot.n_tokens - parent.n_tokens < self._limits.min_tokens:
            shortest = parent
        return shortest

    def _candidate(self, slot: PrefixSlot) -> Candidate:
        tokens = slot.tokens
        known = self.store.find(tokens, len(tokens))
        n_bytes = max_file_bytes(self.store.model, len(tokens))
        return Candidate(slot.number, len(tokens), n_bytes, known.n_tokens if known is not None else 0)

    def _reject_reason(self, slot: PrefixSlot, trigger: SaveTrigger) -> str:
        reason = reject_save_reason(self._candidate(slot), trigger, self._policy)
        if trigger is SaveTrigger.EVICTION and self._backoff.left_s(time.monotonic()):
            reason = "saves pause, as the last one failed"
        if reason:
            log.debug("snapshot not worth a file", n_tokens=slot.n_tokens, trigger=trigger.value, reason=reason)
        return reason

    async def _save(self, slot: PrefixSlot, deadline_s: float) -> bool:
        """Write a slot's file; False if that failed, which is logged."""
        async with self._saving:
            place = await self._engine.slots.export(slot)
            if place is None:
                return False
            pending: PendingSnapshot | None = None
            try:
                drafted = self._engine.prefixes.drafted(slot)
                slot_record = SlotRecord(slot.tokens, time.time(), drafted, slot.paged_out)
                pending = await self._on_disk(self.store.begin, slot_record)
                transfer = await self._await(self.transfers.save([(pending, place)]), deadline_s)
                if transfer.problem:
                    await self._on_disk(self.store.abort, pending, transfer.problem)
                    return False
                await self._on_disk(self.store.finish, pending, transfer.n_bytes)
                self._backoff.succeeded()
            except SaveFailed as failed:  # logged and counted by the store
                if failed.label in DISK_FAILURES:
                    self._backoff.failed(time.monotonic())
                return False
            except asyncio.CancelledError:
                if pending is not None:  # unless it is finished; daemons may still write into the unlinked file
                    self.store.abort(pending, "the stop was cut short")
                raise
            finally:
                self._engine.slots.release(slot)
            return True

    # ---- inside

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work in a thread, to its end: a cancellation takes effect at the caller's next await, when what
        the work opened can be closed.
        """
        call = asyncio.ensure_future(asyncio.wrap_future(self._disk.submit(work, *args, **kwargs)))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            if (task := asyncio.current_task()) is not None:
                task.cancel()
            return call.result()

    async def _await(
        self, end: asyncio.Future[Transfer], seconds: float, late: Callable[[], object] = lambda: None
    ) -> Transfer:
        """Wait for a transfer to end, however long it takes; at the deadline it has failed, and ``late`` is called."""
        try:
            async with suspend_clock.timeout(seconds):
                return await asyncio.shield(end)
        except TimeoutError:
            late()
            transfer = await asyncio.shield(end)
            transfer.problem = f"it took longer than {seconds:.1f} s"
            return transfer

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[object]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("snapshot task failed", task=task.get_name(), reason=repr(error), exc_info=error)
