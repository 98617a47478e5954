"""Every family's float32 cpu path against what transformers computes (tests/data/golden), whole and cut anywhere."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from lucevisor.model.values import Backend, Dtype, LayerRange, Space
from lucevisor.model.weight_layout import weight_bytes
from lucevisor.protocol.steps import CopyPage, CopyState, SetPages
from tests.families.golden import FIXTURES, Golden, opened
from tests.families.pipeline import How, Pipeline, load_stages
from tests.families.rounding import Formats, middle_error


@pytest.mark.parametrize("name", [*FIXTURES, "qwen35_mtp"])
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


def test_every_cut_in_two_changes_no_bit(golden):
    assert golden.layer_splits()
    whole, hidden, tokens = everything(golden.pipeline(), golden)
    for cut in golden.layer_splits():
        c = golden.pipeline(load_stages(golden.spec, [cut]))
        found = everything(c, golden)
        assert torch.equal(found[0], whole)
        assert all(torch.equal(a, b) for a, b in zip(found[1], hidden, strict=True))
        assert found[2] == tokens


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


def test_stages_and_shards_change_no_bit(golden):
    """Three parts: as stages, as shards, and both; and every layer a shard of its own."""
    cuts = golden.layer_splits()
    plans = [([], cuts)]
    for i, (a, b) in enumerate(list(combinations(cuts, 2))[::4]):
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


@pytest.mark.parametrize("size", [1, 7, 64])
def test_chunks_of_a_prompt(golden, size):
    c = golden.pipeline()
    c.open(0)
    golden.assert_logits(c.run_in_chunks(0, golden.ids, size))


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


@pytest.mark.parametrize("name", [n for n in FIXTURES if n.startswith(("gemma4", "laguna"))])
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
    gone = released.texts[0].pages[Space.WINDOW].count(None)
    assert gone == (240 - golden.spec.window + 1) // 64
    assert kept.texts[0].pages[Space.WINDOW].count(None) == 0


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
    second, own = c.texts[1], c.free[Space.FULL].pop()
    shared, partial = first.pages[Space.FULL]
    second.pages[Space.FULL], second.length = [shared, own], 70
    c.apply(
        [
            CopyState(kept, second.state),
            CopyPage(Space.FULL, partial, own, 6),
            SetPages(1, Space.FULL, 0, [shared, own]),
        ]
    )
    golden.bounds.assert_logits(c.run((1, golden.ids[70:])), golden.logits, slice(70, None))


def test_shards_load_what_the_plan_counts(golden):
    for layer_split in ([], golden.layer_splits()):
        boundaries = [0, *layer_split, golden.spec.n_layers]
        stages = load_stages(golden.spec, layer_split)
        for stage, a, b in zip(stages, boundaries, boundaries[1:], strict=False):
            [use] = stage.usage()
            counted = weight_bytes(
                golden.spec,
                LayerRange(a, b),
                embedding=a == 0,
                output=b == golden.spec.n_layers,
                backend=Backend.CPU,
                dtype=Dtype.FLOAT32,
            )
            assert use.weight_bytes == counted
            if not layer_split:
                assert use.weight_bytes == sum(golden.spec.files.tensors[n].n_bytes for n in golden.spec.files.tensors)


def error_in_chunks(golden: Golden, how: How) -> float:
    """The :func:`middle_error`; above what float32 rounding explains: it is not float32 by mistake."""
    c = golden.pipeline(load_stages(golden.spec, how=how))
    c.open(0)
    found = c.run_in_chunks(0, golden.ids, 24)
    assert golden.bounds.logits.worst(found) > 1
    return middle_error(found, golden.logits)


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_half_precision_is_as_near_as_its_roundings(golden, dtype):
    assert error_in_chunks(golden, How(dtype, dtype)) <= golden.explained(Formats(dtype, dtype))
