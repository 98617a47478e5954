"""Specs of Gemma 4 assistants: what they read of their target, and files that are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from bench.gguf_writing import Value
from lucevisor.model.drafters import DraftSpec, draft_paths, open_draft, read_draft_spec
from lucevisor.model.drafters.gemma4_assistant import AssistantParams
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype, Space
from tests.e2e.drafters import write_random_assistant
from tests.model.drafter_files import GOLDEN, TARGET

GEMMA = GOLDEN / "gemma4_e2b" / "model.gguf"


@cache
def target(path: Path = GEMMA) -> ModelSpec:
    return open_spec(path)


def read(path: Path, model: ModelSpec | None = None) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(path)), model or target(), "mtp")


def test_an_assistant_reads_the_last_layers_that_own_keys(tmp_path: Path) -> None:
    """Of 8 layers the last 3 share keys: those of layer 3 slide, those of layer 4 do not."""
    draft = read(write_random_assistant(tmp_path / "a.gguf", target()))
    assert draft.captures == (2, 3, 7)
    p = draft.model.params
    assert isinstance(p, AssistantParams)
    sources = [(source.layer, source.at, source.of_target.sliding) for source in p.sources]
    assert sources == [(2, 1, False), (3, 0, True)]
    assert p.hidden_at == 2
    assert [layer.space for layer in draft.model.layers] == [Space.FULL] * 4
    assert [layer.window for layer in draft.model.layers] == [13, 0, 0, 0]
    assert [len(layer.state) for layer in draft.model.layers] == [0, 0, 2, 2]
    of_target = target().layers
    kept = sum(layer.unit_bytes(Dtype.FLOAT32) for layer in draft.model.layers)
    assert kept == sum(of_target[i].unit_bytes(Dtype.FLOAT32) for i in (3, 4))


def test_matrices_of_the_target_are_read_from_its_file(tmp_path: Path) -> None:
    draft, model = read(write_random_assistant(tmp_path / "a.gguf", target())), target()
    assert model.files is not None
    p = draft.model.params
    assert isinstance(p, AssistantParams)
    files = draft.model.files
    assert files is not None
    for source in p.sources:
        there = 3 if source.of_target.sliding else 4
        for name in ("attn_norm", "attn_k", "attn_k_norm", "attn_v"):
            here = files.tensors[f"blk.{source.layer}.{name}.weight"]
            assert files.read(here) == model.files.read(model.files.tensors[f"blk.{there}.{name}.weight"])
    assert draft.from_target.isdisjoint(draft.files.tensors)
    assert files.tensors["token_embd.weight"].shape == (model.vocabulary, model.hidden_size)
    assert files.tensors["output.weight"].shape == (model.vocabulary, 48)
    assert not draft.shares_lm_head


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"embedding_length_out": 65},
            "embedding_length_out: is 65, expected 64: the drafter belongs to",
        ),
        ({"attention.key_length": 48, "attention.value_length": 48}, "is 48, and the model's keys have 64"),
        ({"attention.head_count": 3}, "blk.0.attn_q.weight'?.*shape"),
        ({"embedding_length": 40}, "shape"),
    ],
)
def test_an_assistant_of_another_model_is_refused(changes: dict[str, Value], text: str, tmp_path: Path) -> None:
    path = write_random_assistant(tmp_path / "a.gguf", target(), changes=changes)
    with pytest.raises(GgufError, match=text):
        read(path)


def test_an_assistant_is_refused_for_other_families_with_unknown_tensors_and_as_a_model(tmp_path: Path) -> None:
    path = write_random_assistant(tmp_path / "a.gguf", target())
    with pytest.raises(GgufError, match="a drafter for gemma4 models"):
        read(path, target(TARGET))
    with pytest.raises(GgufError, match=r"name it in draft\.path"):
        open_spec(path)
    other = write_random_assistant(tmp_path / "b.gguf", target(), more=("masked_embedding.centroids.weight",))
    with pytest.raises(GgufError, match="is unknown to this version"):
        read(other)
