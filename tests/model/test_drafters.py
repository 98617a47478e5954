"""Specs of DFlash drafters: every form of file leads to the same layers, and what does not fit is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.gguf_writing import Value
from lucevisor.model.drafters import DraftSpec, draft_paths, open_draft, read_draft_spec
from lucevisor.model.drafters.dflash import default_captures
from lucevisor.model.drafters.gemma4_assistant import AssistantParams
from lucevisor.model.families import open_spec
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup
from lucevisor.model.weight_layout import TensorRole
from tests.e2e.drafters import write_random_assistant
from tests.model.drafter_files import (
    DFLASH2,
    DFLASH2_CONFIG,
    GOLDEN,
    LUCEBOX,
    MTP,
    TARGET,
    UPSTREAM,
    checkpoint,
    copy,
    head_alone,
    narrow,
    tensors_of,
    write_safetensors,
)
from tests.model.qwen35_file import QWEN36_27B, QWEN36_35B_A3B, write

DRAFT = "qwen35-dflash-draft"


@cache
def target(path: Path = TARGET) -> ModelSpec:
    return open_spec(path)


def read(path: Path, model: ModelSpec | None = None) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(path)), model or target(), "dflash")


def older(path: Path) -> Path:
    """The drafter as files before Lucebox's converter had it."""

    def rename(name: str) -> str:
        name = name.replace("dflash.fc", "dflash_fc").replace("dflash.hidden_norm", "dflash_hidden_norm")
        return name.replace("ffn_norm", "post_attention_norm")

    prefix = "dflash-draft"
    reader = gguf.GGUFReader(LUCEBOX)
    fields = {k: f.contents() for k, f in reader.fields.items() if k.startswith(DRAFT)}
    keys = dict.fromkeys(fields) | {k.replace(DRAFT, prefix): v for k, v in fields.items()}
    keys |= {"general.architecture": prefix, f"{prefix}.dflash.target_layer_ids": None}
    return copy(path, LUCEBOX, keys=keys, rename=rename)


# ---- DFlash


@pytest.fixture(params=["upstream", "lucebox", "checkpoint", "checkpoint-bf16"])
def form(request, tmp_path) -> Path:
    """The same drafter in every form."""
    if request.param.startswith("checkpoint"):
        return checkpoint(tmp_path / "drafter", UPSTREAM, dtype="BF16" if request.param.endswith("bf16") else "F32")
    return {"upstream": UPSTREAM, "lucebox": LUCEBOX}[request.param]


def test_every_form_is_the_same_drafter(form):
    wanted, spec = read(UPSTREAM), read(form)
    assert spec.model.params.eps == pytest.approx(wanted.model.params.eps, rel=1e-7)  # float32 in a GGUF file
    assert replace(spec.model.params, eps=wanted.model.params.eps) == wanted.model.params
    assert spec.model.layers == wanted.model.layers
    assert (spec.version, spec.captures, spec.max_drafts) == (1, (1, 3, 5), 7)
    assert spec.from_target == {"token_embd.weight", "output.weight"}
    p = spec.model.params
    assert (p.windows, p.causal, p.mask_token) == ((24, 24, 0), (True, True, False), 287)
    for name, array in tensors_of(UPSTREAM).items():
        info = spec.model.files.tensors[name]
        raw = narrow(array, info.kind.name)
        assert info.shape == array.shape
        assert spec.model.files.read(info) == raw
    for name in spec.from_target:
        files = target().files
        assert spec.model.files.read(spec.model.files.tensors[name]) == files.read(files.tensors[name])


def test_older_files_have_other_names_and_count_the_captures(tmp_path):
    spec, wanted = read(older(tmp_path / "old.gguf")), read(LUCEBOX)
    assert spec.model.params == wanted.model.params
    assert spec.files.tensors.keys() == wanted.files.tensors.keys()
    assert spec.captures == default_captures(8, 3) == (1, 3, 5)


@pytest.mark.parametrize("form", ["gguf", "checkpoint"])
def test_dflash2_is_told_apart_by_its_tensors(form, tmp_path):
    path = DFLASH2 if form == "gguf" else checkpoint(tmp_path, DFLASH2, DFLASH2_CONFIG)
    spec = read(path)
    p = spec.model.params
    assert (spec.version, spec.captures, spec.max_drafts) == (2, (1, 3, 5), 7)
    assert (p.selector.taps, p.selector.group, p.selector.rank, p.selector.top_k) == (2, 16, 16, 6)
    assert (p.windows, p.causal) == ((24,) * 3, (False,) * 3)
    layouts = {x.name: x for x in spec.layouts(Backend.CUDA, Dtype.BFLOAT16, with_output=True, with_embedding=True)}
    assert layouts["selector_predecessor.weight"].role is TensorRole.LOOKUP
    assert layouts["selector_hidden.weight"].role is TensorRole.MATRIX
    assert layouts["blk.0.attn_conv_base"].role is TensorRole.EXACT
    assert layouts.keys() == spec.files.tensors.keys()


def test_causality_of_the_whole_model_overrides_that_of_sliding_layers(tmp_path):
    for causal in (True, False):
        path = copy(tmp_path / f"{causal}.gguf", UPSTREAM, keys={"dflash.attention.causal": causal})
        assert read(path).model.params.causal == (causal,) * 3
    assert read(checkpoint(tmp_path / "hf", UPSTREAM, {"is_causal": False})).model.params.causal == (False,) * 3


def test_a_split_checkpoint(tmp_path):
    whole = checkpoint(tmp_path / "whole", UPSTREAM)
    split = tmp_path / "split"
    split.mkdir()
    (split / "config.json").write_bytes((whole / "config.json").read_bytes())
    raw = (whole / "model.safetensors").read_bytes()
    n = int.from_bytes(raw[:8], "little")
    entries, data = json.loads(raw[8 : 8 + n]), raw[8 + n :]
    del entries["__metadata__"]
    names = sorted(entries)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        own, at = {}, b""
        for name in part:
            a, b = entries[name]["data_offsets"]
            own[name] = entries[name] | {"data_offsets": [len(at), len(at) + b - a]}
            at += data[a:b]
        write_safetensors(split / f"model-{number:05d}-of-00002.safetensors", own, at)
    spec, wanted = read(split / "model-00002-of-00002.safetensors"), read(whole)
    assert len(spec.files.parts) == 3
    for name, info in wanted.files.tensors.items():
        assert spec.files.read(spec.files.tensors[name]) == wanted.files.read(info)
    (split / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(GgufError, match="1 of 2 parts are missing"):
        read(split)


def test_a_checkpoint_that_changes_is_noticed(tmp_path):
    files = open_draft(draft_paths(checkpoint(tmp_path, UPSTREAM)))
    assert files.changed() == []
    assert files.other_headers() == []
    (tmp_path / "config.json").write_text("{}" + " " * 99)
    assert files.changed() == [tmp_path / "config.json"]
    assert files.other_headers() == [tmp_path / "config.json"]


VECTOR = np.ones(64, np.float32)
REFUSED = {
    "another architecture": (UPSTREAM, {"keys": {"general.architecture": "llama"}}, "not a DFlash drafter"),
    "DSpark": (UPSTREAM, {"extra": {"markov_head.weight": VECTOR}}, "tensor 'markov_head.weight': .*DSpark"),
    "DSpark by key": (UPSTREAM, {"keys": {"dflash.sample_from_anchor": True}}, "dflash.sample_from_anchor: .*DSpark"),
    "Domino": (UPSTREAM, {"extra": {"blk.0.gru_ih.weight": VECTOR}}, "tensor 'blk.0.gru_ih.weight': .*Domino"),
    "sinks": (UPSTREAM, {"extra": {"blk.0.attn_sinks.weight": VECTOR}}, "'blk.0.attn_sinks.weight': .*sinks"),
    "d2t": (UPSTREAM, {"extra": {"d2t": VECTOR}}, "tensor 'd2t': .*vocabulary of its own"),
    "Laguna": (LUCEBOX, {"extra": {"blk.0.attn_gate.weight": VECTOR}}, "'blk.0.attn_gate.weight': .*Laguna"),
    "unknown": (UPSTREAM, {"extra": {"blk.0.new.weight": VECTOR}}, "'blk.0.new.weight': it is unknown"),
    "convolution without selector": (
        DFLASH2,
        {"rename": lambda n: None if "selector" in n else n, "keys": {"dflash.selector_top_k": None}},
        "conv_.* it is unknown",
    ),
    "a missing layer": (UPSTREAM, {"rename": lambda n: None if "blk.2.attn_q.w" in n else n}, "'blk.2.attn_q.weight'"),
    "another width": (UPSTREAM, {"keys": {"dflash.embedding_length": 32}}, "embedding_length: is 32.* has 64"),
    "another vocabulary": (LUCEBOX, {"keys": {f"{DRAFT}.vocab_size": 999}}, "vocab_size: is 999.* another model"),
    "another tokenizer": (UPSTREAM, {"keys": {"tokenizer.ggml.tokens": ["a"]}}, "has 1 tokens.* has 288"),
    "codebooks of another vocabulary": (
        DFLASH2,
        {
            "rename": lambda n: None if n == "selector_successor.weight" else n.removeprefix("x."),
            "extra": {"x.selector_successor.weight": np.ones((100, 16), np.float32)},
        },
        r"'selector_successor.weight': has shape \[100, 16\].*\[288, 16\]",
    ),
    "captures past the end": (UPSTREAM, {"keys": {"dflash.target_layers": [2, 4, 9]}}, "target_layers: .* of the 8"),
    "captures before the start": (UPSTREAM, {"keys": {"dflash.target_layers": [0, 4, 6]}}, "counted from 1"),
    "captures in disorder": (LUCEBOX, {"keys": {f"{DRAFT}.dflash.target_layer_ids": [3, 1, 5]}}, "counted from 0"),
    "fewer captures": (UPSTREAM, {"keys": {"dflash.target_layers": [2, 4]}}, "target_layers: .*reads 3 layers"),
    "no captures in DFlash 2": (DFLASH2, {"keys": {"dflash.target_layers": None}}, "target_layers: is missing"),
    "no mask token": (UPSTREAM, {"keys": {"tokenizer.ggml.mask_token_id": None}}, "mask_token_id: is missing"),
    "a mask token outside": (UPSTREAM, {"keys": {"tokenizer.ggml.mask_token_id": 288}}, "mask_token_id: is 288"),
    "no pattern": (UPSTREAM, {"keys": {"dflash.attention.sliding_window_pattern": None}}, "which layers slide"),
    "another activation": (UPSTREAM, {"keys": {"dflash.hidden_act": "gelu"}}, "hidden_act: .*'gelu'"),
    "scaled values": (UPSTREAM, {"keys": {"dflash.attention.value_scale": 0.5}}, "value_scale: is not 1"),
    "groups that do not fit": (DFLASH2, {"keys": {"dflash.conv_group_size": 48}}, "conv_group_size: .*divide 64"),
    "an embedding without output": (
        UPSTREAM,
        {"extra": {"token_embd.weight": np.ones((288, 64), np.float32)}},
        "'token_embd.weight': comes without 'output.weight'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case, tmp_path):
    source, changes, message = REFUSED[case]
    path = copy(tmp_path / "drafter.gguf", source, **changes)
    with pytest.raises(GgufError, match=message) as raised:
        read(path)
    assert raised.value.file == str(path)


CONFIG_REFUSED = {
    "another model": ({"architectures": ["Qwen3ForCausalLM"]}, "architectures.*DFlashDraftModel"),
    "no width": ({"hidden_size": None}, "'hidden_size': is missing"),
    "no mask token": ({"dflash_config": {"target_layer_ids": [1, 3, 5]}}, "'mask_token_id': is missing"),
    "no base": ({"rope_theta": None}, "'rope_theta': is missing"),
    "scaled positions": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters.*'yarn'"),
    "no window": ({"sliding_window": None}, "'sliding_window': is missing"),
    "unknown layers": ({"layer_types": ["linear_attention"] * 3}, "layer_types.*linear_attention"),
    "strange captures": ({"dflash_config": {"mask_token_id": 287, "target_layer_ids": "all"}}, "target_layer_ids.*all"),
    "another target": ({"num_target_layers": 9}, "num_target_layers: is 9.* has 8"),
    "a width that is text": ({"hidden_size": "64"}, "embedding_length: is '64'"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSED)
def test_a_configuration_that_does_not_fit_is_refused(case, tmp_path):
    config, message = CONFIG_REFUSED[case]
    with pytest.raises(GgufError, match=message):
        read(checkpoint(tmp_path, UPSTREAM, config))


HEADERS = {
    "not JSON": (b"{]", "is not a JSON object"),
    "nested without end": (b"[" * 99_999, "is not a JSON object"),
    "an unknown dtype": (b'{"a":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}', "tensor 'a': has dtype 'I64'"),
    "a scalar": (b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', r"tensor 'a': has shape \[\]"),
    "a negative extent": (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "tensor 'a': has shape"),
    "other bytes": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', "does not take bytes 0 to 4"),
    "past the end": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[16,24]}}', "ends at byte .* truncated"),
    "overlap": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}',
        "tensor 'b': its data overlaps that of 'a'",
    ),
    "no entry": (b'{"a":[1,2]}', "tensor 'a': its entry cannot be read"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_damaged_safetensors_header_is_refused(case, tmp_path):
    header, message = HEADERS[case]
    checkpoint(tmp_path, UPSTREAM)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(GgufError, match=message):
        open_draft(draft_paths(tmp_path))


# ---- bytes


def test_shared_tensors_take_no_memory_of_their_own():
    spec = read(UPSTREAM)

    def names(**has) -> set[str]:
        return {x.name for x in spec.layouts(Backend.CPU, Dtype.FLOAT32, **has)}

    own = set(spec.files.tensors)
    assert names(with_output=True, with_embedding=True) == own
    assert names(with_output=True, with_embedding=False) == own | {"token_embd.weight"}
    assert names(with_output=False, with_embedding=False) == own | spec.from_target


@pytest.mark.parametrize(
    ("backend", "dtype", "shared"),
    [(Backend.CPU, Dtype.FLOAT32, True), (Backend.CPU, Dtype.BFLOAT16, False), (Backend.CUDA, Dtype.BFLOAT16, True)],
)
def test_a_tied_output_matrix_serves_as_the_table_where_its_rows_can_be_read(backend, dtype, shared, tmp_path):
    path = copy(tmp_path / "tied.gguf", TARGET, rename=lambda n: None if n == "output.weight" else n)
    spec = read(UPSTREAM, target(path))
    assert spec.from_target == {"token_embd.weight"}
    layouts = spec.layouts(backend, dtype, with_output=True, with_embedding=False)
    assert ("token_embd.weight" not in {x.name for x in layouts}) == shared


# ---- other releases


@pytest.mark.parametrize("drafter", [UPSTREAM, LUCEBOX])
def test_a_drafter_in_the_place_of_a_model_is_called_one(drafter):
    with pytest.raises(GgufError, match=r"is a drafter, not a model: name it in draft\.path"):
        open_spec(drafter)


# ---- Gemma 4 assistants


GEMMA = GOLDEN / "gemma4_e2b" / "model.gguf"


@cache
def gemma(path: Path = GEMMA) -> ModelSpec:
    return open_spec(path)


def read_assistant(path: Path, model: ModelSpec | None = None) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(path)), model or gemma(), "mtp")


def test_an_assistant_reads_the_last_layers_that_own_keys(tmp_path: Path) -> None:
    """Of 8 layers the last 3 share keys: those of layer 3 slide, those of layer 4 do not."""
    draft = read_assistant(write_random_assistant(tmp_path / "a.gguf", gemma()))
    assert draft.captures == (2, 3, 7)
    p = draft.model.params
    assert isinstance(p, AssistantParams)
    sources = [(source.layer, source.at, source.of_target.sliding) for source in p.sources]
    assert sources == [(2, 1, False), (3, 0, True)]
    assert p.hidden_at == 2
    assert [layer.kv_group for layer in draft.model.layers] == [KvGroup.FULL] * 4
    assert [layer.window for layer in draft.model.layers] == [13, 0, 0, 0]
    assert [len(layer.state) for layer in draft.model.layers] == [0, 0, 2, 2]
    of_target = gemma().layers
    kept = sum(layer.unit_bytes(Dtype.FLOAT32) for layer in draft.model.layers)
    assert kept == sum(of_target[i].unit_bytes(Dtype.FLOAT32) for i in (3, 4))


def test_matrices_of_the_target_are_read_from_its_file(tmp_path: Path) -> None:
    draft, model = read_assistant(write_random_assistant(tmp_path / "a.gguf", gemma())), gemma()
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
    path = write_random_assistant(tmp_path / "a.gguf", gemma(), changes=changes)
    with pytest.raises(GgufError, match=text):
        read_assistant(path)


def test_an_assistant_is_refused_for_other_families_with_unknown_tensors_and_as_a_model(tmp_path: Path) -> None:
    path = write_random_assistant(tmp_path / "a.gguf", gemma())
    with pytest.raises(GgufError, match="a drafter for gemma4 models"):
        read_assistant(path, gemma(TARGET))
    with pytest.raises(GgufError, match=r"name it in draft\.path"):
        open_spec(path)
    other = write_random_assistant(tmp_path / "b.gguf", gemma(), more=("masked_embedding.centroids.weight",))
    with pytest.raises(GgufError, match="is unknown to this version"):
        read_assistant(other)


# ---- MTP heads


@cache
def with_head(path: Path = MTP) -> ModelSpec:
    return open_spec(path)


def read_head(path: Path, model: ModelSpec | None = None) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(path)), model or with_head(), "mtp")


def test_a_head_in_the_models_file():
    model = with_head()
    draft = read_draft_spec(model.files, model, "mtp")
    assert draft.captures == (7,)
    assert (draft.default_drafts, draft.max_drafts) == (3, 15)
    assert [x.kv_group for x in draft.model.layers] == [KvGroup.FULL, KvGroup.RECURRENT]
    assert draft.model.layers[1].unit_bytes(Dtype.BFLOAT16) == 64 * 4
    own = {t.name for t in draft.files.tensors.values()}
    assert own == set(model.skipped)
    assert draft.from_target == {"token_embd.weight", "output_norm.weight", "output.weight"}
    assert draft.model.files.parts == model.files.parts


@pytest.mark.parametrize("with_ends", [False, True])
def test_a_head_of_its_own_file_takes_embedding_and_output_from_the_model(with_ends, tmp_path):
    draft, model = read_head(head_alone(tmp_path / "head.gguf", with_ends=with_ends)), with_head()
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
    model = with_head(path)
    tensors = read_draft_spec(model.files, model, "mtp").model.files.tensors
    assert tensors["nextn.shared_head_norm.weight"] == model.files.tensors["output_norm.weight"]


def test_a_head_with_an_embedding_of_its_own_keeps_it(tmp_path):
    other = {f"blk.8.nextn.{n}.weight": np.ones((288, 64), np.float32) for n in ("embed_tokens", "shared_head_head")}
    path = copy(tmp_path / "m.gguf", MTP, extra=other)
    model = with_head(path)
    draft = read_draft_spec(model.files, model, "mtp")
    assert draft.from_target == {"output_norm.weight"}
    assert draft.model.files.tensors["output.weight"].name == "blk.8.nextn.shared_head_head.weight"


DEEPER = {"keys": {"qwen35.block_count": 13, "qwen35.attention.recurrent_layers": None}}

REFUSED_HEADS = {
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


@pytest.mark.parametrize("case", REFUSED_HEADS)
def test_a_head_that_does_not_fit_is_refused(case, tmp_path):
    changes, message = REFUSED_HEADS[case]
    path = copy(tmp_path / "head.gguf", MTP, **changes)
    with pytest.raises(GgufError, match=message):
        read_head(path)


def test_a_family_without_heads_is_refused():
    with pytest.raises(GgufError, match="here 'qwen3'"):
        read_head(MTP, open_spec(TARGET.parents[1] / "qwen3" / "model.gguf"))


@pytest.mark.parametrize(("shape", "n_weights"), [(QWEN36_27B, 425e6), (QWEN36_35B_A3B, 0.84e9)])
def test_qwen38_is_decided_by_the_architecture_alone(shape, n_weights, tmp_path):
    """The keys of Qwen3.6, a name that says otherwise, one block more (65 is no multiple of 4), and IQ types."""
    shape = replace(shape, mtp=True, mix="iq4_xs")
    spec = open_spec(write(tmp_path / "m.gguf", shape, name="Qwen3.8"))
    assert (spec.name, spec.n_layers) == ("Qwen3.8", shape.n_layers)
    assert [x.kv_group for x in spec.layers[-2:]] == [KvGroup.RECURRENT, KvGroup.FULL]
    assert {name.split(".")[1] for name in spec.skipped} == {str(shape.n_layers)}
    head = read_draft_spec(spec.files, spec, "mtp")
    assert {t.name for t in head.files.tensors.values()} == set(spec.skipped)
    assert head.model.layers[0].n_routed == shape.n_used
    assert sum(prod(t.shape) for t in head.files.tensors.values()) == pytest.approx(n_weights, rel=0.01)
    assert head.model.unit_bytes(KvGroup.FULL, head.layers, Dtype.FLOAT16) == 64 * 2 * shape.n_kv_heads * 256 * 2


# ---- draft models

QWEN3 = GOLDEN / "qwen3" / "model.gguf"
TOKENS = "tokenizer.ggml.tokens"


def read_model(path: Path) -> DraftSpec:
    return read_draft_spec(open_draft(draft_paths(path)), target(QWEN3), "model")


def test_a_draft_model_is_whole_and_takes_nothing_of_its_target():
    spec, own = read_model(GOLDEN / "qwen3moe" / "model.gguf"), target(GOLDEN / "qwen3moe" / "model.gguf")
    assert (spec.captures, spec.from_target, spec.model.layers) == ((), frozenset(), own.layers)
    layouts = spec.layouts(Backend.CPU, Dtype.FLOAT32, with_output=True, with_embedding=True)
    assert {layout.name for layout in layouts} == own.files.tensors.keys()


@pytest.mark.parametrize(
    ("draft", "text"),
    [
        ("qwen35", "'qwen35' has layers with a window or recurrent state; a draft model has full attention"),
        ("gemma3", "'gemma3' has layers with a window or recurrent state; a draft model has full attention"),
        ("dflash", "name it in draft.path"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(draft: str, text: str):
    path = UPSTREAM if draft == "dflash" else GOLDEN / draft / "model.gguf"
    with pytest.raises(GgufError) as error:
        read_model(path)
    assert text in str(error.value)


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path):
    tokens = target(QWEN3).files.metadata[TOKENS]
    path = copy(tmp_path / "other.gguf", QWEN3, keys={TOKENS: [*tokens[:-1], "another"]})
    with pytest.raises(GgufError, match=f"metadata value '{TOKENS}': differs from that of"):
        read_model(path)
