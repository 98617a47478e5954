"""LoRA adapters for tests: random ones, and the files of models that they are merged into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

from bench.gguf_writing import finish
from lucevisor.model.lora_files import EMBEDDING, shard_matrices
from lucevisor.model.spec import ModelSpec
from lucevisor.model.values import LayerRange

Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""a and b by tensor of the model."""


def random_pairs(spec: ModelSpec, rank: int, seed: int, names: Sequence[str] = ()) -> Pairs:
    """Pairs for all matrices, or those whose names end as one of ``names``, that change logits a good deal."""
    rng = np.random.default_rng(seed)
    pairs = {}
    matrices = shard_matrices(spec, LayerRange(0, spec.n_layers), embedding=True, output=True)
    for name, (n_out, width) in matrices.items():
        if names and not name.endswith(tuple(names)):
            continue
        shapes = ((n_out, rank), (width, rank)) if name == EMBEDDING else ((rank, width), (n_out, rank))
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in shapes)
        pairs[name] = a, b / np.float32(np.sqrt(width))
    return pairs


def write_adapter(
    path: Path, architecture: str, pairs: Pairs, alpha: float = 0.0, more: Mapping[str, str] | None = None,
    dtype: np.dtype | type = np.float32,
) -> Path:  # fmt: skip
    """Write the file of an adapter; ``more``: metadata in place of what is right."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in ({"general.type": "adapter", "adapter.type": "lora"} | dict(more or {})).items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, (a, b) in pairs.items():
        writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a.astype(dtype)))
        writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b.astype(dtype)))
    finish(writer)
    return path


def delta(pairs: Pairs, name: str, factor: float) -> np.ndarray:
    """What an adapter adds to a matrix."""
    a, b = (x.astype(np.float64) for x in pairs[name])
    return factor * (a @ b.T if name == EMBEDDING else b @ a)


def write_merged(path: Path, model: Path, pairs: Pairs, factor: float) -> Path:
    """Write a float32 model with what an adapter adds.  The output keeps a token table that it shares."""
    reader = GGUFReader(model)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=sub)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    if EMBEDDING in pairs and "output.weight" not in tensors:
        tensors["output.weight"] = tensors[EMBEDDING]
    for name, data in tensors.items():
        if name in pairs:
            data = (data.astype(np.float64) + delta(pairs, name, factor)).astype(np.float32)
        writer.add_tensor(name, np.ascontiguousarray(data))
    finish(writer)
    return path
