"""The float32 cpu path against logits and hidden states computed with transformers (tests/data/golden)."""

from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch

from lucevisor.model.families import open_spec
from lucevisor.model.values import Dtype, Space
from lucevisor.protocol.steps import CopyPage, CopyState, SetPages
from tests.daemons.stages import Pipeline, load_stages
from tests.families.rounding import Bounds, Formats, assert_same_tokens, bounds, explained, middle_error
from tests.numerics import bound

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FIXTURES = ("qwen35", "qwen35_mtp")


class Golden:
    def __init__(self, name: str) -> None:
        self.spec = open_spec(GOLDEN / name / "model.gguf")
        with np.load(GOLDEN / name / "golden.npz") as z:
            self.ids: list[int] = z["input_ids"].tolist()
            self.logits = torch.from_numpy(z["logits"])
            self.hidden = torch.from_numpy(z["hidden"])
            self.prompt = self.ids[: int(z["prompt_len"])]
            self.greedy: list[int] = z["greedy"].tolist()
        self.whole = load_stages(self.spec)

    @cached_property
    def bounds(self) -> Bounds:
        return bounds(self.spec, self.ids)

    def assert_logits(self, found, rows=slice(None)):
        self.bounds.assert_logits(found, self.logits, rows)

    def pipeline(self, stages=None) -> Pipeline:
        made = Pipeline(self.whole if stages is None else stages)
        for stage in made.stages:
            stage.reset()
        return made


@pytest.fixture(scope="module", params=FIXTURES)
def golden(request) -> Golden:
    return Golden(request.param)


@pytest.fixture(scope="module")
def qwen35() -> Golden:
    return Golden("qwen35")


def test_logits_and_every_layer(golden):
    c = golden.pipeline()
    c.open(3, 5)
    logits = c.run((3, golden.ids), want_hidden=True)
    golden.bounds.assert_layers(c.hidden, golden.hidden)
    golden.assert_logits(logits)


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_chunks_of_a_prompt(golden, size):
    c = golden.pipeline()
    c.open(0, 0)
    golden.assert_logits(c.run_in_chunks(0, golden.ids, size))


def test_greedy_tokens(golden):
    c = golden.pipeline()
    c.open(0, 7)
    assert_same_tokens(golden.spec, golden.prompt, c.greedy(0, golden.prompt, 32), golden.greedy)


def test_the_tail_computes_only_the_rows_asked_for(qwen35):
    c = qwen35.pipeline()
    c.open(0, 0)
    stage = c.stages[0]
    everything = c.run((0, qwen35.ids))
    rows = torch.randn(5, qwen35.spec.hidden_size)
    some = stage.logits(rows, [4, 1])
    assert some.shape == (2, qwen35.spec.vocabulary)
    allowed = bound(lambda rows: stage.logits(rows, None)[[4, 1]], rows)
    assert allowed.worst(some, stage.logits(rows, None)[[4, 1]]) <= 1
    assert everything.dtype == torch.float32


@pytest.mark.parametrize("cut", range(1, 8))
def test_two_stages_change_no_bit(qwen35, cut):
    whole, split = qwen35.pipeline(), qwen35.pipeline(load_stages(qwen35.spec, [[cut], []]))
    for c in (whole, split):
        c.open(0, 0)
    assert torch.equal(whole.run((0, qwen35.prompt)), split.run((0, qwen35.prompt)))
    assert whole.greedy(0, [5], 12) == split.greedy(0, [5], 12)


@pytest.mark.parametrize("layer_split", [[[1, 2, 3, 4, 5, 6, 7]], [[2], [3, 6], []], [[1], [2], [7], []]])
def test_shards_and_stages_change_no_bit(qwen35, layer_split):
    whole, split = qwen35.pipeline(), qwen35.pipeline(load_stages(qwen35.spec, layer_split))
    for c in (whole, split):
        c.open(9, 2)
    assert torch.equal(whole.run((9, qwen35.ids), want_hidden=True), split.run((9, qwen35.ids), want_hidden=True))
    assert len(split.hidden) == qwen35.spec.n_layers + 1
    assert all(torch.equal(a, b) for a, b in zip(whole.hidden, split.hidden, strict=True))


def test_many_sequences_in_one_step(qwen35):
    """Prefill chunks of several lengths and decode rows of others share steps; each sequence gets its own logits."""
    c = qwen35.pipeline()
    lengths = {0: 72, 1: 5, 2: 64, 3: 65, 4: 1, 5: 40}
    for s in lengths:
        c.open(s, 23 - s)
    found = {s: [] for s in lengths}

    def step(parts):
        rows = c.run(*parts)
        at = 0
        for s, tokens in parts:
            found[s].append(rows[at : at + len(tokens)])
            at += len(tokens)

    ids = qwen35.ids
    step([(1, ids[:5]), (0, ids[:30])])
    step([(2, ids[:64]), (1, ids[5:6]), (3, ids[:64])])
    step([(4, ids[:1]), (5, ids[:33]), (0, ids[30:63]), (1, ids[6:7])])
    step([(0, ids[63:64]), (3, ids[64:65]), (1, ids[7:8]), (2, ids[64:65]), (4, ids[1:2]), (5, ids[33:34])])
    step([(5, ids[34:40]), (0, ids[64:70]), (1, ids[8:9]), (4, ids[2:8])])
    for parts in found.values():
        rows = torch.cat(parts)
        qwen35.assert_logits(rows, slice(len(rows)))


def test_concurrent_greedy_equals_one_by_one(qwen35):
    prompts = [
        qwen35.ids[i : i + n] for i, n in ((0, 40), (3, 7), (10, 62), (20, 1), (5, 64), (8, 33), (1, 20), (0, 3))
    ]
    alone = []
    for prompt in prompts:
        c = qwen35.pipeline()
        c.open(0, 0)
        alone.append(c.greedy(0, prompt, 16))
    c = qwen35.pipeline()
    together = []
    for s, prompt in enumerate(prompts):
        c.open(s, s + 1)
        together.append([int(c.run((s, prompt))[-1].argmax())])
    for _ in range(15):
        rows = c.run(*((s, [tokens[-1]]) for s, tokens in enumerate(together)))
        for s, tokens in enumerate(together):
            tokens.append(int(rows[s].argmax()))
    for prompt, found, wanted in zip(prompts, together, alone, strict=True):
        assert_same_tokens(qwen35.spec, prompt, found, wanted)


def test_reused_pages_and_states_hold_nothing_of_the_last_text(qwen35):
    c = qwen35.pipeline()
    c.open(0, 4)
    c.run((0, qwen35.ids[::-1]))
    c.close(0)
    c.open(0, 4)
    qwen35.assert_logits(c.run_in_chunks(0, qwen35.ids, 24))


def test_a_prefix_is_continued_from_copies(qwen35):
    """A second sequence starts from a copied state, a shared full page and a copy of the partial one."""
    c = qwen35.pipeline()
    c.open(0, 0)
    c.run((0, qwen35.ids[:70]))
    c.apply([CopyState(0, 9)])
    c.run((0, [1, 2]))  # the first text goes its own way
    c.open(1, 10)
    shared, partial = c.pages[0]
    own = c.free_pages.pop()
    c.apply([CopyState(9, 10), CopyPage(Space.FULL, partial, own, 6), SetPages(1, Space.FULL, 0, [shared, own])])
    c.pages[1], c.lengths[1] = [shared, own], 70
    qwen35.assert_logits(c.run((1, qwen35.ids[70:])), slice(70, None))


def assert_explained(golden, stages, formats):
    """As far off as rounding to ``formats`` explains, and further than rounding to float32 does."""
    c = golden.pipeline(stages)
    c.open(0, 0)
    found = c.run_in_chunks(0, golden.ids, 24)
    exact = golden.bounds.logits
    assert exact.worst(found) > 1
    assert middle_error(found, exact.exact) <= explained(golden.spec, golden.ids, exact.exact, formats)


@pytest.mark.parametrize("kv_dtype", [Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.Q8_0])
def test_smaller_kv_dtypes_stay_near(qwen35, kv_dtype):
    stages = load_stages(qwen35.spec, kv_dtype=kv_dtype)
    assert_explained(qwen35, stages, Formats(kv=kv_dtype))
    assert stages[0].usage()[0].state_bytes < load_stages(qwen35.spec)[0].usage()[0].state_bytes


@pytest.mark.parametrize("dtype", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_half_precision_stays_near(qwen35, dtype):
    assert_explained(qwen35, load_stages(qwen35.spec, dtype=dtype, kv_dtype=dtype), Formats(dtype, dtype))
