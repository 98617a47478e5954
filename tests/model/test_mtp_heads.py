"""Specs of MTP heads, in the file of their model and alone, and the files of Qwen3.8."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
import pytest

from lucevisor.model.drafters import DraftSpec, draft_paths, open_draft, read_draft_spec
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Dtype, Space
from tests.model.drafter_files import MTP, TARGET, copy, head_alone
from tests.model.qwen35_file import QWEN36_27B, QWEN36_35B_A3B, write


@cache
def target(path: Path = MTP) -> ModelSpec:
    return open_spec(path)


def read(path: Path, model: ModelSpec | None = None) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(path)), model or target(), "mtp")


VECTOR = np.ones(64, np.float32)


def test_a_head_in_the_models_file():
    model = target()
    draft = read_draft_spec(model.files, model, "mtp")
    assert draft.captures == (7,)
    assert (draft.default_drafts, draft.max_drafts) == (3, 15)
    assert [x.space for x in draft.model.layers] == [Space.FULL, Space.RECURRENT]
    assert draft.model.layers[1].unit_bytes(Dtype.BFLOAT16) == 64 * 4
    own = {t.name for t in draft.files.tensors.values()}
    assert own == set(model.skipped)
    assert draft.from_target == {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert draft.model.files.parts == model.files.parts


@pytest.mark.parametrize("with_ends", [False, True])
def test_a_head_of_its_own_file_takes_embedding_and_output_from_the_model(with_ends, tmp_path):
    draft, model = read(head_alone(tmp_path / "head.gguf", with_ends=with_ends)), target()
    wanted = read_draft_spec(model.files, model, "mtp")
    assert draft.model.layers == wanted.model.layers
    assert draft.from_target == wanted.from_target
    files, names = draft.model.files, wanted.model.files.tensors
    assert files.tensors.keys() >= wanted.files.tensors.keys()
    for name in (*wanted.files.tensors, *draft.from_target):
        assert files.read(files.tensors[name]) == wanted.model.files.read(names[name])
        of_target = files.paths[files.tensors[name].part] == MTP
        assert of_target == (name in draft.from_target)


def test_without_a_norm_of_its_own_the_head_takes_the_models(tmp_path):
    path = copy(tmp_path / "m.gguf", MTP, rename=lambda n: None if n.endswith("shared_head_norm.weight") else n)
    model = target(path)
    tensors = read_draft_spec(model.files, model, "mtp").model.files.tensors
    assert tensors["nextn.shared_head_norm.weight"] == model.files.tensors["output_norm.weight"]


def test_a_head_with_an_embedding_of_its_own_keeps_it(tmp_path):
    other = {f"blk.8.nextn.{n}.weight": np.ones((288, 64), np.float32) for n in ("embed_tokens", "shared_head_head")}
    path = copy(tmp_path / "m.gguf", MTP, extra=other)
    model = target(path)
    draft = read_draft_spec(model.files, model, "mtp")
    assert draft.from_target == {"output_norm.weight"}
    assert draft.model.files.tensors["output.weight"].name == "blk.8.nextn.shared_head_head.weight"


DEEPER = {"keys": {"qwen35.block_count": 13, "qwen35.attention.recurrent_layers": None}}
REFUSED = {
    "no head": (
        {"keys": {"qwen35.nextn_predict_layers": None, "qwen35.block_count": 8}},
        "nextn_predict_layers: is missing: the file has no MTP head",
    ),
    "two layers": (
        {"keys": {"qwen35.nextn_predict_layers": 2, "qwen35.block_count": 10}},
        "nextn_predict_layers: is 2: heads of more than one layer",
    ),
    "another family": ({"keys": {"general.architecture": "qwen3"}}, "'qwen3'.* here 'qwen35'"),
    "another depth": (
        DEEPER,
        "block_count: is 13, expected 9",
    ),
    "an unknown tensor": ({"extra": {"blk.8.nextn.new.weight": VECTOR}}, "'blk.8.nextn.new.weight': is unknown"),
    "a missing tensor": (
        {"rename": lambda n: n if n.startswith("blk.8") and "eh_proj" not in n else None},
        "'nextn.eh_proj.weight': is missing",
    ),
    "no block": ({"rename": lambda n: n if n == "output_norm.weight" else None}, "has no block 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_does_not_fit_is_refused(case, tmp_path):
    changes, message = REFUSED[case]
    path = copy(tmp_path / "head.gguf", MTP, **changes)
    with pytest.raises(GgufError, match=message):
        read(path)


def test_a_family_without_heads_is_refused():
    with pytest.raises(GgufError, match="here 'qwen3'"):
        read(MTP, open_spec(TARGET.parents[1] / "qwen3" / "model.gguf"))


@pytest.mark.parametrize(("shape", "n_weights"), [(QWEN36_27B, 425e6), (QWEN36_35B_A3B, 0.84e9)])
def test_qwen38_is_decided_by_the_architecture_alone(shape, n_weights, tmp_path):
    """The keys of Qwen3.6, a name that says otherwise, one block more (65 is no multiple of 4), and IQ types."""
    shape = replace(shape, mtp=True, mix="iq4_xs")
    spec = open_spec(write(tmp_path / "m.gguf", shape, name="Qwen3.8"))
    assert (spec.name, spec.n_layers) == ("Qwen3.8", shape.n_layers)
    assert [x.space for x in spec.layers[-2:]] == [Space.RECURRENT, Space.FULL]
    assert {name.split(".")[1] for name in spec.skipped} == {str(shape.n_layers)}
    head = read_draft_spec(spec.files, spec, "mtp")
    assert {t.name for t in head.files.tensors.values()} == set(spec.skipped)
    assert head.model.layers[0].n_routed == shape.n_used
    assert sum(prod(t.shape) for t in head.files.tensors.values()) == pytest.approx(n_weights, rel=0.01)
    assert head.model.unit_bytes(Space.FULL, head.layers, Dtype.FLOAT16) == 64 * 2 * shape.n_kv_heads * 256 * 2
