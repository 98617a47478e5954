"""The full-size benchmark runs, on small files: right shapes, files that open, a record with every figure."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.make_gguf import SHAPES, layout, write
from lucevisor.model.families import open_spec
from lucevisor.model.quant_types import REPACKED
from lucevisor.model.values import Backend, Dtype, LayerRange
from lucevisor.model.weight_layout import shard_layouts

ROOT = Path(__file__).parents[2]
TINY = [name for name in SHAPES if name.startswith("tiny-") and not name.endswith(("-mtp", "-dflash2"))]


def filled_up(tensor):
    """How much more a matrix takes on a GPU: tiles of 16 rows x 256 columns are filled up."""
    if tensor.kind.name not in REPACKED or len(tensor.shape) < 2:
        return 1
    height, width = tensor.shape[-2:]
    return Fraction(-(-width // 256) * 256, width) * Fraction(-(-height // 16) * 16, height)


@pytest.mark.parametrize("shape", TINY)
def test_files_open_and_every_tensor_is_used(shape, tmp_path):
    path, model = tmp_path / "m.gguf", SHAPES[shape]()
    assert write(path, model) == path.stat().st_size
    spec = open_spec(path)
    assert spec.skipped == ()
    assert (spec.n_layers, spec.vocabulary) == (model.n_layers, model.vocabulary)
    rows, _ = layout(model)
    assert {t.name: t.shape for t in spec.files.tensors.values()} == {name: shape for name, shape, *_ in rows}
    counted = shard_layouts(
        spec, LayerRange(0, spec.n_layers), embedding=True, output=True, backend=Backend.CUDA, dtype=Dtype.BFLOAT16
    )
    assert sum(r.n_bytes for r in counted) == sum(t.n_bytes * filled_up(t) for t in spec.files.tensors.values())
    for t in gguf.GGUFReader(path).tensors:  # weights are small, of both signs, and not all alike
        values = gguf.dequantize(t.data, t.tensor_type)
        assert np.isfinite(values).all()
        if t.tensor_type is not gguf.GGMLQuantizationType.F32:
            assert 0.005 < values.std() < 0.05, t.name
            assert abs(values.mean()) < 0.01, t.name


@pytest.mark.slow
def test_the_benchmark_runs_on_two_cpu_groups(tmp_path, forker):
    command = [
        sys.executable, "-m", "tests.forked_command", "bench/full_size.py",
        "--shape", TINY[0], "--devices", "cpu:0", "cpu:0", "--tokens", "4",
        "--prompt", "70", "--repeats", "1", "--json", str(tmp_path / "out.json"), "--set", "engine.dtype=float32",
        "--file", str(tmp_path / "m.gguf"),
    ]  # fmt: skip
    done = forker.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, timeout_s=100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    for kind in ("cold", "warm"):
        assert [g["layers"] for g in found[kind]["groups"].values()] == [["[0,2)"], ["[2,4)"]]
        for group in found[kind]["groups"].values():
            assert group["load_s"] > 0
            assert group["peak_resident_bytes"] > group["peak_anonymous_bytes"] > 10 << 20
            assert group["host_limit_bytes"] is None
        assert found[kind]["share_of_plain_read"] > 0
    [memory] = found["warm"]["devices"].values()
    assert memory["loaded_weight_bytes"] == memory["planned_weight_bytes"]
    assert memory["loaded_state_bytes"] == memory["planned_state_bytes"]
    assert {key: v["median"] > 0 for key, v in found["warm"]["speed"].items()} == {
        "decode_1_tokens_per_s": True,
        "decode_8_tokens_per_s": True,
        "prefill_tokens_per_s": True,
    }
    assert "prefill_tokens_per_s" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out.json"]


def test_a_counting_model_follows_each_token_with_the_next(tmp_path):
    """Its output matrix is the embedding, one row later; the embedding outweighs the rest."""
    path = tmp_path / "m.gguf"
    write(path, replace(SHAPES["tiny-qwen3.6-27b"](), counting=True))
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    embedding, output = (
        gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        for name in ("token_embd.weight", "output.weight")
    )
    np.testing.assert_array_equal(np.roll(embedding, 1, axis=0), output)
    assert embedding.std() > 30
