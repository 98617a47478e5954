"""The boundary memory of a placement, and the daemons at its ends: shared where both can map it, else over TCP."""

from __future__ import annotations

from collections.abc import Sequence, Set

from msgspec.structs import replace

from lucevisor.kv_transfer.host_memory import HostMemory
from lucevisor.placement.result import HostOwner, Placement
from lucevisor.placement.stages import arena_ends
from lucevisor.protocol.arena import Arena, SharedBuffer, descriptors
from lucevisor.protocol.errors import ProtocolError
from lucevisor.protocol.loading import ArenaPlan, RowsConnection
from lucevisor.protocol.steps import RowsCopy
from lucevisor.protocol.tcp_buffer import RelayBuffer
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

    def open(self, group: str, plans: Sequence[ArenaPlan], address: str) -> tuple[list[ArenaPlan], list[int]]:
        """Return what a daemon opens, and the descriptors for it; ``address``: where it listens.

        Who is loaded later connects: it has the address of the other, whose memory is there, or that is gone and
        connects when it is replaced.
        """
        epoch = self._epochs[group] = max(self._epochs.values(), default=0) + 1
        opened = []
        for plan in plans:
            if not self.buffers[plan.key].shared_memory:
                [other] = {*self._ends[plan.key]} - {group}
                plan = replace(plan, connection=RowsConnection(epoch, self._addresses.get(other, "")))
            opened.append(plan)
        self._addresses[group] = address
        return opened, descriptors([self._arenas[plan.key] for plan in plans if plan.key in self._arenas])

    def on_ready(self, group: str, channel: Channel) -> None:
        """A daemon finished loading."""
        for key, relay in self._relays.items():
            writer, reader = self._ends[key]
            if group == writer:
                relay.attach_writer(self._epochs[group])
            elif group == reader:
                relay.attach_reader(channel, self._epochs[group])

    def on_lost(self, group: str) -> None:
        """A daemon is lost."""
        for key, relay in self._relays.items():
            writer, reader = self._ends[key]
            if group == writer:
                relay.lose_writer()
            elif group == reader:
                relay.attach_reader(None)

    def rows_arrived(self, group: str, rows: RowsCopy, payload: memoryview) -> str:
        """Take a daemon's copy of rows; return why they cannot be what was asked for, or empty."""
        key = rows.capture, rows.boundary
        if key not in self._relays or self._ends[key][0] != group:
            return f"it sent rows of boundary {rows.boundary}, which it does not write"
        try:
            self._relays[key].rows_arrived(rows, payload)
        except ProtocolError as error:
            return str(error)
        return ""

    def step_answered(self, group: str) -> None:
        """A daemon has answered a step, whose rows came before."""
        for key, relay in self._relays.items():
            if self._ends[key][0] == group:
                relay.step_answered()

    def close(self) -> None:
        self._lease.close()
        for buffer in self.buffers.values():
            buffer.close()
