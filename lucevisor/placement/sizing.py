"""Memory estimate: the context length and the number of pages that fit, given dtypes and layer ranges.

Pure arithmetic over the cost model and the free memory.  Invariant: with every memory known and no shortage, the shards
in a memory need at most its usable bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lucevisor.model.pages import pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, LayerRange, Space
from lucevisor.placement.cost import MemoryUse
from lucevisor.placement.devices import HOST, HOST_PAGES, TargetDevice, memories_of
from lucevisor.placement.drafting import REFERENCE_TOKENS
from lucevisor.placement.ranges import balanced_ranges
from lucevisor.placement.result import Shard, Shortage
from lucevisor.placement.sizer import Sizer, SizingInputs, most, slot_window_pages
from lucevisor.placement.stages import shards_of, stages_of
from lucevisor.protocol.loading import PoolSizes

REBALANCINGS = 3
UNKNOWN_PAGES = 512
"""Limit of "auto" pages where a device's free memory is unknown: 32768 positions."""
MODERATE = "moderate"
"""The bound of automatic pages that take HOST_PAGES of the host's memory."""
DRAFT_SHARE = 0.25
"""Of each memory and of the pages, what verifying drafts of recurrent models may take: pages serve all.  Less than all
drafts want only with many sequences beside little memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The sizes of a case.  ``uses[i]`` belongs to ``shards[i]``; ``bound`` is what kept the pages from being more."""

    shards: tuple[Shard, ...]
    uses: tuple[MemoryUse, ...]
    draft_use: MemoryUse | None
    max_context: int
    prefill_chunk: int
    max_step_tokens: int
    pools: PoolSizes
    shortages: tuple[Shortage, ...]
    bound: str  # "configured", "enough", "unknown", or the name of a memory
    n_slots: int = 0  # prefix slots for which states and window pages are set aside
    max_drafts: int = 0  # of a sequence in one step
    n_draft_states: int = 0  # ids of states after drafts

    @property
    def fits(self) -> bool:
        return not self.shortages


def reserved_slots(
    spec: ModelSpec, kv_dtype: Dtype, max_slots: int, memory_bytes: int, drafter: ModelSpec | None = None
) -> tuple[int, int]:
    """Return for how many prefix slots recurrent states and window pages are set aside, and how many pages of the full
    space the rest of their memory holds.

    As many slots as the memory holds, at most ``max_slots``; 0 for a model without such layers: its slots need pages of
    the full space only.
    """
    if not max_slots:
        return 0, 0
    unit_bytes = slot_unit_bytes(spec, kv_dtype, drafter)
    slot_bytes = unit_bytes[Space.RECURRENT] + slot_window_pages(spec) * unit_bytes[Space.WINDOW]
    n_slots = min(max_slots, memory_bytes // slot_bytes) if slot_bytes else 0
    page_bytes = unit_bytes[Space.FULL]
    return n_slots, (memory_bytes - n_slots * slot_bytes) // page_bytes if page_bytes else 0


def slot_unit_bytes(spec: ModelSpec, kv_dtype: Dtype, drafter: ModelSpec | None) -> dict[Space, int]:
    """Return the bytes of a page or a state of each space over all shards and the drafter."""
    models = [spec] if drafter is None else [spec, drafter]
    return {space: sum(m.unit_bytes(space, LayerRange(0, m.n_layers), kv_dtype) for m in models) for space in Space}


def max_usable_pages(inputs: SizingInputs, max_context: int) -> int:
    """Return the pages that all sequences can fill, plus at most as many again for prefix slots."""
    n_pages = inputs.max_sequences * inputs.sequence_pages(max_context)
    return n_pages + min(inputs.n_slot_pages, n_pages)


def compute_sizes(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    """Choose context, pages and states, and list the memories that are too small.

    An automatic context is the longest sequence that fits; automatic pages are as many as fit, up to what sequences and
    prefix slots can use.  Reserved prefix slots are reduced before anything is reported as not fitting.  What verifying
    drafts takes comes last: for as many as all sequences can use, within DRAFT_SHARE.
    """
    sizing = _compute(inputs, ranges)
    if not sizing.fits and inputs.n_slots:
        n_slots = most(inputs.n_slots - 1, lambda n: _compute(replace(inputs, n_slots=n), ranges).fits)
        inputs = replace(inputs, n_slots=max(0, n_slots))
        sizing = _compute(inputs, ranges)
    if not sizing.fits or not inputs.max_drafts or not sizing.pools.states:
        return sizing
    return _with_draft_states(inputs, ranges, sizing)


def _with_draft_states(inputs: SizingInputs, ranges: Sequence[LayerRange], without: Sizing) -> Sizing:
    """Add updates and windows for each draft of each sequence, or as many as the share allows.

    Where the memory of a shard is unknown, those of one sequence.
    """
    known = all(memory.usable_bytes is not None for memory in memories_of(inputs.targets).values())
    sequences = inputs.max_sequences if known else 1
    least_pages = without.pools.full_pages * (1 - DRAFT_SHARE)
    least_context = without.max_context * (1 - DRAFT_SHARE)

    def computed(n: int) -> Sizing:
        return _compute(replace(inputs, n_draft_states=n), ranges)

    def affordable(n: int) -> bool:
        sizing = computed(n)
        kept = sizing.pools.full_pages >= least_pages and sizing.max_context >= least_context
        return kept and sizing.fits and _within_share(inputs, sizing, n)

    return computed(max(0, most(sequences * without.max_drafts, affordable)))


def _within_share(inputs: SizingInputs, sizing: Sizing, n_states: int) -> bool:
    """Whether updates and windows of ``n_states`` take at most DRAFT_SHARE of every memory they are in."""
    taken: Counter[str] = Counter()
    for target, shard in zip(inputs.targets, sizing.shards, strict=True):
        taken[target.memory] += n_states * inputs.spec.draft_state_bytes(shard.layers, inputs.kv_dtype)
    if inputs.draft is not None:
        spec = inputs.draft.spec
        n_bytes = spec.model.draft_state_bytes(spec.layers, inputs.kv_dtype)
        taken[inputs.draft.target.memory] += n_states * n_bytes
    usable = {name: memory.usable_bytes for name, memory in memories_of(inputs.all_targets).items()}
    return all(room is None or taken[name] <= room * DRAFT_SHARE for name, room in usable.items())


def _compute(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    shards = shards_of(
        [target.device for target in inputs.targets], [target.backend for target in inputs.targets], ranges
    )
    sizer = Sizer(inputs, shards, len(stages_of(shards)))
    max_context = _context(sizer)
    n_pages, bound = _pages(sizer, max_context)
    shortages = []
    for memory in sizer.memories.values():
        needed = sizer.needed_bytes(memory.name, max_context, n_pages)
        usable, free = memory.usable_bytes, memory.free_bytes
        if usable is not None and free is not None and needed > usable:
            devices = tuple(target.device for target in inputs.all_targets if target.memory == memory.name)
            shortages.append(Shortage(memory.name, devices, needed, usable, free))
    return Sizing(
        shards=shards,
        uses=tuple(sizer.use(shard, max_context, n_pages) for shard in shards),
        draft_use=None if inputs.draft is None else sizer.draft_use(max_context, n_pages),
        max_context=max_context,
        prefill_chunk=sizer.chunk(max_context),
        max_step_tokens=sizer.max_tokens(max_context),
        pools=sizer.pools(max_context, n_pages),
        shortages=tuple(shortages),
        bound=bound,
        n_slots=inputs.n_slots,
        max_drafts=sizer.max_drafts(max_context),
        n_draft_states=inputs.n_draft_states,
    )


def reference_load(inputs: SizingInputs) -> tuple[int, int]:
    """Return context and pages for automatic ranges: as configured, else one sequence of REFERENCE_TOKENS."""
    context = inputs.max_context or min(inputs.spec.context_tokens, REFERENCE_TOKENS)
    pages = inputs.pages or inputs.sequence_pages(context)
    if inputs.max_context or inputs.pool_pages is not None:
        return context, pages
    return min(inputs.spec.context_tokens, pages * PAGE_TOKENS), pages


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
        self._sizer = Sizer(inputs, (), 1 + sum(a != b for a, b in pairwise(groups)))
        self.reserved = self._reserved()
        self._room = _usable_by_target(inputs.targets, self.reserved)
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

    def _reserved(self) -> Counter[str]:
        """Bytes in each memory that no shard can have: those of the arenas, the drafter and the scoring model."""
        out = Counter({HOST: self._sizer.arena_bytes(self._context)})
        draft = self.inputs.draft
        if draft is not None:
            use = self._sizer.draft_use(self._context, self._pages)
            for memory in {draft.target.memory, HOST}:
                out[memory] += use.bytes_in(memory, draft.target.memory)
        scorer = self.inputs.scorer
        if scorer is not None:
            out[scorer.target.memory] += scorer.use.total_bytes
        return out


def _score(sizing: Sizing) -> tuple[bool, int, int]:
    return sizing.fits, sizing.max_context, sizing.pools.full_pages


def _balanced(range_memory: RangeMemory) -> tuple[LayerRange, ...]:
    inputs = range_memory.inputs
    return balanced_ranges(len(inputs.targets), inputs.spec.n_layers, range_memory.share, inputs.spec.legal_boundary)


def _usable_by_target(targets: Sequence[TargetDevice], reserved: Mapping[str, int]) -> list[float]:
    memories = memories_of(targets)
    known = []
    for target in targets:
        usable = memories[target.memory].usable_bytes
        sharers = sum(other.memory == target.memory for other in targets)
        known.append(None if usable is None else max(1.0, (usable - reserved[target.memory]) / sharers))
    found = [value for value in known if value is not None]
    mean = sum(found) / len(found) if found else 1.0
    return [mean if value is None else value for value in known]


def _context(sizer: Sizer) -> int:
    inputs = sizer.inputs
    if inputs.max_context is not None:
        return inputs.max_context
    limit = inputs.spec.context_tokens
    highest = pages_of(limit)
    if inputs.pool_pages is not None and inputs.host_bytes:
        beside = 0 if inputs.residency_policy in ("qk", "drafter") else inputs.pool_pages
        highest = min(highest, max(inputs.pool_pages, beside + inputs.most_host_pages))
    room = inputs.pages if inputs.pages is not None else highest if sizer.all_known else UNKNOWN_PAGES
    if room < inputs.sequence_pages(limit):
        highest = room

    def fits(n: int) -> bool:
        context = min(limit, n * PAGE_TOKENS)
        n_pages = inputs.sequence_pages(context) if inputs.pages is None else inputs.pages
        return all(sizer.fits(memory, context, n_pages) for memory in sizer.memories.values())

    found = most(highest, lambda n: n == 0 or fits(n))
    if found == 0:  # nothing fits: report what is missing for the configured pages, else for the least
        found = 1 if inputs.pages is None else highest
    return min(limit, found * PAGE_TOKENS)


def _pages(sizer: Sizer, max_context: int) -> tuple[int, str]:
    """Return the pages of the full pool, and what limits them."""
    inputs = sizer.inputs
    if inputs.pages is not None:
        return inputs.pages, "configured"
    least, enough = inputs.sequence_pages(max_context), max_usable_pages(inputs, max_context)
    highest, bound = enough, "enough"
    if not sizer.all_known and max(least, UNKNOWN_PAGES) < highest:
        highest, bound = max(least, UNKNOWN_PAGES), "unknown"
    room, memory = sizer.max_pages(max_context, highest)
    moderate = max(least, _host_pages(sizer, max_context, room))
    if moderate < room:
        return moderate, MODERATE
    return (highest, bound) if room == highest else (max(room, least), memory)


def _host_pages(sizer: Sizer, max_context: int, highest: int) -> int:
    """Return how many pages, up to ``highest``, take at most HOST_PAGES of the host's memory."""
    host = sizer.memories.get(HOST)
    if host is None or host.usable_bytes is None:
        return highest
    inputs, limit = sizer.inputs, HOST_PAGES * host.usable_bytes

    def state_bytes(n: int) -> int:
        shards = [s for t, s in zip(inputs.targets, sizer.shards, strict=True) if t.memory == HOST]
        uses = [sizer.use(shard, max_context, n) for shard in shards]
        if inputs.draft is not None and inputs.draft.target.memory == HOST:
            uses.append(sizer.draft_use(max_context, n))
        return sum(use.state_bytes for use in uses)

    return most(highest, lambda n: state_bytes(n) - state_bytes(0) <= limit)
