"""What the planner answers: a placement, or why there is none.  Records only; nothing here decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lucevisor.config import DeviceRef
from lucevisor.errors import ConfigError
from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.placement.amounts import size
from lucevisor.protocol.loading import ArenaPlan, PoolSizes


class PlacementError(ConfigError):
    """A setting that cannot be meant for this model and these devices: key, value and the nearest valid choice."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One contiguous layer range on one device.  ``first`` also holds the embedding, ``last`` the head."""

    device: DeviceRef
    backend: Backend
    layers: LayerRange
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive shards of one group, run in one call.  ``index`` counts along the chain."""

    index: int
    group: str
    shards: tuple[Shard, ...]

    @property
    def layers(self) -> LayerRange:
        """All layers of the stage."""
        return LayerRange(self.shards[0].layers.start, self.shards[-1].layers.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """One shard and what it needs on its device.

    ``memory`` names the memory the device draws from: all cpu devices share ``host``.  ``free_bytes`` is what that had
    free when it was looked at (None: unknown), ``reserve_bytes`` the part of it left alone, ``short_bytes`` how much is
    missing in that memory for all shards that draw from it.  ``host_state_bytes`` is what of the state lies in host
    memory, not on the device.  ``decode_s`` and ``prefill_s``: what its layers take for
    one token, and for a slice as it was measured; None where the split was not chosen by speed.
    """

    device: DeviceRef
    backend: Backend
    name: str
    memory: str
    layers: LayerRange
    weight_bytes: int
    state_bytes: int
    workspace_bytes: int
    free_bytes: int | None
    reserve_bytes: int
    short_bytes: int
    host_state_bytes: int = 0
    decode_s: float | None = None
    prefill_s: float | None = None

    @property
    def needed_bytes(self) -> int:
        """Weights, state and workspace together, on the device."""
        return self.weight_bytes + self.state_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the memory has room for all its shards; None when that is not known."""
        return None if self.free_bytes is None else self.short_bytes == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where everything goes, and every size that daemons and engine must agree on.

    ``devices`` and ``stages`` are in layer order; ``arenas[b]`` lies between stage b and b + 1.  ``reasons`` say why it
    is so, ``notices`` what the user should be told at start.  ``goal`` and ``measured``: what an automatic split was
    chosen for and when the speeds behind it were measured; empty when it was not chosen by speed.
    """

    model: str
    architecture: str
    quant: str
    n_layers: int
    dtype: Dtype
    kv_dtype: Dtype
    max_context: int
    max_sequences: int
    prefill_chunk: int
    max_step_tokens: int
    pools: PoolSizes
    spaces: frozenset[Space]
    window_tokens: int | None
    devices: tuple[DevicePlan, ...]
    stages: tuple[Stage, ...]
    arenas: tuple[ArenaPlan, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    goal: str = ""
    measured: str = ""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the order in which the chain first meets them."""
        return tuple(dict.fromkeys(stage.group for stage in self.stages))

    @property
    def arena_bytes(self) -> int:
        """Host memory of all arenas."""
        return sum(arena.region_bytes * arena.n_regions for arena in self.arenas)

    @property
    def host_state_bytes(self) -> dict[str, int]:
        """Host memory of the checkpoints that do not lie on the devices, by group; without those that have none."""
        found: dict[str, int] = {}
        for device in self.devices:
            if device.host_state_bytes:
                found[device.device.group] = found.get(device.device.group, 0) + device.host_state_bytes
        return found

    def stages_of(self, group: str) -> tuple[Stage, ...]:
        """The stages a group runs."""
        return tuple(stage for stage in self.stages if stage.group == group)


@dataclass(frozen=True, slots=True)
class Shortage:
    """One memory that is too small: ``needed_bytes`` by the shards on ``devices``, of ``usable_bytes`` there.

    ``usable_bytes`` is ``free_bytes`` less what is left alone.
    """

    memory: str
    devices: tuple[DeviceRef, ...]
    needed_bytes: int
    usable_bytes: int
    free_bytes: int

    @property
    def short_bytes(self) -> int:
        """How much is missing."""
        return self.needed_bytes - self.usable_bytes


@dataclass(frozen=True, slots=True)
class Infeasible:
    """It is clear what is asked, and it does not fit.

    ``placement`` is what was asked for; ``advice`` names changes after which it fits, or says that none was found.
    """

    placement: Placement
    shortages: tuple[Shortage, ...]
    advice: tuple[str, ...]

    @property
    def message(self) -> str:
        """All of it, one line each."""
        lines = [
            f"{s.memory} is {size(s.short_bytes)} short: {', '.join(map(str, s.devices))} would take "
            f"{size(s.needed_bytes)}, {size(s.free_bytes)} are free and {size(s.usable_bytes)} of that usable"
            for s in self.shortages
        ]
        return "\n".join([*lines, *self.advice])
