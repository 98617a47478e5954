"""Page tables, prefix slots and eviction against a model that knows only what every page and state holds.

The model writes into pages and states what a device would compute there: the hash of all tokens up to each position.
So a page that is given away too early, shared wrongly or kept too long shows as a wrong content, a wrong owner or a
leak.  What a prompt must find, and which slot must go first, is looked for by comparing every slot with every other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lucevisor.kv.page_pool import PageAllocator, PagePools
from lucevisor.kv.page_table import PAGED, PageTable
from lucevisor.kv.prefix_cache import PrefixIndex, PrefixMatch, PrefixSettings, Reservation
from lucevisor.kv.prefix_tree import NO_STATE, PrefixSlot, SlotSource
from lucevisor.kv.tokens import TokenBuffer
from lucevisor.kv.validation import index_problems
from lucevisor.model.pages import first_visible_page
from lucevisor.model.values import PAGE_TOKENS, KvGroup
from lucevisor.protocol.loading import PoolSizes

KV_GROUPS = {
    "full": frozenset({KvGroup.FULL}),
    "hybrid": frozenset({KvGroup.FULL, KvGroup.RECURRENT}),
    "one memory": frozenset({KvGroup.FULL, KvGroup.RECURRENT}),
    "window": frozenset({KvGroup.FULL, KvGroup.WINDOW}),
    "all": frozenset(KvGroup),
    "recurrent": frozenset({KvGroup.RECURRENT}),
}

UNIT_BYTES = {KvGroup.FULL: 2, KvGroup.WINDOW: 1, KvGroup.RECURRENT: 5}
PARTS = [(0, 70), (0, 70), (0, 64), (900, 50)]


def text(which: int, length: int) -> list[int]:
    """The beginning of one of four texts, three of which begin alike: for 70, 70 and 64 tokens."""
    first, alike = PARTS[which]
    return [first + i if i < alike else 1000 * (which + 1) + i for i in range(length)]


TEXTS = st.builds(text, st.integers(0, 3), st.sampled_from([30, 64, 65, 70, 80, 128, 129, 150, 192, 250, 300]))


@dataclass(eq=False)
class Sequence:
    """What a live sequence is in the model: tokens, how far they are computed, its table and state."""

    tokens: list[int]
    table: PageTable
    state: int
    n: int


@dataclass
class Device:
    """What pages and states hold; the first ``n_shared`` states have the memory of ``state_pages`` pages each."""

    state_pages: int = 0
    n_shared: int = 0
    pages: dict[tuple[KvGroup, int], list[int]] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)

    def page(self, kv_group: KvGroup, page: int) -> list[int]:
        return self.pages.setdefault((kv_group, page), [-1] * PAGE_TOKENS)

    def write(self, kv_group: KvGroup, page: int) -> list[int]:
        """Return a page to write to."""
        if kv_group is KvGroup.FULL and page < self.n_shared * self.state_pages:
            self.states.pop(page // self.state_pages, None)
        return self.page(kv_group, page)

    def set_state(self, state: int, value: int) -> None:
        self.states[state] = value
        if state < self.n_shared:
            for page in range(state * self.state_pages, (state + 1) * self.state_pages):
                self.pages.pop((KvGroup.FULL, page), None)


def check_choice(victim: PrefixSlot, slots: list[PrefixSlot], pools: PagePools, n_prompts: int) -> None:
    """The one to go is worth no more than any that would free ids of the same KV groups."""
    tokens = {slot: tuple(slot.tokens) for slot in slots}

    def worth(slot: PrefixSlot) -> tuple[float, int, int]:
        others = [known for other, known in tokens.items() if other is not slot]
        shared = [len(known) for known in others if tokens[slot][: len(known)] == known]
        if set(pools.kv_groups) == {KvGroup.FULL}:
            shared += [common(known, list(tokens[slot])) // PAGE_TOKENS * PAGE_TOKENS for known in others]
        n_lost = slot.n_tokens - max(shared, default=0)
        return n_lost / (n_prompts - slot.last_use + 1), slot.last_use, slot.number

    def frees(slot: PrefixSlot) -> set[KvGroup]:
        def lone(kv_group: KvGroup) -> set[int]:
            kept = {page for other in slots if other is not slot for page in held(other, kv_group)}
            return {page for page in held(slot, kv_group) if page not in kept and pools[kv_group].evictable(page)}

        return {kv_group for kv_group in pools.kv_groups if lone(kv_group)}

    rivals = [slot for slot in slots if slot is not victim and not slot.pins and frees(slot) >= frees(victim)]
    assert worth(victim) <= min(map(worth, rivals), default=worth(victim))


def held(slot: PrefixSlot, kv_group: KvGroup) -> list[int]:
    """Ids of a KV group that a slot needs."""
    return [slot.state] if kv_group is KvGroup.RECURRENT else slot.pages(kv_group)


def common(one: tuple[int, ...], other: list[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def prefix_hash(tokens: list[int]) -> int:
    """A number that stands for all tokens up to a position."""
    return hash(tuple(tokens))


PHASES = [phase for phase in Phase if phase is not Phase.explain]


class IndexMachine(RuleBasedStateMachine):
    """One index, a few sequences, and a device that remembers every write.

    ``done`` counts what was asked of the index and the tables, over all runs of a class.
    """

    kinds: ClassVar[tuple[str, ...]] = tuple(sorted(KV_GROUPS))
    done: ClassVar[Counter[str]] = Counter()

    @initialize(
        which=st.integers(0, len(KV_GROUPS) - 1),
        sizes=st.tuples(st.sampled_from([6, 14, 40]), st.sampled_from([5, 12]), st.integers(1, 6)),
        window=st.sampled_from([1, 64, 100]),
        limits=st.tuples(
            st.sampled_from([1, 4, 12, 12]), st.sampled_from([7, 40, 1000, 1000]), st.sampled_from([0, 0, 70])
        ),
        n_live=st.sampled_from([0, 0, 2, 4]),
    )
    def begin(
        self, which: int, sizes: tuple[int, int, int], window: int, limits: tuple[int, int, int], n_live: int
    ) -> None:
        """``n_live``: states for sequences alone, those of slots lie in host memory; 0: one pool for both."""
        kind = self.kinds[which % len(self.kinds)]
        self.kv_groups, state_pages = KV_GROUPS[kind], 3 if kind == "one memory" else 0
        self.window = window if KvGroup.WINDOW in self.kv_groups else None
        n_full, n_window, n_states = sizes
        n_full += state_pages * (n_live or n_states)
        n_host = n_states if n_live else 0
        self.sizes = PoolSizes(n_full, n_window, n_live + n_states, n_host, draft_states=3, state_pages=state_pages)
        self.pools = PagePools(self.kv_groups, self.sizes)
        max_slots, memory_bytes, self.min_tokens = limits
        self.settings = PrefixSettings(
            max_slots=max_slots, memory_bytes=memory_bytes, min_tokens=self.min_tokens, unit_bytes=UNIT_BYTES
        )
        self.index = PrefixIndex(self.pools, self.settings, self.window)
        self.index.hooks.on_evict = self.evicted
        self.recurrent = KvGroup.RECURRENT in self.kv_groups
        self.device = Device(state_pages, n_live or n_states)
        self.sequences: list[Sequence] = []
        self.reservations: list[Reservation] = []
        self.pinned: list[PrefixSlot] = []
        self.pin_next_evicted = False
        self.n_prompts = 0
        self.found: dict[int, tuple[int, PrefixMatch]] = {}

    def evicted(self, slot: PrefixSlot) -> None:
        self.done["evict"] += 1
        assert slot.alive
        assert not slot.pins
        check_choice(slot, self.index.slots, self.pools.slot_pools, self.n_prompts)
        if self.pin_next_evicted:
            self.pin_next_evicted = False
            self.index.pin(slot)
            self.pinned.append(slot)

    # ---- what the model does as the engine does

    @precondition(lambda self: len(self.sequences) < 4)
    @rule(tokens=TEXTS, now=st.floats(0, 100))
    def start(self, tokens: list[int], now: float) -> None:
        """A prompt comes: it starts behind what is remembered, if there is room."""
        self.done["start"] += 1
        match = self.index.match(tokens)
        self.check_match(match, tokens)
        table = PageTable(self.pools, self.window)
        table.adopt(match.full, match.first_window, match.window)
        if match.slot is not None:
            self.index.pin(match.slot)
        needs = table.missing(match.position)
        if self.recurrent:
            needs[KvGroup.RECURRENT] = 1
        possible = self.index.can_reclaim(needs, {})
        fits = self.index.reclaim(needs)
        assert possible or not fits
        assert fits or not possible or self.index.n_evictions or self.pinned or self.pools.fits_elsewhere(needs)
        state = (self.pools[KvGroup.RECURRENT].allocate(1) or [NO_STATE])[0] if fits and self.recurrent else NO_STATE
        growths = table.grow(match.position, match.position) if fits else None
        if growths is not None:
            for growth in growths:
                source = self.device.page(growth.kv_group, match.tail[growth.kv_group])
                self.device.write(growth.kv_group, growth.pages[0])[: match.position % PAGE_TOKENS] = source[
                    : match.position % PAGE_TOKENS
                ]
            if self.recurrent:
                self.device.set_state(state, self.device.states[match.state] if match.position else prefix_hash([]))
            self.sequences.append(Sequence(tokens, table, state, match.position))
        else:
            table.release()
        if match.slot is not None:
            self.index.unpin(match.slot)
        self.index.record_use(match, now)
        self.n_prompts += 1

    @rule(tokens=TEXTS, cuts=st.sets(st.sampled_from([30, 64, 70, 80, 128, 140, 192]), max_size=3))
    def converse(self, tokens: list[int], cuts: set[int]) -> None:
        """A whole request, remembered at some places and at its end."""
        n_before = len(self.sequences)
        self.start(tokens, 0.0)
        if len(self.sequences) > n_before:
            one = self.sequences[-1]
            for stop in sorted({*cuts, len(tokens)}):
                if one.n < stop <= len(tokens) and self.sequences and self.sequences[-1] is one:
                    self.compute(-1, stop - one.n, True)
            if self.sequences and self.sequences[-1] is one:
                self.end(-1, True)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), n=st.sampled_from([1, 7, 64, 200]), publish=st.booleans())
    def compute(self, which: int, n: int, publish: bool) -> None:
        """A sequence gets its next slice; its pages may cost slots."""
        self.done["grow"] += 1
        one = self.sequences[which % len(self.sequences)]
        stop = min(len(one.tokens), one.n + n)
        while one.table.grow(one.n, stop) is None:
            if not self.index.reclaim(one.table.missing(stop)):
                self.end(which, remember=False)
                return
        self.index.trim()  # of window pages that it slides out of: the engine does so when a sequence ends
        for position in range(one.n, stop):
            for kv_group in PAGED:
                if kv_group in self.kv_groups:
                    [page] = one.table.entries(kv_group, position // PAGE_TOKENS, position // PAGE_TOKENS + 1)
                    self.device.write(kv_group, page)[position % PAGE_TOKENS] = prefix_hash(one.tokens[: position + 1])
        one.n = stop
        if self.recurrent:
            self.device.set_state(one.state, prefix_hash(one.tokens[:stop]))
        if publish:
            self.publish(one)

    def publish(self, one: Sequence) -> None:
        self.done["publish"] += 1
        if not self.index.worth_caching(one.n) or self.index.find_slot(one.tokens, one.n) is not None:
            return
        state = NO_STATE
        if self.recurrent:
            taken = self.index.allocate_state(self.index.n_saved(one.tokens, one.n))
            if taken is None:
                return
            state = taken
            self.device.set_state(state, self.device.states[one.state])
        self.index.publish(one.tokens, SlotSource(one.n, one.table.entries, state, "turn"), 0.0)

    @precondition(lambda self: self.sequences)
    @rule(which=st.integers(0, 9), remember=st.booleans())
    def end(self, which: int, remember: bool) -> None:
        self.done["end"] += 1
        one = self.sequences.pop(which % len(self.sequences))
        given = remember and not self.pools.copies_states
        if given:
            self.index.publish(one.tokens, SlotSource(one.n, one.table.entries, one.state, "generation"), 0.0)
        elif remember:
            self.publish(one)
        one.table.release()
        if self.recurrent and not given:
            self.pools[KvGroup.RECURRENT].release([one.state])
        self.index.trim()

    @precondition(lambda self: self.index.slots and len(self.pinned) < 3)
    @rule(which=st.integers(0, 99), keep=st.booleans())
    def pin(self, which: int, keep: bool) -> None:
        self.done["pin" if keep else "drop"] += 1
        slot = self.index.slots[which % len(self.index.slots)]
        if keep:
            self.index.pin(slot)
            self.pinned.append(slot)
        else:
            self.index.drop(slot)
            assert not slot.alive

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        self.done["unpin"] += 1
        self.index.unpin(self.pinned.pop(0))

    @precondition(lambda self: len(self.pinned) < 3)
    @rule()
    def pin_what_is_evicted_next(self) -> None:
        self.pin_next_evicted = True

    @precondition(lambda self: len(self.reservations) < 2)
    @rule(n=st.sampled_from([64, 80, 150, 200]))
    def reserve(self, n: int) -> None:
        self.done["reserve"] += 1
        reservation = self.index.reserve(n)
        if reservation is not None:
            self.reservations.append(reservation)

    @precondition(lambda self: self.reservations)
    @rule(adopt=st.booleans(), which=st.integers(0, 3))
    def restored(self, adopt: bool, which: int) -> None:
        self.done["adopt" if adopt else "cancel"] += 1
        reservation = self.reservations.pop(0)
        if not adopt:
            self.index.cancel(reservation)
            return
        tokens = text(which, reservation.n_tokens)
        for position in range(len(tokens)):
            for kv_group in PAGED:
                at = position // PAGE_TOKENS
                for page in reservation.entries(kv_group, at, at + 1) if kv_group in self.kv_groups else ():
                    self.device.write(kv_group, page)[position % PAGE_TOKENS] = prefix_hash(tokens[: position + 1])
        if self.recurrent:
            self.device.set_state(reservation.state, prefix_hash(tokens))
        slot = self.index.adopt(tokens, reservation, 0.0)
        assert slot is not None
        assert slot.alive
        self.index.unpin(slot)  # whoever waited for it has begun

    @rule(rarely=st.integers(0, 30))
    def lose(self, rarely: int) -> None:
        """The shards lose everything."""
        if rarely:
            return
        self.done["clear"] += 1
        self.index.clear()
        for reservation in self.reservations:  # whoever restored into them comes too late
            assert self.index.adopt(text(0, reservation.n_tokens), reservation, 0.0) is None
            self.index.cancel(reservation)
        for one in self.sequences:
            one.table.release()
            if self.recurrent:
                self.pools[KvGroup.RECURRENT].release([one.state])
        self.sequences, self.reservations = [], []
        self.device = Device(self.sizes.state_pages, self.sizes.device_states)
        assert self.index.slots == []
        assert all(use.used == 0 for use in self.pools.usage().values())

    # ---- what must hold

    def check_match(self, match: PrefixMatch, tokens: list[int]) -> None:
        """The longest there is, and the device holds in it what the prompt would have computed."""
        slots = {tuple(slot.tokens): slot for slot in self.index.slots}
        exact = [n for known in slots if (n := len(known)) < len(tokens) and list(known) == tokens[:n]]
        shared = [common(known, tokens[:-1]) // PAGE_TOKENS * PAGE_TOKENS for known in slots]
        best = max(exact, default=0)
        assert match.n_known == max(shared, default=0)
        if self.recurrent:
            assert match.position == best
        elif self.window is None:
            assert match.position == max([best, *shared])
        else:
            assert best <= match.position <= max([best, *shared])
        whole = match.position // PAGE_TOKENS
        first = 0 if self.window is None else first_visible_page(match.position, self.window)
        if KvGroup.FULL in self.kv_groups:
            assert len(match.full) == whole
            self.check_pages(KvGroup.FULL, 0, list(match.full), match, tokens)
        if KvGroup.WINDOW in self.kv_groups:
            assert match.first_window == first
            assert len(match.window) == whole - first
            self.check_pages(KvGroup.WINDOW, first, list(match.window), match, tokens)
        if self.recurrent and match.position:
            assert self.device.states[match.state] == prefix_hash(tokens[: match.position])

    def check_pages(
        self, kv_group: KvGroup, first: int, pages: list[int], match: PrefixMatch, tokens: list[int]
    ) -> None:
        if match.position % PAGE_TOKENS:
            pages = [*pages, match.tail[kv_group]]
        for position in range(first * PAGE_TOKENS, match.position):
            page = self.device.page(kv_group, pages[position // PAGE_TOKENS - first])
            assert page[position % PAGE_TOKENS] == prefix_hash(tokens[: position + 1])

    @invariant()
    def what_was_found_stays_until_the_version_changes(self) -> None:
        for which in range(len(PARTS)):
            match = self.index.match(text(which, 300))
            version, before = self.found.get(which, (-1, match))
            assert version != self.index.version or match == before
            self.found[which] = (self.index.version, match)

    @invariant()
    def every_id_has_the_owners_it_should(self) -> None:
        for kv_group in self.kv_groups:
            owners: Counter[int] = Counter()
            for one in self.sequences:
                owners.update([one.state] if kv_group is KvGroup.RECURRENT else one.table.held(kv_group))
            for reservation in self.reservations:
                owners.update(reservation.ids.get(kv_group, ()))
            kept = {page for slot in self.index.slots for page in held(slot, kv_group)}
            for allocator, ids in self.allocators(kv_group):
                assert allocator.n_total == len(ids)
                assert [allocator.ref_count(page) for page in ids] == [owners[page] + (page in kept) for page in ids]
                assert allocator.n_evictable == sum(page in kept and not owners[page] for page in ids)

    def allocators(self, kv_group: KvGroup) -> list[tuple[PageAllocator, range]]:
        """The allocators of a KV group and the ids of each."""
        allocator, sizes = self.pools[kv_group], self.sizes
        if kv_group is not KvGroup.RECURRENT or not self.sizes.host_states:
            return [(allocator, range(allocator.n_total))]
        in_host = range(sizes.device_rows, sizes.n_state_ids)
        return [(allocator, range(sizes.device_states)), (self.pools.slot_pools[kv_group], in_host)]

    @invariant()
    def slots_are_within_the_settings(self) -> None:
        slots = self.index.slots
        pinned = [slot for slot in slots if slot.pins]
        assert len(slots) <= max(self.settings.max_slots, len(pinned))
        n_bytes = sum(use.evictable * UNIT_BYTES[kv_group] for kv_group, use in self.pools.usage().items())
        assert self.index.n_bytes == n_bytes
        assert n_bytes <= self.settings.memory_bytes or len(pinned) == len(slots)
        for slot in slots:
            assert slot.n_tokens >= max(1, self.min_tokens)
            before = [other for other in slots if slot.begins_with(other)]
            assert slot.parent is max(before, key=lambda other: other.n_tokens, default=None)

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.sequences:
            self.end(0, remember=False)
        for reservation in self.reservations:
            self.index.cancel(reservation)
        for slot in self.pinned:
            self.index.unpin(slot)
        for slot in self.index.slots:
            self.index.drop(slot)
        assert all(use.used == 0 for use in self.pools.usage().values())


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=150, stateful_step_count=120, deadline=None, phases=PHASES)
OPERATIONS = 25_000
"""Of each kind of model: 125,000 in all."""
NAMES = {"start", "grow", "publish", "end", "pin", "drop", "unpin", "reserve", "adopt", "cancel", "clear", "evict"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KV_GROUPS)
def test_25000_operations_of_each_kind(kind: str) -> None:
    class Machine(IndexMachine):
        kinds: ClassVar[tuple[str, ...]] = (kind,)
        done: ClassVar[Counter[str]] = Counter()

    while Machine.done.total() - Machine.done["evict"] < OPERATIONS:
        some = settings(max_examples=100, stateful_step_count=120, deadline=None, phases=PHASES, database=None)
        run_state_machine_as_test(Machine, settings=some)
    print(f"{kind}: {dict(Machine.done.most_common())}")
    assert Machine.done.keys() == NAMES


# ---- eviction order, pins and hooks


COSTS = {KvGroup.FULL: 10, KvGroup.WINDOW: 10, KvGroup.RECURRENT: 100}


class Maker:
    """Publishes slots as if a sequence had computed them and ended."""

    def __init__(self, *, window: int | None = None, recurrent: bool = False, **settings: int) -> None:
        kv_groups = (
            {KvGroup.FULL} | ({KvGroup.WINDOW} if window else set()) | ({KvGroup.RECURRENT} if recurrent else set())
        )
        self.pools = PagePools(kv_groups, PoolSizes(100, 100, 8))
        self.window = window
        limits = {"max_slots": 10, "memory_bytes": 10_000, "min_tokens": 1, **settings}
        self.index = PrefixIndex(self.pools, PrefixSettings(unit_bytes=COSTS, **limits), window)
        self.made: list[PrefixSlot] = []
        self.evicted: list[PrefixSlot] = []
        self.index.hooks.on_slot = self.made.append
        self.index.hooks.on_evict = self.evicted.append

    def slot(self, tokens: list[int], *, uses: int = 1) -> PrefixSlot | None:
        """``uses``: prompts that come after it."""
        table = PageTable(self.pools, self.window)
        table.grow(0, len(tokens))
        state = NO_STATE
        if self.index.recurrent:
            taken = self.index.allocate_state(self.index.n_saved(tokens, len(tokens)))
            if taken is None:
                table.release()
                return None
            state = taken
        slot = self.index.publish(tokens, SlotSource(len(tokens), table.entries, state, "turn"), 0.0)
        table.release()
        self.index.trim()
        for _ in range(uses):
            self.index.record_use(self.index.match([10**9]), 0.0)
        return slot if slot is not None and slot.alive else None

    def use(self, slot: PrefixSlot) -> None:
        match = self.index.match([*slot.tokens, 10**9])
        assert match.slot is slot
        self.index.record_use(match, 5.0)


def numbered(number: int, n: int) -> list[int]:
    return [1000 * number + i for i in range(n)]


def test_memory_limits_slots_and_a_larger_state_disables_them() -> None:
    maker = Maker(recurrent=True, memory_bytes=250)
    for i in range(5):
        maker.slot(numbered(i, 64))
    assert [slot.tokens[0] for slot in maker.index.slots] == [3000, 4000]
    assert maker.index.n_bytes == 220
    assert not Maker(recurrent=True, memory_bytes=99).index.enabled
    assert Maker(memory_bytes=99).index.enabled
    assert not Maker(max_slots=0).index.enabled


def test_a_checkpoint_evicts_only_a_slot_worth_less() -> None:
    maker = Maker(recurrent=True)
    for i in range(8):
        maker.slot(numbered(i, 500), uses=0)
    assert maker.slot(numbered(9, 100)) is None
    assert maker.evicted == []
    assert maker.slot(numbered(9, 501)) is not None
    assert [slot.tokens[0] for slot in maker.evicted] == [0]


def test_a_slot_pinned_by_the_hook_is_evicted_on_unpin_unless_used_again() -> None:
    for again in (False, True):
        maker = Maker(max_slots=1)
        slot = maker.slot(numbered(0, 100))
        maker.index.hooks.on_evict = maker.index.pin
        other = maker.slot(numbered(1, 200))
        maker.index.hooks.on_evict = maker.evicted.append
        assert slot.alive
        assert slot.evict_on_unpin
        maker.index.unpin(other)
        assert not other.alive
        if again:
            maker.use(slot)
        maker.index.unpin(slot)
        assert slot.alive == again
        assert maker.evicted == []


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_same_tokens_with_another_adapter_are_another_text(recurrent: bool) -> None:
    maker, ids = Maker(recurrent=recurrent), [*range(200)]
    slots = {adapter: maker.slot(TokenBuffer(ids, adapter)) for adapter in ("", "a", "b")}
    pages = {page for slot in slots.values() for page in slot.pages(KvGroup.FULL)}
    assert len(pages) == 3 * 4
    for adapter, slot in slots.items():
        prompt = TokenBuffer([*ids, 7], adapter)
        match = maker.index.match(prompt)
        assert (match.position, match.slot) == (200, slot)
        assert slot.tokens == TokenBuffer(ids, adapter) != TokenBuffer(ids, "c")
        assert (slot.parent, maker.index.n_saved(prompt, 201)) == (None, 1)
        assert maker.index.find_slot(TokenBuffer(ids, adapter), 200) is slot
    assert maker.index.match(TokenBuffer([*ids, 7], "c")).position == 0
    assert [*index_problems(maker.index)] == []
    maker.index.move_pages({page: 99 - page for page in slots["a"].pages(KvGroup.FULL) if 99 - page not in pages})
    maker.index.drop(slots["b"])
    assert maker.index.match(TokenBuffer([*ids, 7], "b")).position == 0
    assert maker.index.match(TokenBuffer([*ids, 7], "a")).slot is slots["a"]
    assert maker.index.match([*ids, 7]).slot is slots[""]
