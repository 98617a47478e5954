"""Specs of all families: the golden files, published sizes, what a shard holds of shared tensors, and hostile
metadata.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.model.families import FAMILIES, open_spec, read_spec
from lucevisor.model.families.gemma4 import ID_WIDTH
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.quant_types import WeightFormat
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import Backend, Dtype, KvGroup, LayerRange
from lucevisor.model.weight_layout import layer_layouts, non_layer_layouts, shard_layouts
from tests.combinations import combinations
from tests.families.shapes import (
    E2B,
    E4B,
    GEMMA4_26B_A4B,
    GEMMA4_31B,
    GLM_45_AIR,
    GPT_OSS_20B,
    GRANITE_3B_MOE,
    GRANITE_8B,
    LAGUNA_XS2,
    MINISTRAL_8B,
    QWEN3_NEXT_80B,
    gemma4,
    write,
)

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FILES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3moe",
    "qwen3next",
    "qwen35",
    "qwen35_mtp",
    "qwen35moe",
    "granite",
    "granitemoe",
    "mistral3",
    "glm4moe",
    "gpt_oss",
]
FILES += ["gemma3", "gemma4_e2b", "gemma4_moe", "laguna", "laguna_mscale"]
EMBEDDERS = ["bert", "gemma_embedding", "qwen3_embedding"]
KINDS = {
    "llama": "ffff",
    "qwen2": "ffff",
    "qwen3": "ffff",
    "qwen3moe": "fff",
    "qwen3next": "rfr",
    "qwen35": "rrrfrrrf",
    "qwen35_mtp": "rrrfrrrf",
    "qwen35moe": "rrrf",
    "granite": "ffff",
    "granitemoe": "ffff",
    "mistral3": "ffff",
    "glm4moe": "ffff",
    "gpt_oss": "wfw",
    "gemma3": "wwwwwfw",
    "gemma4_e2b": "wwfwfwwf",
    "gemma4_moe": "wwfwwf",
    "laguna": "fwwwf",
    "laguna_mscale": "fwwwf",
}
"""KV group of each layer, from the configurations the files were made of."""
LETTER = {KvGroup.FULL: "f", KvGroup.WINDOW: "w", KvGroup.RECURRENT: "r"}


@cache
def golden(name: str) -> ModelSpec:
    return open_spec(GOLDEN / name / "model.gguf")


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full size")
    models = {"e2b": E2B, "e4b": E4B, "26b": GEMMA4_26B_A4B, "31b": GEMMA4_31B, "xs2": LAGUNA_XS2}
    models |= {"granite": GRANITE_8B, "granitemoe": GRANITE_3B_MOE, "mistral3": MINISTRAL_8B, "glm4moe": GLM_45_AIR}
    models |= {"qwen3next": QWEN3_NEXT_80B}
    models["gpt-oss"] = GPT_OSS_20B
    return {name: open_spec(write(folder / f"{name}.gguf", model)) for name, model in models.items()}


@pytest.mark.parametrize("name", FILES)
def test_the_golden_files(name):
    spec = golden(name)
    assert "".join(LETTER[layer.kv_group] for layer in spec.layers) == KINDS[name]
    assert all((layer.window == 12) == (layer.kv_group is KvGroup.WINDOW) for layer in spec.layers)
    ends = {"embedding": True, "output": True}
    layouts = shard_layouts(spec, LayerRange(0, spec.n_layers), **ends, backend=Backend.CPU, dtype=Dtype.FLOAT32)
    assert {layout.name for layout in layouts} | set(spec.skipped) == set(spec.files.tensors)
    assert all(n.startswith("blk.8.") for n in spec.skipped)
    assert bool(spec.skipped) == (name == "qwen35_mtp")
    assert spec.boundary_width == (64 + 64 + ID_WIDTH if name == "gemma4_e2b" else 64)


def test_gemma4_layers_share_from_the_last_owner_of_their_own_type(full_size):
    assert [x.shares_with for x in golden("gemma4_e2b").layers] == [None] * 5 + [3, 3, 4]
    spec = full_size["e2b"]
    assert spec.n_layers == 35
    for i, layer in enumerate(spec.layers):
        full = i % 5 == 4
        assert layer.shares_with == (None if i < 15 else 14 if full else 13)
        assert bool(layer.state) == (i < 15)
    assert [b for b in range(36) if spec.legal_boundary(b)] == [*range(14), 35]
    assert [b for b in range(43) if full_size["e4b"].legal_boundary(b)] == [*range(23), 42]
    assert all(full_size["31b"].legal_boundary(b) for b in range(61))


# bytes of keys and values a token in 16 bits, in full and in window layers: 2 (K and V) x kv heads x head dim x 2 bytes
STATE = {
    "e2b": (3 * 2 * 512 * 2, 12 * 2 * 256 * 2),
    "e4b": (4 * 2 * 2 * 512 * 2, 20 * 2 * 2 * 256 * 2),
    "26b": (5 * 2 * 2 * 512 * 2, 25 * 2 * 8 * 256 * 2),
    "31b": (10 * 2 * 4 * 512 * 2, 50 * 2 * 16 * 256 * 2),
    "xs2": (10 * 2 * 8 * 128 * 2, 30 * 2 * 8 * 128 * 2),
    "granite": (40 * 2 * 8 * 128 * 2, 0),
    "granitemoe": (32 * 2 * 8 * 64 * 2, 0),
    "mistral3": (34 * 2 * 8 * 128 * 2, 0),
    "glm4moe": (46 * 2 * 8 * 128 * 2, 0),
    "qwen3next": (12 * 2 * 2 * 256 * 2, 0),
    "gpt-oss": (12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2),
}
# parameters in thousand millions, as published (of E2B and E4B the effective ones: without the per-layer table), and
# the tolerance
SIZE = {"e2b": (2.3, 0.1), "e4b": (4.5, 0.2), "26b": (26.0, 1.0), "31b": (31.0, 1.0), "xs2": (33.0, 1.5)}
SIZE |= {"granite": (8.17, 0.01), "granitemoe": (3.3, 0.05), "mistral3": (8.5, 0.1), "glm4moe": (106.8, 0.5)}
SIZE |= {"qwen3next": (79.7, 0.5)}
SIZE |= {"gpt-oss": (20.9, 0.05)}


@pytest.mark.parametrize("name", STATE)
def test_full_size_headers_have_the_published_sizes(name, full_size):
    spec = full_size[name]
    everything = LayerRange(0, spec.n_layers)
    assert spec.unit_bytes(KvGroup.FULL, everything, Dtype.FLOAT16) == 64 * STATE[name][0]
    assert spec.unit_bytes(KvGroup.WINDOW, everything, Dtype.FLOAT16) == 64 * STATE[name][1]
    numbers = sum(_numbers(t.shape) for t in spec.files.tensors.values() if t.name != "per_layer_token_embd.weight")
    wanted, tolerance = SIZE[name]
    assert abs(numbers / 1e9 - wanted) < tolerance
    assert spec.skipped == ()


def _numbers(shape: tuple[int, ...]) -> int:
    n = 1
    for extent in shape:
        n *= extent
    return n


@combinations(
    backend=list(Backend), dtype=[Dtype.FLOAT32, Dtype.BFLOAT16], name=[*FILES, *EMBEDDERS, "e2b", "26b", "xs2"]
)
def test_a_shards_bytes_are_the_sum_over_embedding_layers_and_output(name, backend, dtype, full_size):
    spec = full_size.get(name) or golden(name)
    layers = [sum(r.n_bytes for r in layer_layouts(spec, i, backend, dtype)) for i in range(spec.n_layers)]
    cuts = [0, *(b for b in range(1, spec.n_layers) if spec.legal_boundary(b)), spec.n_layers]
    for a, b in [(0, spec.n_layers), *pairwise(cuts)]:
        ends = {"embedding": a == 0, "output": b == spec.n_layers, "backend": backend, "dtype": dtype}
        total = sum(layers[a:b]) + sum(r.n_bytes for r in non_layer_layouts(spec, **ends))
        together = shard_layouts(spec, LayerRange(a, b), **ends)
        assert sum(r.n_bytes for r in together) == total
        names = [r.name for r in together]
        tied = {"token_embd.weight"} if "output.weight" not in spec.output_tensors else set()
        assert all(names.count(n) == 1 or n in tied for n in names)


def test_each_shard_holds_the_columns_of_its_own_layers_only(full_size):
    spec = full_size["e2b"]
    table = spec.files.tensors["per_layer_token_embd.weight"]
    held = []
    for a, b in ((0, 7), (7, 13), (13, 35)):
        layouts = {
            r.name: r
            for r in shard_layouts(
                spec, LayerRange(a, b), embedding=False, output=False, backend=Backend.CUDA, dtype=Dtype.BFLOAT16
            )
        }
        columns, rows = layouts["per_layer_token_embd.weight"], layouts["per_layer_model_proj.weight"]
        assert columns.shape == (262144, (b - a) * 256)
        assert columns.format is WeightFormat.BLOCKS
        assert (columns.part.start, columns.part.stop) == (a * 256, b * 256) == (rows.part.start, rows.part.stop)
        assert rows.shape == ((b - a) * 256, 1536)
        held.append(columns.n_bytes)
    assert sum(held) == table.n_bytes


def test_columns_that_split_a_block_are_kept_dense(tmp_path):
    """Rows of 6 x 80 numbers are whole blocks of 32, a layer's 80 are not."""
    small = {"n_layers": 6, "embedding": 64, "widths": [64] * 6, "n_heads": 2, "kv": (1, 1), "every": 3, "window": 8}
    model = gemma4(**small, dims=(32, 64), layer_input=80, vocabulary=64)
    spec = open_spec(write(tmp_path / "odd.gguf", model, "Q8_0"))
    [table] = [
        r for r in layer_layouts(spec, 1, Backend.CUDA, Dtype.BFLOAT16) if r.name == "per_layer_token_embd.weight"
    ]
    assert (table.format, table.n_bytes) == (WeightFormat.BFLOAT16, 64 * 80 * 2)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (E2B, "per_layer_token_embd.weight"),
        (E2B, "per_layer_proj_norm.weight"),
        (E2B, "blk.3.inp_gate.weight"),
        (E2B, "blk.13.attn_v.weight"),
        (GEMMA4_26B_A4B, "rope_freqs.weight"),
        (GEMMA4_26B_A4B, "blk.7.ffn_down_exps.scale"),
        (GEMMA4_26B_A4B, "blk.7.attn_v.weight"),
        (LAGUNA_XS2, "blk.9.attn_gate.weight"),
        (LAGUNA_XS2, "blk.9.exp_probs_b.bias"),
        (GRANITE_3B_MOE, "blk.3.ffn_gate_inp.weight"),
        (GLM_45_AIR, "blk.1.exp_probs_b.bias"),
        (GLM_45_AIR, "blk.1.attn_k.bias"),
        (GLM_45_AIR, "blk.0.post_attention_norm.weight"),
        (QWEN3_NEXT_80B, "blk.0.attn_gate.weight"),
        (QWEN3_NEXT_80B, "blk.2.ssm_ba.weight"),
        (QWEN3_NEXT_80B, "blk.3.attn_q.weight"),
        (GPT_OSS_20B, "blk.3.attn_sinks.weight"),
        (GPT_OSS_20B, "blk.3.ffn_gate_inp.bias"),
        (GPT_OSS_20B, "blk.3.ffn_up_exps.bias"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, model, name):
    with pytest.raises(GgufError, match=f"tensor '{name}': is missing"):
        open_spec(write(tmp_path / "missing.gguf", model, without=name))


@pytest.mark.parametrize(
    ("model", "changed", "reason"),
    [
        (
            E2B,
            {"attention.shared_kv_layers": 31},
            "shared_kv_layers: leaves no full layer that layer 4 could share from",
        ),
        (E2B, {"attention.shared_kv_layers": 36}, "shared_kv_layers: leaves no sliding layer"),
        (E2B, {"attention.head_count": 7, "attention.head_count_kv": [2] * 35}, "7, not a multiple of 2 kv heads"),
        (E2B, {"rope.dimension_count": 1024}, "is 1024, expected 2 to 512"),
        (GEMMA4_26B_A4B, {"expert_used_count": 129}, "is 129, the model has 128 experts"),
        (LAGUNA_XS2, {"expert_gating_func": 3}, "is 3, known are 1"),
        (LAGUNA_XS2, {"rope.scaling.type": "longrope"}, "is 'longrope', known are 'linear', 'yarn' and 'none'"),
        (LAGUNA_XS2, {"attention.value_length": 64}, "differs from key_length 128"),
        (LAGUNA_XS2, {"attention.head_count": 32}, "attn_gate.weight': has 48 rows"),
        (GRANITE_8B, {"logit_scale": None}, r"granite\.logit_scale: is missing"),
        (GRANITE_3B_MOE, {"logit_scale": 0.0}, r"granitemoe\.logit_scale: is 0\.0, expected more than 0"),
        (GRANITE_8B, {"residual_scale": 0.0}, r"granite\.residual_scale: is 0\.0, expected more than 0"),
        (GRANITE_8B, {"embedding_scale": float("nan")}, r"granite\.embedding_scale: is nan, expected a finite number"),
        (GLM_45_AIR, {"nextn_predict_layers": 46}, "nextn_predict_layers: is 46, of 46 blocks"),
        (GLM_45_AIR, {"feed_forward_length": None}, "feed_forward_length: is missing"),
        (GLM_45_AIR, {"expert_group_count": 8}, "expert_group_count: is more than 1"),
        (GLM_45_AIR, {"expert_feed_forward_length": None}, "expert_feed_forward_length: is missing"),
        (GLM_45_AIR, {"expert_shared_count": 1000}, "expert_shared_count: is 1000, expected 0 to 64"),
        (QWEN3_NEXT_80B, {"ssm.time_step_rank": 24}, "inner_size: is not time_step_rank x state_size = 3072"),
        (QWEN3_NEXT_80B, {"ssm.group_count": 12}, "time_step_rank: 32 is not a multiple of group_count 12"),
        (QWEN3_NEXT_80B, {"expert_count": None}, r"qwen3next\.expert_count: is missing"),
        (MINISTRAL_8B, {"attention.temperature_scale": -0.1}, r"temperature_scale: is -0\.1.*, expected at least 0"),
        (MINISTRAL_8B, {"attention.temperature_length": 0}, "temperature_length: is 0, expected 1 to"),
        (MINISTRAL_8B, {"rope.scaling.type": "none"}, "temperature_length: is missing"),
        (MINISTRAL_8B, {"rope.scaling.yarn_log_multiplier": -1.0}, r"multiplier: is -1\.0, expected at least 0"),
        (GPT_OSS_20B, {"expert_count": None}, "expert_count: is missing"),
        (GPT_OSS_20B, {"attention.sliding_window": "128"}, "sliding_window: is '128'"),
        (GRANITE_8B, {"rope.scaling.finetuned": False}, "finetuned: is false: attention without positions"),
    ],
)
def test_invalid_metadata_names_its_key(tmp_path, model, changed, reason):
    with pytest.raises(GgufError, match=reason):
        open_spec(write(tmp_path / "wrong.gguf", model, changed=changed))


def test_laguna_takes_the_attention_factor_of_the_file_only_when_asked():
    path = GOLDEN / "laguna" / "model.gguf"
    assert open_spec(path).params.rotary.yarn.attention_factor is None
    assert open_spec(path, {"yarn_attn_factor": "file"}).params.rotary.yarn.attention_factor == 1.0


@pytest.mark.parametrize(
    ("pattern", "wanted"), [([True, False, True, True, False], "wfwwf"), (2, "fwfwf"), (1, "fffff")]
)
def test_laguna_patterns_are_arrays_or_periods(pattern, wanted):
    files = golden("laguna").files
    spec = read_spec(
        dataclasses.replace(files, metadata={**files.metadata, "laguna.attention.sliding_window_pattern": pattern})
    )
    assert "".join(LETTER[layer.kv_group] for layer in spec.layers) == wanted


def test_laguna_without_a_window_has_full_layers_only():
    files = golden("laguna").files
    spec = read_spec(dataclasses.replace(files, metadata={**files.metadata, "laguna.attention.sliding_window": 0}))
    assert spec.kv_groups() == {KvGroup.FULL}


def test_a_block_of_mtp_behind_the_layers_of_glm_is_left_out(tmp_path):
    spec = open_spec(write(tmp_path / "mtp.gguf", GLM_45_AIR, changed={"nextn_predict_layers": 1}))
    assert spec.n_layers == 45
    assert {name.split(".")[1] for name in spec.skipped} == {"45"}


def test_a_block_of_mtp_behind_the_layers_of_qwen3_next_is_left_out(tmp_path):
    changed = {"nextn_predict_layers": 1, "attention.recurrent_layers": [i % 4 != 3 for i in range(47)] + [False]}
    spec = open_spec(write(tmp_path / "mtp.gguf", QWEN3_NEXT_80B, changed=changed))
    assert spec.n_layers == 47
    assert {name.split(".")[1] for name in spec.skipped} == {"47"}


def test_a_dense_family_refuses_experts():
    files = golden("qwen3").files
    with pytest.raises(GgufError, match=r"qwen3\.expert_count: is not 0"):
        read_spec(dataclasses.replace(files, metadata={**files.metadata, "qwen3.expert_count": 8}))


VALUES = st.one_of(
    st.sampled_from([0, 1, 2, 3, 63, 64, 2**31 - 1, 2**31, 2**64 - 1, -1, -(2**63)]),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(-3, 70), max_size=9),
    st.lists(st.booleans(), max_size=9),
    st.lists(st.floats(), max_size=4),
    st.lists(st.lists(st.integers(), max_size=2), max_size=9),
)


@settings(max_examples=500, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(
        [
            "qwen3",
            "qwen35",
            "qwen35moe",
            "qwen3next",
            "gemma4_e2b",
            "gemma4_moe",
            "laguna",
            "granite",
            "granitemoe",
            "mistral3",
            "glm4moe",
            "gpt_oss",
        ]
    ),
)
def test_hostile_metadata_raises_gguferror_or_yields_a_valid_spec(data, name):
    files = golden(name).files
    prefix = golden(name).architecture + "."
    keys = [k for k in files.metadata if k.startswith(prefix)]
    changes = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=3))
    removed = data.draw(st.sets(st.sampled_from(keys), max_size=2))
    values = {k: v for k, v in files.metadata.items() if k not in removed} | changes
    message = ""
    try:
        spec = read_spec(dataclasses.replace(files, metadata=values))
    except GgufError as error:
        message = str(error)
    assert len(message) < 2000
    if message:
        return
    assert 1 <= spec.n_layers <= golden(name).n_layers
    assert spec.legal_boundary(0)
    assert spec.legal_boundary(spec.n_layers)
    assert spec.params.eps > 0
    for layer in spec.layers:
        assert (layer.window > 0) == (layer.kv_group is KvGroup.WINDOW)
        assert layer.shares_with is None or spec.layers[layer.shares_with].kv_group is layer.kv_group


def test_every_family_has_a_golden_file():
    assert {golden(name).architecture for name in FILES + EMBEDDERS} == set(FAMILIES)
