"""Which changes to a model file change its fingerprint, and which do not."""

from pathlib import Path

import numpy as np
import pytest

from bench.gguf_writing import finish, new_file
from lucevisor.deployment.weights import digest_tensors
from lucevisor.model import fingerprint as module
from lucevisor.model.families import open_spec
from tests.daemons.tiny_models import Tiny
from tests.model import qwen35_file

GOLDEN = Path(__file__).parents[1] / "data" / "golden"


def fingerprint(spec, options=None):
    return module.fingerprint(spec, digest_tensors(spec.files), options)


def write(path, *, reverse=False, scale=1.0, metadata=(), kind=None, parts=0, unused=""):
    """A small qwen35 file; every difference is asked for."""
    shape = Tiny(n_layers=2)
    rng = np.random.default_rng(0)
    w = new_file(path, "qwen35", qwen35_file.metadata(shape), split=parts)
    w.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    for key, value in metadata:
        w.add_string(key, value)
    arrays = {name: rng.normal(0, 0.1, shape).astype(np.float32) for name, shape in qwen35_file.tensors(shape).items()}
    arrays["blk.1.ffn_down.weight"] *= np.float32(scale)
    if unused:
        arrays[unused] = rng.normal(0, 0.1, (3, 40)).astype(np.float32)
    for name in reversed(arrays) if reverse else arrays:
        x = arrays[name]
        w.add_tensor(name, x.astype(np.float16) if kind == name else x)
    finish(w)
    return sorted(path.parent.glob(path.stem + "*.gguf"))[0]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return fingerprint(open_spec(write(tmp_path_factory.mktemp("model") / "a.gguf")))


def of(tmp_path, **change):
    return fingerprint(open_spec(write(tmp_path / "b.gguf", **change)))


@pytest.mark.parametrize("change", [{}, {"reverse": True}, {"parts": 8}])
def test_neither_the_file_nor_its_order_nor_its_parts_matter(tmp_path, original, change):
    assert len(original) == 64
    assert of(tmp_path, **change) == original
    assert ("parts" in change) == (len(list(tmp_path.glob("*.gguf"))) > 1)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 1.0001},  # a fine-tune: one matrix differs
        {"metadata": [("tokenizer.chat_template", "x")]},
        {"metadata": [("general.name", "another")]},
        {"kind": "blk.0.ffn_up.weight"},
        {"unused": "blk.1.nextn.eh_proj.weight"},
    ],
)
def test_what_makes_it_another_model(tmp_path, original, change):
    assert of(tmp_path, **change) != original


def test_what_computed_a_state_counts_where_its_bits_matter(tmp_path, original):
    spec = open_spec(write(tmp_path / "b.gguf"))
    found = {module.fingerprint(spec, digest_tensors(spec.files), None, by) for by in ((), ["cpu A"], ["cpu B"])}
    assert len(found) == 3
    assert original in found


def test_an_option_counts_only_where_it_has_an_effect():
    laguna, qwen = (GOLDEN / name / "model.gguf" for name in ("laguna_mscale", "qwen35"))
    spec = open_spec(laguna)
    assert "yarn_attn_factor" in spec.options
    plain = fingerprint(spec)
    assert fingerprint(spec, {"yarn_attn_factor": "default"}) == plain
    assert fingerprint(open_spec(laguna, {"yarn_attn_factor": "file"}), {"yarn_attn_factor": "file"}) != plain
    spec = open_spec(qwen)
    assert fingerprint(spec, {"yarn_attn_factor": "file"}) == fingerprint(spec)
