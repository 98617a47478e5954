"""The boundary memory of a placement, and the daemons at its ends: shared where both can map it, else over TCP.

The journal copies its rows to blocks of a page, within ``Placement.journal_bytes``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt
import structlog
from msgspec.structs import replace

from lucevisor.engine.journal import RowCopy
from lucevisor.kv_transfer.host_memory import HostFile, HostMemory, HostMemoryShort
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.placement.result import HostOwner, Placement
from lucevisor.placement.stages import arena_ends
from lucevisor.protocol.arena import Arena, SharedBuffer, descriptors
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.loading import ArenaPlan, RowsConnection
from lucevisor.protocol.steps import RowsCopy, Step
from lucevisor.protocol.tcp_buffer import RelayBuffer
from lucevisor.protocol.threads import ThreadExecutor
from lucevisor.protocol.transport import Channel


class Boundaries:
    """``remote``: groups that share no memory with others.  Raises ArenaError."""

    def __init__(self, placement: Placement, remote: Set[str], memory: HostMemory) -> None:
        self._ends = {arena.key: arena_ends(placement, arena) for arena in placement.arenas}
        self._arenas: dict[tuple[bool, int], Arena] = {}
        self._relays: dict[tuple[bool, int], RelayBuffer] = {}
        for arena in placement.arenas:
            if remote.isdisjoint(self._ends[arena.key]):
                self._arenas[arena.key] = Arena.create(arena)
            else:
                self._relays[arena.key] = RelayBuffer.create(arena)
        self.buffers: dict[tuple[bool, int], SharedBuffer] = {**self._arenas, **self._relays}
        self._lease = memory.lease(HostOwner.BOUNDARIES, placement.arena_bytes)
        self._addresses: dict[str, str] = {}  # by group that was told what to load
        self._epochs: dict[str, int] = {}
        self._copies = placement.journal_bytes > 0  # else a lost stage is never rebuilt from rows

    def open(self, group: str, plans: Sequence[ArenaPlan], address: str) -> tuple[list[ArenaPlan], list[int]]:
        """Return what a daemon opens, and the descriptors for it; ``address``: where it listens.

        Who is loaded later connects to the other, if that is not gone.
        """
        epoch = self._epochs[group] = max(self._epochs.values(), default=0) + 1
        opened = []
        for plan in plans:
            if not self.buffers[plan.key].shared_memory:
                [other] = {*self._ends[plan.key]} - {group}
                connection = RowsConnection(epoch, self._addresses.get(other, ""), self._copies)
                plan = replace(plan, connection=connection)
            opened.append(plan)
        self._addresses[group] = address
        return opened, descriptors([self._arenas[plan.key] for plan in plans if plan.key in self._arenas])

    def on_ready(self, group: str, channel: Channel) -> None:
        for key, relay in self._relays.items():
            writer, reader = self._ends[key]
            if group == writer:
                relay.attach_writer(self._epochs[group])
            elif group == reader:
                relay.attach_reader(channel, self._epochs[group])

    def on_lost(self, group: str) -> None:
        self._addresses.pop(group, None)
        for key, relay in self._relays.items():
            writer, reader = self._ends[key]
            if group == writer:
                relay.lose_writer()
            elif group == reader:
                relay.attach_reader(None)

    def rows_arrived(self, group: str, rows: RowsCopy, payload: memoryview) -> str:
        """Take a daemon's copy of rows; return why they cannot be what was asked for, or ""."""
        key = rows.capture, rows.boundary
        if key not in self._relays or self._ends[key][0] != group:
            return f"it sent rows of boundary {rows.boundary}, which it does not write"
        try:
            self._relays[key].rows_arrived(rows, payload)
        except ProtocolError as error:
            return str(error)
        return ""

    def step_answered(self, group: str) -> None:
        for key, relay in self._relays.items():
            if self._ends[key][0] == group:
                relay.step_answered()

    def close(self) -> None:
        self._lease.close()
        for buffer in self.buffers.values():
            buffer.close()


log = structlog.get_logger("lucevisor.deployment")


class JournalRows:
    """``arenas``: by boundary, all with rows of ``row_bytes``.  ``n_pages``: blocks that fit into ``n_bytes``.

    Raises OSError or MemoryError.
    """

    def __init__(self, arenas: Mapping[int, SharedBuffer], row_bytes: int, n_bytes: int, memory: HostMemory) -> None:
        self.n_pages = n_bytes // (PAGE_TOKENS * row_bytes)
        mapping = mmap.mmap(-1, self.n_pages * PAGE_TOKENS * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)  # a first touch of 4 KiB pages costs as much as the copy
        self._blocks = np.frombuffer(mapping, dtype=np.uint8).reshape(-1, PAGE_TOKENS, row_bytes)
        self._all_rows = self._blocks.reshape(-1, row_bytes)
        self._arenas, self._row_bytes, self._memory = arenas, row_bytes, memory
        self._lease, self._n_touched = memory.lease(HostOwner.JOURNAL), 0
        self._regions = {
            (boundary, region): _rows(arena.region(region), row_bytes)
            for boundary, arena in arenas.items()
            for region in range(arena.plan.n_regions)
        }
        self._thread = ThreadExecutor(1, "journal")  # started now, because the event loop cannot wait for it

    def has_rows(self, boundary: int, step: Step) -> bool:
        return self._arenas[boundary].rung(step.region, step.step_id)

    def file(self, boundary: int, region: int, copies: Sequence[RowCopy]) -> None:
        rows = self._regions[boundary, region]
        for block, offset, row, n in copies:
            if block >= self._n_touched:
                self._touch(block)
            if n == 1:  # a decode, of which a step may have many: an index is quicker than a slice
                self._all_rows[block * PAGE_TOKENS + offset] = rows[row]
            else:
                self._blocks[block, offset : offset + n] = rows[row : row + n]

    def place(self, boundary: int, step: Step, copies: Sequence[RowCopy]) -> None:
        rows = self._regions[boundary, step.region]
        for block, offset, row, n in copies:
            rows[row : row + n] = self._blocks[block, offset : offset + n]
        self._arenas[boundary].ring(step.region, step.step_id, step.n_tokens * self._row_bytes)

    def copy(self, source: int, target: int, n_rows: int) -> None:
        if target >= self._n_touched:
            self._touch(target)
        self._blocks[target, :n_rows] = self._blocks[source, :n_rows]

    def _touch(self, block: int) -> None:
        """Count the blocks up to one that is written for the first time."""
        self._n_touched = block + 1
        self._lease.n_bytes = self._n_touched * PAGE_TOKENS * self._row_bytes

    def gather(self, steps: Sequence[Sequence[RowCopy]]) -> HostFile:
        """Return a memfd to which a thread writes rows, and which it seals at the end.  Raises HostMemoryShort."""
        n_rows = sum(copied.n for copies in steps for copied in copies)
        file = self._memory.open(HostOwner.REPLAYS, n_rows * self._row_bytes)
        try:
            copy = os.dup(file.fileno())  # the caller may close its own meanwhile
        except OSError as error:
            file.close()
            raise HostMemoryShort(f"rows cannot be written: {error}") from error
        self._thread.submit(self._gather, steps, copy)
        return file

    def _gather(self, steps: Sequence[Sequence[RowCopy]], fd: int) -> None:
        at = 0
        try:
            for block, offset, _, n in (copied for copies in steps for copied in copies):
                rows = self._blocks[block, offset : offset + n].data.cast("B")
                while rows:
                    n_written = os.pwrite(fd, rows, at)
                    rows, at = rows[n_written:], at + n_written
        except OSError as error:  # the reader notices that rows are missing
            log.warning("rows for replay not written", reason=str(error))
        finally:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
            os.close(fd)


def _rows(region: memoryview, row_bytes: int) -> npt.NDArray[np.uint8]:
    found = np.frombuffer(region, dtype=np.uint8)
    return found[: len(found) // row_bytes * row_bytes].reshape(-1, row_bytes)


def journal_rows(
    buffers: Mapping[tuple[bool, int], SharedBuffer], placement: Placement, memory: HostMemory
) -> JournalRows | None:
    """Return the journal's memory for a placement; None without a journal, or without memory for it."""
    if not placement.journal_bytes:
        return None
    arenas = {
        boundary: arena for (capture, boundary), arena in buffers.items() if not capture and not arena.plan.tokens
    }
    row_bytes = arenas[0].plan.region_bytes // placement.max_step_tokens
    try:
        return JournalRows(arenas, row_bytes, placement.journal_bytes, memory)
    except (OSError, MemoryError) as error:
        log.warning("no journal: when a shard is lost, all shards recompute its sequences", reason=str(error),
                    hint=f"lower recovery.journal, now {placement.journal_bytes} bytes")  # fmt: skip
        return None
