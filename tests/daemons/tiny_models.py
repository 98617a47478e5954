"""Writes small random models with the gguf library: other shapes and storage types than the golden files have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np


@dataclass(frozen=True)
class Tiny:
    """Shapes of a qwen35 file whose rows are whole 256-blocks, so that every quant type fits."""

    n_layers: int = 4
    embedding: int = 256
    feed_forward: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_rotary: int = 16
    n_key: int = 2
    n_value: int = 4
    dim: int = 64
    vocabulary: int = 320
    tied: bool = True
    interval: int = 2


# offsets of the float16 scales inside a block: random bytes there would be NaN or 60000
_SCALES = {
    "Q4_0": [0],
    "Q8_0": [0],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "Q5_0": [0],
    "IQ4_NL": [0],
    "Q4_1": [0, 2],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "IQ4_XS": [0],
    "MXFP4": [],
    "IQ2_XXS": [0],
    "IQ3_S": [0],
}

_SIZES = {
    "Q8_0": 1 / 64, "Q6_K": 1 / 1500, "Q4_K": 1 / 250, "Q5_K": 1 / 500, "IQ4_NL": 1 / 64, "Q5_0": 1 / 10,
    "Q4_1": 1 / 10, "Q5_1": 1 / 20, "Q2_K": 1 / 15, "Q3_K": 1 / 40, "IQ4_XS": 1 / 1200, "IQ2_XXS": 1 / 90,
    "IQ3_S": 1 / 90,
}  # fmt: skip
"""Scale that makes numbers of about 1."""


def random_blocks(rng: np.random.Generator, kind: str, rows: int, columns: int, size: float = 0.05) -> np.ndarray:
    """Random bytes of a quant type ``[rows, row_bytes]`` whose scales make numbers of about ``size``."""
    quant = gguf.GGMLQuantizationType[kind]
    elements, n_bytes = gguf.GGML_QUANT_SIZES[quant]
    raw = rng.integers(0, 256, (rows, columns // elements, n_bytes), dtype=np.uint8)
    per = _SIZES.get(kind, 1 / 5)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(119, 122, raw.shape[:2])  # powers of two of 2^-9 to 2^-7
    for at in _SCALES[kind]:
        scale = (rng.uniform(0.5, 1.5, raw.shape[:2]) * size * per).astype(np.float16)
        raw[..., at : at + 2] = scale.view(np.uint8).reshape(*raw.shape[:2], 2)
    return raw.reshape(rows, -1)


def tensors(t: Tiny) -> dict[str, tuple[int, ...]]:
    """Names and row-major shapes of all tensors."""
    e, f, d = t.embedding, t.feed_forward, t.head_dim
    channels = (2 * t.n_key + t.n_value) * t.dim
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (t.vocabulary, e), "output_norm.weight": (e,)}
    if not t.tied:
        out["output.weight"] = (t.vocabulary, e)
    for i in range(t.n_layers):
        b = f"blk.{i}."
        out |= {b + "attn_norm.weight": (e,), b + "post_attention_norm.weight": (e,)}
        if (i + 1) % t.interval:
            out |= {
                b + "attn_qkv.weight": (channels, e),
                b + "attn_gate.weight": (t.n_value * t.dim, e),
                b + "ssm_beta.weight": (t.n_value, e),
                b + "ssm_alpha.weight": (t.n_value, e),
                b + "ssm_a": (t.n_value,),
                b + "ssm_dt.bias": (t.n_value,),
                b + "ssm_conv1d.weight": (channels, 4),
                b + "ssm_norm.weight": (t.dim,),
                b + "ssm_out.weight": (e, t.n_value * t.dim),
            }
        else:
            out |= {
                b + "attn_q.weight": (2 * t.n_heads * d, e),
                b + "attn_k.weight": (t.n_kv_heads * d, e),
                b + "attn_v.weight": (t.n_kv_heads * d, e),
                b + "attn_output.weight": (e, t.n_heads * d),
                b + "attn_q_norm.weight": (d,),
                b + "attn_k_norm.weight": (d,),
            }
        out |= {b + "ffn_gate.weight": (f, e), b + "ffn_up.weight": (f, e), b + "ffn_down.weight": (e, f)}
    return out


def write(path: Path, t: Tiny, kinds: list[str], *, expand: bool = False, seed: int = 0, split: int = 0) -> Path:
    """Write a qwen35 file whose matrices take ``kinds`` in turn.  ``expand``: the same numbers, stored as F32;
    ``split``: so many tensors a file, named ``-00001-of-0000N``.
    """
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, "qwen35", split_max_tensors=split)
    numbers = {
        "block_count": t.n_layers, "context_length": 4096, "embedding_length": t.embedding,
        "feed_forward_length": t.feed_forward, "attention.head_count": t.n_heads,
        "attention.head_count_kv": t.n_kv_heads, "attention.key_length": t.head_dim,
        "attention.value_length": t.head_dim, "rope.dimension_count": t.n_rotary,
        "full_attention_interval": t.interval, "ssm.conv_kernel": 4, "ssm.state_size": t.dim,
        "ssm.group_count": t.n_key, "ssm.time_step_rank": t.n_value, "ssm.inner_size": t.n_value * t.dim,
    }  # fmt: skip
    for key, number in numbers.items():
        w.add_uint32(f"qwen35.{key}", number)
    w.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    w.add_float32("qwen35.rope.freq_base", 10000.0)
    turn = 0
    for name, shape in tensors(t).items():
        if len(shape) == 1 or "conv1d" in name:
            x = rng.normal(0, 0.1, shape).astype(np.float32)
            if name.endswith("norm.weight"):
                x += 1
            elif name.endswith("ssm_a"):
                x = -np.abs(x) - 0.1
            w.add_tensor(name, x)
            continue
        kind = kinds[turn % len(kinds)]
        turn += 1
        _add_matrix(w, name, shape, kind, rng, expand)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def _add_matrix(
    w: gguf.GGUFWriter, name: str, shape: tuple[int, ...], kind: str, rng: np.random.Generator, expand: bool
) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    if kind in _SCALES:
        raw = random_blocks(rng, kind, *shape)
    else:
        x = rng.normal(0, 0.05, shape).astype(np.float32)
        raw = x if kind == "F32" else gguf.quants.quantize(x, quant)
    if expand:
        x = raw if kind == "F32" else gguf.quants.dequantize(raw, quant).astype(np.float32)
        w.add_tensor(name, np.ascontiguousarray(x.reshape(shape)))
    else:
        w.add_tensor(name, raw, raw_dtype=None if kind == "F32" else quant)
