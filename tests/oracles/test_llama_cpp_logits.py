"""Our float32 cpu logits beside llama.cpp's, at every position: the golden files, the demo model, random models of many
shapes, and random models in every mix that llama.cpp quantises to.

Each row must be as near as rounding explains (``tests/oracles/rounding.py``).  llama.cpp rounds the activations that
meet a quantised matrix (to 8 bits; to half precision for F16 and BF16), so its run of a quantised file is not float32
arithmetic.  Its run of the same numbers in F32 is: the file, dequantised by llama.cpp itself.  That is what ours must
agree with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGUFReader
from torch import Tensor

from bench.gguf_writing import Value, finish, new_file
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import NATIVE
from lucevisor.model.spec import ModelSpec
from lucevisor.text.tokenizer import Tokenizer
from tests.families.generate import FAMILIES
from tests.families.generate.made import Made
from tests.families.generate.qwen import divided
from tests.families.pipeline import Pipeline, load_stages
from tests.families.rounding import UnclearChoiceError
from tests.families.shapes import SMALL_GEMMA4_EXPERTS, SMALL_GEMMA4_INPUTS, SMALL_LAGUNA, Model
from tests.families.test_generated import ALL, made_with_clear_choices
from tests.model import qwen35_file
from tests.numerics import Bound
from tests.oracles.peer import Peer, PeerError
from tests.oracles.rounding import bound_between
from tests.text.vocabularies import DEMO_GGUF, ROOT, demo_metadata

VOCABULARY = 320
_DENSE = qwen35_file.Shape(n_layers=4, feed_forward=256, vocabulary=VOCABULARY)
_HYBRID = qwen35_file.Shape(n_layers=4, feed_forward=256, vocabulary=VOCABULARY, n_experts=5, n_used=2)


def qwen3() -> Model:
    """Three layers, tied."""
    e, f, n_heads, n_kv_heads, d = 256, 512, 4, 2, 64
    t: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, e), "output_norm.weight": (e,)}
    for b in ("blk.0.", "blk.1.", "blk.2."):
        t |= {b + n: (e,) for n in ("attn_norm.weight", "ffn_norm.weight")}
        t |= {b + n: (d,) for n in ("attn_q_norm.weight", "attn_k_norm.weight")}
        t |= {b + f"attn_{n}.weight": (n_kv_heads * d, e) for n in "kv"}
        t |= {b + "attn_q.weight": (n_heads * d, e), b + "attn_output.weight": (e, n_heads * d)}
        t |= {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
    metadata = {
        "block_count": 3,
        "context_length": 4096,
        "embedding_length": e,
        "feed_forward_length": f,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": d,
        "attention.value_length": d,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    return Model("qwen3", metadata, t)


def hybrid(shape: qwen35_file.Shape) -> Model:
    sections = {"rope.dimension_sections": [3, 3, 2, 0]}
    return Model(shape.architecture, qwen35_file.metadata(shape) | sections, qwen35_file.tensors(shape))


MODELS = {
    "qwen3": qwen3(),
    "qwen35": hybrid(_DENSE),
    "qwen35moe": hybrid(_HYBRID),
    "gemma4 with per-layer inputs": SMALL_GEMMA4_INPUTS,
    "gemma4 with experts": SMALL_GEMMA4_EXPERTS,
    "laguna": SMALL_LAGUNA,
}


def write(path: Path, model: Model, seed: int = 0) -> Path:
    """The file of ``model`` in F32."""
    rng = np.random.default_rng(seed)
    tensors = {name: _numbers(name, shape, rng).astype(np.float32) for name, shape in model.tensors.items()}
    return write_file(path, model.architecture, model.metadata, tensors)


def write_made(path: Path, made: Made) -> Path:
    """A model of the generator, as llama.cpp wants it: it lacks what llama.cpp insists on and we do not read."""
    metadata, tensors = made.metadata, made.tensors
    if made.architecture.startswith("qwen35"):
        pairs = int(metadata["rope.dimension_count"]) // 2
        height, width = (pairs + 1) // 3, pairs // 3
        # every third pair turns with the height, every third with the width, as in published models
        metadata = metadata | {"rope.dimension_sections": [pairs - height - width, height, width, 0]}
    if made.architecture == "laguna":
        tensors = divided(tensors)
    arrays = {n: np.ascontiguousarray(t.detach().to(torch.float32).numpy()) for n, t in tensors.items()}
    return write_file(path, made.architecture, metadata, arrays)


def write_file(path: Path, architecture: str, metadata: Mapping[str, Value], tensors: Mapping[str, np.ndarray]) -> Path:
    writer = new_file(path, architecture, metadata)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(len(tensors["token_embd.weight"]))
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers)
    finish(writer)
    return path


def _numbers(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Matrices by their width, norms and scales near one, decays negative; frequencies of which some stand still."""
    if name == "rope_freqs.weight":
        return np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30)
    x = rng.normal(0.0, 1.0, shape)
    if "norm" in name or name.endswith(("scale.weight", ".scale")):
        return 1.0 + 0.15 * x
    if name.endswith("ssm_a"):
        return -0.1 - np.abs(x)
    if len(shape) > 1 and "embd" not in name:
        return x * (1.3 / math.sqrt(2 if "conv1d" in name else shape[-1]))
    return 0.2 * x if len(shape) == 1 else x


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

GOLDEN = ROOT / "tests/data/golden"
FILES = (
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
)
FILES += ("gemma3", "gemma4_e2b", "gemma4_moe", "laguna", "laguna_mscale")
"""Ours computes ``laguna`` by the formula for YaRN's factor here; llama.cpp knows nothing else.  Not ``gpt_oss``, as it
rounds the ends of YaRN's ramp.
"""
N_TOKENS = 80

MIXES = {
    **{kind: kind for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_NL")},
    **{"Q3_K_M": "Q3_K", "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "IQ4_XS": "IQ4_XS", "MXFP4_MOE": "MXFP4"},
    **{kind: kind for kind in ("IQ3_S", "TQ1_0", "TQ2_0")},
}
"""llama-quantize's name of a mix, and the type that it is named for."""
BY_IMPORTANCE = {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
"""Types whose mixes llama-quantize makes with an importance matrix only."""

REFUSALS = {
    "GGML_ASSERT(buffer)": "a hybrid without any attention layer",
    "map_layer_ids.find(il_reuse)": "Gemma 4 whose last owning layers are not a sliding one and then a full one",
    "is_swa_any()": "a window in the file and no sliding layer",
}
"""What llama.cpp does not open, by words of its message."""


def ours(spec: ModelSpec, ids: list[int]) -> Tensor:
    pipeline = Pipeline(spec, load_stages(spec))
    pipeline.open(0)
    return pipeline.run((0, ids))


def apart(found: Tensor, theirs: np.ndarray, bound: Bound) -> tuple[float, str]:
    """How far ours is from theirs, in parts of what rounding explains, and that for the table of results."""
    wanted = torch.from_numpy(theirs)
    assert found.shape == wanted.shape
    worst = bound.worst(found, wanted)
    return worst, f"{worst:.2f} of what rounding explains ({float((found - wanted).abs().max()):.1e})"


def assert_near(
    label: str, spec: ModelSpec, ids: list[int], theirs: np.ndarray, bound: Bound, measured, more=""
) -> None:
    worst, text = apart(ours(spec, ids), theirs, bound)
    measured[label] = text + more
    assert worst <= 1.0, f"{label}: {text}"


def beta_fast_of(path: Path) -> float | None:
    """What llama.cpp must be told of a file: see the last test."""
    found = [field.contents() for key, field in GGUFReader(path).fields.items() if key.endswith("yarn_beta_fast")]
    return found[0] if found else None


def golden_ids(name: str) -> list[int]:
    with np.load(GOLDEN / name / "golden.npz") as z:
        return z["input_ids"].tolist()


def types_of(path: Path) -> set[str]:
    return {tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


def with_bound(path: Path) -> tuple[ModelSpec, list[int], Bound]:
    """A model, and the first tokens whose choices of experts do not hang on rounding."""
    spec = open_spec(path)
    for first in count(7):
        ids = [(i * 31 + first) % VOCABULARY for i in range(N_TOKENS)]
        with suppress(UnclearChoiceError):
            return spec, ids, bound_between(spec, ids)
    raise AssertionError


@pytest.mark.parametrize("name", FILES)
def test_golden_files(name, peer, measured):
    spec, ids = open_spec(GOLDEN / name / "model.gguf"), golden_ids(name)
    [theirs] = peer.logits(ids, GOLDEN / name / "model.gguf")
    assert_near(name, spec, ids, theirs, bound_between(spec, ids), measured)


@pytest.mark.parametrize("name", ["gemma4_e2b", "gemma4_moe"])
def test_the_smallest_wrong_formula_is_outside(name, peer, measured, monkeypatch):
    """GELU's erf form for its tanh form, on our side."""
    spec, ids = open_spec(GOLDEN / name / "model.gguf"), golden_ids(name)
    [theirs] = peer.logits(ids, GOLDEN / name / "model.gguf")
    bound, gelu = bound_between(spec, ids), F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: gelu(x))
    worst, measured[f"{name} with erf for tanh"] = apart(ours(spec, ids), theirs, bound)
    assert worst > 1


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt-oss"])
def test_random_models_of_many_shapes(family, peer, measured):
    """The same models as against transformers; each agrees, or is refused for a reason that is known."""
    worst, opened = (0.0, ""), 0
    for seed in range(ALL):
        found = random_model(family, seed, peer)
        if found is not None:
            spec, ids, theirs, bound = found
            worst, opened = max(worst, apart(ours(spec, ids), theirs, bound)), opened + 1
            assert worst[0] <= 1.0, f"seed {seed}: {worst[1]}"
    measured[f"random {family}"] = f"{worst[1]}, {opened} of {ALL} models opened"
    assert opened >= ALL // 2


def random_model(family: str, seed: int, peer: Peer) -> tuple[ModelSpec, list[int], np.ndarray, Bound] | None:
    """A model, tokens, llama.cpp's logits and what is allowed; None: llama.cpp refuses it for a reason we know."""
    path = peer.folder / "model.gguf"
    for first in count(seed, 1000):
        made, ids, _, _ = made_with_clear_choices(family, first)
        write_made(path, made)
        try:
            [theirs] = peer.logits(ids, path, beta_fast=beta_fast_of(path))
        except PeerError as error:
            if any(words in str(error) for words in REFUSALS):
                return None
            raise
        spec = open_spec(path)
        with suppress(UnclearChoiceError):
            return spec, ids, theirs, bound_between(spec, ids)
    raise AssertionError


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_files(name, mix, peer, measured):
    if mix == "MXFP4_MOE" and "expert_count" not in MODELS[name].metadata:
        pytest.skip("llama.cpp gives MXFP4 to experts only, and this model has none")
    source, quantised, expanded = (peer.folder / f"{n}.gguf" for n in ("source", "quantised", "expanded"))
    peer.quantize(write(source, MODELS[name]), (quantised, mix), (expanded, "F32"))
    assert MIXES[mix] in types_of(quantised)
    assert types_of(expanded) == {"F32"}
    assert_near_its_float32_run(f"{name} {mix}", quantised, expanded, with_bound(quantised), peer, measured)


def test_the_mixes_hold_every_native_type():
    assert set(MIXES.values()) >= NATIVE - BY_IMPORTANCE


def test_the_demo_model(peer, measured):
    text = (ROOT / "etc/demo/recipe/README.md").read_text()
    spec, ids = open_spec(DEMO_GGUF), Tokenizer.from_gguf(demo_metadata()).encode(text)[:300]
    expanded = peer.folder / "expanded.gguf"
    peer.quantize(DEMO_GGUF, (expanded, "F32"))
    found = spec, ids, bound_between(spec, ids)
    assert_near_its_float32_run("demo model Q4_K_M", DEMO_GGUF, expanded, found, peer, measured)


def assert_near_its_float32_run(
    label: str, quantised: Path, expanded: Path, model: tuple[ModelSpec, list[int], Bound], peer: Peer, measured
) -> None:
    """Ours of the quantised file beside theirs of the same numbers in F32.  How far theirs of the file itself is from
    that is told, not tested: it is llama.cpp's own affair.
    """
    spec, ids, bound = model
    theirs, exact = peer.logits(ids, quantised, expanded, beta_fast=beta_fast_of(quantised))
    own = f"; its rounding of activations: {np.abs(exact - theirs).max():.2g} (logits spread {exact.std():.2g})"
    assert_near(label, spec, ids, exact, bound, measured, own)


def test_llama_cpp_does_not_read_how_fast_laguna_turns(peer, measured):
    """``rope.scaling.yarn_beta_fast``: transformers and we obey it, llama.cpp takes 32 whatever a Laguna file says."""
    model = MODELS["laguna"]
    assert model.metadata["rope.scaling.yarn_beta_fast"] == 64.0
    says_32 = replace(model, metadata=model.metadata | {"rope.scaling.yarn_beta_fast": 32.0})
    spec, ids, bound = with_bound(write(peer.folder / "64.gguf", model))
    slow, slow_ids, slow_bound = with_bound(write(peer.folder / "32.gguf", says_32))
    assert slow_ids == ids
    theirs_slow, theirs_fast = peer.logits(ids, peer.folder / "32.gguf", peer.folder / "64.gguf")
    [told] = peer.logits(ids, peer.folder / "64.gguf", beta_fast=64.0)
    assert np.array_equal(theirs_slow, theirs_fast)
    assert_near("laguna, yarn_beta_fast 32", slow, ids, theirs_slow, slow_bound, measured)
    assert_near("laguna, yarn_beta_fast 64, llama.cpp told", spec, ids, told, bound, measured)
    worst, measured["laguna, yarn_beta_fast 64, llama.cpp not told"] = apart(ours(spec, ids), theirs_fast, bound)
    assert worst > 1
