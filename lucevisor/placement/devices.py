"""The devices that a configuration names, as they were found, and the memories they draw from.

Knows no model.  Invariant: every cpu device of every group draws from the one memory ``host``; every other device has a
memory of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lucevisor.config import Config, DeviceRef
from lucevisor.model.values import Backend
from lucevisor.placement.result import PlacementError
from lucevisor.protocol.loading import DeviceInfo

Inventory = Mapping[str, Sequence[DeviceInfo]]
"""What the daemon (or a probe) of each group said in its Hello; a group that is left out was not asked."""

HOST = "host"
HOST_RESERVE = 0.1
"""Share of the host's available memory left alone: page cache, the supervisor, other people's programs."""
DEVICE_RESERVE_BYTES = 512 << 20
DEVICE_RESERVE = 0.01
"""Left alone on a GPU: what the allocator loses to fragments, and a share that grows with the device."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One device of ``target_devices``; ``info`` is None when its group was not asked."""

    device: DeviceRef
    backend: Backend
    info: DeviceInfo | None

    @property
    def memory(self) -> str:
        """Name of the memory it draws from."""
        return HOST if self.backend is Backend.CPU else str(self.device)


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory: what was free (None: not known) and how much of that is left alone."""

    name: str
    free_bytes: int | None
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int | None:
        """What shards may take; None when not known."""
        return None if self.free_bytes is None else max(0, self.free_bytes - self.reserve_bytes)


def seats_of(config: Config, inventory: Inventory | None) -> tuple[Seat, ...]:
    """Find each configured device in the inventory, in layer order.

    Raises PlacementError for an index that the group does not have.  A cpu group may use any index: all are the host.
    """
    seats = []
    for i, device in enumerate(config.placement.devices):
        backend = Backend(config.groups[device.group].backend)
        found = None if inventory is None else inventory.get(device.group)
        seats.append(Seat(device, backend, None if found is None else _find(config, i, backend, found)))
    return tuple(seats)


def _find(config: Config, i: int, backend: Backend, found: Sequence[DeviceInfo]) -> DeviceInfo:
    device = config.placement.devices[i]
    by_index = {info.index: info for info in found}
    if backend is Backend.CPU and found:
        return by_index.get(device.index, found[0])
    if device.index in by_index:
        return by_index[device.index]
    key, file = f"placement.target_devices[{i}]", str(config.file)
    if not by_index:
        hint = f"look at groups.{device.group}.python and visible_devices: lucevisor doctor says what that torch sees"
        raise PlacementError(
            key, str(device), f"does not exist: the group {device.group} has no device", hint, file=file
        )
    taken = {other.index for other in config.placement.devices if other.group == device.group}
    near = min(by_index, key=lambda index: (index in taken, abs(index - device.index)))
    has = ", ".join(f"{device.group}:{index} ({info.name})" for index, info in sorted(by_index.items()))
    hint = f"nearest: {device.group}:{near}" if near not in taken else "remove it: the others are in use already"
    raise PlacementError(key, str(device), f"does not exist: the group has {has}", hint, file=file)


def memories_of(seats: Sequence[Seat]) -> dict[str, Memory]:
    """Return the memories by name.  The host's is the least that any cpu device reported."""
    out: dict[str, Memory] = {}
    for seat in seats:
        if seat.info is None:
            out.setdefault(seat.memory, Memory(seat.memory, None, 0))
            continue
        free, known = seat.info.free_bytes, out.get(seat.memory)
        if known is not None and known.free_bytes is not None:
            free = min(free, known.free_bytes)
        out[seat.memory] = Memory(seat.memory, free, _reserve(seat, free))
    return out


def _reserve(seat: Seat, free_bytes: int) -> int:
    if seat.backend is Backend.CPU or seat.info is None:
        return int(free_bytes * HOST_RESERVE)
    return min(free_bytes, DEVICE_RESERVE_BYTES + int(seat.info.total_bytes * DEVICE_RESERVE))
