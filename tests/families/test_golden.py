"""Every family's float32 cpu path against what transformers computes (tests/data/golden), whole and cut anywhere."""

from __future__ import annotations

import itertools

import gguf
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from daemons.ops.paged import Pages, Q8Pages
from lucevisor.model.values import Q8_GROUP, Backend, Dtype, KvGroup, LayerRange, q8_groups
from lucevisor.model.weight_layout import shard_layouts
from lucevisor.protocol.steps import CopyPage, CopyState, SetPages
from tests.combinations import combinations, slow
from tests.families.golden import FIXTURES, KINDS, Golden, each_kind, opened
from tests.families.pipeline import How, Pipeline, load_stages, pools_of
from tests.families.rounding import Formats, middle_error
from tests.numerics import UNIT, q8_error


@pytest.mark.parametrize("name", [*FIXTURES, slow("qwen35_mtp")])
def test_logits_and_every_layer(name):
    golden = opened(name)
    c = golden.pipeline()
    c.open(3)
    logits = c.run((3, golden.ids), want_hidden=True)
    golden.bounds.assert_layers(c.hidden, golden.hidden)
    golden.assert_logits(logits)


def test_greedy_tokens(golden):
    c = golden.pipeline()
    c.open(0)
    golden.assert_tokens(c.greedy(0, golden.prompt, 32))


@each_kind
def test_every_cut_in_two_changes_no_bit(golden):
    assert golden.layer_splits()
    whole, hidden, tokens = everything(golden.pipeline(), golden)
    for cut in golden.layer_splits():
        c = golden.pipeline(load_stages(golden.spec, [cut]))
        found = everything(c, golden)
        assert torch.equal(found[0], whole)
        assert all(torch.equal(a, b) for a, b in zip(found[1], hidden, strict=True))
        assert found[2] == tokens


@each_kind
@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_stages_behind_the_first_need_no_tokens(golden, dtype):
    """Only the first one is told those of a step that runs ahead."""
    for split in (golden.layer_splits()[::2], golden.layer_splits()[1::2]):
        stages, found = load_stages(golden.spec, split, How(dtype, dtype)), []
        for tell_first in (False, True):
            c = golden.pipeline(stages, tell_first=tell_first)
            c.open(0)
            c.run((0, golden.prompt))
            found.append(torch.cat([c.run((0, [token])) for token in golden.ids[:4]]))
        assert torch.equal(*found)


def everything(c: Pipeline, golden: Golden) -> tuple[Tensor, list[Tensor], list[int]]:
    """Logits, hidden states and greedy tokens of a pipeline."""
    c.open(0)
    logits, hidden = c.run((0, golden.ids), want_hidden=True), c.hidden
    c.close(0)
    c.open(1)
    return logits, hidden, c.greedy(1, golden.prompt, 12)


@each_kind
def test_stages_and_shards_change_no_bit(golden):
    """Three parts: as stages, as shards, and both; and every layer a shard of its own."""
    cuts = golden.layer_splits()
    plans = [([], cuts)]
    for i, (a, b) in enumerate(list(itertools.combinations(cuts, 2))[::4]):
        plans.append([([a, b], []), ([], [a, b]), ([a], [b]), ([b], [a])][i % 4])
    c = golden.pipeline()
    c.open(0)
    wanted = c.run_in_chunks(0, golden.ids, 29)
    for layer_split, shard_split in plans:
        c = golden.pipeline(load_stages(golden.spec, layer_split, shard_split=shard_split))
        c.open(0)
        assert torch.equal(c.run_in_chunks(0, golden.ids, 29), wanted)
        assert len(c.stages) == len(layer_split) + 1
        assert sum(len(stage.usage()) for stage in c.stages) == len(layer_split) + len(shard_split) + 1


@combinations(indirect=["golden"], golden=FIXTURES, size=[1, 7])
def test_chunks_of_a_prompt(golden, size):
    c = golden.pipeline()
    c.open(0)
    golden.assert_logits(c.run_in_chunks(0, golden.ids, size))


@each_kind
def test_many_sequences_in_one_step(golden):
    """Prefill chunks of several lengths and decode rows of others share steps; each sequence gets its own logits."""
    c, ids = golden.pipeline(), golden.ids
    found: dict[int, list[Tensor]] = {s: [] for s in range(6)}
    for s in found:
        c.open(s)

    def step(*parts):
        rows = c.run(*parts)
        at = 0
        for s, tokens in parts:
            found[s].append(rows[at : at + len(tokens)])
            at += len(tokens)

    step((1, ids[:5]), (0, ids[:30]))
    step((2, ids[:64]), (1, ids[5:6]), (3, ids[:64]))
    step((4, ids[:1]), (5, ids[:33]), (0, ids[30:63]), (1, ids[6:7]))
    step((0, ids[63:64]), (3, ids[64:65]), (1, ids[7:8]), (2, ids[64:65]), (4, ids[1:2]), (5, ids[33:34]))
    step((5, ids[34:40]), (0, ids[64:70]), (1, ids[8:9]), (4, ids[2:8]))
    for parts in found.values():
        rows = torch.cat(parts)
        golden.assert_logits(rows)


@pytest.mark.parametrize("name", [n for n in FIXTURES if n.startswith(("gemma", "gpt", "laguna"))])
def test_window_pages_that_went_back_change_no_bit(name):
    """Pages behind the window are dealt out again while their first owner lives; a run that keeps all of them
    agrees.
    """
    golden = opened(name)
    text = (golden.ids * 4)[:260]
    kept, released = golden.pipeline(release=False), golden.pipeline(load_stages(golden.spec))
    for c in (kept, released):
        c.open(0)
        c.open(1)
    for at in range(0, 260, 20):
        part = text[at : at + 20]
        wanted, found = kept.run((0, part), (1, part[::-1])), released.run((0, part), (1, part[::-1]))
        assert torch.equal(found, wanted)
    gone = released.texts[0].pages[KvGroup.WINDOW].count(None)
    assert gone == (240 - golden.spec.window + 1) // 64
    assert kept.texts[0].pages[KvGroup.WINDOW].count(None) == 0


@each_kind
def test_reused_pages_and_states_hold_nothing_of_the_last_text(golden):
    c = golden.pipeline()
    for s in range(3):
        c.open(s)
        c.run((s, golden.ids[::-1]))
        c.close(s)
    c.open(0)
    golden.assert_logits(c.run_in_chunks(0, golden.ids, 24))


def test_a_prefix_is_continued_from_copies():
    """A second sequence starts from a copied state, a shared full page and a copy of the partial one."""
    golden = opened("qwen35")
    c = golden.pipeline()
    c.open(0)
    c.run((0, golden.ids[:70]))
    first, kept = c.texts[0], c.free_states.pop()
    c.apply([CopyState(first.state, kept)])
    c.run((0, [1, 2]))  # the first text goes its own way
    c.open(1)
    second, own = c.texts[1], c.free[KvGroup.FULL].pop()
    shared, partial = first.pages[KvGroup.FULL]
    second.pages[KvGroup.FULL], second.length = [shared, own], 70
    c.apply(
        [
            CopyState(kept, second.state),
            CopyPage(KvGroup.FULL, partial, own, 6),
            SetPages(1, KvGroup.FULL, 0, [shared, own]),
        ]
    )
    golden.bounds.assert_logits(c.run((1, golden.ids[70:])), golden.logits, slice(70, None))


def test_shards_load_what_the_plan_counts(golden):
    for layer_split in ([], golden.layer_splits()):
        boundaries = [0, *layer_split, golden.spec.n_layers]
        stages = load_stages(golden.spec, layer_split)
        for stage, a, b in zip(stages, boundaries, boundaries[1:], strict=False):
            [use] = stage.usage()
            counted = shard_layouts(
                golden.spec,
                LayerRange(a, b),
                embedding=a == 0,
                output=b == golden.spec.n_layers,
                backend=Backend.CPU,
                dtype=Dtype.FLOAT32,
            )
            assert use.weight_bytes == sum(layout.n_bytes for layout in counted)
            if not layer_split:
                assert use.weight_bytes == sum(golden.spec.files.tensors[n].n_bytes for n in golden.spec.files.tensors)


def error_in_chunks(golden: Golden, how: How) -> float:
    """The :func:`middle_error`; above what float32 rounding explains: it is not float32 by mistake."""
    c = golden.pipeline(load_stages(golden.spec, how=how))
    c.open(0)
    found = c.run_in_chunks(0, golden.ids, 24)
    assert golden.bounds.logits.worst(found) > 1
    return middle_error(found, golden.logits)


@combinations(indirect=["golden"], golden=FIXTURES, dtype=[Dtype.BFLOAT16, Dtype.FLOAT16])
def test_half_precision_is_as_near_as_its_roundings(golden, dtype):
    assert error_in_chunks(golden, How(dtype, dtype)) <= golden.explained(Formats(dtype, dtype))


# ---- keys and values in fewer bits


BITS = {Dtype.FLOAT16: 16, Dtype.BFLOAT16: 16, Dtype.Q8_0: 8.5}


@combinations(kv_dtype=BITS, name=KINDS)
def test_accuracy_and_memory_of_smaller_keys_and_values(name, kv_dtype):
    golden, formats = opened(name), Formats(kv=kv_dtype)
    stages = load_stages(golden.spec, how=How(kv_dtype=kv_dtype))
    pipeline = golden.pipeline(stages)
    pipeline.open(0)
    found, exact = pipeline.run_in_chunks(0, golden.ids, 24), golden.bounds.logits
    assert exact.worst(found) > 1.0  # not float32 by mistake
    assert middle_error(found, exact.exact) <= golden.explained(formats)
    assert paged_bytes(golden, kv_dtype) * 32 == pytest.approx(paged_bytes(golden, Dtype.FLOAT32) * BITS[kv_dtype])
    taken = sum(use.state_bytes for stage in stages for use in stage.usage())
    assert taken == paged_bytes(golden, kv_dtype) + recurrent_bytes(golden)


def paged_bytes(golden, kv_dtype: Dtype) -> int:
    pools, layers = pools_of(golden.spec), golden.spec.layers
    units = {KvGroup.FULL: pools.full_pages, KvGroup.WINDOW: pools.window_pages, KvGroup.RECURRENT: 0}
    return sum(units[layer.kv_group] * layer.unit_bytes(kv_dtype) for layer in layers)


def recurrent_bytes(golden) -> int:
    pools = pools_of(golden.spec)
    recurrent = [x for x in golden.spec.layers if x.kv_group is KvGroup.RECURRENT]
    whole = pools.states * sum(x.device_unit_bytes(Dtype.FLOAT32) for x in recurrent)
    return whole + pools.draft_states * sum(x.draft_state_bytes(Dtype.FLOAT32) for x in recurrent)


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 130),
    heads=st.integers(1, 3),
    exponents=st.lists(st.integers(-8, 12), min_size=5, max_size=5),
    seed=st.integers(0, 1 << 32),
)
def test_what_is_written_comes_back_as_near_as_q8_0_of_ggml(width, heads, exponents, seed):
    """Every number within half a step, and as near as gguf's own q8_0 brings it: the scale is the same, and of its
    multiples the nearest is kept, but for the roundings of float32."""
    groups = q8_groups(width)
    pages = Q8Pages(
        torch.zeros(4, 64, heads, groups * Q8_GROUP, dtype=torch.int8),
        torch.zeros(4, 64, heads, groups, dtype=torch.float16),
        width,
    )
    random = torch.Generator().manual_seed(seed)
    rows = torch.randn(5, heads, width, generator=random) * 2.0 ** torch.tensor(exponents).view(5, 1, 1)
    slots = torch.tensor([3 * 64, 3 * 64 + 1, 3 * 64 + 63, 64 + 5, 64 + 4])
    pages.write(slots, rows)
    found = pages.read(Pages(torch.tensor([0, 1, 2, 3]), 1, 0, 256), torch.float32)[0, slots]
    assert found.shape == rows.shape
    errors = (found.double() - rows.double()).abs()
    assert bool((errors <= q8_error(rows)).all())
    padded = torch.nn.functional.pad(rows, (0, -width % Q8_GROUP))
    flat = padded.reshape(-1, Q8_GROUP).numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind)).view_as(padded)
    theirs = (theirs[..., :width].double() - rows.double()).abs()
    step = rows.abs().amax(dim=-1, keepdim=True).double() / 127  # no group's is larger
    assert bool((errors <= theirs + 4 * 127 * UNIT * step).all())


# ---- the derived tolerances themselves


@pytest.mark.parametrize("name", ["gemma4_e2b", "gemma4_moe"])
def test_the_smallest_wrong_formula_is_outside(name, monkeypatch):
    """GELU's erf form for its tanh form: of wrong formulas visible in float32, the smallest."""
    golden = opened(name)
    allowed = golden.bounds.logits
    gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: gelu(x))
    c = golden.pipeline()
    c.open(0)
    assert allowed.worst(c.run((0, golden.ids)), golden.logits) > 5
