"""Memory estimate: the context length and the number of pages that fit, given dtypes and layer ranges.

Pure arithmetic over the cost model and the free memory.  Invariant: with every memory known and no shortage, the shards
in a memory need at most its usable bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lucevisor.model.pages import max_slot_window_pages, max_window_pages, pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, LayerRange, Space
from lucevisor.placement.cost import CostModel, StepSizes
from lucevisor.placement.devices import HOST, Memory, TargetDevice, memories_of
from lucevisor.placement.ranges import balanced_ranges
from lucevisor.placement.result import Shard, Shortage
from lucevisor.placement.stages import arenas_of, shards_of, stages_of
from lucevisor.protocol.loading import PoolSizes

REBALANCINGS = 3
UNKNOWN_PAGES = 512
"""Limit of "auto" pages where a device's free memory is unknown: 32768 positions."""
REFERENCE_TOKENS = 32768
"""Context that automatic ranges are balanced for if neither context nor pages are configured."""
SPARE_STATES = 1
"""Recurrent states beyond one per sequence, so that a checkpoint can be taken while all sequences run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingInputs:
    """The settings to compute sizes for.  ``max_context`` and ``pages`` None: as much as fits.

    ``n_slots``: prefix slots to reserve states and window pages for; fewer if that many do not fit.  ``n_slot_pages``:
    pages that slots may fill beside those of sequences.  ``states_in_host``: the states of slots are in host memory.
    ``models`` caches the cost models of these inputs and of those derived from them, which share the spec.
    """

    spec: ModelSpec
    targets: tuple[TargetDevice, ...]
    dtype: Dtype
    kv_dtype: Dtype
    max_sequences: int
    prefill_chunk: int
    max_context: int | None
    pages: int | None
    n_slots: int = 0
    n_slot_pages: int = 0
    states_in_host: bool = False
    models: dict[tuple[Dtype, Dtype], CostModel] = field(default_factory=dict, repr=False, compare=False)

    def model(self) -> CostModel:
        """The cost model of these dtypes."""
        formats = (self.dtype, self.kv_dtype)
        if formats not in self.models:
            self.models[formats] = CostModel(self.spec, *formats)
        return self.models[formats]


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of one shard, on its device and in host memory."""

    weight_bytes: int
    state_bytes: int
    workspace_bytes: int
    host_state_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes on the device."""
        return self.weight_bytes + self.state_bytes + self.workspace_bytes

    def bytes_in(self, memory: str, device_memory: str) -> int:
        """Bytes in ``memory``, for a device whose own memory is ``device_memory``."""
        on_device = self.total_bytes if memory == device_memory else 0
        return on_device + (self.host_state_bytes if memory == HOST else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The sizes of a case.  ``uses[i]`` belongs to ``shards[i]``; ``bound`` is what kept the pages from being more."""

    shards: tuple[Shard, ...]
    uses: tuple[MemoryUse, ...]
    max_context: int
    prefill_chunk: int
    max_step_tokens: int
    pools: PoolSizes
    shortages: tuple[Shortage, ...]
    bound: str  # "configured", "enough", "unknown", or the name of a memory
    n_slots: int = 0  # prefix slots for which states and window pages are set aside

    @property
    def fits(self) -> bool:
        return not self.shortages


def reserved_slots(spec: ModelSpec, kv_dtype: Dtype, max_slots: int, memory_bytes: int) -> tuple[int, int]:
    """Return for how many prefix slots recurrent states and window pages are set aside, and how many pages of the full
    space the rest of their memory holds.

    As many slots as the memory holds, at most ``max_slots``; 0 for a model without such layers: its slots need pages of
    the full space only.
    """
    if not max_slots:
        return 0, 0
    every = LayerRange(0, spec.n_layers)
    state_bytes, window_bytes, page_bytes = (
        spec.unit_bytes(space, every, kv_dtype) for space in (Space.RECURRENT, Space.WINDOW, Space.FULL)
    )
    slot_bytes = state_bytes + slot_window_pages(spec) * window_bytes
    n_slots = min(max_slots, memory_bytes // slot_bytes) if slot_bytes else 0
    return n_slots, (memory_bytes - n_slots * slot_bytes) // page_bytes if page_bytes else 0


def max_usable_pages(inputs: SizingInputs, max_context: int) -> int:
    """Return the pages that all sequences can fill, plus at most as many again for prefix slots."""
    n_pages = inputs.max_sequences * pages_of(max_context)
    return n_pages + min(inputs.n_slot_pages, n_pages)


def slot_window_pages(spec: ModelSpec) -> int:
    """Return the most window pages that one prefix slot holds; 0 without sliding-window layers."""
    return max_slot_window_pages(spec.window) if spec.window and Space.WINDOW in spec.spaces() else 0


def window_pages(spec: ModelSpec, max_sequences: int, prefill_chunk: int, max_context: int) -> int:
    """Return the window pages of all sequences, with one more each to grow into; 0 without sliding-window layers."""
    if Space.WINDOW not in spec.spaces():
        return 0
    n_pages = max_window_pages(spec.window, prefill_chunk, max_context) if spec.window else pages_of(max_context)
    return max_sequences * (n_pages + 1)


@dataclass(slots=True)
class _Sizer:
    """A case with its layer ranges: what it takes for a context and a number of pages."""

    inputs: SizingInputs
    shards: tuple[Shard, ...]
    n_stages: int
    model: CostModel = field(init=False)
    memories: Mapping[str, Memory] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.inputs.model()
        self.memories = memories_of(self.inputs.targets)

    def chunk(self, max_context: int) -> int:
        return min(self.inputs.prefill_chunk, max_context)

    def max_tokens(self, max_context: int) -> int:
        """Tokens per step: a prefill chunk and one token of every sequence, so that neither waits for the other."""
        return self.chunk(max_context) + self.inputs.max_sequences

    def pools(self, max_context: int, n_pages: int) -> PoolSizes:
        inputs, spaces = self.inputs, self.inputs.spec.spaces()
        n_kept = inputs.n_slots + SPARE_STATES if inputs.n_slots or not inputs.states_in_host else 0
        recurrent = Space.RECURRENT in spaces
        return PoolSizes(
            full_pages=n_pages if Space.FULL in spaces else 0,
            window_pages=window_pages(inputs.spec, inputs.max_sequences, self.chunk(max_context), max_context)
            + inputs.n_slots * slot_window_pages(inputs.spec),
            states=inputs.max_sequences + n_kept if recurrent else 0,
            host_states=n_kept if recurrent and inputs.states_in_host else 0,
        )

    def use(self, shard: Shard, max_context: int, n_pages: int) -> MemoryUse:
        pools, n = self.pools(max_context, n_pages), self.inputs.max_sequences
        # decoding sequences are dealt into as many steps as there are stages
        steps = StepSizes(self.max_tokens(max_context), n, max_context, -(-n // self.n_stages), pools)
        return MemoryUse(
            weight_bytes=self.model.weight_bytes(shard),
            state_bytes=self.model.state_bytes(shard, pools),
            workspace_bytes=self.model.workspace_bytes(shard, steps),
            host_state_bytes=self.model.host_state_bytes(shard, pools),
        )

    def needed_bytes(self, memory: str, max_context: int, n_pages: int) -> int:
        """Bytes that all shards take in a memory; in the host's, with the arenas."""
        total = 0
        for target, shard in zip(self.inputs.targets, self.shards, strict=True):
            if memory in (target.memory, HOST):
                total += self.use(shard, max_context, n_pages).bytes_in(memory, target.memory)
        return total + (self.arena_bytes(max_context) if memory == HOST else 0)

    def arena_bytes(self, max_context: int) -> int:
        """Host memory of the arenas."""
        width, max_tokens = self.inputs.spec.boundary_width, self.max_tokens(max_context)
        arenas = arenas_of(self.n_stages, max_tokens, width, self.inputs.dtype)
        return sum(arena.region_bytes * arena.n_regions for arena in arenas)

    def fits(self, memory: Memory, max_context: int, n_pages: int) -> bool:
        """Whether a memory has room for everything; unknown memories count as large enough."""
        usable = memory.usable_bytes
        return usable is None or self.needed_bytes(memory.name, max_context, n_pages) <= usable

    def max_pages(self, max_context: int, n_pages: int) -> tuple[int, str]:
        """Most pages up to ``n_pages`` that fit (-1: not even 0 do), and the memory that limits them."""
        least, name = n_pages, ""
        for memory in self.memories.values():
            pages = most(least, lambda n, memory=memory: self.fits(memory, max_context, n))  # type: ignore[misc]
            if pages < least:
                least, name = pages, memory.name
        return least, name

    @property
    def all_known(self) -> bool:
        return all(memory.usable_bytes is not None for memory in self.memories.values())


def most(high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to ``high`` that fits, by bisection; -1 if not even 0 does."""
    if not fits(0):
        return -1
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def compute_sizes(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    """Choose context and pages, and list the memories that are too small.

    An automatic context is the longest sequence that fits; automatic pages are as many as fit, up to what sequences and
    prefix slots can use.  Reserved prefix slots are reduced before anything is reported as not fitting.
    """
    sizing = _compute(inputs, ranges)
    if sizing.fits or not inputs.n_slots:
        return sizing
    n_slots = most(inputs.n_slots - 1, lambda n: _compute(replace(inputs, n_slots=n), ranges).fits)
    return _compute(replace(inputs, n_slots=max(0, n_slots)), ranges)


def _compute(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    shards = shards_of(
        [target.device for target in inputs.targets], [target.backend for target in inputs.targets], ranges
    )
    sizer = _Sizer(inputs, shards, len(stages_of(shards)))
    max_context = _context(sizer)
    n_pages, bound = _pages(sizer, max_context)
    shortages = []
    for memory in sizer.memories.values():
        needed = sizer.needed_bytes(memory.name, max_context, n_pages)
        usable, free = memory.usable_bytes, memory.free_bytes
        if usable is not None and free is not None and needed > usable:
            devices = tuple(target.device for target in inputs.targets if target.memory == memory.name)
            shortages.append(Shortage(memory.name, devices, needed, usable, free))
    return Sizing(
        shards=shards,
        uses=tuple(sizer.use(shard, max_context, n_pages) for shard in shards),
        max_context=max_context,
        prefill_chunk=sizer.chunk(max_context),
        max_step_tokens=sizer.max_tokens(max_context),
        pools=sizer.pools(max_context, n_pages),
        shortages=tuple(shortages),
        bound=bound,
        n_slots=inputs.n_slots,
    )


def reference_load(inputs: SizingInputs) -> tuple[int, int]:
    """Return context and pages for automatic ranges: as configured, else one sequence of REFERENCE_TOKENS."""
    pages = inputs.pages or pages_of(inputs.max_context or min(inputs.spec.context_tokens, REFERENCE_TOKENS))
    return inputs.max_context or min(inputs.spec.context_tokens, pages * PAGE_TOKENS), pages


def ranges_by_memory(inputs: SizingInputs) -> tuple[LayerRange, ...]:
    """Choose ranges so that the fullest device is least full and there are as many pages as possible.

    A device's share is what a range takes there over what is usable; devices that share a memory have equal parts of
    it, and an unknown memory counts like the mean of the others.  Raises SplitError when there are too many devices.
    """
    context, pages = reference_load(inputs)
    best = _balanced(RangeMemory(inputs, context, pages))
    if any(memory.usable_bytes is None for memory in memories_of(inputs.targets).values()):
        return best
    sizing = compute_sizes(inputs, best)
    for _ in range(REBALANCINGS):
        # With these pages the devices are unevenly full: rebalance while that yields more.
        again = _balanced(RangeMemory(inputs, sizing.max_context, sizing.pools.full_pages))
        retried = compute_sizes(inputs, again)
        if not retried.fits or _score(retried) <= _score(sizing):
            break
        best, sizing = again, retried
    return best


class RangeMemory:
    """What any range of layers takes on any target, for one context and one number of pages."""

    def __init__(self, inputs: SizingInputs, context: int, pages: int) -> None:
        groups = [target.device.group for target in inputs.targets]
        self.inputs, self._context, self._pages = inputs, context, pages
        self._sizer = _Sizer(inputs, (), 1 + sum(a != b for a, b in pairwise(groups)))
        self._room = _usable_by_target(inputs.targets)
        # Devices of one backend in the middle of the pipeline are alike.
        self._taken: dict[tuple[Backend, bool, bool, int, int], int] = {}

    def n_bytes(self, i: int, layers: LayerRange) -> int:
        """Bytes that the range takes on target ``i``."""
        target, first, last = self.inputs.targets[i], i == 0, i == len(self.inputs.targets) - 1
        key = (target.backend, first, last, layers.start, layers.stop)
        if key not in self._taken:
            shard = Shard(target.device, target.backend, layers, first, last)
            self._taken[key] = self._sizer.use(shard, self._context, self._pages).bytes_in(target.memory, target.memory)
        return self._taken[key]

    def share(self, i: int, layers: LayerRange) -> float:
        """The same as a share of the usable memory; targets that share a memory have equal parts of it."""
        return self.n_bytes(i, layers) / self._room[i]

    def arena_bytes(self) -> int:
        """Host memory of the arenas."""
        return self._sizer.arena_bytes(self._context)


def _score(sizing: Sizing) -> tuple[bool, int, int]:
    return sizing.fits, sizing.max_context, sizing.pools.full_pages


def _balanced(range_memory: RangeMemory) -> tuple[LayerRange, ...]:
    inputs = range_memory.inputs
    return balanced_ranges(len(inputs.targets), inputs.spec.n_layers, range_memory.share, inputs.spec.legal_boundary)


def _usable_by_target(targets: Sequence[TargetDevice]) -> list[float]:
    memories = memories_of(targets)
    known = []
    for target in targets:
        usable = memories[target.memory].usable_bytes
        sharers = sum(other.memory == target.memory for other in targets)
        known.append(None if usable is None else max(1.0, usable / sharers))
    found = [value for value in known if value is not None]
    mean = sum(found) / len(found) if found else 1.0
    return [mean if value is None else value for value in known]


def _context(sizer: _Sizer) -> int:
    inputs = sizer.inputs
    if inputs.max_context is not None:
        return inputs.max_context
    limit = inputs.spec.context_tokens
    highest = pages_of(limit)
    if inputs.pages is not None:
        highest = min(highest, inputs.pages)
    elif not sizer.all_known:
        highest = min(highest, UNKNOWN_PAGES)

    def fits(n: int) -> bool:
        context, n_pages = min(limit, n * PAGE_TOKENS), n if inputs.pages is None else inputs.pages
        return all(sizer.fits(memory, context, n_pages) for memory in sizer.memories.values())

    found = most(highest, lambda n: n == 0 or fits(n))
    if found == 0:  # nothing fits: report what is missing for the configured pages, else for the least
        found = 1 if inputs.pages is None else highest
    return min(limit, found * PAGE_TOKENS)


def _pages(sizer: _Sizer, max_context: int) -> tuple[int, str]:
    """Return the pages of the full pool, and what limits them."""
    inputs = sizer.inputs
    if inputs.pages is not None:
        return inputs.pages, "configured"
    least, enough = pages_of(max_context), max_usable_pages(inputs, max_context)
    highest, bound = enough, "enough"
    if not sizer.all_known and max(least, UNKNOWN_PAGES) < highest:
        highest, bound = max(least, UNKNOWN_PAGES), "unknown"
    room, memory = sizer.max_pages(max_context, highest)
    return (highest, bound) if room == highest else (max(room, least), memory)
