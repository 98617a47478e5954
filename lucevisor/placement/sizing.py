"""How long a context and how many pages fit, given formats and layer ranges.

Pure arithmetic over the cost model and the free memory.  Invariant: with every memory known and no shortage, what all
shards need in a memory is at most what it has usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from lucevisor.model.pages import max_slot_window_pages, max_window_pages, pages_of
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import PAGE_TOKENS, Backend, Dtype, LayerRange, Space
from lucevisor.placement.cost import CostModel, Steps
from lucevisor.placement.devices import HOST, Memory, Seat, memories_of
from lucevisor.placement.ranges import balanced
from lucevisor.placement.result import Shard, Shortage
from lucevisor.placement.stages import arenas_of, shards_of, stages_of
from lucevisor.protocol.loading import PoolSizes

REBALANCINGS = 3
UNKNOWN_PAGES = 512
"""Pages that "auto" gives at most where a device's free memory is not known: 32768 positions."""
REFERENCE_TOKENS = 32768
"""Context that automatic ranges are balanced for when neither context nor pages are configured."""
SPARE_STATES = 1
"""Recurrent states beyond one a sequence, so that a checkpoint can be taken while all sequences run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination of settings to be sized.  ``max_context`` and ``pages`` None: as much as fits.  ``n_slots``:
    prefix slots for which states and window pages are set aside; fewer where that many do not fit.  ``n_slot_pages``:
    pages that slots may fill beside those of sequences.  ``states_in_host``: the states of slots lie in host memory.

    ``models`` keeps the cost models of this case and of those derived from it, which share the spec.
    """

    spec: ModelSpec
    seats: tuple[Seat, ...]
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
        """The cost model of the case's formats."""
        formats = (self.dtype, self.kv_dtype)
        if formats not in self.models:
            self.models[formats] = CostModel(self.spec, *formats)
        return self.models[formats]


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes of one shard: on its device, and what it has in host memory beside that."""

    weight_bytes: int
    state_bytes: int
    workspace_bytes: int
    host_state_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """On the device."""
        return self.weight_bytes + self.state_bytes + self.workspace_bytes

    def bytes_in(self, memory: str, device_memory: str) -> int:
        """What of it lies in a memory, when the device's own is ``device_memory``."""
        on_device = self.total_bytes if memory == device_memory else 0
        return on_device + (self.host_state_bytes if memory == HOST else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """The sizes of a case.  ``uses[i]`` belongs to ``shards[i]``; ``bound`` is what kept the pages from being more."""

    shards: tuple[Shard, ...]
    uses: tuple[Use, ...]
    max_context: int
    prefill_chunk: int
    max_step_tokens: int
    pools: PoolSizes
    shortages: tuple[Shortage, ...]
    bound: str  # "asked", "enough", "unknown", or the name of a memory
    n_slots: int = 0  # prefix slots for which states and window pages are set aside

    @property
    def fits(self) -> bool:
        return not self.shortages


def slots_set_aside(spec: ModelSpec, kv_dtype: Dtype, max_slots: int, memory_bytes: int) -> tuple[int, int]:
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


def most_used(case: Case, max_context: int) -> int:
    """Pages that all sequences can fill, and as many again at most for prefix slots."""
    n_pages = case.max_sequences * pages_of(max_context)
    return n_pages + min(case.n_slot_pages, n_pages)


def slot_window_pages(spec: ModelSpec) -> int:
    """Most window pages that one prefix slot holds; 0 without sliding layers."""
    return max_slot_window_pages(spec.window) if spec.window and Space.WINDOW in spec.spaces() else 0


def window_pages(spec: ModelSpec, max_sequences: int, prefill_chunk: int, max_context: int) -> int:
    """Pages of the window space for all sequences, with one more for each to grow by; 0 without sliding layers."""
    if Space.WINDOW not in spec.spaces():
        return 0
    n_pages = max_window_pages(spec.window, prefill_chunk, max_context) if spec.window else pages_of(max_context)
    return max_sequences * (n_pages + 1)


@dataclass(slots=True)
class _Sizer:
    """A case with its layer ranges: what it takes for a context and a number of pages."""

    case: Case
    shards: tuple[Shard, ...]
    n_stages: int
    model: CostModel = field(init=False)
    memories: Mapping[str, Memory] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.case.model()
        self.memories = memories_of(self.case.seats)

    def chunk(self, max_context: int) -> int:
        return min(self.case.prefill_chunk, max_context)

    def max_tokens(self, max_context: int) -> int:
        """Tokens of a step: a prefill chunk and one of every sequence, so that neither kind waits for the other."""
        return self.chunk(max_context) + self.case.max_sequences

    def pools(self, max_context: int, n_pages: int) -> PoolSizes:
        case, spaces = self.case, self.case.spec.spaces()
        n_kept = case.n_slots + SPARE_STATES if case.n_slots or not case.states_in_host else 0
        recurrent = Space.RECURRENT in spaces
        return PoolSizes(
            full_pages=n_pages if Space.FULL in spaces else 0,
            window_pages=window_pages(case.spec, case.max_sequences, self.chunk(max_context), max_context)
            + case.n_slots * slot_window_pages(case.spec),
            states=case.max_sequences + n_kept if recurrent else 0,
            host_states=n_kept if recurrent and case.states_in_host else 0,
        )

    def use(self, shard: Shard, max_context: int, n_pages: int) -> Use:
        pools, n = self.pools(max_context, n_pages), self.case.max_sequences
        # decoding sequences are dealt into as many steps as there are stages
        steps = Steps(self.max_tokens(max_context), n, max_context, -(-n // self.n_stages), pools)
        return Use(
            weight_bytes=self.model.weight_bytes(shard),
            state_bytes=self.model.state_bytes(shard, pools),
            workspace_bytes=self.model.workspace_bytes(shard, steps),
            host_state_bytes=self.model.host_state_bytes(shard, pools),
        )

    def needed(self, memory: str, max_context: int, n_pages: int) -> int:
        """Bytes that all shards of a memory take, the host's with the arenas."""
        total = 0
        for seat, shard in zip(self.case.seats, self.shards, strict=True):
            if memory in (seat.memory, HOST):
                total += self.use(shard, max_context, n_pages).bytes_in(memory, seat.memory)
        return total + (self.arena_bytes(max_context) if memory == HOST else 0)

    def arena_bytes(self, max_context: int) -> int:
        """Host memory of the boundaries."""
        width, max_tokens = self.case.spec.boundary_width, self.max_tokens(max_context)
        arenas = arenas_of(self.n_stages, max_tokens, width, self.case.dtype)
        return sum(arena.region_bytes * arena.n_regions for arena in arenas)

    def fits(self, memory: Memory, max_context: int, n_pages: int) -> bool:
        """Whether a memory has room for all that; an unknown one has."""
        return memory.usable_bytes is None or self.needed(memory.name, max_context, n_pages) <= memory.usable_bytes

    def room(self, max_context: int, n_pages: int) -> tuple[int, str]:
        """Most pages up to ``n_pages`` that fit (-1: not even none does), and the memory that allows no more."""
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
    """Return the largest n of 0 to ``high`` that fits, when all smaller ones do; -1 when not even 0 does."""
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


def size(case: Case, ranges: Sequence[LayerRange]) -> Sized:
    """Fix context and pages, and say what is missing where.

    A context that is not configured is the longest of which one sequence fits; pages that are not configured are as
    many as fit, at most what sequences and prefix slots can use.  What is set aside for prefix slots gives way before
    it does not fit.
    """
    sized = _size(case, ranges)
    if sized.fits or not case.n_slots:
        return sized
    n_slots = most(case.n_slots - 1, lambda n: _size(replace(case, n_slots=n), ranges).fits)
    return _size(replace(case, n_slots=max(0, n_slots)), ranges)


def _size(case: Case, ranges: Sequence[LayerRange]) -> Sized:
    shards = shards_of([seat.device for seat in case.seats], [seat.backend for seat in case.seats], ranges)
    sizer = _Sizer(case, shards, len(stages_of(shards)))
    max_context = _context(sizer)
    n_pages, bound = _pages(sizer, max_context)
    shortages = []
    for memory in sizer.memories.values():
        needed = sizer.needed(memory.name, max_context, n_pages)
        usable, free = memory.usable_bytes, memory.free_bytes
        if usable is not None and free is not None and needed > usable:
            devices = tuple(seat.device for seat in case.seats if seat.memory == memory.name)
            shortages.append(Shortage(memory.name, devices, needed, usable, free))
    return Sized(
        shards=shards,
        uses=tuple(sizer.use(shard, max_context, n_pages) for shard in shards),
        max_context=max_context,
        prefill_chunk=sizer.chunk(max_context),
        max_step_tokens=sizer.max_tokens(max_context),
        pools=sizer.pools(max_context, n_pages),
        shortages=tuple(shortages),
        bound=bound,
        n_slots=case.n_slots,
    )


def reference(case: Case) -> tuple[int, int]:
    """Context and pages for which automatic ranges are chosen: as configured, else one sequence of REFERENCE_TOKENS."""
    pages = case.pages or pages_of(case.max_context or min(case.spec.context_tokens, REFERENCE_TOKENS))
    return case.max_context or min(case.spec.context_tokens, pages * PAGE_TOKENS), pages


def automatic_ranges(case: Case) -> tuple[LayerRange, ...]:
    """Choose ranges so that the fullest device is as little full as possible, and the pages as many as that allows.

    A device's share is what a range takes there over what is usable; devices of one memory have equal parts of it, and
    a memory that is not known counts like the mean of the others.  Raises SplitError when there are too many devices.
    """
    context, pages = reference(case)
    best = _evened(Filling(case, context, pages))
    if any(memory.usable_bytes is None for memory in memories_of(case.seats).values()):
        return best
    sized = size(case, best)
    for _ in range(REBALANCINGS):
        # with the pages that came of it the devices are unevenly full: even them out again, while that gives more
        again = _evened(Filling(case, sized.max_context, sized.pools.full_pages))
        retried = size(case, again)
        if not retried.fits or _worth(retried) <= _worth(sized):
            break
        best, sized = again, retried
    return best


class Filling:
    """What any range of layers takes on any seat, for one context and one number of pages."""

    def __init__(self, case: Case, context: int, pages: int) -> None:
        groups = [seat.device.group for seat in case.seats]
        self.case, self._context, self._pages = case, context, pages
        self._sizer = _Sizer(case, (), 1 + sum(a != b for a, b in pairwise(groups)))
        self._room = _usable_by_seat(case.seats)
        # devices of one backend in the middle of the chain are alike
        self._taken: dict[tuple[Backend, bool, bool, int, int], int] = {}

    def n_bytes(self, i: int, layers: LayerRange) -> int:
        """Bytes of seat number ``i``."""
        seat, first, last = self.case.seats[i], i == 0, i == len(self.case.seats) - 1
        key = (seat.backend, first, last, layers.start, layers.stop)
        if key not in self._taken:
            shard = Shard(seat.device, seat.backend, layers, first, last)
            self._taken[key] = self._sizer.use(shard, self._context, self._pages).bytes_in(seat.memory, seat.memory)
        return self._taken[key]

    def share(self, i: int, layers: LayerRange) -> float:
        """The same over what is usable there; seats of one memory have equal parts of it."""
        return self.n_bytes(i, layers) / self._room[i]

    def arena_bytes(self) -> int:
        """Host memory of the boundaries."""
        return self._sizer.arena_bytes(self._context)


def _worth(sized: Sized) -> tuple[bool, int, int]:
    return sized.fits, sized.max_context, sized.pools.full_pages


def _evened(filling: Filling) -> tuple[LayerRange, ...]:
    case = filling.case
    return balanced(len(case.seats), case.spec.n_layers, filling.share, case.spec.legal_boundary)


def _usable_by_seat(seats: Sequence[Seat]) -> list[float]:
    memories = memories_of(seats)
    known = []
    for seat in seats:
        usable = memories[seat.memory].usable_bytes
        sharers = sum(other.memory == seat.memory for other in seats)
        known.append(None if usable is None else max(1.0, usable / sharers))
    found = [value for value in known if value is not None]
    mean = sum(found) / len(found) if found else 1.0
    return [mean if value is None else value for value in known]


def _context(sizer: _Sizer) -> int:
    case = sizer.case
    if case.max_context is not None:
        return case.max_context
    limit = case.spec.context_tokens
    highest = pages_of(limit)
    if case.pages is not None:
        highest = min(highest, case.pages)
    elif not sizer.all_known:
        highest = min(highest, UNKNOWN_PAGES)

    def fits(n: int) -> bool:
        context, n_pages = min(limit, n * PAGE_TOKENS), n if case.pages is None else case.pages
        return all(sizer.fits(memory, context, n_pages) for memory in sizer.memories.values())

    found = most(highest, lambda n: n == 0 or fits(n))
    if found == 0:  # nothing fits: say what is missing for the pages that were asked for, else for the least
        found = 1 if case.pages is None else highest
    return min(limit, found * PAGE_TOKENS)


def _pages(sizer: _Sizer, max_context: int) -> tuple[int, str]:
    """How many pages the full pool has, and what bounds them."""
    case = sizer.case
    if case.pages is not None:
        return case.pages, "asked"
    least, enough = pages_of(max_context), most_used(case, max_context)
    highest, bound = enough, "enough"
    if not sizer.all_known and max(least, UNKNOWN_PAGES) < highest:
        highest, bound = max(least, UNKNOWN_PAGES), "unknown"
    room, memory = sizer.room(max_context, highest)
    return (highest, bound) if room == highest else (max(room, least), memory)
