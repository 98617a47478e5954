"""Limits of the scheduler, as the planner made them: a request alone always fits."""

from __future__ import annotations

from dataclasses import dataclass, field

from lucevisor.engine.request import ContextOverflow, GenerationRequest, InvalidRequest
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import max_window_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.loading import PoolSizes, SpeculationSettings, arena_regions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the scheduler. ``pools`` is the record sent in Load; ``max_sequences`` and ``max_context`` are vLLM's
    max_num_seqs and max_model_len.

    ``max_step_tokens`` (max_num_batched_tokens): one chunk and one token of every sequence with its drafts always fit.
    ``window_tokens``: positions that a sliding layer sees, itself included; None without such layers. ``residency``:
    the bound of KV Flash; None: off. ``long_prefill_tokens``: prompt tokens of a step while others run beside a prompt
    with more of them to compute; 0: ``prefill_chunk``. ``whole_texts``: no prompt is cut, and a chunk is as long as the
    context; ``whole_images``: no image is."""

    max_sequences: int
    max_context: int
    prefill_chunk: int
    max_step_tokens: int
    kv_groups: frozenset[KvGroup]
    pools: PoolSizes
    window_tokens: int | None = None
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    residency: Residency | None = None
    long_prefill_tokens: int = 0
    whole_texts: bool = False
    whole_images: bool = False

    def __post_init__(self) -> None:
        if not self.long_prefill_tokens or self.whole_texts:
            object.__setattr__(self, "long_prefill_tokens", self.prefill_chunk)
        least = self.prefill_chunk + self.max_sequences + self.speculation.step_drafts(self.max_sequences)
        if self.max_step_tokens < least:
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; {least} is the least, for a chunk and decodes"
            )

    def n_regions(self, n_stages: int) -> int:
        """Return how many regions each arena of ``n_stages`` target stages has: the draft stage reads them, too."""
        return arena_regions(n_stages + self.speculation.drafter)

    @property
    def max_paged_tokens(self) -> int:
        """Positions of a sequence that the ``full`` pool and host memory allow; ``max_context`` without such layers, or
        where pages are dropped."""
        if KvGroup.FULL not in self.kv_groups:
            return self.max_context
        if self.residency is None:
            return (self.pools.full_pages - self.pools.state_pages) * PAGE_TOKENS  # beside its state
        if not self.residency.keeps_host:
            return self.max_context
        if self.residency.ranks_pages:
            return max(self.residency.pool_pages, self.pools.host_pages) * PAGE_TOKENS
        return (self.residency.pool_pages + self.pools.host_pages) * PAGE_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that can be computed alone."""
        return min(self.max_context, self.max_paged_tokens)

    def max_answer_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens a request may generate.  Raises InvalidRequest or ContextOverflow if none."""
        if not request.prompt:
            raise InvalidRequest("prompt", "is empty; give at least one token")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"is {request.max_tokens}; ask for at least 1 token")
        n_prompt, capacity = len(request.prompt), self.capacity_tokens
        if n_prompt + (not request.pooled) > capacity:
            key = "engine.pages" if self.residency is None else "kvflash.host"
            raise ContextOverflow(n_prompt, self.max_context, self.max_paged_tokens, key, pooled=request.pooled)
        if request.pooled:
            return 0
        return min(request.max_tokens, capacity - n_prompt)

    def stays_resident(self, n_tokens: int) -> bool:
        """Return whether no page of so long a sequence is paged out."""
        return self.residency is None or pages_of(n_tokens) <= self.residency.pool_pages

    def stays_whole(self, n_tokens: int) -> bool:
        """Return whether all pages of so long a sequence are kept, on the devices or in host memory."""
        return self.stays_resident(n_tokens) or (self.residency is not None and self.residency.keeps_host)

    def pages_needed(self, n_tokens: int) -> dict[KvGroup, int]:
        """Return how many pages of each KV group ``n_tokens`` of a sequence hold at once."""
        n_pages = pages_of(n_tokens)
        n_full = n_pages if self.residency is None else min(n_pages, self.residency.pool_pages)
        needs = {KvGroup.FULL: n_full} if KvGroup.FULL in self.kv_groups else {}
        if self.window_tokens is not None:
            most = max_window_pages(self.window_tokens, self.prefill_chunk, self.max_context)
            needs[KvGroup.WINDOW] = min(n_pages, most)
        return needs

    def host_pages_needed(self, n_tokens: int) -> int:
        """Return how many pages of ``n_tokens`` of a sequence lie in host memory."""
        if self.residency is None:
            return 0
        return self.residency.host_pages(pages_of(n_tokens))

    def ranks_prompt(self, n_tokens: int) -> bool:
        """Return whether so long a prompt ranks its pages before its last token."""
        return self.residency is not None and self.residency.ranks_pages and not self.stays_resident(n_tokens)

    @property
    def stages_rank(self) -> bool:
        return self.residency is not None and self.residency.ranks_decodes

    def make_pools(self) -> PagePools:
        """Return fresh allocators with every id free."""
        return PagePools(self.kv_groups, self.pools)
