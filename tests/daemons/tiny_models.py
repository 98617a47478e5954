"""Writes small random models with the gguf library: other shapes and storage types than the golden files have."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import gguf
import numpy as np

from bench.gguf_writing import finish, new_file
from tests.families.shapes import Model, kind_of
from tests.model import qwen35_file

Tiny = partial(qwen35_file.Shape, n_layers=4, feed_forward=256, vocabulary=320, tied=True, interval=2)
"""Shapes of a qwen35 file whose rows are whole 256-blocks, so that every quant type fits."""

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
    **{kind: [0] for kind in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    "IQ1_M": [],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "NVFP4": [],
}

_SIZES = {
    "Q8_0": 1 / 64, "Q6_K": 1 / 1500, "Q4_K": 1 / 250, "Q5_K": 1 / 500, "IQ4_NL": 1 / 64, "Q5_0": 1 / 10,
    "Q4_1": 1 / 10, "Q5_1": 1 / 20, "Q2_K": 1 / 15, "Q3_K": 1 / 40, "IQ4_XS": 1 / 1200, "IQ2_XXS": 1 / 90,
    "IQ3_S": 1 / 90, "IQ2_XS": 1 / 90, "IQ2_S": 1 / 90, "IQ3_XXS": 1 / 120, "IQ1_S": 1 / 6, "IQ1_M": 1 / 6,
    "TQ1_0": 1, "TQ2_0": 1,
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
    if kind == "NVFP4":
        raw[..., :4] = rng.integers(8, 16, raw[..., :4].shape)  # 2^-6 to 2^-5

    def scales() -> np.ndarray:
        return (rng.uniform(0.5, 1.5, raw.shape[:2]) * size * per).astype(np.float16)

    for at in _SCALES[kind]:
        raw[..., at : at + 2] = scales().view(np.uint8).reshape(*raw.shape[:2], 2)
    if kind == "IQ1_M":  # a nibble in each of the last four words
        scale = scales().view(np.uint16)
        for i in range(4):
            raw[..., 49 + 2 * i] = raw[..., 49 + 2 * i] & 15 | scale >> 4 * i << 4 & 0xF0
    return raw.reshape(rows, -1)


def write(path: Path, shape: qwen35_file.Shape, kinds: list[str], **how: int) -> Path:
    """Write a qwen35 file; ``how`` as in write_data."""
    model = Model(shape.architecture, qwen35_file.metadata(shape), qwen35_file.tensors(shape))
    return write_data(path, model, kinds, **how)  # type: ignore[arg-type]


def write_data(
    path: Path, model: Model, kinds: list[str], *, expand: bool = False, seed: int = 0, split: int = 0
) -> Path:
    """Write ``model`` with random numbers; its matrices take ``kinds`` in turn.  ``expand``: the same numbers in F32;
    ``split``: so many tensors a file, named ``-00001-of-0000N``.
    """
    rng = np.random.default_rng(seed)
    writer = new_file(path, model.architecture, model.metadata, split=split)
    turn = 0
    for name, shape in model.tensors.items():
        if kind_of(name, shape, "Q8_0") is gguf.GGMLQuantizationType.F32 or "conv1d" in name:
            writer.add_tensor(name, _vector(name, shape, rng))
            continue
        kind = "BF16" if name == "per_layer_model_proj.weight" else kinds[turn % len(kinds)]
        turn += kind != "BF16"
        _add_matrix(writer, name, shape, (kind, expand), rng)
    finish(writer)
    return path


def _vector(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    x = rng.normal(0.0, 0.1, shape).astype(np.float32)
    if name == "rope_freqs.weight":
        x = np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30).astype(np.float32)
    elif "norm" in name or name.endswith("scale.weight") or name.endswith(".scale"):
        x += 1.0
    elif name.endswith("ssm_a"):
        x = -np.abs(x) - np.float32(0.1)
    return x


def _add_matrix(
    writer: gguf.GGUFWriter, name: str, shape: tuple[int, ...], form: tuple[str, bool], rng: np.random.Generator
) -> None:
    kind, expand = form
    quant = gguf.GGMLQuantizationType[kind]
    n_rows = int(np.prod(shape[:-1]))
    if kind in ("F32", "F16", "BF16"):
        x = rng.normal(0.0, 0.06, (n_rows, shape[-1])).astype(np.float32)
        raw = gguf.quants.quantize(x, quant)
    else:
        raw = random_blocks(rng, kind, n_rows, shape[-1], 0.06)
    if expand:
        numbers = gguf.quants.dequantize(raw, quant).astype(np.float32)
        writer.add_tensor(name, np.ascontiguousarray(numbers.reshape(shape)))
    else:
        writer.add_tensor(name, raw.reshape(*shape[:-1], -1), raw_dtype=quant)
