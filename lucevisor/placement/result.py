"""Records of the planner's result: a placement, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lucevisor.config import DeviceRef
from lucevisor.errors import ConfigError
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange
from lucevisor.placement.formatting import format_bytes
from lucevisor.protocol.loading import ArenaPlan, DraftKind, PoolSizes, SpeculationSettings


class PlacementError(ConfigError):
    """A setting that is invalid for this model and these devices."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One contiguous layer range on one device.  ``first`` also holds the embedding, ``last`` the output (lm_head)."""

    device: DeviceRef
    backend: Backend
    layers: LayerRange
    first: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive shards of one group, run in one call.  ``index`` counts along the pipeline."""

    index: int
    group: str
    shards: tuple[Shard, ...]

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.shards[0].layers.start, self.shards[-1].layers.stop)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """A model beside the served one, on its device."""

    device: DeviceRef
    backend: Backend

    @property
    def group(self) -> str:
        return self.device.group


@dataclass(frozen=True, slots=True)
class PlacedDrafter(PlacedModel):
    """The drafter; ``index``: the number after the output stage's.

    ``layers``: of the drafter; ``captures``: the model's layers whose hidden states it reads, in its own order.
    """

    index: int
    kind: DraftKind
    layers: LayerRange
    captures: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedScorer(PlacedModel):
    """The scoring model of PFlash.  ``step_tokens``: of one message."""

    name: str
    window_tokens: int
    step_tokens: int


@dataclass(frozen=True, slots=True)
class PlacedEncoder(PlacedModel):
    """The vision encoder.  ``min_tokens``, ``max_tokens``: of an image."""

    name: str
    min_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """One shard and the memory it needs.

    ``host``: where it is; empty for the supervisor's own.  ``memory``: what the device allocates from, of which
    ``free_bytes`` were free (None: unknown), ``reserve_bytes`` are kept free, ``short_bytes`` missing for all its
    shards. ``decode_s``, ``prefill_s``: measured, if the split was chosen by speed.
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
    host: str = ""

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool | None:
        """True if the memory has room for all its shards; None if unknown."""
        return None if self.free_bytes is None else self.short_bytes == 0


class HostOwner(StrEnum):
    """Owners of host memory beside weights and the pools of cpu devices."""

    BOUNDARIES = "boundaries"  # activations on their way to the next stage
    JOURNAL = "journal"  # activations of running sequences
    WEIGHTS = "weights"  # of models that are parked, in the memory of daemons
    REPLAYS = "replays"  # those that a daemon computes again while it loads
    POOLS = "pools"  # checkpoints, and pages of KV Flash, in the daemons
    PREFIXES = "prefixes"  # prefix slots that the devices evict, those of preempted requests among them
    EXPORTS = "exports"  # state for the daemons after a restart or reload

    @property
    def key(self) -> str:
        """The key that bounds it; empty without one."""
        keys = {"journal": "recovery.journal", "replays": "recovery.journal", "prefixes": "cache.host",
                "pools": "cache.states, kvflash.host"}  # fmt: skip
        return keys.get(self, "")


class HostUse(NamedTuple):
    """The most bytes that an owner takes; None: half of what is free."""

    owner: HostOwner
    limit_bytes: int | None

    def as_json(self) -> dict[str, object]:
        return {**self._asdict(), "key": self.owner.key}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Place of each layer, and every size that daemons and engine must agree on.

    ``devices`` and ``stages`` are in layer order; ``arenas[b]`` lies between stages b and b + 1, and those of captures
    follow.  ``journal_bytes``, ``host_cache_bytes``: the most host memory of journal and prefix slots; None: half of
    what is free.  ``hosts_left_out``: why hosts hold no layers, or empty; ``draft_left_out`` likewise.  ``pool_pages``:
    the most pages of a sequence on the devices with KV Flash; None: all.  ``tau``: tokens between two of its rankings.
    ``reasons`` explain the choices, ``notices`` are logged at start.  ``goal``, ``measured``: of a split by speed.
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
    kv_groups: frozenset[KvGroup]
    window_tokens: int | None
    devices: tuple[DevicePlan, ...]
    stages: tuple[Stage, ...]
    arenas: tuple[ArenaPlan, ...]
    journal_bytes: int = 0
    host_cache_bytes: int | None = 0
    memory_shares: Mapping[str, float] = field(default_factory=dict)
    prefix_slots: int = 0
    cache_bytes: int = 0
    draft: PlacedDrafter | None = None
    draft_device: DevicePlan | None = None
    draft_left_out: str = ""
    hosts_left_out: str = ""
    drafting: SpeculationSettings = field(default_factory=SpeculationSettings)
    scorer: PlacedScorer | None = None
    scorer_device: DevicePlan | None = None
    encoder: PlacedEncoder | None = None
    encoder_device: DevicePlan | None = None
    pool_pages: int | None = None
    residency_policy: ResidencyPolicy = "lru"
    tau: int = 64
    deterministic: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    goal: str = ""
    measured: str = ""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups, in the order of their first stages."""
        others = (model.group for model in (self.draft, self.scorer, self.encoder) if model is not None)
        return tuple(dict.fromkeys((*(stage.group for stage in self.stages), *others)))

    @property
    def max_attended(self) -> int:
        """Positions that a slice attends to at once, in layers without a window."""
        if self.pool_pages is None:
            return self.max_context
        return min(self.max_context, self.pool_pages * PAGE_TOKENS)

    @property
    def arena_bytes(self) -> int:
        return sum(arena.region_bytes * arena.n_regions for arena in self.arenas)

    @property
    def host_state_bytes(self) -> int:
        return sum(device.host_state_bytes for device in (*self.devices, self.draft_device) if device is not None)

    @property
    def host_memory(self) -> tuple[HostUse, ...]:
        return (
            HostUse(HostOwner.BOUNDARIES, self.arena_bytes),
            HostUse(HostOwner.JOURNAL, self.journal_bytes),
            HostUse(HostOwner.REPLAYS, self.journal_bytes),
            HostUse(HostOwner.POOLS, self.host_state_bytes),
            HostUse(HostOwner.PREFIXES, self.host_cache_bytes),
            HostUse(HostOwner.EXPORTS, None),
        )

    def workspace_bytes(self, device: DeviceRef) -> int:
        """Workspace of all layers on a device, and of the drafter's there."""
        plans = (*self.devices, self.draft_device)
        return sum(plan.workspace_bytes for plan in plans if plan is not None and plan.device == device)

    def stages_of(self, group: str) -> tuple[Stage, ...]:
        return tuple(stage for stage in self.stages if stage.group == group)


@dataclass(frozen=True, slots=True)
class Shortage:
    """One memory that is too small for the shards on ``devices``."""

    memory: str
    devices: tuple[DeviceRef, ...]
    needed_bytes: int
    usable_bytes: int
    free_bytes: int

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes - self.usable_bytes


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A valid configuration that does not fit; ``advice``: changes that make it fit."""

    placement: Placement
    shortages: tuple[Shortage, ...]
    advice: tuple[str, ...]

    @property
    def message(self) -> str:
        lines = [
            f"{s.memory} is {format_bytes(s.short_bytes)} short: {', '.join(map(str, s.devices))} would take "
            f"{format_bytes(s.needed_bytes)}; {format_bytes(s.free_bytes)} are free, "
            f"{format_bytes(s.usable_bytes)} of that usable"
            for s in self.shortages
        ]
        return "\n".join([*lines, *self.advice])
