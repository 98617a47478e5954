"""Sizes of a placement: the context, pages, slots, chunk and pool that fit the free memory, each with its reason.

Invariant: with every memory known and no shortage, all that lies in a memory takes at most its usable bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

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
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, KvGroup, LayerRange, dtype_bytes
from lucevisor.model.workspace import SAMPLED_ROWS
from lucevisor.placement.cost import CostModel, MemoryUse, StepSizes, rounding_bytes
from lucevisor.placement.devices import HOST, HOST_PAGES, Memory, TargetDevice, memories_of
from lucevisor.placement.extra_models import REFERENCE_TOKENS, DrafterSizing, ExtraSizing, memory_use
from lucevisor.placement.formatting import format_bytes
from lucevisor.placement.result import PlacedEncoder, PlacedScorer, Shard, Shortage
from lucevisor.placement.split import balanced_ranges
from lucevisor.placement.stages import shards_of, stages_of
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings, arena_regions, token_region_bytes

SPARE_STATES = 1
"""Recurrent states beyond one per sequence, so that a checkpoint can be taken while all sequences run."""
UNKNOWN_PAGES = 512
"""Limit of automatic pages where a device's free memory is unknown: 32,768 positions."""
NO_DRAFTS = SpeculationSettings()
DRAFT_SHARE = 0.25
"""Share of the pages and of the context that verifying drafts of recurrent models may take."""
MAX_AUTO_POOL_PAGES = 256
"""Automatic pool of KV Flash, 16,384 tokens: a larger one slows every decode, and is configured by its number."""
LONG_CHUNKS = (2048, 1024)
"""A GPU dequantises as many weights for 512 tokens as for 2,048, so longer prefill chunks compute prompts faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingInputs:
    """Settings to compute sizes for.  ``max_context`` and ``pages`` None: as much as fits.

    ``n_slots``: prefix slots to reserve states and window pages for.  ``n_slot_pages``: pages that slots may fill
    beside sequences.  ``pool_pages``: resident pages of a sequence with KV Flash; None: off.  ``host_bytes``: for its
    others. ``one_memory``: pages and recurrent states share theirs where the layers of each shard allow it.
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
    drafting: SpeculationSettings = NO_DRAFTS
    scorer: ExtraSizing[PlacedScorer] | None = None
    encoder: ExtraSizing[PlacedEncoder] | None = None
    one_memory: bool = False
    models: dict[tuple[str, Dtype, Dtype], CostModel] = field(default_factory=dict, repr=False, compare=False)

    def cost(self, spec: ModelSpec) -> CostModel:
        key = (spec.architecture, self.dtype, self.kv_dtype)  # a drafter has an architecture of its own
        if key not in self.models:
            self.models[key] = CostModel(spec, self.dtype, self.kv_dtype)
        return self.models[key]

    def sequence_pages(self, n_tokens: int) -> int:
        n_pages = pages_of(n_tokens)
        return n_pages if self.pool_pages is None else min(n_pages, self.pool_pages)

    @property
    def host_page_limit(self) -> int:
        page_bytes = self.spec.unit_bytes(KvGroup.FULL, LayerRange(0, self.spec.n_layers), self.kv_dtype)
        return self.host_bytes // page_bytes if page_bytes else 0

    def even_boundaries(self) -> Collection[int]:
        """Return the boundaries between ranges with the model's ratio of layers, so that pages and states can share
        memory; none if there are too few for the targets."""
        spec, kv_groups = self.spec, [layer.kv_group for layer in self.spec.layers]
        if self.cost(spec).extent is None or not self.one_memory:
            return ()
        n, n_attention = len(kv_groups), [*accumulate(kv_group is KvGroup.FULL for kv_group in kv_groups)]
        legal = filter(spec.legal_boundary, range(1, n))
        even = {i for i in legal if n_attention[i - 1] * n == n_attention[-1] * i}
        return even if len(even) >= len(self.targets) - 1 else ()

    @property
    def all_targets(self) -> tuple[TargetDevice, ...]:
        extras = (self.draft, self.scorer, self.encoder)
        return (*self.targets, *(extra.target for extra in extras if extra is not None))


def largest_fitting(high: int, fits: Callable[[int], bool]) -> int:
    """Return the largest n from 0 to ``high`` that fits, by bisection; -1: not even 0."""
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


def slot_unit_bytes(spec: ModelSpec, kv_dtype: Dtype, drafter: ModelSpec | None) -> dict[KvGroup, int]:
    """Return the bytes of a page or a state of each KV group over all shards and the drafter."""
    models = [spec] if drafter is None else [spec, drafter]
    return {
        kv_group: sum(m.unit_bytes(kv_group, LayerRange(0, m.n_layers), kv_dtype) for m in models)
        for kv_group in KvGroup
    }


def slot_window_pages(spec: ModelSpec) -> int:
    return max_slot_window_pages(spec.window) if spec.window and KvGroup.WINDOW in spec.kv_groups() else 0


def reserved_slots(
    spec: ModelSpec, kv_dtype: Dtype, max_slots: int, memory_bytes: int, drafter: ModelSpec | None = None
) -> tuple[int, int]:
    """Return for how many prefix slots states and window pages are reserved, and how many full pages the rest of their
    memory holds."""
    if not max_slots:
        return 0, 0
    unit_bytes = slot_unit_bytes(spec, kv_dtype, drafter)
    slot_bytes = unit_bytes[KvGroup.RECURRENT] + slot_window_pages(spec) * unit_bytes[KvGroup.WINDOW]
    n_slots = min(max_slots, memory_bytes // slot_bytes) if slot_bytes else 0
    page_bytes = unit_bytes[KvGroup.FULL]
    return n_slots, (memory_bytes - n_slots * slot_bytes) // page_bytes if page_bytes else 0


@dataclass(frozen=True)
class Sizing:
    """Sizes for a context and ``n_pages`` of the full pool, or of all memory that pages and recurrent states share.

    Without ``shards`` only arenas and single shards are counted.
    """

    inputs: SizingInputs
    shards: tuple[Shard, ...]
    n_stages: int
    max_context: int
    n_pages: int
    n_draft_states: int = 0
    reasons: tuple[str, ...] = ()

    @cached_property
    def memories(self) -> dict[str, Memory]:
        return memories_of(self.inputs.all_targets)

    @property
    def prefill_chunk(self) -> int:
        return min(self.inputs.prefill_chunk, self.max_context)

    @cached_property
    def drafting(self) -> SpeculationSettings:
        """Limits of drafts, less than a chunk of a sequence: window pages are counted for chunks."""
        most, settings = self.prefill_chunk - 1, self.inputs.drafting
        n_lookup = min(most, settings.max_lookup)
        return structs.replace(settings, max_drafts=min(most, settings.max_drafts), max_lookup=n_lookup)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of a step: a prefill chunk beside one token of every sequence with its drafts."""
        n = self.inputs.max_sequences
        return self.prefill_chunk + n + self.drafting.step_drafts(n)

    @cached_property
    def state_pages(self) -> int:
        """Pages in whose memory a recurrent state lies; 0: in none."""
        inputs = self.inputs
        cost = inputs.cost(inputs.spec)
        if cost.extent is None or not inputs.one_memory or not all(map(cost.shares_memory, self.shards)):
            return 0
        return cost.extent.pages

    @property
    def n_kept_states(self) -> int:
        inputs = self.inputs
        return inputs.n_slots + SPARE_STATES if inputs.n_slots or not inputs.states_in_host else 0

    @property
    def most_shared_pages(self) -> int:
        inputs = self.inputs
        return self.state_pages * (inputs.max_sequences + (0 if inputs.states_in_host else self.n_kept_states))

    @cached_property
    def pools(self) -> PoolSizes:
        inputs, spec, kv_groups = self.inputs, self.inputs.spec, self.inputs.spec.kv_groups()
        recurrent, n_kept = KvGroup.RECURRENT in kv_groups, self.n_kept_states
        host_states = n_kept if recurrent and inputs.states_in_host else 0
        device_states = inputs.max_sequences + n_kept - host_states if recurrent else 0
        if self.state_pages:
            device_states = min(device_states, self.n_pages // self.state_pages)
        n_context = n_window = pages_of(self.max_context)
        if spec.window:
            n_window = max_window_pages(spec.window, self.prefill_chunk, self.max_context)
        window_pages = inputs.max_sequences * (n_window + 1)  # one more each to grow into
        host_pages = 0
        if inputs.pool_pages is not None and inputs.host_bytes:
            n_out = max_host_pages(n_context, inputs.pool_pages, inputs.residency_policy)
            host_pages = min(inputs.max_sequences * n_out, inputs.host_page_limit)
        return PoolSizes(
            full_pages=self.n_pages if KvGroup.FULL in kv_groups else 0,
            window_pages=window_pages + inputs.n_slots * slot_window_pages(spec) if KvGroup.WINDOW in kv_groups else 0,
            states=device_states + host_states,
            host_states=host_states,
            host_pages=host_pages,
            draft_states=self.n_draft_states if recurrent else 0,
            state_pages=self.state_pages if device_states else 0,
        )

    @cached_property
    def steps(self) -> StepSizes:
        n = self.inputs.max_sequences
        return StepSizes(
            max_tokens=self.max_step_tokens,
            max_sequences=n,
            max_context=self.max_context,
            resident=min(self.max_context, self.inputs.sequence_pages(self.max_context) * PAGE_TOKENS),
            n_together=-(-n // self.n_stages),  # decoding sequences are dealt into as many steps as there are stages
            pools=self.pools,
            sampled_rows=min(max(SAMPLED_ROWS, n), n + self.drafting.step_drafts(n)),
            ranks_pages=self.inputs.residency_policy == "qk",
        )

    def use(self, shard: Shard) -> MemoryUse:
        return memory_use(self.inputs.cost(self.inputs.spec), shard, self.steps)

    @cached_property
    def uses(self) -> tuple[MemoryUse, ...]:
        return tuple(map(self.use, self.shards))

    @cached_property
    def draft_use(self) -> MemoryUse | None:
        """Bytes of the drafter.  Its captures count as one more activation.  Where layers of the model are in the same
        daemon, its steps reuse their memory."""
        draft, steps, dtype = self.inputs.draft, self.steps, self.inputs.dtype
        if draft is None:
            return None
        spec, backend = draft.spec, draft.target.backend
        steps = replace(steps, pools=structs.replace(steps.pools, state_pages=0))
        if self.inputs.residency_policy == "exact":
            steps = replace(steps, pools=structs.replace(steps.pools, host_pages=0))
        shard = Shard(draft.target.device, backend, spec.layers, first=True, last=True)
        layouts = spec.layouts(backend, dtype, with_output=draft.with_output, with_embedding=draft.with_embedding)
        captured = steps.max_tokens * len(spec.captures) * self.inputs.spec.hidden_size * 4
        cost = self.inputs.cost(spec.model)
        use, beside = memory_use(cost, shard, steps), [s for s in self.shards if s.device == shard.device]
        reused = max((self.inputs.cost(self.inputs.spec).step_bytes(s, self.steps) for s in beside), default=0)
        n_bytes = sum(t.n_bytes for t in layouts) + spec.draft_vocabulary_bytes(backend, dtype)
        in_steps = cost.step_bytes(shard, steps) + captured
        return replace(
            use,
            weight_bytes=n_bytes,
            workspace_bytes=max(0, in_steps - reused) + cost.graph_bytes(shard, steps) + rounding_bytes(shard, n_bytes),
        )

    @cached_property
    def arena_bytes(self) -> int:
        """Host memory of the arenas.  Before the ranges are chosen, all captures are in one."""
        inputs, draft = self.inputs, self.inputs.draft
        widths = [inputs.spec.boundary_width] * (self.n_stages - 1)
        if draft is not None:
            groups = {
                i: shard.device.group for shard in self.shards for i in range(shard.layers.start, shard.layers.stop)
            }
            counts = Counter(groups.get(layer, "") for layer in draft.spec.captures)
            counts.pop(draft.target.device.group, 0)
            widths += [n * inputs.spec.hidden_size for n in counts.values()]
        region_bytes = sum(self.max_step_tokens * dtype_bytes(inputs.dtype, width) for width in widths)
        if self.n_stages > 1:
            region_bytes += token_region_bytes(inputs.max_sequences, self.drafting.max_drafts)
        return region_bytes * arena_regions(self.n_stages + (draft is not None))

    def needed_bytes(self, memory: str) -> int:
        """Return the bytes of all models in a memory; in the host's, with the arenas."""
        uses = zip([*self.inputs.targets], self.uses, strict=True)
        return self.extra_bytes(memory) + sum(use.bytes_in(memory, target.memory) for target, use in uses)

    def extra_bytes(self, memory: str) -> int:
        """Return the bytes in a memory of arenas and extra models."""
        draft = self.inputs.draft
        n_bytes = self.arena_bytes if memory == HOST else 0
        if draft is not None and self.draft_use is not None:
            n_bytes += self.draft_use.bytes_in(memory, draft.target.memory)
        others = [extra for extra in (self.inputs.scorer, self.inputs.encoder) if extra is not None]
        return n_bytes + sum(extra.use.bytes_in(memory, extra.target.memory) for extra in others)

    def fits_in(self, memory: Memory) -> bool:
        return memory.usable_bytes is None or self.needed_bytes(memory.name) <= memory.usable_bytes

    @cached_property
    def fits(self) -> bool:
        return all(map(self.fits_in, self.memories.values()))

    @property
    def shortages(self) -> tuple[Shortage, ...]:
        return tuple(
            Shortage(
                memory.name,
                tuple(target.device for target in self.inputs.all_targets if target.memory == memory.name),
                self.needed_bytes(memory.name),
                memory.usable_bytes,
                memory.free_bytes,
            )
            for memory in self.memories.values()
            if memory.usable_bytes is not None and memory.free_bytes is not None and not self.fits_in(memory)
        )

    @property
    def all_known(self) -> bool:
        return all(self.memories[target.memory].usable_bytes is not None for target in self.inputs.targets)


# ---- context, pages, slots and drafts


def compute_sizes(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    """Choose context, pages and states, and list the memories that are too small.

    An automatic context is the longest sequence that fits; automatic pages are as many as fit, up to what sequences and
    prefix slots can use.  Reserved slots give way first; verifying drafts gets the rest, within DRAFT_SHARE.
    """
    sizing, wanted = _compute(inputs, ranges), inputs.n_slots
    if not sizing.fits and wanted:
        n_slots = largest_fitting(wanted - 1, lambda n: _compute(replace(inputs, n_slots=n), ranges).fits)
        inputs = replace(inputs, n_slots=max(0, n_slots))
        sizing = _compute(inputs, ranges)
    if sizing.fits and inputs.drafting.max_drafts and sizing.pools.states:
        sizing = _with_draft_states(sizing, ranges)
    if inputs.n_slots < wanted:
        why = f"memory is reserved for {inputs.n_slots}; {wanted}, as cache.memory allows, do not fit"
        sizing = replace(sizing, reasons=(*sizing.reasons, f"prefix slots: {why}"))
    return sizing


def _compute(inputs: SizingInputs, ranges: Sequence[LayerRange], n_draft_states: int = 0) -> Sizing:
    targets = inputs.targets
    shards = shards_of([target.device for target in targets], [target.backend for target in targets], ranges)
    sizing = _with_context(Sizing(inputs, shards, len(stages_of(shards)), 1, 0, n_draft_states))
    sizing = _with_pages(sizing)
    return replace(sizing, reasons=(*sizing.reasons, *_state_reasons(sizing)))


def _with_context(sizing: Sizing) -> Sizing:
    inputs, limit = sizing.inputs, sizing.inputs.spec.context_tokens

    def chosen(n: int) -> Sizing:
        context = min(limit, n * PAGE_TOKENS)
        n_pages = inputs.pages or inputs.sequence_pages(context) + sizing.state_pages
        return replace(sizing, max_context=context, n_pages=n_pages)

    if inputs.max_context is not None:
        why = f"max_context {inputs.max_context}: as configured"
        return replace(sizing, max_context=inputs.max_context, reasons=(why,))
    highest = pages_of(limit)
    if inputs.pool_pages is not None and inputs.host_bytes:
        beside = 0 if inputs.residency_policy in ("qk", "drafter") else inputs.pool_pages
        highest = min(highest, max(inputs.pool_pages, beside + inputs.host_page_limit))
    room = highest if sizing.all_known else UNKNOWN_PAGES
    if inputs.pages is not None:
        room = max(1, inputs.pages - sizing.state_pages)
    if room < inputs.sequence_pages(limit):
        highest = room
    n = largest_fitting(highest, lambda n: n == 0 or chosen(n).fits)
    if n == 0:  # nothing fits: report what is missing for the configured pages, else for the fewest
        n = 1 if inputs.pages is None else highest
    sizing, own = chosen(n), f"the model's own is {limit}"
    if sizing.max_context == limit:
        why = "the model's own"
    elif inputs.pages is not None and n == room:
        why = f"engine.pages = {inputs.pages} hold no more; {own}"
    elif n == UNKNOWN_PAGES:
        why = f"limited because free memory is unknown; {own}, engine.max_context sets it"
    else:
        why = f"the longest sequence that fits; {own}"
    return replace(sizing, reasons=(f"max_context {sizing.max_context}: {why}",))


def _with_pages(sizing: Sizing) -> Sizing:
    inputs, max_context, shared = sizing.inputs, sizing.max_context, sizing.most_shared_pages
    fewest = inputs.sequence_pages(max_context)
    enough = inputs.max_sequences * fewest
    if not inputs.spec.pooling.generates:  # texts leave with their last step
        n_steps = (sizing.n_stages + 1) * pages_of(sizing.max_step_tokens)
        enough = max(fewest, min(enough, 2 * inputs.max_sequences + n_steps))
    enough += min(inputs.n_slot_pages, enough) + shared  # prefix slots: at most as many again
    slots = " and prefix slots" if inputs.n_slot_pages else ""
    generates = inputs.spec.pooling.generates
    resident = fewest * PAGE_TOKENS
    tokens = f"{max_context} tokens" if resident >= max_context else f"{resident} resident tokens"
    what = f"{inputs.max_sequences} sequences of {tokens}{slots}" if generates else "the texts of all steps under way"
    fewest += sizing.state_pages

    def chosen(n: int) -> Sizing:
        return replace(sizing, n_pages=n)

    n, why = enough, f"enough for {what}"
    if KvGroup.FULL not in inputs.spec.kv_groups():
        n, why = 0, "no layer of the model attends to all positions"
    elif inputs.pages is not None:
        n, why = inputs.pages, "as configured"
    else:
        if not sizing.all_known and max(fewest, UNKNOWN_PAGES) < n:
            n, why = max(fewest, UNKNOWN_PAGES), "limited because free memory is unknown; engine.pages sets it"
        for memory in sizing.memories.values():
            n_fitting = largest_fitting(n, lambda n, memory=memory: chosen(n).fits_in(memory))  # type: ignore[misc]
            if n_fitting < n:
                n, why = n_fitting, f"as many as fit in {memory.name}; {what} would use {enough}"
        for host in (sizing.memories[name] for name in _host_memories(sizing)):
            if host.usable_bytes is None:
                continue
            limit = _host_state_bytes(chosen(0), host.name) + HOST_PAGES * host.usable_bytes

            def is_moderate(n: int, name: str = host.name, limit: float = limit) -> bool:
                return _host_state_bytes(chosen(n), name) <= limit

            n_moderate = max(fewest, largest_fitting(n, is_moderate))
            if n_moderate < n:
                share = f"{HOST_PAGES:.0%} of the {host.name}'s usable memory or one sequence"
                n, why = n_moderate, f"as many as fit in {share}; {what} would use {enough}, and engine.pages sets more"
        n = max(n, fewest)
    if sizing.state_pages:
        why += f"; each recurrent state takes the memory of {sizing.state_pages}"
    return replace(sizing, n_pages=n, reasons=(*sizing.reasons, f"pages {n}: {why}"))


def _host_memories(sizing: Sizing) -> list[str]:
    targets = [target for target in sizing.inputs.targets if target.backend is Backend.CPU]
    return [name for name in dict.fromkeys(target.memory for target in targets) if name in sizing.memories]


def _host_state_bytes(sizing: Sizing, memory: str) -> int:
    inputs, draft = sizing.inputs, sizing.draft_use
    n_bytes = sum(u.state_bytes for t, u in zip(inputs.targets, sizing.uses, strict=True) if t.memory == memory)
    on_host = draft is not None and inputs.draft is not None and inputs.draft.target.memory == memory
    return n_bytes + draft.state_bytes if draft is not None and on_host else n_bytes


def _state_reasons(sizing: Sizing) -> Iterator[str]:
    inputs, pools, n = sizing.inputs, sizing.pools, sizing.inputs.max_sequences
    if pools.state_pages:
        kept = " and prefix slots" if inputs.n_slots and not pools.host_states else ""
        in_host = f"; in host memory {pools.host_states} for prefix slots" if pools.host_states else ""
        yield f"recurrent states {pools.states}: of {n} sequences{kept}, in memory that they share with pages{in_host}"
    elif pools.host_states:
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


def _with_draft_states(without: Sizing, ranges: Sequence[LayerRange]) -> Sizing:
    """Add updates and windows for each draft of each sequence, or as many as the share allows."""
    inputs, n_sequences = without.inputs, without.inputs.max_sequences
    min_pages = without.pools.full_pages * (1 - DRAFT_SHARE)
    min_context = without.max_context * (1 - DRAFT_SHARE)

    def affordable(n: int) -> bool:
        sizing = _compute(inputs, ranges, n)
        return sizing.fits and sizing.pools.full_pages >= min_pages and sizing.max_context >= min_context

    drafting = without.drafting
    n = max(0, largest_fitting(drafting.step_drafts(n_sequences if without.all_known else 1), affordable))
    wanted, why = drafting.step_drafts(n_sequences), f"all of {n_sequences} sequences"
    if n < wanted:
        share = f"{DRAFT_SHARE:.0%} of the pages and of the context"
        why = f"as many as fit within {share}; {n_sequences} sequences would use {wanted}"
    n_bytes = inputs.spec.draft_state_bytes(LayerRange(0, inputs.spec.n_layers), inputs.kv_dtype)
    sizing = _compute(inputs, ranges, n)
    reason = f"updates for verifying {n} drafts, {format_bytes(n_bytes)} each: {why}"
    return replace(sizing, reasons=(*sizing.reasons, reason))


# ---- the prefill chunk and the pool of KV Flash


def choose_chunk(inputs: SizingInputs, ranges: Sequence[LayerRange]) -> Sizing:
    """Return the sizes with the longest chunk that leaves nine tenths of pages and context, on known GPUs alone."""
    usual = compute_sizes(inputs, ranges)
    known = all(memory.usable_bytes is not None for memory in usual.memories.values())
    if not known or not usual.fits or any(target.backend is Backend.CPU for target in inputs.targets):
        return usual
    limit = LONG_CHUNKS[0] if inputs.pool_pages is None else max_resident_chunk(inputs.pool_pages)
    for chunk in (chunk for chunk in LONG_CHUNKS if inputs.prefill_chunk < chunk <= limit):
        longer = compute_sizes(replace(inputs, prefill_chunk=chunk), ranges)
        if longer.fits and _leaves_enough(longer, usual):
            if longer.prefill_chunk > usual.prefill_chunk:
                why = "GPUs compute prompts faster so, and there is memory for it"
                longer = replace(longer, reasons=(*longer.reasons, f"prefill_chunk {longer.prefill_chunk}: {why}"))
            return longer
    return usual


def _leaves_enough(longer: Sizing, usual: Sizing) -> bool:
    def kept(sizing: Sizing) -> tuple[int, int, int]:
        return sizing.pools.draft_states, sizing.max_context, sizing.pools.full_pages

    return longer.inputs.n_slots == usual.inputs.n_slots and all(
        n >= 0.9 * before for n, before in zip(kept(longer), kept(usual), strict=True)
    )


def choose_pool(inputs: SizingInputs, ranges: Sequence[LayerRange], chunk: int) -> SizingInputs:
    """Return the inputs with the largest pool of KV Flash that fits for each sequence, or the smallest one.

    ``chunk``: the prefill chunk, which a pool may cut.
    """

    def with_pool(n_more: int) -> SizingInputs:
        n_pages = MIN_POOL_PAGES + n_more
        return replace(inputs, pool_pages=n_pages, prefill_chunk=min(chunk, max_resident_chunk(n_pages)))

    def fits(n_more: int) -> bool:
        sizing = compute_sizes(with_pool(n_more), ranges)
        resident = min(MIN_POOL_PAGES + n_more, pages_of(sizing.max_context))
        return sizing.fits and sizing.pools.full_pages >= inputs.max_sequences * resident

    return with_pool(max(0, largest_fitting(MAX_AUTO_POOL_PAGES - MIN_POOL_PAGES, fits)))


# ---- ranges by memory


def reference_load(inputs: SizingInputs) -> tuple[int, int]:
    context = inputs.max_context or min(inputs.spec.context_tokens, REFERENCE_TOKENS)
    pages = inputs.pages or inputs.sequence_pages(context)
    shared = 0 if inputs.pages else Sizing(inputs, (), 1, context, pages).state_pages
    if inputs.max_context or inputs.pool_pages is not None:
        return context, pages + shared
    return min(inputs.spec.context_tokens, pages * PAGE_TOKENS), pages + shared


def ranges_by_memory(inputs: SizingInputs) -> tuple[LayerRange, ...]:
    """Choose ranges so that the fullest device is least full and there are as many pages as possible.

    Devices that share a memory have equal parts of it; an unknown one counts like the mean of the others.  Raises
    SplitError.
    """

    even = inputs.even_boundaries()
    legal = even.__contains__ if even else inputs.spec.legal_boundary
    balancing = inputs if even else replace(inputs, one_memory=False)

    def balanced(context: int, pages: int) -> tuple[LayerRange, ...]:
        share = RangeMemory(balancing, context, pages).share
        return balanced_ranges(len(inputs.targets), inputs.spec.n_layers, share, legal)

    def score(sizing: Sizing) -> tuple[bool, int, int]:
        return sizing.fits, sizing.max_context, sizing.pools.full_pages

    best = balanced(*reference_load(balancing))
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
        self._targets = targets = inputs.targets
        n_stages = 1 + sum(a.device.group != b.device.group for a, b in pairwise(targets))
        self._sizing = Sizing(inputs, (), n_stages, context, pages)
        sharers = Counter(target.memory for target in targets)
        self._usable = [
            None if n_bytes is None else (n_bytes - self._sizing.extra_bytes(target.memory)) / sharers[target.memory]
            for target in targets
            for n_bytes in [self._sizing.memories[target.memory].usable_bytes]
        ]
        known = [max(1.0, n_bytes) for n_bytes in self._usable if n_bytes is not None]
        self._mean = sum(known) / len(known) if known else 1.0
        # Devices of one backend in the middle of the pipeline are alike.
        self._taken: dict[tuple[Backend, bool, bool, int, int], int] = {}

    def share(self, i: int, layers: LayerRange) -> float:
        """Return what the range takes on target ``i`` over what is usable, or over the mean of others."""
        target, first, last = self._targets[i], i == 0, i == len(self._targets) - 1
        key = (target.backend, first, last, layers.start, layers.stop)
        if key not in self._taken:
            use = self._sizing.use(Shard(target.device, target.backend, layers, first, last))
            self._taken[key] = use.bytes_in(target.memory, target.memory)
        usable = self._usable[i]
        return self._taken[key] / (self._mean if usable is None else max(1.0, usable))

    def fits(self, i: int, layers: LayerRange) -> bool:
        usable = self._usable[i]
        return usable is None or self.share(i, layers) * max(1.0, usable) <= usable
