"""The requests that have a sequence in the shards, and the ids they hold there.

Invariant: a request is in here exactly while it has a live sequence; what it holds is free as soon as ``close``
returns, but for what prefix slots hold too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.prefix_reuse import PrefixReuse
from lucevisor.engine.request import RequestState
from lucevisor.engine.sequence import LiveSequence, RequestRecord, grow_table, page_operations
from lucevisor.engine.step import ScheduledSlice
from lucevisor.kv.page_pool import Extents, PageAllocator, PagePools
from lucevisor.kv.page_table import HostMemoryFull
from lucevisor.kv.prefix_cache import PrefixMatch
from lucevisor.kv.prefix_tree import NO_STATE
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.steps import CloseSequence, CopyPage, OpenSequence, Operation, PageIn, UseState, ZeroState

_MOVE_AGAIN = 16
"""Steps after which pages are moved if transfers had all of them."""


class RunningRequests(Collection[RequestRecord]):
    """Records by sequence number."""

    def __init__(self, limits: EngineLimits, pools: PagePools, reuse: PrefixReuse) -> None:
        self._limits = limits
        self._pools = pools
        self._reuse = reuse
        self.sequence_ids = PageAllocator(limits.max_sequences, "sequences")
        self._records: dict[int, RequestRecord] = {}
        self._n_waits = 0  # steps until pages may be moved again

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, record: object) -> bool:
        return record in self._records.values()

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    @property
    def states(self) -> list[RequestState]:
        """The states of all requests, in no order that matters."""
        return [record.state for record in self._records.values()]

    @property
    def full(self) -> bool:
        """True if no further sequence may be open."""
        return not self.sequence_ids.n_free

    def open(self, record: RequestRecord, match: PrefixMatch) -> list[Operation] | None:
        """Open a sequence that starts with ``match``.  None, taking nothing, while there is no room for it."""
        if not self.fits(record, match):
            return None
        [sequence] = self.sequence_ids.allocate(1) or [NO_STATE]
        opened = self._reuse.open(record, sequence, match)
        if opened is None:
            self.sequence_ids.release([sequence])
            return None
        record.live, operations = opened
        self._records[sequence] = record
        return operations

    def free_extent(self) -> list[Operation]:
        """Move the pages of an extent elsewhere if none is free for a state, though so much memory is."""
        extents = self._pools.extents
        if extents is None or extents.free or self._pools[KvGroup.FULL].n_free < extents.n_pages:
            return []
        self._n_waits = max(0, self._n_waits - 1)
        if self._n_waits and self._records:  # who run plan further steps
            return []
        operations = self.move_pages(extents)
        self._n_waits = 0 if operations else _MOVE_AGAIN
        return operations

    def move_pages(self, extents: Extents) -> list[Operation]:
        """Move the pages of the extent with the fewest to others; pages stay that a transfer may be using."""
        pools, index = self._pools, self._reuse.index
        lives = [record.live for record in self._records.values() if record.live is not None]
        owners = Counter(page for live in lives for page in live.table.held(KvGroup.FULL))
        pinned, full = index.pinned_pages(), pools[KvGroup.FULL]
        for extent in extents.by_use():
            used = extents.used_pages(extent)
            known = all(full.ref_count(page) == owners[page] + index.n_owners(page) for page in used)
            if known and pinned.isdisjoint(used):
                break
        else:
            return []
        extents.close(extent)
        targets = pools[KvGroup.FULL].allocate(len(used))
        if targets is None:
            extents.reopen(extent)
            return []
        moves = dict(zip(used, targets, strict=True))
        operations: list[Operation] = [CopyPage(KvGroup.FULL, page, to, PAGE_TOKENS) for page, to in moves.items()]
        for live in lives:
            for growth in live.table.move_pages(moves):
                operations += page_operations(live.sequence, growth)
        index.move_pages(moves)
        extents.reopen(extent)
        for page, to in moves.items():
            pools[KvGroup.FULL].move(page, to)
        return operations

    def opening_operations(self, *, restored: bool) -> list[Operation]:
        """Return the operations that open all sequences in a daemon without any; ``restored``: it has their states."""
        operations: list[Operation] = []
        for record in self._records.values():
            live = record.live
            if live is None:
                continue
            sampling, n_prompt = record.request.sampling, len(record.request.prompt)
            history = [*record.tokens[: live.n_computed]] if sampling.needs_history else []
            images, adapter = record.request.image_spans, record.tokens.adapter
            opening = OpenSequence(live.sequence, live.state, sampling, history, record.mu, n_prompt, images, adapter)
            operations.append(opening)
            if live.state != NO_STATE and not restored:
                operations.append(ZeroState(live.state))
            for growth in live.table.growths():
                operations += page_operations(live.sequence, growth)
        return operations

    def grow(self, chosen: ScheduledSlice) -> list[Operation] | None:
        """Give a sequence the pages of its next slice; None, taking nothing, when too few are free. Raises
        HostMemoryFull if host memory has too few, and the slice follows from no token in flight."""
        try:
            return self._grow(chosen.live, chosen.stop, 0)
        except HostMemoryFull as full:
            if chosen.runs_ahead:
                return None
            if not self._reuse.index.reclaim_host(full.n_pages):
                raise
            return self._grow(chosen.live, chosen.stop, 0)

    def extend(self, live: LiveSequence, stop: int, num_draft_tokens: int = 0) -> list[Operation]:
        """Give a sequence the pages of drafts up to ``stop``, and of ``num_draft_tokens`` more that only the drafter
        writes; nothing when that would take pages from other sequences. Prefix slots give theirs."""
        needs, index = live.table.missing(stop, num_draft_tokens), self._reuse.index
        if live.table.surplus(stop + num_draft_tokens):  # drafts end with their page, so they change no residency
            return []
        if not needs or not index.can_reclaim(needs, {}) or not index.reclaim(needs):
            return []
        return self._grow(live, stop, num_draft_tokens) or []

    def release_ahead(self) -> bool:
        """Release the pages after the tokens of all sequences, which only drafts would fill, and which are never read
        as drafts are cut to the pages; False if there are none."""
        lives = [(record.live, len(record.tokens)) for record in self._records.values() if record.live is not None]
        return sum(live.table.shrink(max(n_tokens, live.n_scheduled)) for live, n_tokens in lives) > 0

    def end_verification(self, live: LiveSequence) -> list[Operation]:
        """Release what a verify slice took for drafts, and go on from the state after the last accepted one."""
        live.n_scheduled = live.n_computed
        if not live.draft_states:
            return []
        state = live.state if live.accepted == NO_STATE else live.accepted
        self._pools.draft_states.release(live.draft_states)
        live.draft_states, live.accepted = [], NO_STATE
        return [UseState(live.sequence, state)]

    def close(self, record: RequestRecord) -> list[Operation]:
        """Release all that a request holds in the shards; does nothing when it has no sequence."""
        live = record.live
        if live is None:
            return []
        live.table.release()
        if live.state != NO_STATE:
            self._pools[KvGroup.RECURRENT].release([live.state])
        self._pools.draft_states.release(live.draft_states)
        self.sequence_ids.release([live.sequence])
        del self._records[live.sequence]
        record.live = None
        return [CloseSequence(live.sequence)]

    def _grow(self, live: LiveSequence, stop: int, num_draft_tokens: int) -> list[Operation] | None:
        operations = grow_table(
            live.sequence, live.table, live.n_scheduled, stop, num_draft_tokens, self._reuse.make_room
        )
        if operations and any(isinstance(operation, PageIn) for operation in operations):
            live.draft_from = (-1, 0)  # of a page that is back the drafter may lack the state
        return operations

    def _fits_host(self, record: RequestRecord, match: PrefixMatch) -> bool:
        """Return whether what it pages out by the end of its prompt fits beside what the running ones still will."""
        n_needed = self._limits.host_pages_needed(len(record.tokens))
        for other in self._records.values() if n_needed else ():
            if other.live is not None:
                promised = self._limits.host_pages_needed(len(other.tokens) + PAGE_TOKENS)
                n_needed += max(0, promised - len(other.live.table.hosts))
        if n_needed <= self._pools.host_pages.n_free:
            return True
        ids = self._pools.host_pages.ids
        shared = [page for page in match.full if page in ids]
        return self._reuse.index.can_reclaim_host(n_needed - len(shared), shared)

    def fits(self, record: RequestRecord, match: PrefixMatch) -> bool:
        """Return whether there is room for a request beside what the running ones still need."""
        needs = self._limits.pages_needed(len(record.tokens))
        if KvGroup.FULL in needs:
            ids = self._pools[KvGroup.FULL].ids
            needs[KvGroup.FULL] -= sum(page in ids for page in match.full)
        for other in self._records.values():
            for kv_group, n in self._limits.pages_needed(len(other.tokens) + PAGE_TOKENS).items():
                held = 0 if other.live is None else len(other.live.table.held(kv_group))
                needs[kv_group] += max(0, n - held)  # promised to it, and one to grow by
        if KvGroup.RECURRENT in self._pools:
            needs[KvGroup.RECURRENT] = 1
        if not self._fits_host(record, match):
            return False
        return self._reuse.index.can_reclaim(needs, {KvGroup.FULL: match.full, KvGroup.WINDOW: match.window})
