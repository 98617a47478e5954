"""Random models as files that llama.cpp opens: of every family with rows of whole 256-blocks, for it to quantise, and
those of the generator in ``tests/families/generate``.

They have no vocabulary (``tokenizer.ggml.model`` = ``none``): llama.cpp wants the key, and the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from bench.gguf_writing import Value, finish, new_file
from tests.families.generate.made import Made
from tests.families.generate.qwen import divided
from tests.families.shapes import SMALL_GEMMA4_EXPERTS, SMALL_GEMMA4_INPUTS, SMALL_LAGUNA, Model
from tests.model import qwen35_file

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
