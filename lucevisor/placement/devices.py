"""The configured devices, matched with the inventory, the memories they allocate from, and the dtypes they compute in.

All cpu devices of a host share one memory, ``host`` on the supervisor's own; so do groups that see the same GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from lucevisor.config import Auto, Config, DeviceRef, DType, KvDType
from lucevisor.config.sections import Neighbour
from lucevisor.errors import NO_VALUE
from lucevisor.model.values import Backend, Dtype
from lucevisor.placement.result import PlacementError
from lucevisor.protocol.loading import DeviceInfo

Inventory = Mapping[str, Sequence[DeviceInfo]]
"""The devices in the Hello of each group's daemon or probe; groups that are left out were not queried."""

HOST = "host"
HOST_RESERVE = 0.1
"""Share of the host's available memory kept free for the page cache, the supervisor and other programs."""
HOST_PAGES = 0.25
"""Share of the host's usable memory for automatic pages beyond one sequence; other programs run there, too."""
SPARE_DEVICE_BYTES = 800 << 20
SPARE_HOST_BYTES = 300 << 20
"""Memory of a spare: a context on each GPU of its group, and host memory."""


@dataclass(frozen=True, slots=True)
class TargetDevice:
    """One device of ``target_devices``; ``info`` None: its group was not queried.  ``n_spares``: of its group.

    ``share``: of its usable memory.  ``host``: where it is; empty for this one.  ``same_as``: the first device that is
    the same GPU, seen by another group.
    """

    device: DeviceRef
    backend: Backend
    info: DeviceInfo | None
    n_spares: int = 0
    share: float = 1.0
    host: str = ""
    same_as: DeviceRef | None = None

    @property
    def memory(self) -> str:
        if self.backend is not Backend.CPU:
            return str(self.same_as or self.device)
        return f"{HOST} {self.host}" if self.host else HOST


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory: its free bytes (None: unknown) and how much of them to keep free."""

    name: str
    free_bytes: int | None
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int | None:
        return None if self.free_bytes is None else max(0, self.free_bytes - self.reserve_bytes)


def with_target_devices(config: Config, inventory: Inventory) -> Config:
    """Return the configuration with all devices of all groups if it names none; of a group that was not queried, one.

    Raises PlacementError.
    """
    if config.placement.devices:
        return config
    devices = []
    for group in config.groups:
        indices = [info.index for info in inventory[group]] if group in inventory else [0]
        if not indices:
            raise _no_device(config, "placement.target_devices", group, NO_VALUE)
        devices += [DeviceRef(group, index) for index in indices]
    return replace(config, placement=replace(config.placement, devices=tuple(devices)))


def target_devices(config: Config, inventory: Inventory | None) -> tuple[TargetDevice, ...]:
    """Find each configured device in the inventory, in layer order.  Raises PlacementError.

    Cpu groups accept any index: all are the host.
    """
    targets = []
    for i, device in enumerate(config.placement.devices):
        backend = Backend(config.groups[device.group].backend)
        taken = {other.index for other in config.placement.devices if other.group == device.group}
        info = find_device(config, f"placement.target_devices[{i}]", device, backend, inventory, taken)
        share = memory_share(config, device, backend)
        host = config.groups[device.group].host_name
        same_as = first_seen(config, device, info, inventory)
        targets.append(TargetDevice(device, backend, info, config.recovery.spares, share, host, same_as))
    return tuple(targets)


def first_seen(
    config: Config, device: DeviceRef, info: DeviceInfo | None, inventory: Inventory | None
) -> DeviceRef | None:
    """Return the device of an earlier group on the same host that is the same GPU; None: there is none, as far as
    known."""
    if info is None or not info.uuid or inventory is None:
        return None
    for group in config.groups:
        if group == device.group:
            break
        if config.groups[group].host_name == config.groups[device.group].host_name:
            for other in inventory.get(group, ()):
                if other.uuid == info.uuid:
                    return DeviceRef(group, other.index)
    return None


def order_is_free(config: Config, targets: Sequence[TargetDevice]) -> bool:
    placement, several = config.placement, len({target.host for target in targets}) > 1
    return several and isinstance(placement.split, Auto) and "placement.target_devices" not in config.set_keys


def find_device(
    config: Config,
    key: str,
    device: DeviceRef,
    backend: Backend,
    inventory: Inventory | None,
    taken: Collection[int] = (),
) -> DeviceInfo | None:
    """Return what the group reported of the device that ``key`` names; None if it was not queried.

    Raises PlacementError, with the nearest index that is not ``taken``.
    """
    devices = None if inventory is None else inventory.get(device.group)
    if devices is None:
        return None
    by_index = {info.index: info for info in devices}
    if backend is Backend.CPU and devices:
        return by_index.get(device.index, devices[0])
    if device.index in by_index:
        return by_index[device.index]
    if not by_index:
        raise _no_device(config, key, device.group, str(device))
    near = min(by_index, key=lambda index: (index in taken, abs(index - device.index)))
    has = ", ".join(f"{device.group}:{index} ({info.name})" for index, info in sorted(by_index.items()))
    hint = f"nearest: {device.group}:{near}" if near not in taken else "remove it: the others are already used"
    raise PlacementError(key, str(device), f"does not exist: the group has {has}", hint, file=str(config.file))


def _no_device(config: Config, key: str, group: str, value: object) -> PlacementError:
    hint = f"check groups.{group}.python and visible_devices: lucevisor doctor lists what that torch sees"
    return PlacementError(key, value, f"does not exist: the group {group} has no device", hint, file=str(config.file))


def memories_of(targets: Sequence[TargetDevice]) -> dict[str, Memory]:
    """Return the memories by name; of what cpu devices report, the smallest value counts."""
    out: dict[str, Memory] = {}
    for target in targets:
        if target.info is None:
            out.setdefault(target.memory, Memory(target.memory, None, 0))
            continue
        free, known = target.info.free_bytes, out.get(target.memory)
        if known is not None and known.free_bytes is not None:
            free = min(free, known.free_bytes)
        spares = max(_spare_bytes(other, targets) for other in targets if other.memory == target.memory)
        groups = {other.device.group for other in targets if other.memory == target.memory}
        usable = max(0, free - _reserve(target, free, len(groups)) - spares)
        out[target.memory] = Memory(target.memory, free, free - int(usable * target.share))
    return out


def memory_share(config: Config, device: DeviceRef, backend: Backend) -> float:
    """Return the share of each device's usable memory for the model of ``config``, beside the others that use it.

    Those that are loaded at the start divide the memory; one loaded on demand may have all that pinned ones leave.
    Raises PlacementError if the configured shares leave nothing for others.
    """
    host = config.groups[device.group].host_name
    users = [other for other in config.neighbours if _uses(other.config, device, backend, host)]
    if len(users) < 2:
        return 1.0
    if config.replica:
        return 1.0 / len(users)
    pinned = [user for user in users if user.config.model.pin]
    on_demand = [user for user in users if user not in pinned and not user.config.model.preload]
    beside = [user for user in users if user not in pinned and user not in on_demand]
    largest = sorted(on_demand, key=lambda user: user.n_bytes)[-1:]
    shares = _divide([*pinned, *beside, *(largest if pinned else ())], 1.0, device)
    if config.section in {user.config.section for user in pinned}:
        return shares[config.section]
    left = 1.0 - sum(shares[user.config.section] for user in pinned)
    if config.model.preload:
        return _divide(beside, left, device)[config.section]
    share = config.model.memory_share
    return left if share == "auto" else min(left, share)


def _divide(users: Sequence[Neighbour], whole: float, device: DeviceRef) -> dict[str, float]:
    """Return the shares of ``whole`` of a memory: as configured, the rest by file sizes.  Raises PlacementError."""
    shares = {user.config.section: user.config.model.memory_share for user in users}
    given = {name: share for name, share in shares.items() if share != "auto"}
    left = whole - sum(given.values())
    if left < -1e-9 or (left < 1e-9 and len(given) < len(users)):
        name = next(iter(given))
        why = f"leaves nothing of {device} for others: the shares of {', '.join(given)} add up to {whole - left:g}"
        file = str(users[0].config.file)
        raise PlacementError(f"{name}.memory_share", given[name], why, "lower one", file=file)
    automatic = {user.config.section: user.n_bytes for user in users if user.config.section not in given}
    total = max(1, sum(automatic.values()))
    return {**given, **{name: left * n_bytes / total for name, n_bytes in automatic.items()}}


def _uses(config: Config, device: DeviceRef, backend: Backend, host: str) -> bool:
    if backend is Backend.CPU:
        return any(group.backend == "cpu" and group.host_name == host for group in config.groups.values())
    named = {*config.placement.devices, config.draft.device, config.pflash.device, config.vision.device}
    return device.group in config.groups and (device in named or not config.placement.devices)


def _reserve(target: TargetDevice, free_bytes: int, n_daemons: int) -> int:
    if target.backend is Backend.CPU or target.info is None:
        return int(free_bytes * HOST_RESERVE)
    # for kernels, graphs and fragmentation of the allocator
    return n_daemons * (768 << 20) + int(target.info.total_bytes * 0.01)


def _spare_bytes(target: TargetDevice, targets: Sequence[TargetDevice]) -> int:
    """Return the bytes of spares: on a GPU those of its group, in a host those of all cpu groups there."""
    if target.backend is not Backend.CPU:
        return target.n_spares * SPARE_DEVICE_BYTES
    groups = {other.device.group for other in targets if other.memory == target.memory}
    return target.n_spares * SPARE_HOST_BYTES * len(groups)


_AUTO = "auto"
_PREFERENCE = (Dtype.BFLOAT16, Dtype.FLOAT16)


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """A dtype, why it was chosen, and notices for the user."""

    dtype: Dtype
    reason: str
    notices: tuple[str, ...] = ()


def choose_dtype(configured: DType, targets: Sequence[TargetDevice]) -> DtypeChoice:
    """Choose the dtype of activations and arithmetic, one for the whole pipeline, as activations cross every boundary.

    ``auto``: with a GPU, bfloat16 if all devices multiply it natively, else float16, else float32; on cpus alone,
    bfloat16 or float32.  Devices that were not queried count as usual for their backend.
    """
    if configured != _AUTO:
        dtype = Dtype(configured)
        slow = [str(s.device) for s in targets if s.info is not None and dtype not in s.info.dtypes]
        names = ", ".join(slow)
        notice = f"engine.dtype = {configured}: {names} cannot multiply it natively and will be slow; nearest: auto"
        return DtypeChoice(dtype, f"dtype {dtype}: as configured", (notice,) if slow else ())
    only_cpu = all(target.backend is Backend.CPU for target in targets)
    lacking = ""
    for dtype in _PREFERENCE[:1] if only_cpu else _PREFERENCE:
        without = [target for target in targets if not _native(target, dtype)]
        if not without:
            unknown = "" if all(target.info for target in targets) else " as far as known"
            return DtypeChoice(dtype, f"dtype {dtype}: every device multiplies it natively{unknown}{lacking}")
        names = ", ".join(str(target.device) for target in without)
        why = "cannot multiply natively" if any(target.info for target in without) else "were not asked about"
        lacking += f"; not {dtype}, which {names} {why}"
    return DtypeChoice(Dtype.FLOAT32, f"dtype {Dtype.FLOAT32}: the one format that all devices share{lacking}")


def choose_kv_dtype(configured: KvDType, dtype: Dtype) -> DtypeChoice:
    if configured == _AUTO:
        return DtypeChoice(dtype, f"kv_dtype {dtype}: as dtype")
    return DtypeChoice(Dtype(configured), f"kv_dtype {configured}: as configured")


def _native(target: TargetDevice, dtype: Dtype) -> bool:
    if target.info is not None:
        return dtype in target.info.dtypes
    return target.backend is not Backend.CPU
