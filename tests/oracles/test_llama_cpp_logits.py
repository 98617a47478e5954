"""Our float32 cpu logits beside llama.cpp's, at every position: the golden files, the demo model, random models of many
shapes, and random models in every mix that llama.cpp quantises to.

Differences are the largest of any logit at any position.  llama.cpp rounds the activations that meet a quantised
matrix (to 8 bits; to half precision for F16 and BF16), so its run of a quantised file is not float32 arithmetic.  Its
run of the same numbers in F32 is: the file, dequantised by llama.cpp itself.  That is what ours must agree with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import NATIVE
from lucevisor.text.tokenizer import Tokenizer
from tests.families.generate import FAMILIES
from tests.families.pipeline import Pipeline, load_stages
from tests.families.test_generated import ALL, made_with_clear_choices
from tests.oracles.gelu import gelu_of
from tests.oracles.peer import Peer, PeerError
from tests.oracles.random_models import MODELS, VOCABULARY, write, write_made
from tests.text.vocabularies import DEMO_GGUF, ROOT, demo_metadata

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-2
"""A choice, not a bound: how llama.cpp orders its sums and approximates exp is its own affair and changes with its
version, so tests/numerics.py does not model it.  Measured are 6e-6 to 3.5e-4, with a stock build up to 6.6e-3
(docs/families.md).  Wrong formulas start at 0.024 (docs/numerics.md).
"""
STOCK_GELU = 6e-2
"""How far Gemma's logits may be from a llama.cpp whose GELU is the half-precision table: a choice as well.  The table
rounds argument and result of each GELU to 11 bits; 3.7e-2 was measured.
"""
GOLDEN = ROOT / "tests/data/golden"
FILES = ("qwen3", "qwen35", "qwen35_mtp", "qwen35moe", "gemma4_e2b", "gemma4_moe", "laguna", "laguna_mscale")
"""Ours computes ``laguna`` by the formula for YaRN's factor here; llama.cpp knows nothing else."""
IDS = [(i * 31 + 7) % VOCABULARY for i in range(80)]

MIXES = {
    **{kind: kind for kind in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q6_K", "IQ4_NL")},
    **{"Q3_K_M": "Q3_K", "Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "IQ4_XS": "IQ4_XS", "MXFP4_MOE": "MXFP4"},
    **{"IQ3_S": "IQ3_S", "TQ2_0": "TQ2_0"},
}
"""llama-quantize's name of a mix, and the type that it is named for.  The last two are not native to us: converted at
load.
"""

REFUSALS = {
    "GGML_ASSERT(buffer)": "a hybrid without any attention layer",
    "map_layer_ids.find(il_reuse)": "Gemma 4 whose last owning layers are not a sliding one and then a full one",
    "is_swa_any()": "a window in the file and no sliding layer",
}
"""What llama.cpp does not open, by words of its message."""


def ours(path: Path, ids: list[int]) -> np.ndarray:
    spec = open_spec(path)
    pipeline = Pipeline(spec, load_stages(spec))
    pipeline.open(0)
    return pipeline.run((0, ids)).numpy()


def beta_fast_of(path: Path) -> float | None:
    """What llama.cpp must be told of a file: see the last test."""
    found = [field.contents() for key, field in GGUFReader(path).fields.items() if key.endswith("yarn_beta_fast")]
    return found[0] if found else None


def apart(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    return float(np.abs(a - b).max())


def golden_ids(name: str) -> list[int]:
    with np.load(GOLDEN / name / "golden.npz") as z:
        return z["input_ids"].tolist()


def types_of(path: Path) -> set[str]:
    return {tensor.tensor_type.name for tensor in GGUFReader(path).tensors}


@pytest.fixture(scope="session")
def stock(here, tmp_path_factory) -> bool:
    """Whether this llama.cpp takes GELU from its table: it is nearer to one of the two by far."""
    path, ids = GOLDEN / "gemma4_moe/model.gguf", golden_ids("gemma4_moe")
    [theirs] = Peer(tmp_path_factory.mktemp("stock")).logits(ids, path)
    with gelu_of(stock=True):
        table = apart(ours(path, ids), theirs)
    exact = apart(ours(path, ids), theirs)
    assert min(table, exact) < 0.5 * max(table, exact)
    return table < exact


@pytest.mark.parametrize("name", FILES)
def test_golden_files(name, peer, stock, measured):
    path, ids = GOLDEN / name / "model.gguf", golden_ids(name)
    [theirs] = peer.logits(ids, path)
    exact = apart(ours(path, ids), theirs)
    if not (stock and name.startswith("gemma4")):
        measured[name] = f"{exact:.1e}"
        assert exact < TOLERANCE
        return
    with gelu_of(stock):
        found = apart(ours(path, ids), theirs)
    measured[name] = f"{found:.1e} with GELU by ggml's table, {exact:.1e} without"
    assert found < TOLERANCE
    assert exact < STOCK_GELU


@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_of_many_shapes(family, peer, stock, measured):
    """The same models as against transformers; each agrees, or is refused for a reason that is known."""
    worst, opened = 0.0, 0
    for seed in range(ALL):
        made, ids, _, _ = made_with_clear_choices(family, seed)
        path = write_made(peer.folder / "model.gguf", made)
        try:
            [theirs] = peer.logits(ids, path, beta_fast=beta_fast_of(path))
        except PeerError as error:
            if any(words in str(error) for words in REFUSALS):
                continue
            raise
        with gelu_of(stock):
            difference = apart(ours(path, ids), theirs)
        assert difference < TOLERANCE, f"seed {seed}"
        worst, opened = max(worst, difference), opened + 1
    measured[f"random {family}"] = f"{worst:.1e}, {opened} of {ALL} models opened"
    assert opened >= ALL // 2


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("name", MODELS)
def test_quantised_files(name, mix, peer, stock, measured):
    if mix == "MXFP4_MOE" and "expert_count" not in MODELS[name].metadata:
        pytest.skip("llama.cpp gives MXFP4 to experts only, and this model has none")
    source, quantised, expanded = (peer.folder / f"{n}.gguf" for n in ("source", "quantised", "expanded"))
    peer.quantize(write(source, MODELS[name]), (quantised, mix), (expanded, "F32"))
    assert MIXES[mix] in types_of(quantised)
    assert types_of(expanded) == {"F32"}
    compare(f"{name} {mix}", quantised, expanded, IDS, peer, stock, measured)


def test_the_mixes_hold_every_native_type():
    assert set(MIXES.values()) >= NATIVE


def test_the_demo_model(peer, stock, measured):
    text = (ROOT / "etc/demo/recipe/README.md").read_text()
    ids = Tokenizer.from_gguf(demo_metadata()).encode(text)[:300]
    expanded = peer.folder / "expanded.gguf"
    peer.quantize(DEMO_GGUF, (expanded, "F32"))
    compare("demo model Q4_K_M", DEMO_GGUF, expanded, ids, peer, stock, measured)


def compare(label: str, quantised: Path, expanded: Path, ids: list[int], peer: Peer, stock: bool, measured) -> None:
    """Ours of the quantised file with theirs of the same numbers in F32, and with theirs of the file itself."""
    theirs, exact = peer.logits(ids, quantised, expanded, beta_fast=beta_fast_of(quantised))
    with gelu_of(stock):
        found = ours(quantised, ids)
    to_exact, to_theirs, own = apart(found, exact), apart(found, theirs), apart(exact, theirs)
    measured[label] = (
        f"{to_exact:.1e} from its float32 run; from its quantised run {to_theirs:.2g}, as its float32 run is: {own:.2g}"
        f" (logits spread {exact.std():.2g})"
    )
    assert to_exact < TOLERANCE
    assert to_theirs < own + TOLERANCE


def test_llama_cpp_does_not_read_how_fast_laguna_turns(peer, measured):
    """``rope.scaling.yarn_beta_fast``: transformers and we obey it, llama.cpp takes 32 whatever a Laguna file says."""
    model = MODELS["laguna"]
    assert model.metadata["rope.scaling.yarn_beta_fast"] == 64.0
    says_32 = replace(model, metadata=model.metadata | {"rope.scaling.yarn_beta_fast": 32.0})
    slow, fast = write(peer.folder / "32.gguf", says_32), write(peer.folder / "64.gguf", model)
    theirs_slow, theirs_fast = peer.logits(IDS, slow, fast)
    [told] = peer.logits(IDS, fast, beta_fast=64.0)
    assert np.array_equal(theirs_slow, theirs_fast)
    assert apart(ours(slow, IDS), theirs_slow) < TOLERANCE
    assert apart(ours(fast, IDS), told) < TOLERANCE
    distance = apart(ours(fast, IDS), theirs_fast)
    measured["laguna, yarn_beta_fast 64 against llama.cpp's 32"] = f"{distance:.2g}"
    assert distance > 0.1
