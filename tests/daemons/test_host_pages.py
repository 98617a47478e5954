"""Pages in host memory: what the supervisor's tables say of them is what a daemon's memory holds, byte for byte."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from daemons.device import CPU
from daemons.errors import StateError
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.host_pages import HostPages, runs_of
from lucevisor.engine.sequence import grow_table, page_operations
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import Growth, HostMemoryFull, PageTable
from lucevisor.kv.residency import Residency, page_table
from lucevisor.kv.validation import Owner, pool_problems
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.model.spec import LayerSpec, ModelSpec, attention_state
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CloseSequence, OpenSequence, PageIn, PageOut, SamplingParams, SetPages

POOL = 6
MAX_SEQUENCES = 4
LAYERS = tuple(LayerSpec(i, Space.FULL, {}, attention_state(1 + i, 4, 4)) for i in range(2))
SPEC = ModelSpec("test", "test", "F32", 16, 100, 4096, LAYERS, {}, {}, 0, None)


def content(sequence: int, position: int) -> float:
    """What every number of a position's keys and values is."""
    return float(sequence * 10_000 + position)


@dataclass
class Held:
    """A sequence of the machine: by position, the number that its pages hold."""

    table: PageTable
    numbers: list[float] = field(default_factory=list)


class HostPagesMachine(RuleBasedStateMachine):
    """Sequences that grow, fork and end in a supervisor's tables and in a daemon's pools."""

    sequences = Bundle("sequences")

    @initialize(
        policy=st.sampled_from(["lru", "exact", "qk"]),
        kv_dtype=st.sampled_from([Dtype.FLOAT32, Dtype.Q8_0]),
        host_pages=st.sampled_from([1, 7, 40]),
    )
    def begin(self, policy: ResidencyPolicy, kv_dtype: Dtype, host_pages: int) -> None:
        host_pages = 0 if policy == "lru" else host_pages
        self.sizes = PoolSizes(full_pages=26, window_pages=0, states=0, host_pages=host_pages)
        self.residency = Residency(POOL, policy)
        self.pools = PagePools([Space.FULL], self.sizes)
        self.shards = [Pools(SPEC, LayerRange(i, i + 1), CPU, kv_dtype, self.sizes) for i in range(2)]
        self.daemon = Sequences(self.shards, self.sizes, MAX_SEQUENCES, attend_host=policy == "exact")
        self.held: dict[int, Held] = {}
        self.exact = kv_dtype is Dtype.FLOAT32
        self.n = 0

    def opened(self, held: Held) -> int:
        self.n += 1
        self.held[self.n] = held
        self.daemon.apply(OpenSequence(self.n, 0, SamplingParams()))
        return self.n

    @rule(target=sequences)
    def open(self) -> int:
        if len(self.held) == MAX_SEQUENCES:
            return 0
        return self.opened(Held(page_table(self.pools, None, self.residency)))

    @rule(sequence=sequences, slices=st.lists(st.sampled_from([1, 17, 64]), max_size=12))
    def grow(self, sequence: int, slices: list[int]) -> None:
        held = self.held.get(sequence)
        for n_tokens in slices if held is not None else ():
            self.slice(sequence, held, n_tokens)

    def slice(self, sequence: int, held: Held, n_tokens: int) -> None:
        start = len(held.numbers)
        before = held.table.held(Space.FULL), held.table.n_out
        try:
            operations = grow_table(sequence, held.table, start, start + n_tokens)
        except HostMemoryFull:
            operations = None
        if operations is None:
            assert (held.table.held(Space.FULL), held.table.n_out) == before
            return
        for operation in operations:
            self.daemon.apply(operation)
        held.numbers += [content(sequence, at) for at in range(start, start + n_tokens)]
        one = self.daemon.get(sequence, "test")
        slots = []
        for position in range(start, start + n_tokens):
            place = one.place(position)
            slots.append(one.pages[Space.FULL][place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS)
        for i, shard in enumerate(self.shards):
            for name in "kv":
                rows = torch.tensor(held.numbers[start:]).view(-1, 1, 1).expand(-1, 1 + i, 4)
                shard.paged(i, name).write(torch.tensor(slots), rows)

    @rule(sequence=sequences, seed=st.randoms(use_true_random=False))
    def rank(self, sequence: int, seed: random.Random) -> None:
        held = self.held.get(sequence)
        if held is not None and self.residency.ranks_pages:
            held.table.rank([seed.random() for _ in range(len(held.numbers) // PAGE_TOKENS)])

    @rule(target=sequences, sequence=sequences)
    def fork(self, sequence: int) -> int:
        """Another sequence starts with the whole pages of one from which nothing has left."""
        held = self.held.get(sequence)
        if held is None or held.table.n_out or len(self.held) == MAX_SEQUENCES:
            return 0
        n_pages = len(held.numbers) // PAGE_TOKENS
        pages = held.table.entries(Space.FULL, 0, n_pages)
        table = page_table(self.pools, None, self.residency)
        table.adopt(pages, 0, [])
        fork = self.opened(Held(table, held.numbers[: n_pages * PAGE_TOKENS]))
        for operation in page_operations(fork, Growth(Space.FULL, 0, pages)) if pages else ():
            self.daemon.apply(operation)
        return fork

    @rule(sequence=consumes(sequences))
    def end(self, sequence: int) -> None:
        held = self.held.pop(sequence, None)
        if held is not None:
            held.table.release()
            self.daemon.apply(CloseSequence(sequence))

    @invariant()
    def ids_have_their_owners(self) -> None:
        owners = []
        for name, held in self.held.items():
            owners.append(Owner(str(name), self.pools[Space.FULL], held.table.held(Space.FULL)))
            owners.append(Owner(str(name), self.pools.host_pages, held.table.hosts))
        assert not list(pool_problems(self.pools, owners))

    @invariant()
    def pages_hold_their_positions(self) -> None:
        for sequence, held in self.held.items():
            one = self.daemon.get(sequence, "test")
            assert len(one.pages.get(Space.FULL, [])) <= POOL
            assert one.pages.get(Space.FULL, []) == held.table.held(Space.FULL)
            hosts = dict(zip(one.out, held.table.hosts, strict=False))
            rows = {entry: page - self.sizes.full_pages for entry, page in hosts.items()}
            assert rows == one.hosts
            assert one.host_rows == (sorted(rows.values()) if self.residency.attends_host else [])
            for entry in range(-(-len(held.numbers) // PAGE_TOKENS)):
                numbers = held.numbers[entry * PAGE_TOKENS : (entry + 1) * PAGE_TOKENS]
                if entry not in one.out:
                    place = one.place(entry * PAGE_TOKENS) // PAGE_TOKENS
                    self.check(one.pages[Space.FULL][place], numbers, in_host=False)
                elif self.residency.keeps_host:
                    self.check(hosts[entry] - self.sizes.full_pages, numbers, in_host=True)

    def check(self, row: int, numbers: list[float], *, in_host: bool) -> None:
        wanted = torch.tensor(numbers)
        for i, shard in enumerate(self.shards):
            for name in "kv":
                paged = shard.paged(i, name)
                if in_host:
                    assert paged.host is not None
                    paged = paged.over(paged.host.parts)
                one = paged.pages if hasattr(paged, "pages") else paged.codes[..., :4].float() * paged.scales
                found = one[row, : len(numbers), 0, 0].float()
                assert torch.equal(found, wanted) if self.exact else torch.allclose(found, wanted, rtol=1e-2)


HostPagesMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestHostPages = HostPagesMachine.TestCase


def test_rows_are_copied_in_runs() -> None:
    assert list(runs_of([3, 4, 5, 9, 11, 12])) == [(0, 3), (3, 4), (4, 6)]
    assert not list(runs_of([]))


def test_chunks_hold_all_rows_once() -> None:
    host = HostPages(CPU, 200)
    memory = host.add(torch.zeros(2, 3, PAGE_TOKENS, 1, 2))
    memory[1, :, 0, 0, 0] = torch.arange(200)
    found = []
    paged = Pools(SPEC, LayerRange(0, 1), CPU, Dtype.FLOAT32, PoolSizes(3, 0, 0, host_pages=200)).paged(0, "k").host
    assert paged is not None
    for [[tensor]], rows in host.chunks([type(paged)([memory[1]], host)], list(range(5, 140))):
        found += tensor[rows.long(), 0, 0, 0].tolist()
    assert found == list(range(5, 140))


@pytest.mark.parametrize("page", [2, 5])
def test_pages_outside_host_memory_are_refused(page: int) -> None:
    sizes = PoolSizes(3, 0, 0, host_pages=2)
    sequences = Sequences([Pools(SPEC, LayerRange(0, 2), CPU, Dtype.FLOAT32, sizes)], sizes, 1)
    sequences.apply(OpenSequence(1, 0, SamplingParams()))
    sequences.apply(SetPages(1, Space.FULL, 0, [0, 1]))
    with pytest.raises(StateError, match=f"page {page} is outside the 2 pages in host memory"):
        sequences.apply(PageOut(1, [1], [page]))
    sequences.apply(PageOut(1, [1], [4]))


def test_a_page_that_the_target_alone_keeps_comes_back_empty():
    """A drafter under ``exact``: it has no host memory, and slots bring pages of the target back."""
    sizes = PoolSizes(full_pages=8, window_pages=0, states=0)
    pools = Pools(SPEC, LayerRange(0, 1), CPU, Dtype.FLOAT32, sizes)
    opening = [OpenSequence(1, -1, SamplingParams(), []), SetPages(1, Space.FULL, 0, [1, 2, 3]), PageOut(1, [1], [8])]
    drafter, target = Sequences([pools], sizes, 1, forgets=True), Sequences([pools], sizes, 1)
    for operation in opening:
        drafter.apply(operation)
        target.apply(operation)
    drafter.apply(PageIn(1, [1], [5]))
    assert drafter.get(1, "test").table(Space.FULL) == [1, 5, 3]
    for sequences in (drafter, target):  # it is there, and it was never kept
        with pytest.raises(StateError, match="entry 1 is not in host memory"):
            sequences.apply(PageIn(1, [1], [6]))
