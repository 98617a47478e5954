"""Snapshot manager: copies prefix slots (KV cache) to host memory and to disk, and restores them.

New slots are copied to host memory behind the steps, and saved from there; those of preempted requests when they are
evicted.  A request that a lower tier has more of is held while that is read into reserved pages, if that is faster than
computing; after a failure it resumes without.  Invariant: a slot is published only if every daemon restored its part
and all checksums match; pages and descriptors are kept until every daemon is done with them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import structlog

from lucevisor import __version__, suspend_clock
from lucevisor.config import CacheConfig
from lucevisor.engine.shell import Engine
from lucevisor.errors import ConfigError
from lucevisor.kv.prefix_cache import MeasuredRate, PrefixHooks, Reservation
from lucevisor.kv.prefix_tree import CacheTier, PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.kv_transfer.host_tier import HostSlot, HostTier
from lucevisor.kv_transfer.transfers import KvTransfer, Transfer, TransferFile, Units
from lucevisor.model.fingerprint import adapter_fingerprint, fingerprint
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.placement.result import Placement
from lucevisor.protocol.messages import SlotPlace
from lucevisor.snapshots.disk import describe_error
from lucevisor.snapshots.file_format import DraftModel, SlotRecord, StateModel, max_file_bytes
from lucevisor.snapshots.policy import (
    Candidate,
    SavePolicy,
    SaveTrigger,
    SnapshotEntry,
    SnapshotMatch,
    longest_match,
    plan_shutdown_saves,
    reject_save_reason,
)
from lucevisor.snapshots.store import (
    DISK_FAILURES,
    PendingSnapshot,
    SaveFailed,
    SnapshotRefused,
    SnapshotStore,
)

TRANSFER_S = 60.0
"""Timeout of a save or restore in seconds; after it the disk is considered hung."""

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger("lucevisor.snapshots")


async def open_store(
    cache: CacheConfig,
    spec: ModelSpec,
    digests: Mapping[str, str],
    placement: Placement,
    draft: DraftModel | None = None,
    known: Sequence[SnapshotStore] = (),
    adapters: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> SnapshotStore:
    """Open and scan ``cache.dir``, unless a ``known`` store is for the same state.  ``digests``: of all tensors, and of
    those of the ``adapters`` by name.  Raises ConfigError."""
    mark = await asyncio.to_thread(fingerprint, spec, digests, placement.options, _computed_by(placement))
    model = StateModel(
        mark, spec.architecture, spec.name, placement.dtype, placement.kv_dtype, spec.layers, draft,
        {one.name: adapter_fingerprint(mark, one, adapters[one.name]) for one in spec.adapters},
    )  # fmt: skip
    for store in known:
        if (store.directory, store.model) == (Path(cache.dir), model):
            return store
    store = SnapshotStore(Path(cache.dir), model, cache.disk)
    await asyncio.to_thread(store.scan)
    return store


def _computed_by(placement: Placement) -> list[str]:
    """What the bits of a sequence's state depend on; nothing unless they are promised."""
    if not placement.deterministic:
        return []
    return ["deterministic", __version__, *sorted({f"{one.backend} {one.name}" for one in placement.devices})]


@dataclass(slots=True, eq=False)
class _Restoring:
    """A restore and the requests waiting for it.  ``resumed``: it ended or timed out."""

    match: SnapshotMatch
    waiting: list[str] = field(default_factory=list)
    resumed: bool = False


class SnapshotManager:
    """``host`` None: slots are not kept in host memory.  ``transfers``: of the present deployment, None without one."""

    def __init__(
        self, engine: Engine, transfers: Callable[[], KvTransfer | None], policy: SavePolicy, host: HostTier | None
    ) -> None:
        self.host = host
        self.store: SnapshotStore | None = None
        self._engine, self._transfers, self._save_policy = engine, transfers, policy
        self._whole_only = not engine.prefixes.block_granular
        self._rates: dict[CacheTier, MeasuredRate] = {"host": MeasuredRate(), "disk": MeasuredRate()}
        self._new_slots: asyncio.Queue[PrefixSlot] = asyncio.Queue()  # to be copied to host memory
        self._copying = asyncio.Lock()  # one slot at a time
        self._pause_s = self._paused_until = 0.0
        self._restoring: dict[tuple[str, int], _Restoring] = {}
        self._candidates: dict[int, PrefixSlot] = {}
        self._disk = ThreadPoolExecutor(3, thread_name_prefix="snapshots")  # a save, a restore, and the rest
        self._wake = asyncio.Event()
        self._saving = asyncio.Lock()  # one file at a time
        self._tasks: set[asyncio.Task[object]] = set()

    # ---- lifecycle

    def start(self) -> None:
        """Install the engine hooks and start copying slots to host memory."""
        hooks = self._engine.prefixes.hooks
        hooks.on_slot, hooks.on_evict = self._on_slot, self._on_evict
        hooks.fetch, hooks.find = self._fetch, self._find
        if self.host is not None:
            self.host.on_evict, hooks.on_invalid = self._on_host_evict, self.host.forget
            self._spawn(self._copy_slots(self.host), "copy slots to host memory")

    def use(self, store: SnapshotStore) -> None:
        self.store = store
        self._spawn(self._save_turns(store), "save snapshots at turns")

    async def save_all(self, deadline_s: float) -> int:
        """Save all slots that are worth it, the last used first, before the shards lose them; return the number of
        files.

        No save starts after the deadline.
        """
        store = self.store
        if store is None:
            return 0
        end, n_saved = time.monotonic() + deadline_s, 0
        await self._renew(store)
        alike = [self._shortest_alike(slot) for slot in self._engine.prefixes.slots if slot.origin != "preempted"]
        find, held = self._engine.prefixes.find_slot, self.host.slots if self.host is not None else ()
        evicted = [slot for slot in held if find(slot.tokens, slot.n_tokens) is None]
        slots: list[PrefixSlot | HostSlot] = [*dict.fromkeys(alike), *evicted]
        slots.sort(key=lambda slot: (slot.used_at, slot.n_tokens), reverse=True)
        candidates = [self._candidate(store, slot, number) for number, slot in enumerate(slots)]
        for candidate in plan_shutdown_saves(candidates, self._policy_for(store)):
            left = end - time.monotonic()
            slot = slots[candidate.slot]
            if left <= 0:
                log.warning("snapshots not saved in time", deadline_s=deadline_s, n_saved=n_saved)
                break
            if not slot.alive or self._reject_reason(store, slot, SaveTrigger.SHUTDOWN):
                continue
            if isinstance(slot, PrefixSlot):
                n_saved += await self._save(store, slot, left)
            elif self.host is not None:
                self.host.pin(slot)
                n_saved += await self._save_held(store, self.host, slot)
            if self._pause_left_s:  # others would fail as well
                break
        return n_saved

    async def copy_all(self) -> None:
        """Copy the slots that host memory lacks, the last used last, before the shards lose them."""
        if self.host is None:
            return
        for slot in sorted(self._engine.prefixes.slots, key=lambda slot: slot.used_at):
            if slot.alive and slot.origin != "preempted":
                await self._copy(self.host, slot)

    async def close(self) -> None:
        """End all tasks and wait for the disk; the store stays open.  Call it when every transfer has ended."""
        hooks, nothing = self._engine.prefixes.hooks, PrefixHooks()
        hooks.on_slot, hooks.on_evict, hooks.on_invalid = nothing.on_slot, nothing.on_evict, nothing.on_invalid
        hooks.fetch, hooks.find = nothing.fetch, nothing.find
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # _done has logged what failed
        await asyncio.to_thread(self._disk.shutdown)  # as long as the disk takes
        if self.host is not None:
            self.host.close()

    @property
    def _min_gain(self) -> int:
        """Tokens more than another tier has, for which a slot is copied to host memory and read back."""
        return max(1, min(PAGE_TOKENS, self._save_policy.min_tokens))

    @property
    def _pause_left_s(self) -> float:
        return max(0.0, self._paused_until - time.monotonic())

    def _pause_saves(self) -> None:
        """Pause after a failure of the disk, twice as long as the last time."""
        self._pause_s = min(3600.0, max(60.0, 2 * self._pause_s))
        self._paused_until = time.monotonic() + self._pause_s

    # ---- restore

    def _fetch(self, request_id: str, tokens: TokenBuffer, n_cached: int) -> bool:
        match = self._better(tokens, n_cached)
        if match is None:
            return False
        key = (match.entry.file, match.n_tokens)
        under_way = self._restoring.get(key)
        if under_way is None:
            under_way = self._restoring[key] = _Restoring(match)
            if self.host is not None and isinstance(match.entry, HostSlot):
                self.host.pin(match.entry)
            self._spawn(self._restore_for(key, under_way), f"restore {match.entry.file}")
        if not under_way.resumed:
            under_way.waiting.append(request_id)
        return not under_way.resumed

    def _find(self, tokens: TokenBuffer, n_cached: int) -> int:
        match = self._better(tokens, n_cached)
        return n_cached if match is None else match.n_tokens

    def _better(self, tokens: TokenBuffer, n_cached: int) -> SnapshotMatch | None:
        """Return what to restore for a request: of all tiers, or of host memory where that is too slow."""
        held = self.host.slots if self.host is not None else ()
        files = self.store.entries[::-1] if self.store is not None else ()
        for entries in ([*held, *files], held):
            match = longest_match(entries, tokens, len(tokens) - 1, whole_only=self._whole_only)
            if match is None:
                return None
            gain = match.n_tokens - n_cached
            if gain < (self._min_gain if _tier(match) == "host" else max(1, self._save_policy.min_tokens)):
                continue
            restorable = self._engine.slots.can_restore(match.n_tokens, match.entry.n_tokens, match.entry.paged_out)
            if restorable and self._is_faster(match, gain):
                return match
        return None

    def _is_faster(self, match: SnapshotMatch, n_tokens: int) -> bool:
        """Return whether reading a match takes less time than computing so many tokens, by the rates measured last."""
        rate, to_compute = (
            self._rates[_tier(match)],
            self._engine.core.scheduler.reuse.prompt_rate.seconds_for(n_tokens),
        )
        # a rate counts for a minute; then one prefix is read again, however slow that was
        to_read = rate.seconds_for(match.n_bytes) if time.monotonic() - rate.measured_at < 60.0 else None
        return to_compute is None or to_read is None or to_read < to_compute

    async def _restore_for(self, key: tuple[str, int], under_way: _Restoring) -> None:
        slot = None
        try:
            slot = await self._restore(under_way)
        finally:
            del self._restoring[key]
            if self.host is not None and isinstance(under_way.match.entry, HostSlot):
                self.host.unpin(under_way.match.entry)
            self._resume(under_way)
            if slot is not None:
                self._engine.slots.release(slot)

    def _resume(self, under_way: _Restoring) -> None:
        under_way.resumed = True
        for request_id in under_way.waiting:
            self._engine.resume(request_id)
        under_way.waiting.clear()

    async def _restore(self, under_way: _Restoring) -> PrefixSlot | None:
        """Return the restored slot, pinned, or None."""
        match, entry, started = under_way.match, under_way.match.entry, time.monotonic()
        reservation = await self._engine.slots.reserve(match.n_tokens, entry.paged_out)
        if reservation is None:
            log.info("snapshot not restored", file=entry.file, reason="not enough free pages or states")
            return None
        slot, tokens = None, TokenBuffer(match.entry.tokens[: match.n_tokens], match.entry.adapter)
        try:
            if isinstance(entry, HostSlot):
                reservation.origin = "host"
                transfer, drafted = await self._read_host(entry, reservation, lambda: self._resume(under_way))
            else:
                transfer, drafted = await self._read_file(match, entry, reservation, lambda: self._resume(under_way))
            drafted, problem = drafted and not transfer.without, transfer.problem
            if not problem and (slot := self._engine.slots.adopt(tokens, reservation, drafted=drafted)) is None:
                problem = "a daemon was lost in the meantime"
        except SnapshotRefused:  # logged and counted by the store
            return None
        finally:
            self._engine.slots.cancel_reservation(reservation)
        seconds = time.monotonic() - started
        if not problem:
            self._rates[_tier(match)].add(match.n_bytes, seconds, time.monotonic())
            log.info("snapshot restored", file=entry.file, n_tokens=match.n_tokens, seconds=round(seconds, 4),
                     converted=transfer.converted, with_draft=drafted)  # fmt: skip
        if isinstance(entry, SnapshotEntry) and self.store is not None:
            if problem:
                self.store.not_restored(entry, problem)
            else:
                self.store.restored(entry, seconds)
        elif problem:
            log.info("prefix slot not restored from host memory", reason=problem)
        return slot

    async def _read_host(
        self, held: HostSlot, reservation: Reservation, on_timeout: Callable[[], None]
    ) -> tuple[Transfer, bool]:
        """Let the daemons read a slot from host memory; return whether the drafter's state is among it."""
        assert self.host is not None
        drafted = held.with_draft and reservation.drafted
        self.host.touch(held, time.monotonic())
        units = self.host.units(held, reservation.place, with_draft=drafted)
        return await self._move(units, TRANSFER_S, on_timeout, load=True), drafted

    async def _read_file(
        self, match: SnapshotMatch, entry: SnapshotEntry, reservation: Reservation, on_timeout: Callable[[], None]
    ) -> tuple[Transfer, bool]:
        """Let the daemons read a file, and checksum it; return whether the drafter's state is in it.  Raises
        SnapshotRefused."""
        assert self.store is not None
        opened = await self._on_disk(self.store.open_for_restore, entry, match.n_tokens)
        opened.with_draft = opened.with_draft and reservation.drafted
        try:
            check = asyncio.create_task(self._on_disk(self.store.check, opened))
            try:
                transfer = await self._move([(opened, reservation.place)], TRANSFER_S, on_timeout, load=True)
            finally:
                await asyncio.wait({check})  # it reads the descriptor that is closed next
            check.result()
        finally:
            self.store.close_snapshot(opened)
        for group, reason in transfer.without.items():
            log.warning("snapshot restored without the drafter's state", file=opened.file, group=group, reason=reason)
        return transfer, opened.with_draft

    # ---- save

    def _on_slot(self, slot: PrefixSlot) -> None:
        if self.host is not None and slot.origin not in ("host", "preempted"):
            self._new_slots.put_nowait(slot)
        if self.store is not None and slot.origin not in ("host", "disk", "preempted"):
            if self._pause_left_s:  # no candidate is saved now
                self._candidates = {n: known for n, known in self._candidates.items() if known.alive}
            self._candidates[slot.number] = slot
            self._wake.set()

    def _on_evict(self, slot: PrefixSlot) -> None:
        """Delay an eviction to copy the slot to host memory, or else to save it, if it is worth it.

        That of a preempted request waits for its turn, and is not saved: its answer is incomplete.
        """
        preempted = slot.origin == "preempted"
        if self.host is not None:
            if (self._copying.locked() and not preempted) or not self._is_new(self.host, slot):
                return
            work: Coroutine[Any, Any, object] = self._copy(self.host, slot)
        else:
            if (
                self.store is None
                or preempted
                or self._saving.locked()
                or self._reject_reason(self.store, slot, SaveTrigger.EVICTION)
            ):
                return
            work = self._save(self.store, slot, TRANSFER_S)
        self._engine.prefixes.pin(slot)
        self._spawn(self._finish_eviction(slot, work), "keep an evicted slot")

    async def _finish_eviction(self, slot: PrefixSlot, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        finally:
            self._engine.slots.release(slot)

    def _on_host_evict(self, held: HostSlot) -> None:
        """Save a slot that host memory is about to evict to disk, if it is worth a file."""
        if self.store is None or self._saving.locked() or self._reject_reason(self.store, held, SaveTrigger.EVICTION):
            return
        assert self.host is not None
        self.host.pin(held)
        self._spawn(self._save_held(self.store, self.host, held), "save a slot from host memory")

    # ---- to host memory

    async def _copy_slots(self, host: HostTier) -> None:
        """Copy new slots to host memory, the oldest first, while steps run."""
        while True:
            slot = await self._new_slots.get()
            if slot.alive:
                copying = self._spawn(self._copy(host, slot), "copy a slot to host memory")
                await asyncio.wait({copying})  # an exception is logged and does not end this loop

    def _is_new(self, host: HostTier, slot: PrefixSlot) -> bool:
        """Return whether host memory lacks so much of a slot that it is copied."""
        known = longest_match(host.slots, slot.tokens, slot.n_tokens, whole_only=self._whole_only)
        return slot.n_tokens - (known.n_tokens if known is not None else 0) >= self._min_gain

    async def _copy(self, host: HostTier, slot: PrefixSlot) -> None:
        async with self._copying:
            place = await self._engine.slots.export(slot) if self._is_new(host, slot) else None
            if place is None:
                return
            held = None
            try:
                held = host.begin(slot, time.monotonic())
                if held is not None and not (await self._move_out(slot, held.unit, place, TRANSFER_S)).problem:
                    host.finish(held)
            finally:
                if held is not None and not held.alive:
                    host.discard(held)
                self._engine.slots.release(slot)

    # ---- to disk

    async def _save_turns(self, store: SnapshotStore) -> None:
        """Save new slots, longest first, while no request is queued."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._candidates:
                await self._engine.slots.wait_for_capacity()
                if pause_s := self._pause_left_s:
                    await asyncio.sleep(pause_s)
                    continue
                await self._renew(store)
                longest = max(self._candidates.values(), key=lambda slot: slot.n_tokens)
                del self._candidates[longest.number]
                slot = self._shortest_alike(longest)
                if slot.alive and not self._reject_reason(store, slot, SaveTrigger.TURN):
                    saving = self._spawn(self._save(store, slot, TRANSFER_S), "save a turn")
                    await asyncio.wait({saving})  # an exception is logged and does not end this loop

    async def _renew(self, store: SnapshotStore) -> None:
        try:
            await self._on_disk(store.renew)
        except ConfigError as error:
            log.warning("snapshot directory cannot be used", reason=str(error))
            self._pause_saves()

    def _policy_for(self, store: SnapshotStore) -> SavePolicy:
        return replace(self._save_policy, disk_bytes=store.budget)

    def _shortest_alike(self, slot: PrefixSlot) -> PrefixSlot:
        """Return the shortest slot that has all but a few tokens of another one: its file serves more prompts."""
        shortest = slot
        while (
            parent := shortest.parent
        ) is not None and slot.n_tokens - parent.n_tokens < self._save_policy.min_tokens:
            shortest = parent
        return shortest

    @staticmethod
    def _candidate(store: SnapshotStore, slot: PrefixSlot | HostSlot, number: int = 0) -> Candidate:
        tokens = slot.tokens
        known = store.find(tokens, len(tokens))
        n_bytes = max_file_bytes(store.model, len(tokens))
        return Candidate(number, len(tokens), n_bytes, known.n_tokens if known is not None else 0)

    def _reject_reason(self, store: SnapshotStore, slot: PrefixSlot | HostSlot, trigger: SaveTrigger) -> str:
        reason = reject_save_reason(self._candidate(store, slot), trigger, self._policy_for(store))
        if trigger is SaveTrigger.EVICTION and self._pause_left_s:
            reason = "saves pause, as the last one failed"
        if reason:
            log.debug("snapshot not worth a file", n_tokens=slot.n_tokens, trigger=trigger.value, reason=reason)
        return reason

    async def _save(self, store: SnapshotStore, slot: PrefixSlot, deadline_s: float) -> bool:
        async with self._saving:
            place = await self._engine.slots.export(slot)
            if place is None:
                return False
            try:
                drafted = self._engine.prefixes.drafted(slot)
                record = SlotRecord(slot.tokens, time.time(), drafted, slot.paged_out)
                return await self._write(store, record, lambda file: self._move_out(slot, file, place, deadline_s))
            finally:
                self._engine.slots.release(slot)

    async def _save_held(self, store: SnapshotStore, host: HostTier, held: HostSlot) -> bool:
        """Write the file of a pinned slot in host memory, and remove the pin."""

        async def copy(file: PendingSnapshot) -> Transfer:
            try:
                return Transfer(await self._on_disk(host.copy_to, file.fd, held, file.contents))
            except OSError as error:
                return Transfer(problem=describe_error(error))

        try:
            async with self._saving:
                return await self._write(
                    store, SlotRecord(held.tokens, time.time(), held.with_draft, held.paged_out), copy
                )
        finally:
            host.unpin(held)

    async def _write(
        self, store: SnapshotStore, record: SlotRecord, fill: Callable[[PendingSnapshot], Awaitable[Transfer]]
    ) -> bool:
        pending: PendingSnapshot | None = None
        try:
            pending = await self._on_disk(store.begin, record)
            transfer = await fill(pending)
            if transfer.problem:
                await self._on_disk(store.abort, pending, transfer.problem)
                return False
            await self._on_disk(store.finish, pending, transfer.n_bytes)
            self._pause_s = self._paused_until = 0.0
        except SaveFailed as failed:  # logged and counted by the store
            if failed.label in DISK_FAILURES:
                self._pause_saves()
            return False
        except asyncio.CancelledError:
            if pending is not None:  # unless it is finished; daemons may still write into the unlinked file
                store.abort(pending, "the stop was cut short")
            raise
        return True

    # ---- inside

    async def _on_disk(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run blocking work in a thread, to its end; a cancellation takes effect at the caller's next await."""
        call = asyncio.ensure_future(asyncio.wrap_future(self._disk.submit(work, *args, **kwargs)))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            if (task := asyncio.current_task()) is not None:
                task.cancel()
            return call.result()

    async def _move_out(self, slot: PrefixSlot, file: TransferFile, place: SlotPlace, seconds: float) -> Transfer:
        """Let the daemons write a slot; one that was dropped meanwhile has failed, as others may have its pages."""
        transfer = await self._move([(file, place)], seconds)
        if not slot.alive:
            transfer.problem = transfer.problem or "its slot was dropped"
        return transfer

    async def _move(
        self, units: Units, seconds: float, on_timeout: Callable[[], object] = lambda: None, *, load: bool = False
    ) -> Transfer:
        """Let the daemons write or read; at the deadline it has failed, and ``on_timeout`` is called."""
        transfers = self._transfers()
        if transfers is None:
            return Transfer(problem="there are no daemons")
        end = transfers.load(units) if load else transfers.save(units)
        try:
            async with suspend_clock.timeout(seconds):
                return await asyncio.shield(end)
        except TimeoutError:
            on_timeout()
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


def _tier(match: SnapshotMatch) -> CacheTier:
    return "host" if isinstance(match.entry, HostSlot) else "disk"
