"""What a case takes: the bytes of every shard, pool and arena, for a context and a number of pages.

Pure arithmetic over the cost model; decides neither context nor pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from lucevisor.model.pages import ResidencyPolicy, max_host_pages, max_slot_window_pages, max_window_pages, pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space, dtype_bytes
from lucevisor.placement.cost import CostModel, MemoryUse, StepSizes
from lucevisor.placement.devices import HOST, Memory, TargetDevice, memories_of
from lucevisor.placement.drafting import DrafterSizing
from lucevisor.placement.result import Shard
from lucevisor.placement.scoring import ScorerSizing
from lucevisor.protocol.loading import PoolSizes, arena_regions, token_region_bytes

SPARE_STATES = 1
"""Recurrent states beyond one per sequence, so that a checkpoint can be taken while all sequences run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingInputs:
    """The settings to compute sizes for.  ``max_context`` and ``pages`` None: as much as fits.

    ``n_slots``: prefix slots to reserve states and window pages for; fewer if that many do not fit.  ``n_slot_pages``:
    pages that slots may fill beside those of sequences.  ``states_in_host``: the states of slots are in host memory.
    ``pool_pages``: the most pages of a sequence with KV Flash; None: off.  ``host_bytes``: what its pages in host
    memory may take in all groups together; 0: it keeps none there.
    ``draft``: a drafter beside the shards; ``max_drafts``: of a sequence in one step; ``n_draft_states``: ids of
    states after drafts.
    ``scorer``: the scoring model of PFlash.
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
    pool_pages: int | None = None
    host_bytes: int = 0
    residency_policy: ResidencyPolicy = "lru"
    draft: DrafterSizing | None = None
    max_drafts: int = 0
    n_draft_states: int = 0
    scorer: ScorerSizing | None = None
    models: dict[tuple[str, Dtype, Dtype], CostModel] = field(default_factory=dict, repr=False, compare=False)

    def model(self) -> CostModel:
        """The cost model of these dtypes."""
        return self._cost(self.spec)

    def draft_model(self) -> CostModel | None:
        """The cost model of the drafter."""
        return None if self.draft is None else self._cost(self.draft.spec.model)

    def _cost(self, spec: ModelSpec) -> CostModel:
        key = (spec.architecture, self.dtype, self.kv_dtype)  # a drafter's architecture is no model's
        if key not in self.models:
            self.models[key] = CostModel(spec, self.dtype, self.kv_dtype)
        return self.models[key]

    def sequence_pages(self, n_tokens: int) -> int:
        """Pages that a sequence of ``n_tokens`` keeps on the devices."""
        n_pages = pages_of(n_tokens)
        return n_pages if self.pool_pages is None else min(n_pages, self.pool_pages)

    @property
    def most_host_pages(self) -> int:
        """Pages of all layers that fit into ``host_bytes``."""
        page_bytes = self.spec.unit_bytes(Space.FULL, LayerRange(0, self.spec.n_layers), self.kv_dtype)
        return self.host_bytes // page_bytes if page_bytes else 0

    @property
    def all_targets(self) -> tuple[TargetDevice, ...]:
        """The devices of the shards, the drafter and the scoring model."""
        others = (each.target for each in (self.draft, self.scorer) if each is not None)
        return (*self.targets, *others)


def slot_window_pages(spec: ModelSpec) -> int:
    """Return the most window pages that one prefix slot holds; 0 without sliding-window layers."""
    return max_slot_window_pages(spec.window) if spec.window and Space.WINDOW in spec.spaces() else 0


def window_pages(spec: ModelSpec, max_sequences: int, prefill_chunk: int, max_context: int) -> int:
    """Return the window pages of all sequences, with one more each to grow into; 0 without sliding-window layers."""
    if Space.WINDOW not in spec.spaces():
        return 0
    n_pages = max_window_pages(spec.window, prefill_chunk, max_context) if spec.window else pages_of(max_context)
    return max_sequences * (n_pages + 1)


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


@dataclass(slots=True)
class Sizer:
    """A case with its layer ranges: what it takes for a context and a number of pages."""

    inputs: SizingInputs
    shards: tuple[Shard, ...]
    n_stages: int
    model: CostModel = field(init=False)
    memories: Mapping[str, Memory] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.inputs.model()
        self.memories = memories_of(self.inputs.all_targets)

    def chunk(self, max_context: int) -> int:
        return min(self.inputs.prefill_chunk, max_context)

    def max_tokens(self, max_context: int) -> int:
        """Tokens per step: a prefill chunk, and one token of every sequence with its drafts, so that neither waits for
        the other."""
        return self.chunk(max_context) + self.inputs.max_sequences * (1 + self.max_drafts(max_context))

    def max_drafts(self, max_context: int) -> int:
        """Drafts of one sequence: fewer than a chunk, as pages of a window are counted for slices of a chunk."""
        return min(self.inputs.max_drafts, self.chunk(max_context) - 1)

    def pools(self, max_context: int, n_pages: int) -> PoolSizes:
        inputs, spaces = self.inputs, self.inputs.spec.spaces()
        n_kept = inputs.n_slots + SPARE_STATES if inputs.n_slots or not inputs.states_in_host else 0
        recurrent = Space.RECURRENT in spaces
        n_states = inputs.max_sequences + n_kept
        return PoolSizes(
            full_pages=n_pages if Space.FULL in spaces else 0,
            window_pages=window_pages(inputs.spec, inputs.max_sequences, self.chunk(max_context), max_context)
            + inputs.n_slots * slot_window_pages(inputs.spec),
            states=n_states if recurrent else 0,
            host_states=n_kept if recurrent and inputs.states_in_host else 0,
            host_pages=self.host_pages(max_context),
            draft_states=inputs.n_draft_states if recurrent else 0,
        )

    def host_pages(self, max_context: int) -> int:
        """Pages of KV Flash in host memory: what all sequences can page out, within the budget."""
        inputs = self.inputs
        if inputs.pool_pages is None or not inputs.host_bytes:
            return 0
        n_out = max_host_pages(pages_of(max_context), inputs.pool_pages, inputs.residency_policy)
        return min(inputs.max_sequences * n_out, inputs.most_host_pages)

    def use(self, shard: Shard, max_context: int, n_pages: int) -> MemoryUse:
        pools, steps = self.pools(max_context, n_pages), self._steps(max_context, n_pages)
        return MemoryUse(
            weight_bytes=self.model.weight_bytes(shard),
            state_bytes=self.model.state_bytes(shard, pools),
            workspace_bytes=self.model.workspace_bytes(shard, steps),
            host_state_bytes=self.model.host_state_bytes(shard, pools),
        )

    def draft_use(self, max_context: int, n_pages: int) -> MemoryUse:
        """What the drafter takes.  Its captures count as one more activation."""
        draft, model = self.inputs.draft, self.inputs.draft_model()
        assert draft is not None
        assert model is not None
        steps = self._steps(max_context, n_pages)
        pools = steps.pools
        if self.inputs.residency_policy == "exact":
            pools = structs.replace(pools, host_pages=0)
        steps = replace(steps, pools=pools)
        shard = Shard(draft.target.device, draft.target.backend, draft.spec.layers, first=True, last=True)
        layouts = draft.spec.layouts(
            draft.target.backend,
            self.inputs.dtype,
            with_output=draft.with_output,
            with_embedding=draft.with_embedding,
        )
        vocabulary_bytes = draft.spec.draft_vocabulary_bytes(draft.target.backend, self.inputs.dtype)
        captured = steps.max_tokens * len(draft.spec.captures) * self.inputs.spec.hidden_size * 4
        return MemoryUse(
            weight_bytes=sum(layout.n_bytes for layout in layouts) + vocabulary_bytes,
            state_bytes=model.state_bytes(shard, pools),
            workspace_bytes=model.workspace_bytes(shard, steps) + captured,
            host_state_bytes=model.host_state_bytes(shard, pools),
        )

    def _steps(self, max_context: int, n_pages: int) -> StepSizes:
        n = self.inputs.max_sequences
        # decoding sequences are dealt into as many steps as there are stages
        pools = self.pools(max_context, n_pages)
        resident = min(max_context, self.inputs.sequence_pages(max_context) * PAGE_TOKENS)
        ranks, n_together = self.inputs.residency_policy == "qk", -(-n // self.n_stages)
        return StepSizes(self.max_tokens(max_context), n, max_context, resident, n_together, pools, ranks)

    def needed_bytes(self, memory: str, max_context: int, n_pages: int) -> int:
        """Bytes that all shards, the drafter and the scoring model take in a memory; in the host's, with the arenas."""
        total = 0
        for target, shard in zip(self.inputs.targets, self.shards, strict=True):
            if memory in (target.memory, HOST):
                total += self.use(shard, max_context, n_pages).bytes_in(memory, target.memory)
        draft = self.inputs.draft
        if draft is not None and memory in (draft.target.memory, HOST):
            total += self.draft_use(max_context, n_pages).bytes_in(memory, draft.target.memory)
        scorer = self.inputs.scorer
        if scorer is not None:
            total += scorer.use.bytes_in(memory, scorer.target.memory)
        return total + (self.arena_bytes(max_context) if memory == HOST else 0)

    def arena_bytes(self, max_context: int) -> int:
        """Host memory of the arenas."""
        inputs, max_tokens = self.inputs, self.max_tokens(max_context)
        widths = [inputs.spec.boundary_width] * (self.n_stages - 1) + self._captured_widths()
        region_bytes = sum(max_tokens * dtype_bytes(inputs.dtype, width) for width in widths)
        if self.n_stages > 1:
            region_bytes += token_region_bytes(inputs.max_sequences, self.max_drafts(max_context))
        return region_bytes * arena_regions(self.n_stages + (inputs.draft is not None))

    def _captured_widths(self) -> list[int]:
        """Numbers per token in each arena of captures; before the ranges are chosen, all of them in one."""
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
        """Whether the free memory of every device with layers is known."""
        return all(self.memories[target.memory].usable_bytes is not None for target in self.inputs.targets)
