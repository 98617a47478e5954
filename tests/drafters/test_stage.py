"""The draft stage: batches, prefixes, positions without state, sharing with the output stage, and refusals.

Captures are random numbers: what a drafter makes of them depends on its own state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from daemons.draft.mtp import Mtp
from daemons.draft.stage import MAX_ROWS, DraftStage
from daemons.errors import LoadError, StateError
from daemons.kv.batch import Batch, Layout
from daemons.ops.topk import TOP_K_CHUNK, top_k
from lucevisor.model.drafters import draft_paths, open_draft
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup
from lucevisor.protocol.loading import DraftKind, Load
from lucevisor.protocol.steps import (
    CloseSequence,
    CopyPage,
    CopyState,
    Drafted,
    OpenSequence,
    Operation,
    SamplingParams,
    SetPages,
    Slice,
    Step,
    UseState,
    ZeroState,
)
from tests.drafters.drafted import load_draft
from tests.families.pipeline import load_stages, pools_of
from tests.model.drafter_files import DFLASH2, GOLDEN, MTP, TARGET, UPSTREAM, copy, tensors_of

KINDS = {"dflash": (TARGET, UPSTREAM), "dflash2": (TARGET, DFLASH2), "mtp": (MTP, MTP)}


@cache
def target(path: Path = TARGET) -> ModelSpec:
    return open_spec(path)


def load(kind: str, **options: object) -> DraftStage:
    model, path = KINDS[kind]
    draft_kind = DraftKind.MTP if kind == "mtp" else DraftKind.DFLASH
    return load_draft(target(model), path, draft_kind, **options)  # type: ignore[arg-type]


@pytest.fixture(params=KINDS)
def stage(request) -> DraftStage:
    return load(request.param)


@dataclass
class Text:
    """A sequence with random tokens and captures."""

    sequence: int
    state: int
    ids: list[int]
    captures: Tensor
    length: int = 0
    pages: list[int] = field(default_factory=list)


class Driver:
    """Gives a stage steps of random texts, with ids dealt out like a supervisor's."""

    def __init__(self, stage: DraftStage) -> None:
        self.stage, self.free = stage, [(i * 37 + 5) % 61 for i in range(61)]
        self.width = sum(len(source.layers) for source in stage.plan.sources) * 64
        stage.reset()

    def open(self, sequence: int, state: int, seed: int, n: int = 200) -> Text:
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 288, (n,), generator=random).tolist()
        text = Text(sequence, state, ids, torch.randn(n, self.width, generator=random))
        self.stage.apply([OpenSequence(sequence, state, SamplingParams()), ZeroState(state)])
        return text

    def grow(self, text: Text, n: int) -> list[Operation]:
        missing = -(-n // 64) - len(text.pages)
        new = [self.free.pop() for _ in range(missing)]
        text.pages += new
        return [SetPages(text.sequence, KvGroup.FULL, len(text.pages) - len(new), new)] if new else []

    def step(self, *parts: tuple[Text, int, int], draft_from: int = 0) -> list[Drafted]:
        """Run n tokens of each text, and draft ahead behind the token that follows them."""
        operations, slices, captures, tokens = [], [], [], []
        for text, n, ahead in parts:
            operations += self.grow(text, text.length + n + ahead + 1)
            end = text.length + n
            slices.append(
                Slice(
                    text.sequence,
                    text.length,
                    text.ids[text.length : end],
                    True,
                    num_draft_tokens=ahead,
                    draft_from=draft_from,
                )
            )
            captures.append(text.captures[text.length : end])
            tokens.append([text.ids[end]])
            text.length = end
        self.stage.apply(operations)
        return self.stage.run(Step(1, 0, [], slices), [torch.cat(captures)], tokens)


SOFTMAX = 4e-4
"""Relative error of a probability: twice that of its logits, of which rounding explains 1.3e-4 (test_dflash.py)."""


def assert_same(found: Drafted, wanted: Drafted) -> None:
    """Equal drafts, but for the sequence."""
    assert found.tokens == wanted.tokens
    assert found.probabilities == pytest.approx(wanted.probabilities, rel=SOFTMAX)


def alone(stage: DraftStage, seed: int, n: int, ahead: int, **options: int) -> Drafted:
    driver = Driver(stage)
    [drafted] = driver.step((driver.open(0, 0, seed), n, ahead), **options)
    return drafted


def test_sequences_of_one_step_are_as_if_alone(stage):
    """Prefill chunks and decodes of several lengths, and drafts of several lengths."""
    driver = Driver(stage)
    texts = [driver.open(s, s + 2, seed=s) for s in range(4)]
    driver.step((texts[0], 70, 0), (texts[1], 1, 2), (texts[2], 30, 0))
    driver.step((texts[2], 30, 0), (texts[0], 1, 3))
    found = driver.step((texts[3], 5, 4), (texts[0], 1, 2), (texts[2], 1, 4), (texts[1], 1, 2))
    assert [d.sequence for d in found] == [3, 0, 2, 1]
    for drafted, (seed, n) in zip(found, ((3, 5), (0, 72), (2, 61), (1, 2)), strict=True):
        assert_same(drafted, alone(stage, seed, n, len(drafted.tokens)))


def test_chunks_are_as_one_prompt(stage):
    driver = Driver(stage)
    text = driver.open(0, 0, seed=7)
    for _ in range(9):
        driver.step((text, 10, 3))
    [found] = driver.step((text, 10, 5))
    assert_same(found, alone(stage, 7, 100, 5))


def test_a_verified_step_is_as_one_that_was_right_from_the_start(stage):
    """Three drafts, of which one is accepted: the next draft is that of a text with the right tokens and captures."""
    driver = Driver(stage)
    text = driver.open(0, 0, seed=3)
    driver.step((text, 50, 3))
    right = text.ids[50:53]
    operations = driver.grow(text, 64)
    wrong = [right[0], right[1], 5, 6]
    captures = torch.cat((text.captures[50:52], torch.randn(2, driver.width)))
    states = [0, 9, 8, 7]
    s = Slice(0, 50, wrong, sample=True, n_drafts=3, states=states, num_draft_tokens=5)
    stage.apply(operations)
    [found] = stage.run(Step(1, 0, [], [s]), [captures], [right[1:]])
    assert_same(found, alone(load_again(stage), 3, 52, 5))
    stage.apply([UseState(0, states[1])])
    text.length = 52
    [found] = driver.step((text, 1, 5))
    assert_same(found, alone(load_again(stage), 3, 53, 5))


def load_again(stage: DraftStage) -> DraftStage:
    """The same drafter with pools of its own."""
    model = target(MTP if stage.plan.kind is DraftKind.MTP else TARGET)
    return load_draft(model, Path(stage.plan.files[0]), stage.plan.kind)


def test_a_restored_prefix_is_as_a_fresh_one(stage):
    """A slot shares the full page, copies the partial one and the state; both texts go on on their own."""
    driver = Driver(stage)
    first = driver.open(0, 0, seed=1)
    driver.step((first, 100, 0))
    stage.apply([CopyState(0, 5)])
    kept = list(first.pages)
    driver.step((first, 20, 3))
    stage.apply([OpenSequence(1, 6, SamplingParams()), CopyState(5, 6)])
    own = driver.free.pop()
    stage.apply([CopyPage(KvGroup.FULL, kept[1], own, 36), SetPages(1, KvGroup.FULL, 0, [kept[0], own])])
    second = Text(1, 6, first.ids, first.captures, 100, [kept[0], own])
    found = driver.step((second, 20, 5), (first, 10, 5))
    again = load_again(stage)
    assert_same(found[0], alone(again, 1, 120, 5))
    assert_same(found[1], alone(again, 1, 130, 5))


def test_positions_without_state_are_not_attended_to(stage):
    """A text of whose first 70 positions the drafter knows nothing: whatever their pages hold changes nothing."""
    found = []
    for junk in (0, 1):
        driver = Driver(stage)
        text = driver.open(0, 0, seed=4)
        other = driver.open(1, 1, seed=50 + junk)
        other.pages = text.pages
        driver.step((other, 70, 0))
        stage.apply([CloseSequence(1)])
        text.length = 70
        stage.apply([SetPages(0, KvGroup.FULL, 0, text.pages)])
        driver.step((text, 20, 3), draft_from=70)
        found += driver.step((text, 1, 5), draft_from=70)
    assert_same(found[0], found[1])
    driver = Driver(stage)
    text = driver.open(0, 0, seed=4)
    driver.step((text, 90, 3))
    [whole] = driver.step((text, 1, 5))
    assert whole.probabilities != pytest.approx(found[0].probabilities, rel=1e-3)


# ---- weights of the vocabulary


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_stage_shares_its_matrices(kind):
    model = target(KINDS[kind][0])
    [whole] = load_stages(model)
    shared = load(kind, output_stage=whole)
    assert shared.drafter.vocabulary.lm_head is whole.shards[-1].output.lm_head
    assert shared.drafter.vocabulary.table is whole.shards[0].table
    _, tail = load_stages(model, [4])
    half = load(kind, output_stage=tail)
    assert half.drafter.vocabulary.lm_head is tail.shards[-1].output.lm_head
    own = load(kind)
    table = 288 * 64 * 4
    assert own.weight_bytes == half.weight_bytes + table == shared.weight_bytes + 2 * table
    wanted = alone(own, 8, 40, 4)
    for stage in (shared, half):
        assert_same(alone(stage, 8, 40, 4), wanted)


@pytest.mark.parametrize(("name", "full"), [("qwen35moe", 3), ("qwen3next", 1)])
def test_a_head_with_experts_is_the_layer_it_is_made_of(name, full, tmp_path):
    """A golden MoE model with a copy of its layer ``full`` as head: both compute the same of the same rows."""
    source = GOLDEN / name / "model.gguf"
    weights, n_layers = tensors_of(source), open_spec(source).n_layers
    b, head = f"blk.{full}.", f"blk.{n_layers}."
    extra = {key.replace(b, head): array for key, array in weights.items() if key.startswith(b)}
    random = np.random.default_rng(0)
    extra |= {f"{head}nextn.{n}.weight": np.ones(64, np.float32) for n in ("enorm", "hnorm", "shared_head_norm")}
    extra[head + "nextn.eh_proj.weight"] = random.normal(0, 0.1, (64, 128)).astype(np.float32)
    keys = {f"{name}.nextn_predict_layers": 1, f"{name}.block_count": n_layers + 1}
    path = copy(tmp_path / "moe.gguf", source, keys=keys, extra=extra)
    model = open_spec(path)
    stage = load_draft(model, path, DraftKind.MTP)
    assert isinstance(stage.drafter, Mtp)
    [whole] = load_stages(model)
    rows, found = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), []
    for one, layer in ((stage, stage.drafter.layer), (whole, whole.shards[0].layers[full])):
        one.apply([OpenSequence(0, 0, SamplingParams()), SetPages(0, KvGroup.FULL, 0, [3])])
        one.sequences.flush()
        layout = Layout([Slice(0, 0, [1] * 20, True)], one.sequences, one.spec if one is whole else one.spec.model)
        with torch.inference_mode():
            found.append(layer(rows, Batch(layout, one.sequences.tables(one.device), layout.on(one.device))))
    assert torch.equal(*found)
    assert alone(stage, 1, 30, 4).tokens


# ---- refusals


def run(
    stage: DraftStage, s: Slice, captures: Sequence[Tensor] | None = None, tokens: Sequence[Sequence[int]] = ((1,),)
):
    width = Driver(stage).width
    stage.apply([OpenSequence(0, 0, SamplingParams()), SetPages(0, KvGroup.FULL, 0, [3])])
    return stage.run(Step(4, 0, [], [s]), [torch.zeros(len(s.tokens), width)] if captures is None else captures, tokens)


def test_what_contradicts_the_plan_is_refused(stage):
    with pytest.raises(StateError, match=r"draft step 4: captures of shapes .*, expected"):
        run(stage, Slice(0, 0, [1, 2], True), [torch.zeros(1, 64)])
    with pytest.raises(StateError, match="draft step 4: sampled tokens of 2 slices, the step has 1"):
        run(stage, Slice(0, 0, [1], True), tokens=[[1], [2]])
    with pytest.raises(StateError, match="slice of sequence 0 at 0: 1 tokens sampled and 16 drafts ahead"):
        run(stage, Slice(0, 0, [1], True, num_draft_tokens=16))
    with pytest.raises(StateError, match="2 tokens sampled and 1 drafts ahead: 1 are the most"):
        run(stage, Slice(0, 0, [1], True, num_draft_tokens=1), tokens=[[1, 2]])
    with pytest.raises(StateError, match="sequence 7 is not open"):
        run(stage, Slice(7, 0, [1], True))
    with pytest.raises(StateError, match="token id 288 is outside the vocabulary"):
        run(stage, Slice(0, 0, [1], True, num_draft_tokens=1), tokens=[[288]])
    with pytest.raises(StateError, match=r"it attends to positions from (99|100) on"):
        run(stage, Slice(0, 0, [1], True, num_draft_tokens=1, draft_from=99))


def test_a_file_that_was_replaced_is_not_loaded(tmp_path):
    path = copy(tmp_path / "d.gguf", UPSTREAM)
    identities = list(open_draft(draft_paths(path)).identities)
    plan = msgspec.structs.replace(load("dflash").plan, files=[str(path)], identities=identities)
    order = Load([], Dtype.FLOAT32, Dtype.FLOAT32, [], [], pools_of(target()), 16, 512, draft=plan)
    DraftStage.load(target(), order, Backend.CPU, lambda _: None, None)
    copy(tmp_path / "other.gguf", UPSTREAM).replace(path)
    with pytest.raises(LoadError, match="not the one that the supervisor asked for"):
        DraftStage.load(target(), order, Backend.CPU, lambda _: None, None)


# ---- pending rows


@pytest.fixture(params=KINDS)
def loaded(request: pytest.FixtureRequest) -> DraftStage:
    return load(request.param)


def counted(loaded: DraftStage) -> list[int]:
    """The rows of each extension of the context from now on."""
    seen: list[int] = []
    extend = loaded.drafter.extend

    def spy(captures: torch.Tensor | None, batch: object) -> torch.Tensor:
        assert captures is not None
        seen.append(len(captures))
        return extend(captures, batch)  # type: ignore[arg-type]

    loaded.drafter.extend = spy  # type: ignore[method-assign]
    return seen


def test_plain_decodes_are_added_together_and_draft_the_same(loaded: DraftStage) -> None:
    """Two texts that decode 40 tokens each, the second from later on; then both draft."""
    driver = Driver(loaded)
    texts = [driver.open(s, s, seed=s) for s in range(2)]
    driver.step((texts[0], 50, 0), (texts[1], 30, 0))
    rows = counted(loaded)
    for i in range(70):
        driver.step(*((text, 1, 0) for text in texts[: 1 + (i >= 5)]))
    assert rows == [2 * MAX_ROWS - 5]  # 5 of the first text alone, then of each, until the first has too many
    found = driver.step((texts[0], 1, 4), (texts[1], 1, 4))
    assert rows[1:] == [12, 2]
    again = load_again(loaded)
    for drafted, (seed, n) in zip(found, ((0, 121), (1, 96)), strict=True):
        assert_same(drafted, alone(again, seed, n, 4))


def test_pending_rows_are_computed_before_a_prefix_is_taken_from_them(loaded: DraftStage) -> None:
    driver = Driver(loaded)
    first = driver.open(0, 0, seed=1)
    driver.step((first, 97, 0))
    for _ in range(3):
        driver.step((first, 1, 0))
    own = driver.free.pop()
    loaded.apply([CopyState(0, 5), OpenSequence(1, 6, SamplingParams()), CopyState(5, 6)])
    loaded.apply([CopyPage(KvGroup.FULL, first.pages[1], own, 36), SetPages(1, KvGroup.FULL, 0, [first.pages[0], own])])
    second = Text(1, 6, first.ids, first.captures, 100, [first.pages[0], own])
    [found] = driver.step((second, 20, 5))
    assert_same(found, alone(load_again(loaded), 1, 120, 5))


def decode(sequence: int, start: int, **more: object) -> Slice:
    return Slice(sequence, start, [7], True, **more)  # type: ignore[arg-type]


# ---- rejected drafts


# ---- the best tokens of large vocabularies


@pytest.mark.parametrize("vocabulary", [17, 4096, TOP_K_CHUNK**2, TOP_K_CHUNK**2 + 1, 248320])
@pytest.mark.parametrize("k", [1, 16])
def test_values_and_indices_are_those_of_torch(vocabulary: int, k: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary + k)
    logits = torch.randperm(2 * 3 * vocabulary, generator=generator).view(2, 3, vocabulary).float()  # no two are equal
    logits[0, 0, -16:] += 2e7  # all in one chunk
    wanted = logits.topk(k, dim=-1)
    best, tokens = top_k(logits, k)
    assert torch.equal(best, wanted.values)
    assert torch.equal(tokens, wanted.indices)
