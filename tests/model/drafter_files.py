"""Copies of the golden drafters: changed GGUF files, and the same weights as a Hugging Face checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from bench.gguf_writing import add_value, finish

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
TARGET = GOLDEN / "qwen35" / "model.gguf"
"""The model that both DFlash drafters were trained for."""
UPSTREAM = GOLDEN / "dflash" / "drafter-upstream.gguf"
LUCEBOX = GOLDEN / "dflash" / "drafter-lucebox.gguf"
DFLASH2 = GOLDEN / "dflash2" / "drafter.gguf"
MTP = GOLDEN / "qwen35_mtp_draft" / "model.gguf"
LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj.weight": "attention_conv.kernel_projection.weight",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj.weight": "mlp_conv.kernel_projection.weight",
}
OUTSIDE = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
}
DFLASH2_CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 3,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 287,
        "selector_rank": 16,
        "selector_top_k": 6,
        "target_layer_ids": [1, 3, 5],
    },
}
"""What differs from the configuration of golden/dflash."""


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Tensors of an F32 GGUF file."""
    return {t.name: np.array(t.data).reshape(t.shape[::-1]) for t in gguf.GGUFReader(path).tensors}


def copy(
    path: Path,
    source: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    rename: Callable[[str], str | None] = lambda name: name,
    extra: Mapping[str, np.ndarray] | None = None,
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A copy with other metadata (None: without the key), tensors under other names (None: without), and more of them.

    ``kinds``: types to quantise tensors to.
    """
    reader, keys = gguf.GGUFReader(source), dict(keys or {})
    architecture = keys.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in keys:
            continue
        value, kind = field.contents(), field.types
        writer.add_key_value(key, value, kind[0], sub_type=kind[-1] if len(kind) > 1 else None)
    for key, value in keys.items():
        if value is not None:
            add_value(writer, key, value)
    for name, array in (tensors_of(source) | dict(extra or {})).items():
        renamed = rename(name)
        if renamed is not None:
            kind = (kinds or {}).get(renamed)
            if kind is None:
                writer.add_tensor(renamed, array)
            else:
                writer.add_tensor(renamed, gguf.quantize(array, kind), raw_dtype=kind)
    finish(writer)
    return path


def checkpoint(folder: Path, source: Path, config: Mapping[str, Any] | None = None, dtype: str = "F32") -> Path:
    """The drafter ``source`` as config.json and model.safetensors; ``config``: fields to change."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = json.loads((GOLDEN / "dflash" / "hf_config.json").read_text()) | dict(config or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors_of(source).items():
        raw = narrow(array, dtype)
        entries[hf_name(name)] = {
            "dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]
        }  # fmt: skip
        data += raw
    write_safetensors(folder / "model.safetensors", entries, data)
    return folder


def write_safetensors(path: Path, entries: object, data: bytes) -> Path:
    header = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def hf_name(name: str) -> str:
    """The name in the authors' checkpoints of a tensor of llama.cpp's layout."""
    if name.startswith("blk."):
        _, i, rest = name.split(".", 2)
        return f"layers.{i}.{LAYER[rest]}"
    return OUTSIDE[name]


def narrow(array: np.ndarray, dtype: str) -> bytes:
    if dtype == "F32":
        return array.astype("<f4").tobytes()
    if dtype == "F16":
        return array.astype("<f2").tobytes()
    return (array.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()  # BF16, rounded towards zero


def head_alone(path: Path, source: Path = MTP, *, with_ends: bool = False, **changes: Any) -> Path:
    """The MTP head of a model as a file of its own, without or with copies of embedding and output."""
    ends = {"token_embd.weight", "output.weight", "output_norm.weight"} if with_ends else set()
    return copy(
        path, source, rename=lambda name: name if name.startswith("blk.8.") or name in ends else None, **changes
    )
