"""Limits of the scheduler.  Invariant: limits that would block every request are refused here."""

from __future__ import annotations

from dataclasses import dataclass, field

from lucevisor.engine.request import ContextOverflow, GenerationRequest, InvalidRequest
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.prefix_cache import PrefixSettings
from lucevisor.kv.residency import Residency
from lucevisor.model.pages import max_window_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.loading import DraftKind, PoolSizes, arena_regions


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """Limits of speculative decoding.  ``max_drafts``: drafts that a slice may verify; 0: none, it is off.

    ``drafter``: a draft stage may be attached.  ``lookup``: drafts are also looked up in the sequence's own tokens.
    ``kind``: of the drafter.  ``fixed``: always ``max_drafts``, whatever that costs.  ``n_vocabulary``: ids
    that the model can embed; drafts outside are refused.
    """

    max_drafts: int = 0
    drafter: bool = False
    lookup: bool = False
    kind: DraftKind = DraftKind.MTP
    fixed: bool = False
    n_vocabulary: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the scheduler may use.  ``pools`` is the record sent in Load.  Raises ValueError naming the wrong field.

    ``max_sequences`` and ``max_context`` are vLLM's max_num_seqs and max_model_len.  ``max_step_tokens``
    (max_num_batched_tokens) bounds a step and with it how long a decode may wait for the prefill chunks beside it; one
    chunk and one token of every sequence with its drafts always fit, so neither starves.  ``window_tokens``: positions
    that a sliding layer sees, itself included; None without such layers.  ``prefix``: what prefix slots may take; off
    by default, as is ``speculation``.  ``residency``: the bound of KV Flash; None: off.  ``long_prefill_tokens``:
    prompt tokens of a step while others run beside a prompt with more of them to compute; 0: ``prefill_chunk``.
    """

    max_sequences: int
    max_context: int
    prefill_chunk: int
    max_step_tokens: int
    spaces: frozenset[Space]
    pools: PoolSizes
    window_tokens: int | None = None
    prefix: PrefixSettings = field(default_factory=PrefixSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    residency: Residency | None = None
    long_prefill_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("max_sequences", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if not self.long_prefill_tokens:
            object.__setattr__(self, "long_prefill_tokens", self.prefill_chunk)
        if self.max_context < 2:
            raise ValueError(f"max_context is {self.max_context}; a token of prompt and one more need 2")
        self._check_speculation()
        n_drafts = self.speculation.max_drafts
        least = self.prefill_chunk + self.max_sequences * (1 + n_drafts)
        if self.max_step_tokens < least:
            per = f" * (1 + {n_drafts} drafts)" if n_drafts else ""
            raise ValueError(
                f"max_step_tokens is {self.max_step_tokens}; prefill_chunk + max_sequences{per} = {least} is the least"
            )
        self._check_pools()

    def _check_speculation(self) -> None:
        speculation = self.speculation
        if not 0 <= speculation.max_drafts < self.prefill_chunk:  # window pages are counted for such slices
            raise ValueError(
                f"speculation.max_drafts is {speculation.max_drafts}; it must be 0 or more and less than prefill_chunk "
                f"= {self.prefill_chunk}"
            )
        if speculation.max_drafts and speculation.n_vocabulary < 1:
            raise ValueError(
                f"speculation.n_vocabulary is {speculation.n_vocabulary}; drafts are checked by it, so give 1 or more"
            )
        if speculation.drafter and Space.FULL not in self.spaces:
            raise ValueError("speculation.drafter needs pages of space full: a drafter keeps its state under their ids")

    def _check_pools(self) -> None:
        if not self.spaces:
            raise ValueError("spaces is empty; name the spaces of the model's layers")
        if Space.FULL in self.spaces and self.pools.full_pages < 1:
            raise ValueError(f"pools.full_pages is {self.pools.full_pages}; the model needs 1 or more")
        if self.residency is not None:
            self._check_residency(self.residency)
        if self.pools.host_states < 0:
            raise ValueError(f"pools.host_states is {self.pools.host_states}; give 0 or more")
        if self.pools.draft_states < 0:
            raise ValueError(f"pools.draft_states is {self.pools.draft_states}; give 0 or more")
        if Space.RECURRENT in self.spaces and self.pools.device_states < self.max_sequences:
            in_host = f", {self.pools.host_states} of them in host memory" if self.pools.host_states else ""
            raise ValueError(
                f"pools.states is {self.pools.states}{in_host}; max_sequences = {self.max_sequences} need a live state "
                "each"
            )
        if (Space.WINDOW in self.spaces) != (self.window_tokens is not None):
            raise ValueError(
                f"window_tokens is {self.window_tokens}; it is given if and only if the model has sliding layers"
            )
        if self.window_tokens is not None:
            if self.window_tokens < 1:
                raise ValueError(f"window_tokens is {self.window_tokens}; it must be 1 or more")
            least = max_window_pages(self.window_tokens, self.prefill_chunk, self.max_context)
            if self.pools.window_pages < least:
                raise ValueError(
                    f"pools.window_pages is {self.pools.window_pages}; one sequence needs {least} for a window of "
                    f"{self.window_tokens} tokens and chunks of {self.prefill_chunk}"
                )

    def _check_residency(self, residency: Residency) -> None:
        if Space.FULL not in self.spaces:
            raise ValueError("residency is given, and the model has no pages of space full")
        least = min(residency.pool_pages, pages_of(self.max_context))
        if self.pools.full_pages < least:
            raise ValueError(f"pools.full_pages is {self.pools.full_pages}; one sequence keeps {least} resident")
        if self.prefill_chunk > residency.max_chunk:
            raise ValueError(
                f"prefill_chunk is {self.prefill_chunk}; {residency.max_chunk} is the most beside the protected pages "
                f"of {residency.pool_pages} resident ones"
            )

    def n_regions(self, n_stages: int) -> int:
        """Return how many regions each arena of ``n_stages`` target stages has: the draft stage reads them, too."""
        return arena_regions(n_stages + self.speculation.drafter)

    @property
    def page_tokens(self) -> int:
        """Positions of a sequence that the ``full`` pool allows, with the pages in host memory; ``max_context`` without
        such layers, or where pages are dropped.
        """
        if Space.FULL not in self.spaces:
            return self.max_context
        if self.residency is None:
            return self.pools.full_pages * PAGE_TOKENS
        if not self.residency.keeps_host:
            return self.max_context
        if self.residency.ranks_pages:
            return max(self.residency.pool_pages, self.pools.host_pages) * PAGE_TOKENS
        return (self.residency.pool_pages + self.pools.host_pages) * PAGE_TOKENS

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that can be computed alone."""
        return min(self.max_context, self.page_tokens)

    def max_answer_tokens(self, request: GenerationRequest) -> int:
        """Return how many tokens a request may generate.  Raises InvalidRequest or ContextOverflow if none."""
        if not request.prompt:
            raise InvalidRequest("prompt", "is empty; give at least one token")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens", f"is {request.max_tokens}; ask for at least 1 token")
        n_prompt, capacity = len(request.prompt), self.capacity_tokens
        if n_prompt + 1 > capacity:
            key = "engine.pages" if self.residency is None else "kvflash.host"
            raise ContextOverflow(n_prompt, self.max_context, self.page_tokens, key)
        return min(request.max_tokens, capacity - n_prompt)

    def stays_resident(self, n_tokens: int) -> bool:
        """Whether no page of so long a sequence is paged out."""
        return self.residency is None or pages_of(n_tokens) <= self.residency.pool_pages

    def stays_whole(self, n_tokens: int) -> bool:
        """Whether all pages of so long a sequence are kept, on the devices or in host memory."""
        return self.stays_resident(n_tokens) or (self.residency is not None and self.residency.keeps_host)

    def pages_needed(self, n_tokens: int) -> dict[Space, int]:
        """Return how many pages of each space ``n_tokens`` of a sequence hold at once."""
        n_pages = pages_of(n_tokens)
        n_full = n_pages if self.residency is None else min(n_pages, self.residency.pool_pages)
        needs = {Space.FULL: n_full} if Space.FULL in self.spaces else {}
        if self.window_tokens is not None:
            most = max_window_pages(self.window_tokens, self.prefill_chunk, self.max_context)
            needs[Space.WINDOW] = min(n_pages, most)
        return needs

    def host_pages_needed(self, n_tokens: int) -> int:
        """Return how many pages of ``n_tokens`` of a sequence lie in host memory."""
        if self.residency is None:
            return 0
        return self.residency.host_pages(pages_of(n_tokens))

    def ranks_prompt(self, n_tokens: int) -> bool:
        """Whether so long a prompt ranks its pages before its last token."""
        return self.residency is not None and self.residency.ranks_pages and not self.stays_resident(n_tokens)

    @property
    def stages_rank(self) -> bool:
        """Whether the stages rank pages, and not a small model."""
        return self.residency is not None and self.residency.ranks_decodes

    def make_pools(self) -> PagePools:
        """Return fresh allocators with every id free."""
        return PagePools(self.spaces, self.pools)
