"""Refills prefix slots that stages have lost their part of: these stages alone compute it again when a prompt asks.

Pure.  The journal has the rows that the stages were given; they go through the layers of these stages in steps of their
own, among those of other requests (``LoneWork``), over the pages and states that the slot has everywhere.  The request
waits until the last of these steps is planned, and then begins with the slot as with any other.  Where rows are
missing, or pages are in use, it begins with what is whole.
Invariants: nothing is written that a running sequence reads; a slot is whole no sooner than all steps that refill it
are planned; one refill at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from lucevisor.engine.journal import Journal, RowCopy
from lucevisor.engine.limits import EngineLimits
from lucevisor.engine.lone_work import LoneWork
from lucevisor.engine.sequence import RequestRecord
from lucevisor.kv.page_pool import PageAllocator, PagePools
from lucevisor.kv.prefix_cache import PrefixIndex
from lucevisor.kv.prefix_records import PrefixMatch
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.model.pages import first_visible_page, max_window_pages, pages_of
from lucevisor.model.values import PAGE_TOKENS, Space
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    OpenSequence,
    Operation,
    Sampling,
    SetPages,
    Slice,
    ZeroState,
)


class _CannotRefill(Exception):
    """Rows are missing, or pages are in use."""


@dataclass(slots=True, eq=False)
class _Refill:
    """``units``: ids that it owns besides others until its last step is applied.  ``sequence``, ``state``, ``spare``:
    what it computes with, until that is planned.  ``filled``: units, and how many positions, that are whole then.
    """

    sequence: int
    state: int
    spare: list[int]
    units: dict[Space, list[int]]
    works: list[LoneWork] = field(default_factory=list)  # the next one last
    filled: list[tuple[Space, int, int]] = field(default_factory=list)
    opened: bool = False
    last_step: int = 0


class Refills:
    """What lost stages compute again for prompts.  ``journal`` None: nothing."""

    def __init__(self, limits: EngineLimits, pools: PagePools, index: PrefixIndex, sequence_ids: PageAllocator) -> None:
        self.journal: Journal | None = None
        self.n_tokens = 0  # computed again, once for each stage
        self._limits, self._pools, self._index, self._sequence_ids = limits, pools, index, sequence_ids
        self._current: _Refill | None = None
        self._in_flight: list[_Refill] = []  # planned to the end

    @property
    def active(self) -> bool:
        """Whether steps of a refill are to be planned."""
        return self._current is not None

    @property
    def sequences(self) -> list[int]:
        """Ids of sequences that it uses."""
        return [self._current.sequence] if self._current is not None else []

    @property
    def units(self) -> list[Mapping[Space, Sequence[int]]]:
        """Ids that it owns, of slots; of states, those of slots and not of sequences."""
        current = [self._current] if self._current is not None else []
        return [one.units for one in (*self._in_flight, *current)]

    @property
    def own_units(self) -> dict[Space, list[int]]:
        """Ids that it alone owns."""
        if self._current is None:
            return {}
        return {Space.WINDOW: self._current.spare, Space.RECURRENT: _states(self._current.state)}

    def begin(self, record: RequestRecord, wanted: PrefixMatch) -> bool:
        """Begin to refill what stages lack of a match, if no other is being refilled; return whether the request waits.

        False: it begins with what is whole.
        """
        if self._current is not None:
            return True
        if self.journal is None or not self._sequence_ids.n_free:
            return False
        whole = self._index.match(record.tokens, whole=True)
        slots = self._slots(record.tokens, whole, wanted)
        refill = self._reserve(whole, wanted, slots) if self._may_write(whole.position, wanted) else None
        if refill is None:
            return False
        try:
            planner = _Planner(self._limits, self._pools, self.journal, record.tokens, whole, wanted, refill)
            refill.works = [*planner.works(slots)][::-1]
        except _CannotRefill:
            self._close(refill)
            self._release(refill)
            return False
        refill.filled = planner.filled
        self._current = refill
        return True

    def next(self, step_id: int) -> tuple[list[Operation], LoneWork]:
        """Return the operations and the work of the next step of the refill, which is planned now."""
        refill = self._current
        assert refill is not None
        operations: list[Operation] = []
        if not refill.opened:
            operations.append(OpenSequence(refill.sequence, refill.state, Sampling(temperature=0.0)))
            refill.opened = True
        work = refill.works.pop()
        self.n_tokens += work.n_tokens
        refill.last_step = step_id
        return operations, work

    def close(self) -> list[Operation]:
        """What was refilled is whole if all its steps are planned; return the operations that follow."""
        refill = self._current
        if refill is None or refill.works:
            return []
        for unit in refill.filled:
            self._index.fill(*unit)
        self._current = None
        self._in_flight.append(refill)
        return self._close(refill)

    def applied(self, step_id: int) -> None:
        """All stages have done a step."""
        for refill in [one for one in self._in_flight if one.last_step <= step_id]:
            self._in_flight.remove(refill)
            self._release(refill)

    def abort(self) -> list[Operation]:
        """Plan no more of the present refill; its slot stays partial."""
        refill, self._current = self._current, None
        if refill is None:
            return []
        self._release(refill)
        return self._close(refill)

    def forget(self) -> None:
        """The shards lost all sequences."""
        self.abort()
        for refill in self._in_flight:
            self._release(refill)
        self._in_flight.clear()

    # ---- inside

    def _slots(self, tokens: TokenBuffer, whole: PrefixMatch, wanted: PrefixMatch) -> list[PrefixSlot]:
        """Return the slots that a refill passes, and that become whole with it."""
        slots = [one for one in self._index.partial_slots(tokens, wanted.position) if one.n_tokens > whole.position]
        if Space.WINDOW in self._pools:  # of others it passes the window pages are not there
            return [one for one in slots if one is wanted.slot]
        return [one for one in slots if self._index.lost_in(one) <= wanted.lost_in]

    def _may_write(self, start: int, wanted: PrefixMatch) -> bool:
        """Whether prefix slots alone own what is written of a match, and its queries saw all that was before them."""
        if wanted.paged_out is not None and wanted.paged_out.approximate:
            return False
        written = {
            Space.FULL: [*wanted.full[start // PAGE_TOKENS :], *_tail(wanted, Space.FULL)],
            Space.WINDOW: [*wanted.window[_n_window_before(start, wanted) :], *_tail(wanted, Space.WINDOW)],
        }
        return all(
            page in self._pools[space].ids and self._pools[space].evictable(page)
            for space, pages in written.items()
            for page in pages
        )

    def _reserve(self, whole: PrefixMatch, wanted: PrefixMatch, slots: Sequence[PrefixSlot]) -> _Refill | None:
        """Take a sequence, a state and window pages, evicting slots if need be; None if there are not enough."""
        units = {space: list[int]() for space in self._pools.spaces}
        for space, pages in ((Space.FULL, wanted.full), (Space.WINDOW, (*whole.window, *wanted.window))):
            if pages:
                units[space] += pages
        tails = [*whole.tail.items(), *wanted.tail.items(), *(tail for slot in slots for tail in slot.tail.items())]
        for space, page in tails:
            units[space].append(page)
        if self._index.recurrent:
            units[Space.RECURRENT] += _states(whole.state) + [slot.state for slot in slots]
        needs = {Space.RECURRENT: 1} if self._index.recurrent else {}
        if self._limits.window_tokens is not None:
            chunk, window = self._limits.prefill_chunk, self._limits.window_tokens
            needs[Space.WINDOW] = max_window_pages(window, chunk, wanted.position)
        for space, ids in units.items():
            self._index.pools.retain(space, ids)
        if wanted.slot is not None:
            self._index.pin(wanted.slot)
        taken = self._pools.allocate(needs) if self._index.evictor.reclaim(needs) else None
        if wanted.slot is not None:
            self._index.unpin(wanted.slot)
        sequence = self._sequence_ids.allocate(1) if taken is not None else None
        if taken is None or sequence is None:
            for space, ids in units.items():
                self._index.pools.release(space, ids)
            return None
        [state] = taken.get(Space.RECURRENT, [NO_STATE])
        return _Refill(sequence[0], state, taken.get(Space.WINDOW, []), units)

    def _close(self, refill: _Refill) -> list[Operation]:
        """Give back what it computes with."""
        self._sequence_ids.release([refill.sequence])
        if refill.spare:
            self._pools[Space.WINDOW].release(refill.spare)
        if refill.state != NO_STATE:
            self._pools[Space.RECURRENT].release([refill.state])
        return [CloseSequence(refill.sequence)] if refill.opened else []

    def _release(self, refill: _Refill) -> None:
        for space, ids in refill.units.items():
            self._index.pools.release(space, ids)
        self._index.evictor.trim()


class _Planner:
    """Plans the works of a refill from ``whole`` to ``wanted``, which lies on the same pages."""

    def __init__(
        self,
        limits: EngineLimits,
        pools: PagePools,
        journal: Journal,
        tokens: TokenBuffer,
        whole: PrefixMatch,
        wanted: PrefixMatch,
        refill: _Refill,
    ) -> None:
        self._limits, self._pools, self._journal, self._tokens = limits, pools, journal, tokens
        self._whole, self._wanted, self._refill = whole, wanted, refill
        self._start, self._stop = whole.position, wanted.position
        self._full = [*wanted.full, *_tail(wanted, Space.FULL)]
        self._window = [*wanted.window, *_tail(wanted, Space.WINDOW)]
        self.filled: list[tuple[Space, int, int]] = []

    def works(self, slots: Sequence[PrefixSlot]) -> Iterator[LoneWork]:
        """Yield the works in order.  Raises _CannotRefill."""
        self._fill_pages()
        operations = self._opening()
        stops = {self._stop, *(slot.n_tokens for slot in slots)}
        chunk = self._limits.prefill_chunk
        whole_chunks = range(self._start - self._start % chunk + chunk, self._stop, chunk)
        for start, stop in pairwise(sorted({self._start, *whole_chunks, *stops})):
            piece = Slice(self._refill.sequence, start, self._tokens[start:stop], sample=False)
            operations += self._window_table(start, stop)
            yield LoneWork(self._wanted.lost_in, operations, [piece], self._rows(start, stop))
            operations = [copy for slot in slots if slot.n_tokens == stop for copy in self._copies(slot)]
        if operations:
            yield LoneWork(self._wanted.lost_in, operations, [], {})

    def _fill_pages(self) -> None:
        n_last = self._stop % PAGE_TOKENS
        for space, pages in (
            (Space.FULL, self._wanted.full[self._start // PAGE_TOKENS :]),
            (Space.WINDOW, self._wanted.window[_n_window_before(self._start, self._wanted) :]),
        ):
            self.filled += [(space, page, PAGE_TOKENS) for page in pages]
        self.filled += [(space, page, n_last) for space, page in self._wanted.tail.items()]

    def _opening(self) -> list[Operation]:
        """Begin with what is whole: its state, and its last page."""
        refill, at, n_last = self._refill, self._start // PAGE_TOKENS, self._start % PAGE_TOKENS
        operations: list[Operation] = []
        if refill.state != NO_STATE:
            state = self._whole.state
            operations.append(ZeroState(refill.state) if state == NO_STATE else CopyState(state, refill.state))
        if self._full:
            operations.append(SetPages(refill.sequence, Space.FULL, 0, self._full))
        for space, source in self._whole.tail.items():
            target = self._full[at] if space is Space.FULL else self._window_page(at)
            if target != source:
                operations.append(CopyPage(space, source, target, n_last))
        return operations

    def _copies(self, slot: PrefixSlot) -> Iterator[Operation]:
        """Yield what gives a slot its own part, when its tokens have just been computed."""
        at, n_last = slot.n_tokens // PAGE_TOKENS, slot.n_tokens % PAGE_TOKENS
        if slot.state != NO_STATE:
            yield CopyState(self._refill.state, slot.state)
            self.filled.append((Space.RECURRENT, slot.state, PAGE_TOKENS))
        page = slot.tail.get(Space.FULL)
        if page is not None and page != self._full[at] and self._pools.lost_in(Space.FULL, page, n_last):
            yield CopyPage(Space.FULL, self._full[at], page, n_last)
            self.filled.append((Space.FULL, page, n_last))

    def _rows(self, start: int, stop: int) -> dict[int, list[RowCopy]]:
        found = {}
        for stage in self._wanted.lost_in:
            if stage:
                pages = self._full[start // PAGE_TOKENS : pages_of(stop)]
                copies = self._journal.find(stage - 1, pages, start, stop)
                if copies is None:
                    raise _CannotRefill
                found[stage - 1] = copies
        return found

    def _window_table(self, start: int, stop: int) -> list[Operation]:
        """Return the window table for a chunk: pages that stay from the last window on, spare ones in turn before."""
        if self._limits.window_tokens is None:
            return []
        first = first_visible_page(start, self._limits.window_tokens)
        pages = [self._window_page(entry) for entry in range(first, pages_of(stop))]
        return [SetPages(self._refill.sequence, Space.WINDOW, first, pages)]

    def _window_page(self, entry: int) -> int:
        whole, wanted, spare = self._whole, self._wanted, self._refill.spare
        if entry < self._start // PAGE_TOKENS:
            return whole.window[entry - whole.first_window]
        if entry >= wanted.first_window:
            return self._window[entry - wanted.first_window]
        return spare[entry % len(spare)]


def _tail(match: PrefixMatch, space: Space) -> list[int]:
    return [match.tail[space]] if space in match.tail else []


def _states(state: int) -> list[int]:
    return [state] if state != NO_STATE else []


def _n_window_before(start: int, wanted: PrefixMatch) -> int:
    """Return how many window pages of a match lie before a position."""
    return max(0, start // PAGE_TOKENS - wanted.first_window)
