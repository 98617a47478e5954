"""Pools, page tables and step layouts: every operation of a step, every contradiction."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daemons.device import CPU
from daemons.errors import DeviceError, StateError
from daemons.kv.batch import Batch, Layout
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from daemons.ops.attention import reference
from daemons.ops.paged import Pages
from lucevisor.model.spec import LayerSpec, ModelSpec, StateTensor, attention_state
from lucevisor.model.values import PAGE_TOKENS, Dtype, LayerRange, Space
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    OpenSequence,
    PageOut,
    SamplingParams,
    SetPages,
    Slice,
    ZeroState,
)
from tests.numerics import attention_error, q8_error

SIZES = PoolSizes(full_pages=12, window_pages=8, states=5)


def make_spec(window: int = 0, head_dim: int = 8) -> ModelSpec:
    """A full, a sliding and two recurrent layers."""
    pages = attention_state(2, head_dim, head_dim)
    recurrent = (StateTensor("conv", (3, 4), Dtype.FLOAT32), StateTensor("delta", (2, 4, 4), Dtype.FLOAT32))
    layers = (
        LayerSpec(0, Space.FULL, {}, pages),
        LayerSpec(1, Space.WINDOW, {}, pages, window=window or 70),
        LayerSpec(2, Space.RECURRENT, {}, recurrent),
        LayerSpec(3, Space.RECURRENT, {}, recurrent),
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


@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.Q8_0])
def test_copies_of_pages_and_states(kv_dtype):
    _, pools, sequences = make(kv_dtype)
    keys, other = pools.paged(0, "k"), pools.paged(1, "k")
    every = torch.arange(12 * PAGE_TOKENS)
    keys.write(every, torch.randn(len(every), 2, 8))
    other.write(every[: 8 * PAGE_TOKENS], torch.randn(8 * PAGE_TOKENS, 2, 8))

    def page(i: int, of=keys) -> torch.Tensor:
        return of.read(Pages(torch.tensor([i]), 1, 0, PAGE_TOKENS), torch.float32)[0]

    before, source, window = page(4), page(9), page(4, other)
    sequences.apply(CopyPage(Space.FULL, 9, 4, 10))
    assert torch.equal(page(4)[:10], source[:10])
    assert torch.equal(page(4)[10:], before[10:])
    assert torch.equal(page(4, other), window)  # another space, another page 4
    pools.state(2, "delta")[3], pools.state(3, "conv")[3] = 1.5, 2.5
    sequences.apply(CopyState(3, 0))
    assert float(pools.state(2, "delta")[0].min()) == 1.5
    sequences.apply(ZeroState(3))
    assert not pools.state(3, "conv")[3].any()
    assert float(pools.state(3, "conv")[0].min()) == 2.5


# ---- operations


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (opened(1), "OpenSequence 1: the sequence is open already"),
        (opened(2, 5), "OpenSequence 2: state 5 is outside the pool of 5"),
        (CloseSequence(4), "CloseSequence: sequence 4 is not open"),
        (SetPages(4, Space.FULL, 0, [1]), "sequence 4, space full: sequence 4 is not open"),
        (SetPages(1, Space.FULL, 0, [12]), "page of space full 12 is outside the pool of 12"),
        (SetPages(1, Space.WINDOW, 0, [0, -1]), "page of space window -1 is outside the pool of 8"),
        (SetPages(1, Space.FULL, 1, [1]), "entry 1 leaves a gap behind the 0 entries"),
        (SetPages(1, Space.WINDOW, 1 << 40, [1]), "is outside a table of at most"),
        (SetPages(1, Space.FULL, -1, [1]), "entry -1 is outside"),
        (SetPages(1, Space.RECURRENT, 0, [1]), "recurrent states have no page table"),
        (CopyPage(Space.FULL, 0, 12, 3), "page of space full 12 is outside"),
        (CopyPage(Space.WINDOW, 8, 0, 3), "page of space window 8 is outside"),
        (CopyPage(Space.FULL, 0, 1, 65), "65 tokens of a page of 64"),
        (CopyPage(Space.RECURRENT, 0, 1, 4), "4 tokens of a page"),
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


def test_entries_behind_those_paged_out_keep_their_numbers():
    _, _, sequences = make()
    sequences.apply(opened())
    sequences.apply(SetPages(1, Space.FULL, 0, [3, 4, 5, 6, 7]))
    sequences.apply(PageOut(1, [1, 2]))
    sequences.apply(SetPages(1, Space.FULL, 5, [8]))
    sequences.apply(PageOut(1, [3]))
    one = sequences.get(1, "test")
    sequences.flush()
    table = sequences.tables(CPU)[Space.FULL][one.row]
    assert one.pages[Space.FULL] == table[:3].tolist() == [3, 7, 8]
    assert one.breaks[Space.FULL] == 1
    places = {0: 0, 63: 63, 64: 64, 100: 64, 255: 64, 256: 64, 257: 65, 383: 191}
    assert {position: one.place(position) for position in places} == places
    for wrong in (SetPages(1, Space.FULL, 2, [9]), PageOut(1, [2]), PageOut(1, [4, 0]), PageOut(1, [7])):
        with pytest.raises(StateError):
            sequences.apply(wrong)
    with pytest.raises(StateError, match="lacks a page for positions 128 to 128"):
        Layout([Slice(1, 128, [1], True)], sequences, full_only())
    layout = Layout([Slice(1, 260, [1], True)], sequences, full_only())
    assert layout.metadata[2] == 7 * PAGE_TOKENS + 4
    assert layout.groups[0].max_length == 128


def full_only() -> ModelSpec:
    spec = make_spec()
    return replace(spec, layers=spec.layers[:1])


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
            sequences.apply(SetPages(s, Space.FULL, first, pages))
            model[s][first : first + len(pages)] = pages
        elif any(model.values()):
            sequences.flush()
            table = sequences.tables(CPU)[Space.FULL]
            for s, pages in model.items():
                sequence = sequences.by_id[s]
                assert table[sequence.row, : len(pages)].tolist() == pages
                run = next((i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1), len(pages))
                assert sequence.breaks.get(Space.FULL, 0) == run


# ---- layouts


def table_of(sequences: Sequences, sequence: int, pages: list[int], space: Space = Space.FULL, first: int = 0) -> None:
    sequences.apply(SetPages(sequence, space, first, pages))


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
    table_of(sequences, 1, [0, 1, 2], Space.WINDOW)
    table_of(sequences, 2, [5], Space.WINDOW, first=1)  # its window reaches back to position 31, whose page is away
    with pytest.raises(StateError) as caught:
        Layout(slices, sequences, spec)
    assert message in str(caught.value)


def test_rows_keep_the_order_of_slices_and_groups_find_theirs():
    spec, _, sequences = make()
    for s, pages in ((0, [5, 9]), (1, [3]), (2, [1, 0])):
        sequences.apply(opened(s, s + 1))
        table_of(sequences, s, pages)
        table_of(sequences, s, [s, s + 3], Space.WINDOW)
    batch = batch_of(spec, sequences, [Slice(0, 64, [10], True), Slice(1, 2, [11, 12], True), Slice(2, 70, [13], True)])
    assert batch.ids.tolist() == [10, 11, 12, 13]
    assert batch.positions.tolist() == [64, 2, 3, 70]
    assert batch.slots[Space.FULL].tolist() == [9 * 64, 3 * 64 + 2, 3 * 64 + 3, 6]
    assert batch.slots[Space.WINDOW].tolist() == [3 * 64, 64 + 2, 64 + 3, 5 * 64 + 6]
    decode, chunk = batch.groups
    assert (decode.n_slices, decode.n_tokens) == (2, 1)
    assert (chunk.n_slices, chunk.n_tokens, chunk.offset) == (1, 2, 0)
    assert decode.states.tolist() == [1, 3]
    x = torch.arange(4.0)[:, None]
    assert decode.take(x).flatten().tolist() == [0, 3]
    assert batch.map_groups(lambda group, part: part * group.n_tokens, x).flatten().tolist() == [0, 2, 4, 3]


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
        for space in (Space.FULL, Space.WINDOW):
            table_of(sequences, s, [s], space)
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
        for space in (Space.FULL, Space.WINDOW):
            table_of(sequences, s, [s], space)
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
    free = {Space.FULL: rng.sample(range(12), 12), Space.WINDOW: rng.sample(range(8), 8)}
    if rng.random() < 0.3:
        free = {space: sorted(pages, reverse=True) for space, pages in free.items()}
    for s in range(rng.randint(1, 3)):
        length = rng.randint(1, 150)
        n = rng.choice([1, 1, 1, rng.randint(1, length)])
        n = min(n, length)
        sequences.apply(opened(s, s))
        texts[s] = torch.randn(2, length, 2, 8)
        for space in (Space.FULL, Space.WINDOW):
            last = (length - 1) // PAGE_TOKENS
            first = max(0, length - n - window + 1) // PAGE_TOKENS if space is Space.WINDOW else 0
            if len(free[space]) < last - first + 1:
                return
            pages = [free[space].pop() for _ in range(last - first + 1)]
            table_of(sequences, s, pages, space, first)
            layer = 0 if space is Space.FULL else 1
            at = torch.arange(first * PAGE_TOKENS, length)
            slots = torch.tensor(pages)[at // PAGE_TOKENS - first] * PAGE_TOKENS + at % PAGE_TOKENS
            pools.paged(layer, "k").write(slots, texts[s][0, at])
            pools.paged(layer, "v").write(slots, texts[s][1, at])
        slices.append(Slice(s, length - n, [0] * n, True))
    rng.shuffle(slices)
    batch = batch_of(spec, sequences, slices)
    q = torch.randn(batch.n_rows, 4, 8)
    for space, reach, layer in ((Space.FULL, 0, 0), (Space.WINDOW, window, 1)):

        def attend(group, part, space=space, reach=reach, layer=layer):
            pages, mask = group.keys(space, reach)
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
