"""Sizes of a placement: the context, pages, slots, chunk and pool that fit the free memory, each with its reason.

Pure arithmetic over the cost model.  Invariant: with every memory known and no shortage, all that lies in a memory
takes at most its usable bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from msgspec import structs

from lucevisor.model.pages import (
    MIN_POOL_PAGES,
    ResidencyPolicy,
    max_host_pages,
    max_resident_chunk,
    max_slot_window_pages,
    max_window_pages,
    pages_of,
)
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, LayerRange, Space, dtype_bytes
from lucevisor.placement.cost import CostModel, MemoryUse, StepSizes
from lucevisor.placement.devices import HOST, HOST_PAGES, Memory, TargetDevice, memories_of
from lucevisor.placement.extra_models import REFERENCE_TOKENS, DrafterSizing, ScorerSizing
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.result import Shard, Shortage
from lucevisor.placement.split import balanced_ranges
from lucevisor.placement.stages import shards_of, stages_of
from lucevisor.protocol.loading import PoolSizes, arena_regions, token_region_bytes

SPARE_STATES = 1
"""Recurrent states beyond one per sequence, so that a checkpoint can be taken while all sequences run."""
UNKNOWN_PAGES = 512
"""Limit of automatic pages where a device's free memory is unknown: 32,768 positions."""
DRAFT_SHARE = 0.25
"""Share of the pages and of the context that verifying drafts of recurrent models may take."""
MAX_AUTO_POOL_PAGES = 256
"""Automatic pool of KV Flash, 16,384 tokens: a larger one slows every decode, and is configured by its number."""
LONG_CHUNKS = (2048, 1024)
"""A GPU dequantises as many weights for 512 tokens as for 2,048, so longer prefill chunks compute prompts faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingInputs:
    """Settings to compute sizes for.  ``max_context`` and ``pages`` None: as much as fits.

    ``n_slots``: prefix slots to reserve states and window pages for, if that many fit.  ``n_slot_pages``: pages that
    slots may fill beside those of sequences.  ``states_in_host``: slots keep their states in host memory.
    ``pool_pages``: resident pages of a sequence with KV Flash; None: off.  ``host_bytes``: host memory for its other
    pages.  ``max_drafts``: of a sequence in one step.  ``models`` caches cost models; derived inputs share it.
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
    pool_pages: int | None = None
    host_bytes: int = 0
    residency_policy: ResidencyPolicy = "lru"
    draft: DrafterSizing | None = None
    max_drafts: int = 0
    n_draft_states: int = 0
    scorer: ScorerSizing | None = None
    models: dict[tuple[str, Dtype, Dtype], CostModel] = field(default_factory=dict, repr=False, compare=False)

    def cost(self, spec: ModelSpec) -> CostModel:
        """Return the cost model of the served model or its drafter."""
        key = (spec.architecture, self.dtype, self.kv_dtype)  # a drafter has an architecture of its own
        if key not in self.models:
            self.models[key] = CostModel(spec, self.dtype, self.kv_dtype)
        return self.models[key]

    def sequence_pages(self, n_tokens: int) -> int:
        """Return the pages that a sequence of ``n_tokens`` keeps on the devices."""
        n_pages = pages_of(n_tokens)
        return n_pages if self.pool_pages is None else min(n_pages, self.pool_pages)

    def usable_pages(self, max_context: int) -> int:
        """Return the pages that all sequences can fill, and at most as many again for prefix slots."""
        n_pages = self.max_sequences * self.sequence_pages(max_context)
        return n_pages + min(self.n_slot_pages, n_pages)

    @property
    def host_page_limit(self) -> int:
        """Pages of all layers that fit into ``host_bytes``."""
        page_bytes = self.spec.unit_bytes(Space.FULL, LayerRange(0, self.spec.n_layers), self.kv_dtype)
        return self.host_bytes // page_bytes if page_bytes else 0

    @property
    def all_targets(self) -> tuple[TargetDevice, ...]:
        """Devices of the shards, the drafter and the scoring model."""
        return (*self.targets, *(extra.target for extra in (self.draft, self.scorer) if extra is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Sizes of a placement.  ``uses[i]`` belongs to ``shards[i]``; ``reasons`` and ``details`` explain the sizes."""

    shards: tuple[Shard, ...]
    uses: tuple[MemoryUse, ...]
    draft_use: MemoryUse | None
    max_context: int
    prefill_chunk: int
    max_step_tokens: int
    max_drafts: int
    n_slots: int
    pools: PoolSizes
    shortages: tuple[Shortage, ...]
    reasons: tuple[str, ...]
    details: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.shortages


def largest(high: int, fits: Callable[[int], bool]) -> int:
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


def slot_unit_bytes(spec: ModelSpec, kv_dtype: Dtype, drafter: ModelSpec | None) -> dict[Space, int]:
    """Return the bytes of a page or a state of each space over all shards and the drafter."""
    models = [spec] if drafter is None else [spec, drafter]
    return {space: sum(m.unit_bytes(space, LayerRange(0, m.n_layers), kv_dtype) for m in models) for space in Space}


def slot_window_pages(spec: ModelSpec) -> int:
    """Return the most window pages that one prefix slot holds; 0 without sliding-window layers."""
    return max_slot_window_pages(spec.window) if spec.window and Space.WINDOW in spec.spaces() else 0


def reserved_slots(
    spec: ModelSpec, kv_dtype: Dtype, max_slots: int, memory_bytes: int, drafter: ModelSpec | None = None
) -> tuple[int, int]:
    """Return for how many prefix slots states and window pages are reserved, and how many pages of the full space the
    rest of their memory holds.

    No slots are reserved for a model with neither recurrent nor sliding layers: its slots take only full pages.
    """
    if not max_slots:
        return 0, 0
    unit_bytes = slot_unit_bytes(spec, kv_dtype, drafter)
    slot_bytes = unit_bytes[Space.RECURRENT] + slot_window_pages(spec) * unit_bytes[Space.WINDOW]
    n_slots = min(max_slots, memory_bytes // slot_bytes) if slot_bytes else 0
    page_bytes = unit_bytes[Space.FULL]
    return n_slots, (memory_bytes - n_slots * slot_bytes) // page_bytes if page_bytes else 0


@dataclass(slots=True)
class Sizer:
    """Bytes of given inputs and shards, for a context and a number of pages."""

    inputs: SizingInputs
    shards: tuple[Shard, ...]
    n_stages: int
    memories: Mapping[str, Memory] = field(init=False)

    def __post_init__(self) -> None:
        self.memories = memories_of(self.inputs.all_targets)

    def chunk(self, max_context: int) -> int:
        return min(self.inputs.prefill_chunk, max_context)

    def max_tokens(self, max_context: int) -> int:
        """Return the tokens of a step: a prefill chunk beside one token of every sequence with its drafts."""
        return self.chunk(max_context) + self.inputs.max_sequences * (1 + self.max_drafts(max_context))

    def max_drafts(self, max_context: int) -> int:
        """Return the drafts of one sequence, fewer than a chunk: window pages are counted for slices of a chunk."""
        return min(self.inputs.max_drafts, self.chunk(max_context) - 1)

    def pools(self, max_context: int, n_pages: int) -> PoolSizes:
        inputs, spec, spaces = self.inputs, self.inputs.spec, self.inputs.spec.spaces()
        recurrent = Space.RECURRENT in spaces
        n_kept = inputs.n_slots + SPARE_STATES if inputs.n_slots or not inputs.states_in_host else 0
        n_window = pages_of(max_context)
        if spec.window:
            n_window = max_window_pages(spec.window, self.chunk(max_context), max_context)
        window_pages = inputs.max_sequences * (n_window + 1)  # one more each to grow into
        return PoolSizes(
            full_pages=n_pages if Space.FULL in spaces else 0,
            window_pages=window_pages + inputs.n_slots * slot_window_pages(spec) if Space.WINDOW in spaces else 0,
            states=inputs.max_sequences + n_kept if recurrent else 0,
            host_states=n_kept if recurrent and inputs.states_in_host else 0,
            host_pages=self._host_pages(max_context),
            draft_states=inputs.n_draft_states if recurrent else 0,
        )

    def _host_pages(self, max_context: int) -> int:
        """Return the pages that all sequences can page out with KV Flash, within its host memory."""
        inputs = self.inputs
        if inputs.pool_pages is None or not inputs.host_bytes:
            return 0
        n_out = max_host_pages(pages_of(max_context), inputs.pool_pages, inputs.residency_policy)
        return min(inputs.max_sequences * n_out, inputs.host_page_limit)

    def use(self, shard: Shard, max_context: int, n_pages: int) -> MemoryUse:
        steps, cost = self._steps(max_context, n_pages), self.inputs.cost(self.inputs.spec)
        return MemoryUse(
            weight_bytes=cost.weight_bytes(shard),
            state_bytes=cost.state_bytes(shard, steps.pools),
            workspace_bytes=cost.workspace_bytes(shard, steps),
            host_state_bytes=cost.host_state_bytes(shard, steps.pools),
        )

    def draft_use(self, max_context: int, n_pages: int) -> MemoryUse:
        """Return the bytes of the drafter.  Its captures count as one more activation."""
        draft, dtype = self.inputs.draft, self.inputs.dtype
        assert draft is not None
        steps, cost, backend = (
            self._steps(max_context, n_pages),
            self.inputs.cost(draft.spec.model),
            draft.target.backend,
        )
        if self.inputs.residency_policy == "exact":
            steps = replace(steps, pools=structs.replace(steps.pools, host_pages=0))
        shard = Shard(draft.target.device, backend, draft.spec.layers, first=True, last=True)
        layouts = draft.spec.layouts(backend, dtype, with_output=draft.with_output, with_embedding=draft.with_embedding)
        captured = steps.max_tokens * len(draft.spec.captures) * self.inputs.spec.hidden_size * 4
        vocabulary_bytes = draft.spec.draft_vocabulary_bytes(backend, dtype)
        return MemoryUse(
            weight_bytes=sum(layout.n_bytes for layout in layouts) + vocabulary_bytes,
            state_bytes=cost.state_bytes(shard, steps.pools),
            workspace_bytes=cost.workspace_bytes(shard, steps) + captured,
            host_state_bytes=cost.host_state_bytes(shard, steps.pools),
        )

    def _steps(self, max_context: int, n_pages: int) -> StepSizes:
        n, resident = self.inputs.max_sequences, self.inputs.sequence_pages(max_context) * PAGE_TOKENS
        return StepSizes(
            max_tokens=self.max_tokens(max_context),
            max_sequences=n,
            max_context=max_context,
            resident=min(max_context, resident),
            n_together=-(-n // self.n_stages),  # decoding sequences are dealt into as many steps as there are stages
            pools=self.pools(max_context, n_pages),
            ranks_pages=self.inputs.residency_policy == "qk",
        )

    def needed_bytes(self, memory: str, max_context: int, n_pages: int) -> int:
        """Return the bytes of shards, drafter and scoring model in a memory; in the host's, with the arenas."""
        inputs, total = self.inputs, 0
        for target, shard in zip(inputs.targets, self.shards, strict=True):
            if memory in (target.memory, HOST):
                total += self.use(shard, max_context, n_pages).bytes_in(memory, target.memory)
        if inputs.draft is not None and memory in (inputs.draft.target.memory, HOST):
            total += self.draft_use(max_context, n_pages).bytes_in(memory, inputs.draft.target.memory)
        if inputs.scorer is not None:
            total += inputs.scorer.use.bytes_in(memory, inputs.scorer.target.memory)
        return total + (self.arena_bytes(max_context) if memory == HOST else 0)

    def arena_bytes(self, max_context: int) -> int:
        """Return the host memory of the arenas."""
        inputs, max_tokens = self.inputs, self.max_tokens(max_context)
        widths = [inputs.spec.boundary_width] * (self.n_stages - 1) + self._captured_widths()
        region_bytes = sum(max_tokens * dtype_bytes(inputs.dtype, width) for width in widths)
        if self.n_stages > 1:
            region_bytes += token_region_bytes(inputs.max_sequences, self.max_drafts(max_context))
        return region_bytes * arena_regions(self.n_stages + (inputs.draft is not None))

    def _captured_widths(self) -> list[int]:
        """Return the numbers per token in each arena of captures; before the ranges are chosen, all of them in one."""
        draft, width = self.inputs.draft, self.inputs.spec.hidden_size
        if draft is None:
            return []
        if not self.shards:
            return [len(draft.spec.captures) * width]
        counts = Counter(
            shard.device.group
            for shard in self.shards
            for layer in draft.spec.captures
            if layer in shard.layers and shard.device.group != draft.target.device.group
        )
        return [n * width for n in counts.values()]

    def fits(self, memory: Memory, max_context: int, n_pages: int) -> bool:
        """Return whether a memory has room for everything; unknown memories count as large enough."""
        usable = memory.usable_bytes
        return usable is None or self.needed_bytes(memory.name, max_context, n_pages) <= usable

    @property
    def all_known(self) -> bool:
        """True if the free memory of every device with layers is known."""
        return all(self.memories[target.memory].usable_bytes is not None for target in self.inputs.targets)


# ---- context, pages, slots and drafts


def compute_sizes(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    """Choose context, pages and states, and list the memories that are too small.

    An automatic context is the longest sequence that fits; automatic pages are as many as fit, up to what sequences and
    prefix slots can use.  Reserved prefix slots are reduced before anything is reported as not fitting.  Verifying
    drafts comes last: for as many as all sequences can use, within DRAFT_SHARE.
    """
    sizing, wanted = _compute(inputs, ranges), inputs.n_slots
    if not sizing.fits and wanted:
        n_slots = largest(wanted - 1, lambda n: _compute(replace(inputs, n_slots=n), ranges).fits)
        inputs = replace(inputs, n_slots=max(0, n_slots))
        sizing = _compute(inputs, ranges)
    if sizing.fits and inputs.max_drafts and sizing.pools.states:
        sizing = _with_draft_states(inputs, ranges, sizing)
    if inputs.n_slots < wanted:
        why = f"memory is reserved for {inputs.n_slots}; {wanted}, as cache.memory allows, do not fit"
        sizing = replace(sizing, reasons=(*sizing.reasons, f"prefix slots: {why}"))
    return sizing


def _compute(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    targets = inputs.targets
    shards = shards_of([target.device for target in targets], [target.backend for target in targets], ranges)
    sizer = Sizer(inputs, shards, len(stages_of(shards)))
    max_context, why_context = _context(sizer)
    n_pages, why_pages = _pages(sizer, max_context)
    pools, shortages = sizer.pools(max_context, n_pages), []
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
        max_drafts=sizer.max_drafts(max_context),
        n_slots=inputs.n_slots,
        pools=pools,
        shortages=tuple(shortages),
        reasons=(f"max_context {max_context}: {why_context}", why_pages, *_state_reasons(inputs, pools)),
    )


def _context(sizer: Sizer) -> tuple[int, str]:
    """Return the context and why."""
    inputs = sizer.inputs
    if inputs.max_context is not None:
        return inputs.max_context, "as configured"
    limit = inputs.spec.context_tokens
    highest = pages_of(limit)
    if inputs.pool_pages is not None and inputs.host_bytes:
        beside = 0 if inputs.residency_policy in ("qk", "drafter") else inputs.pool_pages
        highest = min(highest, max(inputs.pool_pages, beside + inputs.host_page_limit))
    room = inputs.pages if inputs.pages is not None else highest if sizer.all_known else UNKNOWN_PAGES
    if room < inputs.sequence_pages(limit):
        highest = room

    def fits(n: int) -> bool:
        context = min(limit, n * PAGE_TOKENS)
        n_pages = inputs.sequence_pages(context) if inputs.pages is None else inputs.pages
        return all(sizer.fits(memory, context, n_pages) for memory in sizer.memories.values())

    n = largest(highest, lambda n: n == 0 or fits(n))
    if n == 0:  # nothing fits: report what is missing for the configured pages, else for the fewest
        n = 1 if inputs.pages is None else highest
    context, own = min(limit, n * PAGE_TOKENS), f"the model's own is {limit}"
    if context == limit:
        return context, "the model's own"
    if inputs.pages is not None and n == inputs.pages:
        return context, f"engine.pages = {inputs.pages} hold no more; {own}"
    if n == UNKNOWN_PAGES:
        return context, f"limited because free memory is unknown; {own}, engine.max_context sets it"
    return context, f"the longest sequence that fits; {own}"


def _pages(sizer: Sizer, max_context: int) -> tuple[int, str]:
    """Return the pages of the full pool, and why."""
    inputs = sizer.inputs
    fewest, enough = inputs.sequence_pages(max_context), inputs.usable_pages(max_context)
    slots = " and prefix slots" if inputs.n_slot_pages else ""
    resident = fewest * PAGE_TOKENS
    tokens = f"{max_context} tokens" if resident >= max_context else f"{resident} resident tokens"
    what = f"{inputs.max_sequences} sequences of {tokens}{slots}"
    if Space.FULL not in inputs.spec.spaces():
        return 0, "pages 0: no layer of the model attends to all positions"
    if inputs.pages is not None:
        return inputs.pages, f"pages {inputs.pages}: as configured"
    n, why = enough, f"enough for {what}"
    if not sizer.all_known and max(fewest, UNKNOWN_PAGES) < n:
        n, why = max(fewest, UNKNOWN_PAGES), "limited because free memory is unknown; engine.pages sets it"
    for memory in sizer.memories.values():
        n_fitting = largest(n, lambda n, memory=memory: sizer.fits(memory, max_context, n))  # type: ignore[misc]
        if n_fitting < n:
            n, why = n_fitting, f"as many as fit in {memory.name}; {what} would use {enough}"
    n_moderate = max(fewest, _moderate_host_pages(sizer, max_context, n))
    if n_moderate < n:
        share = f"{HOST_PAGES:.0%} of the host's usable memory or one sequence"
        n, why = n_moderate, f"as many as fit in {share}; {what} would use {enough}, and engine.pages sets more"
    n = max(n, fewest)
    return n, f"pages {n}: {why}"


def _moderate_host_pages(sizer: Sizer, max_context: int, highest: int) -> int:
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

    return largest(highest, lambda n: state_bytes(n) - state_bytes(0) <= limit)


def _state_reasons(inputs: SizingInputs, pools: PoolSizes) -> Iterator[str]:
    n = inputs.max_sequences
    if pools.host_states:
        kept = f"in host memory {pools.host_states - SPARE_STATES} for prefix slots, and {SPARE_STATES} spare"
        yield f"recurrent states {pools.states}: one on the devices for each of {n} sequences; {kept}"
    elif pools.states:
        n_spare = min(SPARE_STATES, pools.states - n)
        n_kept = pools.states - n - n_spare
        kept = f", {n_kept} for prefix slots" if n_kept else ""
        yield f"recurrent states {pools.states}: one for each of {n} sequences{kept}, and {n_spare} spare"
    if pools.window_pages:
        kept = " and prefix slots" if inputs.n_slots else ""
        window = f"a window of {inputs.spec.window} tokens"
        yield f"window pages {pools.window_pages}: what {n} sequences{kept} hold at {window}"


def _with_draft_states(inputs: SizingInputs, ranges: Sequence[LayerRange], without: Sizing) -> Sizing:
    """Add updates and windows for each draft of each sequence, or as many as the share allows.

    Where the memory of a shard is unknown, those of one sequence.
    """
    known = all(memory.usable_bytes is not None for memory in memories_of(inputs.targets).values())
    min_pages = without.pools.full_pages * (1 - DRAFT_SHARE)
    min_context = without.max_context * (1 - DRAFT_SHARE)

    def computed(n: int) -> Sizing:
        return _compute(replace(inputs, n_draft_states=n), ranges)

    def affordable(n: int) -> bool:
        sizing = computed(n)
        return sizing.fits and sizing.pools.full_pages >= min_pages and sizing.max_context >= min_context

    n = max(0, largest((inputs.max_sequences if known else 1) * without.max_drafts, affordable))
    wanted, why = inputs.max_sequences * without.max_drafts, f"all of {inputs.max_sequences} sequences"
    if n < wanted:
        share = f"{DRAFT_SHARE:.0%} of the pages and of the context"
        why = f"as many as fit within {share}; {inputs.max_sequences} sequences would use {wanted}"
    n_bytes = inputs.spec.draft_state_bytes(LayerRange(0, inputs.spec.n_layers), inputs.kv_dtype)
    return replace(computed(n), details=(f"updates for verifying {n} drafts, {format_bytes(n_bytes)} each: {why}",))


# ---- the prefill chunk and the pool of KV Flash


def choose_chunk(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> tuple[SizingInputs, Sizing]:
    """Return the inputs with the longest chunk that leaves nine tenths of pages and context, and their sizes.

    The chunk of ``inputs`` stays where a device is a cpu or a memory is unknown.
    """
    usual = compute_sizes(inputs, ranges)
    known = all(memory.usable_bytes is not None for memory in memories_of(inputs.all_targets).values())
    if not known or not usual.fits or any(target.backend is Backend.CPU for target in inputs.targets):
        return inputs, usual
    limit = LONG_CHUNKS[0] if inputs.pool_pages is None else max_resident_chunk(inputs.pool_pages)
    for chunk in (chunk for chunk in LONG_CHUNKS if chunk <= limit):
        longer_inputs = replace(inputs, prefill_chunk=chunk)
        longer = compute_sizes(longer_inputs, ranges)
        if longer.fits and _leaves_enough(longer, usual):
            if longer.prefill_chunk > usual.prefill_chunk:
                why = "GPUs compute prompts faster so, and there is memory for it; less beside others"
                longer = replace(longer, reasons=(*longer.reasons, f"prefill_chunk {longer.prefill_chunk}: {why}"))
            return longer_inputs, longer
    return inputs, usual


def _leaves_enough(longer: Sizing, usual: Sizing) -> bool:
    def kept(sizing: Sizing) -> tuple[int, int, int]:
        return sizing.pools.draft_states, sizing.max_context, sizing.pools.full_pages

    return longer.n_slots == usual.n_slots and all(
        n >= 0.9 * before for n, before in zip(kept(longer), kept(usual), strict=True)
    )


def choose_pool(inputs: SizingInputs, ranges: Sequence[LayerRange], chunk: int) -> SizingInputs:
    """Return the inputs with the largest pool of KV Flash of which the devices hold one for each sequence; with the
    smallest where they hold none.  ``chunk``: the prefill chunk, which a pool may cut.
    """

    def with_pool(n_more: int) -> SizingInputs:
        n_pages = MIN_POOL_PAGES + n_more
        return replace(inputs, pool_pages=n_pages, prefill_chunk=min(chunk, max_resident_chunk(n_pages)))

    def fits(n_more: int) -> bool:
        sizing = compute_sizes(with_pool(n_more), ranges)
        resident = min(MIN_POOL_PAGES + n_more, pages_of(sizing.max_context))
        return sizing.fits and sizing.pools.full_pages >= inputs.max_sequences * resident

    return with_pool(max(0, largest(MAX_AUTO_POOL_PAGES - MIN_POOL_PAGES, fits)))


# ---- ranges by memory


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

    def balanced(context: int, pages: int) -> tuple[LayerRange, ...]:
        share = RangeMemory(inputs, context, pages).share
        return balanced_ranges(len(inputs.targets), inputs.spec.n_layers, share, inputs.spec.legal_boundary)

    def score(sizing: Sizing) -> tuple[bool, int, int]:
        return sizing.fits, sizing.max_context, sizing.pools.full_pages

    best = balanced(*reference_load(inputs))
    if any(memory.usable_bytes is None for memory in memories_of(inputs.targets).values()):
        return best
    sizing = compute_sizes(inputs, best)
    for _ in range(3):  # with these pages the devices are unevenly full: rebalance while that yields more
        again = balanced(sizing.max_context, sizing.pools.full_pages)
        retried = compute_sizes(inputs, again)
        if not retried.fits or score(retried) <= score(sizing):
            break
        best, sizing = again, retried
    return best


class RangeMemory:
    """Bytes of any range of layers on any target, for one context and one number of pages."""

    def __init__(self, inputs: SizingInputs, context: int, pages: int) -> None:
        groups = [target.device.group for target in inputs.targets]
        self._inputs, self._context, self._pages = inputs, context, pages
        self._sizer = Sizer(inputs, (), 1 + sum(a != b for a, b in pairwise(groups)))
        self.reserved = self._reserved()
        self._room = self._usable_by_target()
        # Devices of one backend in the middle of the pipeline are alike.
        self._taken: dict[tuple[Backend, bool, bool, int, int], int] = {}

    def n_bytes(self, i: int, layers: LayerRange) -> int:
        """Return the bytes that the range takes on target ``i``."""
        target, first, last = self._inputs.targets[i], i == 0, i == len(self._inputs.targets) - 1
        key = (target.backend, first, last, layers.start, layers.stop)
        if key not in self._taken:
            shard = Shard(target.device, target.backend, layers, first, last)
            self._taken[key] = self._sizer.use(shard, self._context, self._pages).bytes_in(target.memory, target.memory)
        return self._taken[key]

    def share(self, i: int, layers: LayerRange) -> float:
        """Return the same as a share of the usable memory; targets that share a memory have equal parts of it."""
        return self.n_bytes(i, layers) / self._room[i]

    def _reserved(self) -> Counter[str]:
        """Return the bytes in each memory that no shard can have: arenas, drafter and scoring model."""
        out, draft, scorer = (
            Counter({HOST: self._sizer.arena_bytes(self._context)}),
            self._inputs.draft,
            self._inputs.scorer,
        )
        if draft is not None:
            use = self._sizer.draft_use(self._context, self._pages)
            for memory in {draft.target.memory, HOST}:
                out[memory] += use.bytes_in(memory, draft.target.memory)
        if scorer is not None:
            out[scorer.target.memory] += scorer.use.total_bytes
        return out

    def _usable_by_target(self) -> list[float]:
        targets, memories = self._inputs.targets, memories_of(self._inputs.targets)
        usable: list[float | None] = []
        for target in targets:
            n_bytes = memories[target.memory].usable_bytes
            n_sharers = sum(other.memory == target.memory for other in targets)
            part = None if n_bytes is None else max(1.0, (n_bytes - self.reserved[target.memory]) / n_sharers)
            usable.append(part)
        known = [part for part in usable if part is not None]
        mean = sum(known) / len(known) if known else 1.0
        return [mean if part is None else part for part in usable]
