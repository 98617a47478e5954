"""Random tiny models that see whole texts, against transformers: many texts in a step, whole and cut anywhere."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from daemons.errors import StateError
from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from lucevisor.protocol.steps import Slice
from tests.families.generate import gemma3
from tests.families.generate.bert import bert, pooled
from tests.families.generate.made import Draw
from tests.families.generate.qwen import qwen3
from tests.families.pipeline import Pipeline, load_stages
from tests.families.test_pooling import distance
from tests.families.test_pooling import pooled as ours

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
POOLINGS = ("mean", "cls", "rank")


EMBEDDERS = ("bert", "gemma_embedding", "qwen3_embedding")


def golden_texts(name: str) -> tuple[ModelSpec, list[list[int]], torch.Tensor]:
    """A model that pools, texts, and what transformers has of them."""
    with np.load(GOLDEN / name / "golden.npz") as golden:
        ids, ends = golden["ids"].tolist(), golden["lengths"].cumsum().tolist()
        expected = torch.from_numpy(golden["pooled"])
    return open_spec(GOLDEN / name / "model.gguf"), [ids[a:b] for a, b in pairwise([0, *ends])], expected


@pytest.mark.parametrize("name", EMBEDDERS)
def test_golden_files(name):
    spec, texts, expected = golden_texts(name)
    for split in ([], [1], [1, spec.n_layers - 1]):
        assert distance(ours(Pipeline(spec, load_stages(spec, split)), *texts), expected) < 1e-6


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_bert(pooling, seed, tmp_path):
    draw = Draw(seed)
    made = bert(draw, pooling)
    texts = [draw.ids(n, made.vocabulary) for n in (1, 160, 7, 33, 7, 64, 65, draw.between(2, 90))]
    expected = torch.stack([pooled(made, text) for text in texts])
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    assert spec.skipped == ()
    assert (spec.pooling.bidirectional, spec.pooling.generates) == (True, False)
    for split in ([], [1], [1, spec.n_layers - 1]):
        found = ours(Pipeline(spec, load_stages(spec, split)), *texts)
        if pooling == "rank":
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        else:
            assert distance(found, expected) < 1e-6


def test_pairs_of_a_cross_encoder(tmp_path):
    """The types of tokens change behind the separator."""
    draw = Draw(3)
    made, separator = bert(draw, "rank"), 5
    pair = [*draw.ids(9, separator), separator, *draw.ids(20, separator), separator]
    texts = [[7, 8, 9], pair, [1, separator, 2, separator], [6] * 40]
    expected = torch.stack([pooled(made, text, separator) for text in texts])
    spec = open_spec(made.write(tmp_path / "model.gguf", {"tokenizer.ggml.seperator_token_id": separator}))
    for split in ([], [1]):
        found = ours(Pipeline(spec, load_stages(spec, split)), *texts)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_gemma_embedding(seed, dense, tmp_path):
    """Windows on both sides of a token, which reach over the ends of short texts."""
    draw = Draw(seed)
    made = gemma3.gemma_embedding(draw, dense=dense)
    texts = [draw.ids(n, made.vocabulary) for n in (1, 160, 7, 33, 7, 64, 65, 12)]
    expected = torch.stack([gemma3.pooled(made, text) for text in texts])
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    assert spec.skipped == ()
    for split in ([], [1], [1, spec.n_layers - 1]):
        assert distance(ours(Pipeline(spec, load_stages(spec, split)), *texts), expected) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("pooling", [1, 3, 4])
def test_qwen3_for_embeddings_and_ranking(pooling, tmp_path):
    draw = Draw(11)
    made = qwen3(draw)
    texts, (yes, no) = [draw.ids(n, made.vocabulary) for n in (3, 70, 64, 1, 33)], (7, 12)
    head = made.model.get_output_embeddings().weight
    made.metadata["pooling_type"] = pooling
    if pooling == 4:
        made.tensors["cls.output.weight"] = head[[yes, no]]
    made.tensors.pop("output.weight", None)
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    ranks = pooling == 4
    assert (spec.pooling.generates, spec.pooling.ranks) == (False, ranks)
    assert spec.pooled_width == (1 if ranks else spec.hidden_size)
    for split in ([], [1], [1, spec.n_layers - 1] if spec.n_layers > 2 else []):
        found = ours(Pipeline(spec, load_stages(spec, split)), *texts)
        for row, text in zip(found, texts, strict=True):
            hidden = made.model.model(torch.tensor([text])).last_hidden_state[0]
            if ranks:
                probability = (head[[yes, no]] @ hidden[-1]).softmax(dim=-1)[0]
                torch.testing.assert_close(row.sigmoid()[0], probability, atol=1e-5, rtol=1e-5)
            else:
                assert distance(row[None], hidden.mean(0)[None] if pooling == 1 else hidden[-1:]) < 1e-6


def test_half_a_text_is_refused(tmp_path):
    made = bert(Draw(1), "mean")
    spec = open_spec(made.write(tmp_path / "model.gguf"))
    pipeline = Pipeline(spec, load_stages(spec))
    pipeline.open(0)
    pipeline.run((0, [1, 2, 3]), want_logits=False)
    with pytest.raises(StateError, match="must be in one step"):
        pipeline.stages[-1].pooled(pipeline.rows, [Slice(0, 3, [1, 2, 3], False, pooled=True)])
