"""Joins requests and the prefix index: where a sequence starts, what is cached of it, and who waits for whom.

A slot is published as soon as the step that computes its last token is planned, as every stage runs later steps later.
Invariant: a sequence that starts at position p finds before it what it would have computed itself, in pages it never
writes, except the page of p, of which it has a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.request import RequestState
from lucevisor.engine.sequence import LiveSequence, RequestRecord, page_operations, swap_operations
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import HostMemoryFull, NoRoom, PagedOut
from lucevisor.kv.prefix_cache import MeasuredRate, PrefixIndex, PrefixMatch, PrefixSettings, Reservation
from lucevisor.kv.prefix_tree import NO_STATE, CacheTier, Origin, SlotSource
from lucevisor.kv.residency import page_table
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.steps import CopyPage, CopyState, OpenSequence, Operation, ZeroState


def find_checkpoints(
    n_prompt: int, turns: Sequence[int], settings: PrefixSettings, *, block_granular: bool
) -> dict[int, Origin]:
    """Return the checkpoints of a prompt, ascending, and why each was chosen; none before ``min_tokens``.

    The end of the last chat turn, where the conversation continues, and of the first, the system prompt. Then, a page
    away from the others: the turn before the last; without turns, and unless the cache is ``block_granular``, the last
    multiple of ``checkpoint_pages``; the end of the prompt."""
    inside = [turn for turn in turns if turn < n_prompt]
    chosen: dict[int, Origin] = dict.fromkeys((*inside[:1], *inside[-1:]), "turn")
    others: list[tuple[int, Origin]] = [(turn, "turn") for turn in inside[-2:-1]]
    step = settings.checkpoint_pages * PAGE_TOKENS
    if not block_granular and step and not inside:
        others.append(((n_prompt - 1) // step * step, "pages"))
    others.append((n_prompt, "prompt"))
    for position, origin in others:
        if all(abs(position - other) >= PAGE_TOKENS for other in chosen):
            chosen[position] = origin
    return {n: chosen[n] for n in sorted(chosen) if n >= max(1, settings.min_tokens)}


NO_MATCH = PrefixMatch(0)


@dataclass(slots=True)
class ReuseCounts:
    """Since the start: prompts, those that began with a cached prefix, and their reused tokens by its source."""

    n_prompts: int = 0
    n_hits: int = 0
    tokens: dict[CacheTier, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})


class PrefixReuse:
    """The scheduler's interface to the prefix index."""

    def __init__(self, limits: EngineLimits, pools: PagePools) -> None:
        self._limits = limits
        self._pools = pools
        self.index = PrefixIndex(pools, limits.prefix, limits.window_tokens, limits.residency)
        self.counts = ReuseCounts()
        self.prompt_rate = MeasuredRate()  # in tokens that were computed, from a request's start to its first token

    # ---- before a request starts

    def on_submitted(self, record: RequestRecord) -> None:
        """Choose the checkpoints of a prompt, whatever is cached."""
        request, use = record.request, record.prefix
        turns = request.turn_boundaries
        use.checkpoints = find_checkpoints(
            len(request.prompt), turns, self._limits.prefix, block_granular=self.index.block_granular
        )
        stays = self._limits.stays_whole
        use.checkpoints = {at: why for at, why in use.checkpoints.items() if stays(at + 1)}
        if record.uncached or not request.publishes:
            use.checkpoints = {}
        use.checkpoint_positions = list(use.checkpoints)
        self.resize(record)

    def resize(self, record: RequestRecord) -> None:
        """Update how many tokens of a waiting request are to be computed."""
        record.n_to_prefill = len(record.tokens) - self.match(record).position

    def match(self, record: RequestRecord) -> PrefixMatch:
        """Return the cached prefix of a request; none if all its rows are wanted."""
        if record.computes_prompt or not self.index.enabled:
            return NO_MATCH
        use = record.prefix
        if use.lookup is None or use.lookup[0] != self.index.version:
            use.lookup = (self.index.version, self._match(record))
        return use.lookup[1]

    def _match(self, record: RequestRecord) -> PrefixMatch:
        """Return the cached prefix without part of an image: ids of a part may be those of another image."""
        first = record.request.prompt_logprobs_from  # the first row with one is computed
        match = self.index.match(record.tokens.first(first + 1) if first else record.tokens)
        for image in reversed(record.request.images):
            if image.span.start < match.position < image.span.stop:
                match = self.index.match(record.tokens.first(image.span.start + 1))
        return match

    def fetch(self, record: RequestRecord, match: PrefixMatch) -> bool:
        """Ask lower tiers for more tokens of a request than ``match`` has, once for as many; return whether it is held
        until they are read."""
        use = record.prefix
        if record.computes_prompt or not self.index.enabled:
            return False
        if use.fetched is not None and use.fetched <= match.position:
            return False
        use.fetched = match.position
        use.held = self.index.hooks.fetch(record.request.request_id, record.tokens, match.position)
        return use.held

    def must_wait(self, record: RequestRecord, running: Iterable[RequestRecord]) -> bool:
        """Return whether a queued request is held, or another is just computing the prefix it needs."""
        if record.prefix.held:
            return True
        if record.computes_prompt or not self.index.enabled:
            return False
        reached = self.match(record).position + PAGE_TOKENS
        for other in running:
            if other.state is RequestState.PREFILL and other.live is not None and not other.uncached:
                for stop in reversed(other.prefix.checkpoint_positions):
                    if stop <= other.live.n_computed:
                        break
                    if self._usable(stop, self._common(record, other)) >= reached:
                        return True
        return False

    # ---- start, progress, end

    def open(
        self, record: RequestRecord, sequence: int, match: PrefixMatch
    ) -> tuple[LiveSequence, list[Operation]] | None:
        """Open a sequence that starts with ``match``.  None, taking nothing, if too few ids are free."""
        position, limits = match.position, self._limits
        table = page_table(self._pools, limits.window_tokens, limits.residency)
        table.adopt(match.full, match.first_window, match.window)
        if match.slot is not None:
            self.index.pin(match.slot)  # until its last page and its state are copied
        adopted = [operation for growth in table.growths() for operation in page_operations(sequence, growth)]
        needs = table.missing(position)
        if self.index.recurrent:
            needs[KvGroup.RECURRENT] = 1
        swap, growths = None, None
        with suppress(NoRoom, HostMemoryFull):
            swap = table.arrange(match.paged_out, self.make_room)
            growths = table.grow(position, position) if self.index.reclaim(needs) else None
        states = self._pools[KvGroup.RECURRENT].allocate(1) if growths is not None and self.index.recurrent else None
        if match.slot is not None:
            self.index.unpin(match.slot)
        if growths is None:
            table.release()
            return None
        state = states[0] if states else NO_STATE
        live = LiveSequence(sequence, state, table, n_computed=position, began_at=position, n_scheduled=position)
        sampling = record.request.sampling
        history = record.tokens[:position] if sampling.needs_history else []
        n_prompt = len(record.request.prompt)
        images, adapter = record.request.image_spans, record.tokens.adapter
        opening = OpenSequence(sequence, state, sampling, history, record.mu, n_prompt, images, adapter)
        operations: list[Operation] = [opening]
        if state != NO_STATE:
            operations.append(CopyState(match.state, state) if position else ZeroState(state))
        operations += adopted + swap_operations(sequence, swap)
        for growth in growths:
            operations += page_operations(sequence, growth)
            source, n_tokens = match.tail[growth.kv_group], position % PAGE_TOKENS
            self._pools[growth.kv_group].stamp(growth.pages, self._pools[growth.kv_group].epoch_of(source))
            operations.append(CopyPage(growth.kv_group, source, growth.pages[0], n_tokens))
        return live, operations

    def reserve(self, n_tokens: int, paged_out: PagedOut | None = None) -> Reservation | None:
        """Allocate ids for the first ``n_tokens`` of a prefix whose bytes come from elsewhere, evicting slots if need
        be; None if there are not enough, or KV Flash would drop some of it. ``paged_out``: pages that were in host
        memory when it was saved."""
        limits = self._limits
        if not limits.stays_whole(n_tokens + 1):
            return None
        bound, leaving = limits.residency, tuple[int, ...]()
        if bound is not None and not limits.stays_resident(n_tokens + 1):
            leaving = bound.leaving(n_tokens, paged_out)
        scores = paged_out.scores if paged_out is not None else ()
        out = PagedOut(bound.policy, bound.pool_pages, leaving, scores) if bound is not None and leaving else None
        return self.index.reserve(n_tokens, out)

    def make_room(self, n_device: int, n_host: int) -> None:
        """Evict slots for pages of KV group full on the devices and in host memory, as far as that is possible."""
        self.index.reclaim({KvGroup.FULL: n_device})
        self.index.reclaim_host(n_host)

    def on_started(self, record: RequestRecord, match: PrefixMatch, now: float) -> None:
        use = record.prefix
        n_cached = min(match.position, len(record.request.prompt))
        if use.cached is None:
            use.tier = match.tier
        use.cached = n_cached if use.cached is None else min(use.cached, n_cached)
        use.common.clear()
        self.index.record_use(match, now)
        if match.slot is not None and match.slot.origin == "preempted" and match.position == record.n_computed_before:
            self.index.drop(match.slot)  # left by this request, which goes on
        if not self.index.block_granular and match.n_known - match.position >= PAGE_TOKENS:
            # Other prompts share more with it than any slot covers: make one where they diverge.
            chunk = match.n_known // self._limits.prefill_chunk * self._limits.prefill_chunk
            ends = (stop for stop in use.checkpoint_positions if stop <= match.n_known)  # of slices
            use.branch_position = max([chunk, *ends])

    def on_first_token(self, record: RequestRecord, now: float) -> None:
        """Measure how fast a prompt was computed that was neither preempted nor held up by a loss."""
        if record.live is None or record.started_at is None or record.n_computed_before or record.last_loss:
            return
        if self.index.worth_caching(record.live.n_prefill):
            self.prompt_rate.add(record.live.n_prefill, now - record.started_at, now)

    def on_slice_planned(self, record: RequestRecord, now: float) -> list[Operation]:
        """Publish a slot if the slice just planned ends at a checkpoint."""
        live, use = record.live, record.prefix
        if live is None:
            return []
        origin: Origin | None = use.checkpoints.get(live.n_computed)
        if origin is None and live.n_computed and live.n_computed == use.branch_position:
            origin = "shared"
        if origin is None or record.uncached or not record.request.publishes or not self._is_whole(live):
            return []
        return self._remember(record, live, origin, now)

    def on_finishing(self, record: RequestRecord, now: float) -> list[Operation]:
        """Publish all that was computed of a request that is about to release its ids."""
        live = record.live
        kept = live is not None and not record.uncached and record.request.publishes
        return [] if live is None or not kept else self._publish_all(record, live, "generation", now)

    def publish_preempted(self, record: RequestRecord, now: float) -> list[Operation]:
        """Publish all that was computed of a request that is preempted, if a slot can hold it."""
        live = record.live
        if live is None or record.computes_prompt or not record.request.publishes:
            return []
        if live.ranking or live.table.swaps_next:
            return []  # it takes no cached prefix, or other pages would be out for its next token
        return self._publish_all(record, live, "preempted", now)

    def drop_slots(self, record: RequestRecord) -> None:
        """Drop the slots that a request's tokens begin with: what they hold is wrong."""
        tree, n_tokens = self.index.tree, len(record.tokens)
        for slot in [*tree.slots_on(tree.walk(record.tokens, n_tokens), record.tokens, n_tokens)]:
            self.index.drop(slot)
        self.index.hooks.on_invalid(record.tokens)

    def on_finished(self, record: RequestRecord) -> None:
        use = record.prefix
        if use.cached is not None and not record.uncached:
            self.counts.n_prompts += 1
            self.counts.n_hits += use.cached > 0
            self.counts.tokens[use.tier] += use.cached
        self.index.trim()

    # ---- inside

    def _publish_all(self, record: RequestRecord, live: LiveSequence, origin: Origin, now: float) -> list[Operation]:
        """Publish all that was computed of a sequence that is about to be closed. The slot takes over its state, unless
        slots keep theirs in host memory: then it is copied there."""
        if not 0 < live.n_computed <= len(record.tokens) or not self._is_whole(live):
            return []  # of what runs ahead it is not known what it computes
        if self._pools.copies_states:
            return self._remember(record, live, origin, now)
        source = self._source(live, live.state, origin)
        live.state = NO_STATE  # the index takes it over
        self.index.publish(record.tokens, source, now, branches=record.request.branches)
        return []

    def _remember(self, record: RequestRecord, live: LiveSequence, origin: Origin, now: float) -> list[Operation]:
        n, index, branches = live.n_computed, self.index, record.request.branches
        if not index.worth_caching(n, branches=branches):
            return []
        if (known := index.find_slot(record.tokens, n)) is not None:
            index.touch(known, now)
            return []
        state = NO_STATE
        if index.recurrent:
            taken = index.allocate_state(index.n_saved(record.tokens, n))
            if taken is None:
                return []
            state = taken
        slot = index.publish(record.tokens, self._source(live, state, origin), now, branches=branches)
        return [CopyState(live.state, state)] if slot is not None and state != NO_STATE else []

    @staticmethod
    def _source(live: LiveSequence, state: int, origin: Origin) -> SlotSource:
        return SlotSource(live.n_computed, live.table.entries, state, origin, live.table.paged_out())

    def _is_whole(self, live: LiveSequence) -> bool:
        """Return whether no page was dropped, nor would be for the next token."""
        n_lost = live.table.n_out - len(live.table.hosts)
        return not n_lost and self._limits.stays_whole(live.n_computed + 1)

    def _usable(self, stop: int, n_common: int) -> int:
        """Return how many tokens of a slot at ``stop`` a prompt can use that shares ``n_common``."""
        if stop <= n_common:
            return stop
        return 0 if not self.index.block_granular else n_common // PAGE_TOKENS * PAGE_TOKENS

    def _common(self, record: RequestRecord, other: RequestRecord) -> int:
        """Return how many tokens two requests share at the start, leaving one to compute."""
        known = record.prefix.common.get(other.arrival)
        if known is None:
            known = record.tokens.n_common(other.tokens, len(record.tokens) - 1)
            record.prefix.common[other.arrival] = known
        return known
