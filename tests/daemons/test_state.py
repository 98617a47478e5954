"""Pools, page tables and step layouts: every operation of a step, every contradiction."""

import gc
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from daemons import device
from daemons.device import CPU
from daemons.errors import DeviceError, StateError
from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.attention import reference
from daemons.ops.delta_rule import apply_updates
from daemons.ops.paged import Pages
from lucevisor.engine.sequence import grow_table, page_operations
from lucevisor.kv.page_pool import PagePools
from lucevisor.kv.page_table import Growth, HostMemoryFull, PageTable
from lucevisor.kv.residency import Residency, page_table
from lucevisor.kv.validation import Owner, pool_problems
from lucevisor.model.pages import ResidencyPolicy
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor, attention_state, update_width
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    OpenSequence,
    Operation,
    PageIn,
    PageOut,
    SamplingParams,
    SetPages,
    Slice,
    UseState,
    ZeroState,
)
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, states_of
from tests.numerics import attention_error, q8_error

SIZES = PoolSizes(full_pages=12, window_pages=8, states=5)


def make_spec(window: int = 0, head_dim: int = 8) -> ModelSpec:
    """A full, a sliding and two recurrent layers."""
    pages = attention_state(2, head_dim, head_dim)
    recurrent = (StateTensor("conv", (3, 4), Dtype.FLOAT32), StateTensor("delta", (2, 4, 4), Dtype.FLOAT32))
    layers = (
        LayerSpec(0, KvGroup.FULL, {}, pages),
        LayerSpec(1, KvGroup.WINDOW, {}, pages, window=window or 70),
        LayerSpec(2, KvGroup.RECURRENT, {}, recurrent),
        LayerSpec(3, KvGroup.RECURRENT, {}, recurrent),
    )
    return ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 16, None)


def make(kv_dtype: Dtype = Dtype.FLOAT32, **options: int) -> tuple[ModelSpec, Pools, Sequences]:
    spec = make_spec(**options)
    pools = Pools(spec, LayerRange(0, 4), CPU, kv_dtype, SIZES)
    return spec, pools, Sequences([pools], SIZES, max_sequences=3)


def opened(sequence: int = 1, state: int = 0) -> OpenSequence:
    return OpenSequence(sequence, state, SamplingParams())


@pytest.fixture(autouse=True)
def _same_numbers_each_time():
    torch.manual_seed(1)


# ---- pools


TORCH = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


@pytest.mark.parametrize("kv_dtype", list(Dtype))
@pytest.mark.parametrize("head_dim", [32, 40])
def test_pages_give_back_what_was_written(kv_dtype, head_dim):
    """Floats rounded to the nearest, and nothing else done to them; q8_0 within half a step of each group of 32."""
    _, pools, _ = make(kv_dtype, head_dim=head_dim)
    keys = pools.paged(0, "k")
    rows = torch.randn(70, 2, head_dim)
    rows[3] = 0
    page_ids = [7, 2]
    slots = torch.tensor([page_ids[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS for i in range(70)])
    keys.write(slots, rows)
    found = keys.read(Pages(torch.tensor(page_ids), 1, 0, 70), torch.float32)
    assert found.shape == (1, 70, 2, head_dim)
    if kv_dtype is Dtype.Q8_0:
        assert bool(((found[0].double() - rows.double()).abs() <= q8_error(rows)).all())
    else:
        assert torch.equal(found[0], rows.to(TORCH[kv_dtype]).float())
    tail = keys.read(Pages(torch.tensor([7]), 1, 3, 60), torch.float32)
    assert torch.equal(tail[0], found[0, 3:63])
    view = keys.read(Pages(None, 1, 7 * PAGE_TOKENS + 3, 60), torch.float32)
    assert torch.equal(view, tail)


def test_too_large_a_pool_names_device_and_bytes():
    with pytest.raises(DeviceError, match=r"cpu: out of memory for state 'k' of layers 0\.\.0 .*bytes asked") as caught:
        Pools(make_spec(), LayerRange(0, 4), CPU, Dtype.FLOAT32, PoolSizes(1 << 40, 1, 1))
    assert caught.value.configuration
    assert "pages" in caught.value.advice


# ---- operations


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (opened(1), "OpenSequence 1: the sequence is open already"),
        (opened(2, 5), "OpenSequence 2: state 5 is outside the pool of 5"),
        (CloseSequence(4), "CloseSequence: sequence 4 is not open"),
        (SetPages(4, KvGroup.FULL, 0, [1]), "sequence 4, KV group full: sequence 4 is not open"),
        (SetPages(1, KvGroup.FULL, 0, [12]), "page of KV group full 12 is outside the pool of 12"),
        (SetPages(1, KvGroup.WINDOW, 0, [0, -1]), "page of KV group window -1 is outside the pool of 8"),
        (SetPages(1, KvGroup.FULL, 1, [1]), "entry 1 leaves a gap behind the 0 entries"),
        (SetPages(1, KvGroup.WINDOW, 1 << 40, [1]), "is outside a table of at most"),
        (SetPages(1, KvGroup.FULL, -1, [1]), "entry -1 is outside"),
        (SetPages(1, KvGroup.RECURRENT, 0, [1]), "recurrent states have no page table"),
        (CopyPage(KvGroup.FULL, 0, 12, 3), "page of KV group full 12 is outside"),
        (CopyPage(KvGroup.WINDOW, 8, 0, 3), "page of KV group window 8 is outside"),
        (CopyPage(KvGroup.FULL, 0, 1, 65), "65 tokens of a page of 64"),
        (CopyPage(KvGroup.RECURRENT, 0, 1, 4), "4 tokens of a page"),
        (CopyState(0, -1), "CopyState: state -1 is outside the pool of 5"),
        (PageOut(1, []), "PageOut of sequence 1: entries none of 0"),
        (PageOut(1, [1, 2]), "PageOut of sequence 1: entries 1, 2 of 0; 0 are out already"),
        (PageOut(1, [0, 1], [12]), "PageOut of sequence 1: 1 pages in host memory for 2 entries"),
        (ZeroState(99), "ZeroState: state 99 is outside the pool of 5"),
    ],
)
def test_impossible_operations_are_refused_and_change_nothing(operation, message):
    _, _, sequences = make()
    sequences.apply(opened())
    with pytest.raises(StateError) as caught:
        sequences.apply(operation)
    assert message in str(caught.value)
    assert caught.value.where
    assert caught.value.advice
    assert list(sequences.by_id) == [1]
    assert not any(sequences.by_id[1].pages.values())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_device_tables_follow_the_operations(seed):
    rng = random.Random(seed)
    _, _, sequences = make()
    model: dict[int, list[int]] = {}
    for _ in range(60):
        choice = rng.random()
        if choice < 0.25 and len(model) < 3:
            s = rng.choice([i for i in range(9) if i not in model])
            sequences.apply(opened(s))
            model[s] = []
        elif choice < 0.35 and model:
            s = rng.choice(sorted(model))
            sequences.apply(CloseSequence(s))
            del model[s]
        elif choice < 0.8 and model:
            s = rng.choice(sorted(model))
            first = rng.randint(max(0, len(model[s]) - 3), len(model[s]))
            start = rng.randrange(10)
            pages = list(range(start, start + rng.randint(1, 2))) if rng.random() < 0.7 else [rng.randrange(12)] * 80
            sequences.apply(SetPages(s, KvGroup.FULL, first, pages))
            model[s][first : first + len(pages)] = pages
        elif any(model.values()):
            sequences.flush()
            table = sequences.tables(CPU)[KvGroup.FULL]
            for s, pages in model.items():
                sequence = sequences.by_id[s]
                assert table[sequence.row, : len(pages)].tolist() == pages
                run = next((i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1), len(pages))
                assert sequence.breaks.get(KvGroup.FULL, 0) == run


# ---- layouts


def table_of(
    sequences: Sequences, sequence: int, pages: list[int], kv_group: KvGroup = KvGroup.FULL, first: int = 0
) -> None:
    sequences.apply(SetPages(sequence, kv_group, first, pages))


def batch_of(spec: ModelSpec, sequences: Sequences, slices: list[Slice]) -> Batch:
    sequences.flush()
    layout = Layout(slices, sequences, spec)
    return Batch(layout, sequences.tables(CPU), layout.on(CPU))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([Slice(7, 0, [1], True)], "slice of sequence 7 at 0: sequence 7 is not open"),
        ([Slice(1, 0, [], True)], "0 tokens at position 0"),
        ([Slice(1, -1, [1], True)], "1 tokens at position -1"),
        ([Slice(1, 0, [100], True)], "token id 100 is outside the vocabulary of 100"),
        ([Slice(1, 0, [3, -2], True)], "token id -2 is outside"),
        ([Slice(1, 0, [1], True), Slice(1, 1, [1], True)], "another slice in this step"),
        ([Slice(1, 120, [1] * 9, True)], "the full table of 2 entries lacks a page for positions 64 to 128"),
        ([Slice(2, 100, [1], True)], "the window table of 2 entries lacks a page for positions 0 to 100"),
    ],
)
def test_slices_that_contradict_the_tables_are_refused(slices, message):
    spec, _, sequences = make()
    for s in (1, 2):
        sequences.apply(opened(s))
        table_of(sequences, s, [3, 4])
    table_of(sequences, 1, [0, 1, 2], KvGroup.WINDOW)
    table_of(sequences, 2, [5], KvGroup.WINDOW, first=1)  # its window reaches back to position 31, whose page is away
    with pytest.raises(StateError) as caught:
        Layout(slices, sequences, spec)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("slice_", "message"),
    [
        (Slice(1, 0, [1, 2, 3], True, 3), "3 drafts among 3 tokens"),
        (Slice(1, 0, [1, 2, 3], True, -1), "-1 drafts among 3 tokens"),
        (Slice(1, 0, [1, 2, 3], False, 1, [0, 3]), "1 drafts among 3 tokens of a slice that samples nothing"),
        (Slice(1, 0, [1, 2, 3], True, 2), "0 states to write; 2 drafts take 3"),
        (Slice(1, 0, [1, 2, 3], True, 2, [0, 3]), "2 states to write; 2 drafts take 3"),
        (Slice(1, 0, [1, 2], True, 0, [0, 2, 3]), "3 states to write in a slice of 2 tokens"),
        (Slice(1, 0, [1] * 17, True, 0, [0]), "1 states to write in a slice of 17 tokens"),
        (Slice(1, 0, [1, 2, 3], True, 2, [0, 3, 5]), "state 5 is outside the pool of 5"),
        (Slice(1, 0, [1, 2, 3], True, 2, [0, -1, 3]), "state -1 is outside the pool of 5"),
        (Slice(1, 0, [1, 2, 3], True, 2, [0, 4, 3]), "state 4 lies in host memory"),
        (Slice(1, 0, [1, 2, 3], True, 2, [0, 3, 3]), "recurrent state 3 is used twice in this step"),
        (Slice(1, 0, [1, 2, 3], True, 2, [0, 1, 3]), "recurrent state 1 is used twice in this step"),
    ],
)
def test_verify_slices_that_contradict_themselves_or_others_are_refused(slice_: Slice, message: str) -> None:
    """Sequence 2 has a slice of one token in the same step; its live state is 1."""
    sizes = PoolSizes(full_pages=12, window_pages=8, states=5, host_states=1)
    spec = make_spec()
    sequences = Sequences([Pools(spec, LayerRange(0, 4), CPU, Dtype.FLOAT32, sizes)], sizes, max_sequences=3)
    for s in (1, 2):
        sequences.apply(opened(s, s - 1))
        for kv_group in (KvGroup.FULL, KvGroup.WINDOW):
            table_of(sequences, s, [s], kv_group)
    for slices in ([slice_, Slice(2, 0, [1], True)], [Slice(2, 0, [1], True), slice_]):
        with pytest.raises(StateError) as caught:
            Layout(slices, sequences, spec)
        assert message in str(caught.value)
        assert caught.value.where == "slice of sequence 1 at 0" or "twice" in message


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_states_are_kept_where_the_slices_say(data: st.DataObject) -> None:
    """Any slices with and without states to write: each kept state goes to its row, and no other row changes."""
    spec, pools, sequences = make()
    free = data.draw(st.permutations(range(5)))
    slices, wanted = [], {}
    for s in range(data.draw(st.integers(1, 3))):
        live, free = free[0], free[1:]
        sequences.apply(opened(s, live))
        for kv_group in (KvGroup.FULL, KvGroup.WINDOW):
            table_of(sequences, s, [s], kv_group)
        n = data.draw(st.integers(1, 4))
        n_states = data.draw(st.integers(0, min(n, len(free) - 2 + s, 3)))  # the next sequences need one each
        used = [live, *free[: n_states - 1]] if data.draw(st.booleans()) else list(free[:n_states])
        states = data.draw(st.permutations(used)) if n_states else []
        free = [state for state in free if state not in states]
        slices.append(Slice(s, 0, [s] * n, True, 0, states))
        wanted |= {state: (s, n - len(states) + i) for i, state in enumerate(states)} or {live: (s, n - 1)}
    pool = pools.state(2, "conv")
    pool.fill_(-1.0)
    for group in batch_of(spec, sequences, slices).groups:
        ids = torch.tensor([slices[sequence.id].sequence for sequence in group.layout.sequences])
        after = (ids[:, None] * 10.0 + torch.arange(group.n_tokens))[:, :, None, None].expand(-1, -1, *pool.shape[1:])
        if group.n_states == 0:
            group.store_state(pool, after[:, -1])
            continue
        first = group.n_tokens - group.n_states
        assert group.kept_row(pool, first - 1) is None
        row = group.kept_row(pool, first)
        if row is not None:
            row.copy_(after[:, first])
            first += 1
        group.keep_states(pool, first, after[:, first:])
    found = {i: float(value) for i, value in enumerate(pool[:, 0, 0]) if value >= 0}
    assert found == {state: s * 10.0 + token for state, (s, token) in wanted.items()}
    assert bool((pool == pool[:, :1, :1]).all())


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), window=st.sampled_from([1, 5, 64, 70]))
def test_gathered_keys_are_those_a_position_may_see(seed, window):
    """Any slices over scattered tables, full and sliding: pages and mask give what a plain list of keys gives."""
    rng = random.Random(seed)
    spec, pools, sequences = make(window=window)
    slices, texts = [], {}
    free = {KvGroup.FULL: rng.sample(range(12), 12), KvGroup.WINDOW: rng.sample(range(8), 8)}
    if rng.random() < 0.3:
        free = {kv_group: sorted(pages, reverse=True) for kv_group, pages in free.items()}
    for s in range(rng.randint(1, 3)):
        length = rng.randint(1, 150)
        n = rng.choice([1, 1, 1, rng.randint(1, length)])
        n = min(n, length)
        sequences.apply(opened(s, s))
        texts[s] = torch.randn(2, length, 2, 8)
        for kv_group in (KvGroup.FULL, KvGroup.WINDOW):
            last = (length - 1) // PAGE_TOKENS
            first = max(0, length - n - window + 1) // PAGE_TOKENS if kv_group is KvGroup.WINDOW else 0
            if len(free[kv_group]) < last - first + 1:
                return
            pages = [free[kv_group].pop() for _ in range(last - first + 1)]
            table_of(sequences, s, pages, kv_group, first)
            layer = 0 if kv_group is KvGroup.FULL else 1
            at = torch.arange(first * PAGE_TOKENS, length)
            slots = torch.tensor(pages)[at // PAGE_TOKENS - first] * PAGE_TOKENS + at % PAGE_TOKENS
            pools.paged(layer, "k").write(slots, texts[s][0, at])
            pools.paged(layer, "v").write(slots, texts[s][1, at])
        slices.append(Slice(s, length - n, [0] * n, True))
    rng.shuffle(slices)
    batch = batch_of(spec, sequences, slices)
    q = torch.randn(batch.n_rows, 4, 8)
    for kv_group, reach, layer in ((KvGroup.FULL, 0, 0), (KvGroup.WINDOW, window, 1)):

        def attend(group, part, kv_group=kv_group, reach=reach, layer=layer):
            pages, mask = group.keys(kv_group, reach)
            k, v = (pools.paged(layer, name).read(pages, part.dtype) for name in "kv")
            return reference(part, k, v, mask, scale=1.0)

        found, row = batch.map_groups(attend, q), 0
        for slice_ in slices:
            for t in range(slice_.start, slice_.start + len(slice_.tokens)):
                low = max(0, t - reach + 1) if reach else 0
                k, v = texts[slice_.sequence][:, low : t + 1]
                wanted = reference(q[row][None, None], k[None], v[None], None, scale=1.0)[0, 0]
                group = q.shape[1] // k.shape[1]
                heads = [attention_error(q[row, h], k[:, h // group], v[:, h // group], 1.0) for h in range(q.shape[1])]
                assert bool(((found[row] - wanted).abs().amax(dim=-1) <= 2 * torch.tensor(heads)).all())
                row += 1


# ---- states of drafts


DRAFT_SIZES = PoolSizes(full_pages=0, window_pages=0, states=6, host_states=2, draft_states=5)
LIVE, OTHER, FREE = 1, 3, 2
DRAFTS, HOSTS = range(4, 9), range(9, 11)
KEPT = [LIVE, 6, 4, 8]
N_KEY, N_VALUE, DIM = 1, 2, 16
N_DRAFT_LAYERS = 3


def draft_model() -> ModelSpec:
    width = update_width(N_KEY, N_VALUE, DIM)
    state = (
        StateTensor("conv", (3, 8), Dtype.FLOAT32),
        StateTensor("delta", (N_VALUE, DIM, DIM), Dtype.FLOAT32, width),
    )
    layers = tuple(LayerSpec(i, KvGroup.RECURRENT, {}, state) for i in range(N_DRAFT_LAYERS))
    return ModelSpec("test", "test", "F32", 16, 100, 4096, layers, {}, {}, 16, None)


class Verified:
    """Pools in which a verify slice of sequence 1 left ``KEPT``; sequence 3 has another state."""

    def __init__(self) -> None:
        self.pools = Pools(draft_model(), LayerRange(0, N_DRAFT_LAYERS), CPU, Dtype.FLOAT32, DRAFT_SIZES)
        torch.manual_seed(0)
        for i in range(N_DRAFT_LAYERS):
            for rows in (self.pools.state(i, "delta"), self.pools.state(i, "conv"), self.pools.updates.of_layer(i)):
                rows.normal_()
        self.sequences = Sequences([self.pools], DRAFT_SIZES, 3)
        self.apply(OpenSequence(1, LIVE, SamplingParams()), OpenSequence(3, OTHER, SamplingParams()))
        self.sequences.record_updates([Slice(1, 0, [1] * 4, True, 3, KEPT)])
        self.wanted, self.windows = self.matrices(), self.stacked("conv")
        self.updates = torch.stack([self.pools.updates.of_layer(i) for i in range(N_DRAFT_LAYERS)])

    def apply(self, *operations: Operation) -> None:
        for operation in operations:
            self.sequences.apply(operation)

    def stacked(self, name: str) -> torch.Tensor:
        return torch.stack([self.pools.state(i, name) for i in range(N_DRAFT_LAYERS)])

    def matrices(self) -> torch.Tensor:
        return self.stacked("delta")

    def expect(self, n_tokens: int) -> None:
        """The live state is that after so many tokens of the slice, and nothing else changes."""
        apply_updates(self.wanted, self.updates, LIVE, torch.tensor(KEPT[:n_tokens]), LIVE)
        if n_tokens:
            self.windows[:, LIVE] = self.windows[:, KEPT[n_tokens - 1]]

    def check(self) -> None:
        assert torch.equal(self.matrices(), self.wanted)
        assert torch.equal(self.stacked("conv"), self.windows)
        assert self.sequences.by_id[1].state == LIVE


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
def test_the_state_that_is_used_is_made_in_place(n_tokens: int) -> None:
    one = Verified()
    one.apply(UseState(1, KEPT[n_tokens - 1]))
    one.expect(n_tokens)
    one.check()
    one.apply(UseState(1, KEPT[n_tokens - 1]), CloseSequence(3))  # once
    one.check()


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("target", [FREE, HOSTS[1]], ids=["device", "host"])
def test_a_copy_before_the_verdict_has_the_first_token(n_tokens: int, target: int) -> None:
    """As of a request that is preempted: the newest token always counts."""
    one = Verified()
    one.apply(CopyState(LIVE, target))
    one.expect(1)
    for i in range(N_DRAFT_LAYERS):
        for name, wanted in (("delta", one.wanted), ("conv", one.windows)):
            rows, at = one.pools.rows_with(i, name, target)
            assert torch.equal(rows[at], wanted[i, LIVE])
            if target == FREE:
                wanted[i, FREE] = wanted[i, LIVE]
    one.check()
    one.apply(UseState(1, KEPT[n_tokens - 1]))
    apply_updates(one.wanted, one.updates, LIVE, torch.tensor(KEPT[1:n_tokens], dtype=torch.int64), LIVE)
    one.windows[:, LIVE] = one.windows[:, KEPT[n_tokens - 1]]
    one.check()


@pytest.mark.parametrize("what", [Slice(1, 1, [1], True), CloseSequence(1)], ids=["a slice", "the end"])
def test_without_a_word_the_first_token_counts(what: Slice | Operation) -> None:
    one = Verified()
    if isinstance(what, Slice):
        one.sequences.commit_states([Slice(3, 0, [1], False), what])
    else:
        one.apply(what)
    one.expect(1)
    assert torch.equal(one.matrices(), one.wanted)


def test_an_id_that_the_slice_did_not_leave_is_refused() -> None:
    one = Verified()
    with pytest.raises(StateError, match="left no state 5"):
        one.apply(UseState(1, 5))
    one.check()
    one.apply(UseState(1, KEPT[2]))
    one.expect(3)
    one.check()


@pytest.mark.parametrize(
    "operation",
    [
        OpenSequence(7, 4, SamplingParams()),
        ZeroState(4),
        CopyState(4, FREE),
        CopyState(LIVE, 4),
        CopyState(HOSTS[0], 8),
        UseState(3, HOSTS[0]),
        UseState(3, 11),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_what_is_nowhere_whole_is_refused(operation: Operation) -> None:
    one = Verified()
    with pytest.raises(StateError, match=r"draft's|host memory|outside the pool of 11"):
        one.apply(operation)
    one.check()


@pytest.mark.parametrize(
    ("n", "states"),
    [(1, [4]), (2, [4, 5]), (4, [LIVE, 4]), (3, [4, LIVE, 5]), (3, [FREE, 4, LIVE]), (2, [LIVE, HOSTS[0]])],
    ids=repr,
)
def test_slices_that_would_write_a_whole_state_there_are_refused(n: int, states: list[int]) -> None:
    one = Verified()
    with pytest.raises(StateError, match=r"draft's, and may only be|host memory"):
        Layout([Slice(1, 0, [1] * n, True, 0, states)], one.sequences, draft_model())
    Layout([Slice(1, 0, [1] * 3, True, 2, [LIVE, 4, 5])], one.sequences, draft_model())


# ---- recurrent states in host memory


HOST_SIZES = PoolSizes(full_pages=4, window_pages=0, states=5, host_states=3)
N = 133


@pytest.fixture(scope="module")
def spec():
    return golden_spec("qwen35")


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_the_device_holds_what_may_be_live_and_the_host_the_rest(spec):
    layers = LayerRange(0, spec.n_layers)
    pools = Pools(spec, layers, CPU, Dtype.FLOAT32, HOST_SIZES)
    full, state = (spec.unit_bytes(kv_group, layers, Dtype.FLOAT32) for kv_group in (KvGroup.FULL, KvGroup.RECURRENT))
    updates = 4 * sum(t.update_width for layer in spec.layers for t in layer.state)
    assert updates
    assert pools.nbytes == 4 * full + 2 * (state + updates)
    assert pools.host_nbytes == 3 * state
    first = next(layer.index for layer in spec.layers if layer.kv_group is KvGroup.RECURRENT)
    assert pools.state(first, "delta").shape[0] == 2
    for state_id, (n_rows, row) in enumerate([(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]):
        rows, found = pools.rows_with(first, "delta", state_id)
        assert (rows.shape[0], found) == (n_rows, row)
        assert not rows.any()


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (OpenSequence(1, 2, SamplingParams()), "OpenSequence 1: state 2 lies in host memory"),
        (OpenSequence(1, 5, SamplingParams()), "OpenSequence 1: state 5 is outside the pool of 5"),
        (ZeroState(4), "ZeroState: state 4 lies in host memory"),
        (CopyState(2, 4), "CopyState: states 2 and 4 both lie in host memory"),
        (CopyState(1, 5), "CopyState: state 5 is outside the pool of 5"),
        (CopyState(-1, 4), "CopyState: state -1 is outside the pool of 5"),
    ],
)
def test_what_a_state_in_host_memory_cannot_be_is_refused(spec, operation, message):
    pools = Pools(spec, LayerRange(0, spec.n_layers), CPU, Dtype.FLOAT32, HOST_SIZES)
    sequences = Sequences([pools], HOST_SIZES, max_sequences=2)
    with pytest.raises(StateError, match=message):
        sequences.apply(operation)
    assert not sequences.by_id


def test_a_sequence_goes_on_from_a_checkpoint_in_host_memory(spec):
    pipeline = SlotPipeline(spec, [[3], []], host_states=4, seed=1)
    pipeline.open(0)
    pipeline.run(0, ids_of(spec, N))
    place = checkpoint(pipeline, 0, 6)
    kept = states_of(pipeline, 6)
    assert equal(kept, states_of(pipeline, 0))
    wanted = pipeline.greedy(0, [3, 1], 16)
    assert equal(kept, states_of(pipeline, 6))  # it did not move with the sequence
    assert not equal(kept, states_of(pipeline, 0))
    pipeline.adopt(1, place, live_state=3)
    assert equal(kept, states_of(pipeline, 3))
    assert pipeline.greedy(1, [3, 1], 16) == wanted


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_host_without_room_is_told_of_with_the_bytes(kind):
    with pytest.raises(DeviceError, match=r"cpu: out of memory for checkpoints: \d+ bytes asked") as caught:
        device.host_zeros((1 << 45,), torch.float32, torch.device(kind), "checkpoints", "cache.states")
    assert caught.value.configuration
    assert caught.value.advice == "cache.states"


def test_memory_is_unlocked_before_it_is_unmapped(monkeypatch):
    """As long as a view lives it stays; the driver is not here, so it is seen when it would be called."""
    seen = []

    def mapped(address):
        lines = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(first, 16) <= address < int(end, 16) for first, end in lines)

    monkeypatch.setattr(device, "register_host", lambda _: True)
    monkeypatch.setattr(device, "_unregister", lambda address: seen.append((address, mapped(address))))
    zeros, locked = device.host_zeros((64, 1 << 16), torch.float32, torch.device("cuda"), "checkpoints", "")
    address, view = zeros.data_ptr(), zeros[3:].view(torch.uint8)
    assert locked
    del zeros
    assert not view.any()
    assert seen == []
    del view
    gc.collect()
    assert seen == [(address, True)]
    assert not mapped(address)


# ---- pages in host memory


POOL = 6
MAX_SEQUENCES = 4
LAYERS = tuple(LayerSpec(i, KvGroup.FULL, {}, attention_state(1 + i, 4, 4)) for i in range(2))
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
        self.pools = PagePools([KvGroup.FULL], self.sizes)
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
        before = held.table.held(KvGroup.FULL), held.table.n_out
        try:
            operations = grow_table(sequence, held.table, start, start + n_tokens)
        except HostMemoryFull:
            operations = None
        if operations is None:
            assert (held.table.held(KvGroup.FULL), held.table.n_out) == before
            return
        for operation in operations:
            self.daemon.apply(operation)
        held.numbers += [content(sequence, at) for at in range(start, start + n_tokens)]
        one = self.daemon.get(sequence, "test")
        slots = []
        for position in range(start, start + n_tokens):
            place = one.place(position)
            slots.append(one.pages[KvGroup.FULL][place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS)
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
        pages = held.table.entries(KvGroup.FULL, 0, n_pages)
        table = page_table(self.pools, None, self.residency)
        table.adopt(pages, 0, [])
        fork = self.opened(Held(table, held.numbers[: n_pages * PAGE_TOKENS]))
        for operation in page_operations(fork, Growth(KvGroup.FULL, 0, pages)) if pages else ():
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
            owners.append(Owner(str(name), self.pools[KvGroup.FULL], held.table.held(KvGroup.FULL)))
            owners.append(Owner(str(name), self.pools.host_pages, held.table.hosts))
        assert not list(pool_problems(self.pools, owners))

    @invariant()
    def pages_hold_their_positions(self) -> None:
        for sequence, held in self.held.items():
            one = self.daemon.get(sequence, "test")
            assert len(one.pages.get(KvGroup.FULL, [])) <= POOL
            assert one.pages.get(KvGroup.FULL, []) == held.table.held(KvGroup.FULL)
            hosts = dict(zip(one.out, held.table.hosts, strict=False))
            rows = {entry: page - self.sizes.full_pages for entry, page in hosts.items()}
            assert rows == one.hosts
            assert one.host_rows == (sorted(rows.values()) if self.residency.attends_host else [])
            for entry in range(-(-len(held.numbers) // PAGE_TOKENS)):
                numbers = held.numbers[entry * PAGE_TOKENS : (entry + 1) * PAGE_TOKENS]
                if entry not in one.out:
                    place = one.place(entry * PAGE_TOKENS) // PAGE_TOKENS
                    self.check(one.pages[KvGroup.FULL][place], numbers, in_host=False)
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


@pytest.mark.parametrize("page", [2, 5])
def test_pages_outside_host_memory_are_refused(page: int) -> None:
    sizes = PoolSizes(3, 0, 0, host_pages=2)
    sequences = Sequences([Pools(SPEC, LayerRange(0, 2), CPU, Dtype.FLOAT32, sizes)], sizes, 1)
    sequences.apply(OpenSequence(1, 0, SamplingParams()))
    sequences.apply(SetPages(1, KvGroup.FULL, 0, [0, 1]))
    with pytest.raises(StateError, match=f"page {page} is outside the 2 pages in host memory"):
        sequences.apply(PageOut(1, [1], [page]))
    sequences.apply(PageOut(1, [1], [4]))


def test_a_page_that_the_target_alone_keeps_comes_back_empty():
    """A drafter under ``exact``: it has no host memory, and slots bring pages of the target back."""
    sizes = PoolSizes(full_pages=8, window_pages=0, states=0)
    pools = Pools(SPEC, LayerRange(0, 1), CPU, Dtype.FLOAT32, sizes)
    opening = [OpenSequence(1, -1, SamplingParams(), []), SetPages(1, KvGroup.FULL, 0, [1, 2, 3]), PageOut(1, [1], [8])]
    drafter, target = Sequences([pools], sizes, 1, forgets=True), Sequences([pools], sizes, 1)
    for operation in opening:
        drafter.apply(operation)
        target.apply(operation)
    drafter.apply(PageIn(1, [1], [5]))
    assert drafter.get(1, "test").table(KvGroup.FULL) == [1, 5, 3]
    for sequences in (drafter, target):  # it is there, and it was never kept
        with pytest.raises(StateError, match="entry 1 is not in host memory"):
            sequences.apply(PageIn(1, [1], [6]))
