"""Recurrent states in the memory of pages: the numbers are those of states and pages with memory of their own."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from daemons.errors import LoadError
from daemons.kv.pools import Pools
from daemons.kv.sequences import Sequences
from lucevisor.model.extents import Extent, extent_of
from lucevisor.model.values import PAGE_TOKENS, Dtype, KvGroup, LayerRange
from lucevisor.protocol.loading import PoolSizes
from lucevisor.protocol.steps import CopyPage, CopyState, OpenSequence, SamplingParams, SetPages, UseState, ZeroState
from tests.daemons.snapshot_pipeline import SlotPipeline, checkpoint, golden_spec, ids_of, state_model, states_of
from tests.daemons.test_snapshot import opened
from tests.families.pipeline import How, Pipeline, load_stages

CPU = torch.device("cpu")
MODELS = {"qwen35": [4], "qwen35moe": []}
"""Where the models are cut into two stages."""
HOWS = {
    "float32": How(),
    "bfloat16": How(Dtype.BFLOAT16, Dtype.BFLOAT16),
    "q8_0": How(kv_dtype=Dtype.Q8_0),
    "bfloat16 and q8_0": How(Dtype.BFLOAT16, Dtype.Q8_0),
}


def both(name: str, how: How, split: list[int]) -> list[Pipeline]:
    """Two pipelines: with one memory, and without."""
    spec = golden_spec(name)
    shared = How(how.dtype, how.kv_dtype, one_memory=True)
    return [Pipeline(spec, load_stages(spec, split, one)) for one in (shared, how)]


def logits(c: Pipeline) -> list[torch.Tensor]:
    """Prompts, decodes of several sequences, and verify slices of which some drafts are accepted."""
    ids = ids_of(c.spec, 400)
    out = []
    for sequence in (0, 1, 2):
        c.open(sequence)
    out.append(c.run((0, ids[:150])))
    out.append(c.run((1, ids[5:75]), (2, ids[200:210])))
    out += [c.run((0, [ids[i]]), (1, [ids[i + 9]]), (2, [ids[i + 20]])) for i in range(3)]
    for n, accepted in ((3, 2), (4, 0), (2, 2)):
        out.append(c.verify((0, ids[30 : 31 + n], n), (1, ids[60 : 61 + n], n)))
        for sequence in (0, 1):
            c.accept(sequence, n, accepted)
    out.append(c.run((0, ids[300:301]), (1, ids[302:303])))
    out.append(c.run((2, ids[210:280])))
    c.close(1)
    c.open(5)
    out.append(c.run((5, ids[90:190]), (0, [3])))
    return out


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_two_memories(name, how):
    one, two = both(name, HOWS[how], MODELS[name])
    assert one.stages[0].sequences.sizes.state_pages
    for found, wanted in zip(logits(one), logits(two), strict=True):
        assert torch.equal(found, wanted)


def pools_of(n_states: int = 4, alone: int = 5, kv_dtype: Dtype = Dtype.FLOAT32) -> tuple[Pools, Sequences, Extent]:
    spec = golden_spec("qwen35")
    extent = extent_of(spec, kv_dtype)
    assert extent is not None
    sizes = PoolSizes(n_states * extent.pages + alone, 0, n_states, draft_states=2, state_pages=extent.pages)
    pools = Pools(spec, LayerRange(0, spec.n_layers), CPU, kv_dtype, sizes)
    return pools, Sequences([pools], sizes, max_sequences=3), extent


def layers_of(kv_group: KvGroup) -> list[int]:
    return [layer.index for layer in golden_spec("qwen35").layers if layer.kv_group is kv_group]


def page(pools: Pools, number: int) -> list[torch.Tensor]:
    return [
        pools.paged(i, name).pages[number * pools.page_rows] for i in layers_of(KvGroup.FULL) for name in ("k", "v")
    ]


def matrices(pools: Pools, state: int) -> list[torch.Tensor]:
    return [rows[at] for i in layers_of(KvGroup.RECURRENT) for rows, at in [pools.rows_with(i, "delta", state)]]


def test_every_number_of_a_state_lies_in_its_own_pages():
    """All pages and states are filled with a number of their own; whatever is written last is whole, and the rest is
    as it was, so no two lie in the same memory but those that should."""
    pools, _, extent = pools_of()
    n_pages = pools.units[KvGroup.FULL]
    for i in layers_of(KvGroup.FULL):  # as kernels ask
        keys, values = pools.paged(i, "k").pages, pools.paged(i, "v").pages
        assert keys.shape == values.shape
        assert keys.is_contiguous()
        assert values.is_contiguous()
    for number in range(n_pages):
        for at, part in enumerate(page(pools, number)):
            part.fill_(100 * number + at)
    for state in (1, 3):
        for at, part in enumerate(matrices(pools, state)):
            part.fill_(-100 * state - at)
    for state in (1, 3):
        assert all(torch.all(part == -100 * state - at) for at, part in enumerate(matrices(pools, state)))
    for number in range(n_pages):
        if number // extent.pages not in (1, 3):
            assert all(torch.all(part == 100 * number + at) for at, part in enumerate(page(pools, number)))
    n_bytes = sum(part.nbytes for state in range(4) for part in matrices(pools, state))
    assert n_bytes <= 4 * extent.pages * sum(part.nbytes for part in page(pools, 0))
    assert n_bytes > 0.7 * 4 * extent.pages * sum(part.nbytes for part in page(pools, 0))


def test_pages_in_the_place_of_a_state_become_zeros():
    """Stale positions are masked, which leaves a NaN what it is."""
    pools, sequences, extent = pools_of()
    sequences.apply(ZeroState(1))
    for part in matrices(pools, 1):
        part.fill_(float("nan"))
    for part in page(pools, 0) + page(pools, 2 * extent.pages):
        part.fill_(7.0)
    sequences.apply(OpenSequence(0, 3, SamplingParams()))
    sequences.apply(SetPages(0, KvGroup.FULL, 0, [0, 2 * extent.pages - 1]))
    assert all(torch.all(part == 0) for n in range(extent.pages) for part in page(pools, extent.pages + n))
    for part in page(pools, extent.pages):
        part.fill_(5.0)
    sequences.apply(SetPages(0, KvGroup.FULL, 2, [extent.pages]))  # used since: what is there stays
    assert all(torch.all(part == 5) for part in page(pools, extent.pages))
    assert all(torch.all(part == 7) for part in page(pools, 0) + page(pools, 2 * extent.pages))


@pytest.mark.parametrize("by", ["copied", "chosen", "opened"])
def test_whatever_uses_a_state_is_noted(by):
    pools, sequences, extent = pools_of()
    sequences.apply(OpenSequence(0, 2 if by == "opened" else 0, SamplingParams()))
    if by == "copied":
        sequences.apply(CopyState(0, 2))
    if by == "chosen":
        sequences.apply(UseState(0, 2))
    for part in matrices(pools, 2):
        part.fill_(float("nan"))
    first = 2 * extent.pages
    for part in page(pools, 0):
        part.fill_(3.0)
    sequences.apply(CopyPage(KvGroup.FULL, 0, first, 10))
    assert all(torch.all(part[:10] == 3) and torch.all(part[10:] == 0) for part in page(pools, first))
    assert all(torch.all(part == 0) for part in page(pools, first + 1))


def test_sizes_that_do_not_fit_the_model_are_refused():
    spec = golden_spec("qwen35")
    sizes = PoolSizes(12, 0, 4, state_pages=3)
    with pytest.raises(LoadError, match="states cannot share the memory of 2 pages"):
        Pools(spec, LayerRange(0, 8), CPU, Dtype.FLOAT32, replace(sizes, state_pages=2))
    with pytest.raises(LoadError, match=r"states cannot share the memory of 3 pages on layers \[0,3\)"):
        Pools(spec, LayerRange(0, 3), CPU, Dtype.FLOAT32, sizes)  # no attention layer
    with pytest.raises(LoadError, match="11 pages do not hold 4 states of 3 pages"):
        Pools(spec, LayerRange(0, 8), CPU, Dtype.FLOAT32, replace(sizes, full_pages=11))


@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT32, Dtype.Q8_0])
@pytest.mark.parametrize("shared", [(True, False), (False, True), (True, True)])
def test_slots_are_saved_and_restored_with_and_without_one_memory(shared, kv_dtype, tmp_path):
    spec, n = golden_spec("qwen35"), 150
    ids = ids_of(spec, n)
    saving, restoring = (SlotPipeline(spec, kv_dtype=kv_dtype, seed=i, one_memory=one) for i, one in enumerate(shared))
    saving.open(0)
    saving.run(0, ids)
    place = checkpoint(saving, 0, 5)
    wanted = saving.greedy(0, [3, 1], 16)
    store = opened(tmp_path, state_model(spec, kv_dtype))
    entry = saving.save(store, ids, place)
    fresh = restoring.fresh_place(n, 2)
    restoring.restore(store, entry, fresh)
    before, after = states_of(saving, 5), states_of(restoring, 2)
    assert all(torch.equal(before[key], after[key]) for key in before)
    restoring.adopt(1, fresh, live_state=3)
    assert restoring.greedy(1, [3, 1], 16) == wanted
    store.close()


def test_a_page_that_comes_back_from_a_file_finds_zeros(tmp_path):
    """The rest of its last page was part of a state."""
    spec, n = golden_spec("qwen35"), 70
    one = SlotPipeline(spec, seed=1, one_memory=True)
    one.open(0)
    one.run(0, ids_of(spec, n))
    store = opened(tmp_path, state_model(spec))
    entry = one.save(store, ids_of(spec, n), checkpoint(one, 0, 5))
    n_pages = one.stages[0].sequences.sizes.state_pages
    one.apply(ZeroState(6))
    [pools] = one.stages[0].sequences.pools
    with torch.inference_mode():
        for part in matrices(pools, 6):
            part.fill_(float("nan"))
    fresh = replace(one.fresh_place(n, 2), full=[6 * n_pages, 6 * n_pages + 1])
    one.restore(store, entry, fresh)
    first, last = page(pools, fresh.full[0]), page(pools, fresh.full[1])
    assert not any(torch.isnan(part).any() for part in first)
    assert all(torch.all(part[n - PAGE_TOKENS :] == 0) for part in last)
    store.close()
