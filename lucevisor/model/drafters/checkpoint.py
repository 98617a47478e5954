"""A DFlash drafter as a Hugging Face checkpoint (``config.json`` and safetensors), seen as a GGUF file.

Keys and tensors get the names of llama.cpp's converter.  The tensor table is read as strictly as a GGUF header. Source:
https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from lucevisor.model.gguf_files import GgufFiles, OpenFile, part_paths
from lucevisor.model.gguf_header import (
    MAX_DIMENSIONS,
    MAX_NAME_BYTES,
    MAX_TENSORS,
    GgufError,
    TensorInfo,
    Value,
    check_overlap,
)
from lucevisor.model.quant_types import BY_NAME, DENSE

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel")
_REQUIRED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
    "num_target_layers": "num_target_layers",
    "hidden_act": "hidden_act",
    "block_size": "block_size",
    "conv_kernel_size": "conv_kernel_size",
    "conv_group_size": "conv_group_size",
    "selector_rank": "selector_rank",
    "selector_top_k": "selector_top_k",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "is_causal": "attention.causal",
    "causal": "attention.causal",
}
_TENSORS = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
_LAYER_TENSORS = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def checkpoint_paths(path: Path) -> tuple[Path, ...]:
    """The configuration and all parts of the checkpoint in a directory.  Raises GgufError."""
    single = path / WEIGHTS
    if single.exists():
        return (path / CONFIG, single)
    parts = sorted(path.glob("model-00001-of-?????.safetensors"))
    if len(parts) != 1:
        raise GgufError(
            str(path), "directory", f"has neither {WEIGHTS} nor one split model: name a drafter's directory"
        )
    return (path / CONFIG, *part_paths(parts[0]))


def open_checkpoint(paths: Sequence[Path]) -> GgufFiles:
    """Open a checkpoint, the configuration first.  Raises GgufError, OSError."""
    parts = [OpenFile(path) for path in paths]
    metadata = _metadata(parts[0])
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts[1:], 1):
        for name, tensor in _read_header(part, number).items():
            gguf_name = _gguf_name(name)
            if gguf_name in tensors:
                raise GgufError(str(part.path), f"tensor {name!r}", "is twice in the checkpoint: its files do not fit")
            tensors[gguf_name] = tensor
    return GgufFiles(tuple(paths), metadata, tensors, tuple(parts))


def _gguf_name(name: str) -> str:
    """The name in a GGUF file; an unknown one stays, for the reader to refuse."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_TENSORS:
        return f"blk.{layer[1]}.{_LAYER_TENSORS[layer[2]]}"
    return _TENSORS.get(name) or _TENSORS.get(name.removesuffix(".weight"), name)


def _metadata(file: OpenFile) -> dict[str, Value]:
    where = str(file.path)
    if file.n_bytes > MAX_CONFIG_BYTES:
        raise GgufError(where, "file", f"has {file.n_bytes} bytes, at most {MAX_CONFIG_BYTES} are allowed")
    raw = file.read(0, file.n_bytes)
    file.keep_header(raw)
    try:
        config = msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GgufError(where, "file", f"is not a JSON object ({error})") from None
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not any(a in ARCHITECTURES for a in architectures):
        raise GgufError(where, "field 'architectures'", f"is {architectures!r}, known are {', '.join(ARCHITECTURES)}")
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise GgufError(where, "field 'dflash_config'", "is not an object")
    fields = {name: value for name, value in (config | nested).items() if value is not None}
    missing = [name for name in (*_REQUIRED, "mask_token_id") if name not in fields]
    if missing:
        raise GgufError(where, f"field {missing[0]!r}", "is missing: this is not the configuration of a drafter")
    keys = (_REQUIRED | _OPTIONAL).items()
    out: dict[str, Value] = {f"dflash.{key}": fields[name] for name, key in keys if name in fields}
    out |= {"general.architecture": "dflash", "tokenizer.ggml.mask_token_id": fields["mask_token_id"]}
    out["dflash.rope.freq_base"] = _rope_base(where, fields)
    return out | _windows(where, fields) | _captures(where, fields)


def _rope_base(where: str, fields: dict[str, Any]) -> Value:
    """Return the RoPE base, whose place depends on the version of transformers; scaled positions are refused."""
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, dict) else scaling
    if kind != "default":
        raise GgufError(where, "field 'rope_parameters'", f"has type {kind!r}, known is 'default'")
    base: Value | None = fields.get("rope_theta", scaling.get("rope_theta"))
    if base is None:
        raise GgufError(where, "field 'rope_theta'", "is missing")
    return base


def _windows(where: str, fields: dict[str, Any]) -> dict[str, Value]:
    types = fields.get("layer_types", [])
    known_types = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(t not in known_types for t in types):
        raise GgufError(where, "field 'layer_types'", f"is {types!r}, known are {', '.join(known_types)}")
    if "sliding_attention" not in types:
        return {}
    if "sliding_window" not in fields:
        raise GgufError(where, "field 'sliding_window'", "is missing, and layer_types has sliding layers")
    pattern = [t == "sliding_attention" for t in types]
    window: Value = fields["sliding_window"]
    return {"dflash.attention.sliding_window": window, "dflash.attention.sliding_window_pattern": pattern}


def _captures(where: str, fields: dict[str, Any]) -> dict[str, Value]:
    """Return the captured layers: a checkpoint counts by outputs, a GGUF file by inputs."""
    ids = fields.get("target_layer_ids")
    if ids is None:
        return {}
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise GgufError(where, "field 'target_layer_ids'", f"is {ids!r}, expected layer numbers")
    return {"dflash.target_layers": [i + 1 for i in ids]}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _read_header(file: OpenFile, part: int) -> dict[str, TensorInfo]:
    """The tensors of file ``part`` of a model.  Raises GgufError."""
    path = str(file.path)
    n = int.from_bytes(file.read(0, _LENGTH_BYTES), "little")
    start = _LENGTH_BYTES + n
    if not 2 <= n <= 100_000_000 or start > file.n_bytes:  # the format's own limit
        reason = (
            f"a header of {n} bytes in a file of {file.n_bytes}: this is not a safetensors file, or it is truncated"
        )
        raise GgufError(path, "byte 0", reason)
    raw = file.read(0, start)
    try:
        entries = msgspec.json.decode(raw[_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GgufError(path, "header", f"is not a JSON object ({error}): the file is damaged") from None
    file.keep_header(raw)
    entries.pop(_METADATA, None)
    if len(entries) > MAX_TENSORS:
        raise GgufError(path, "header", f"{len(entries)} tensors, at most {MAX_TENSORS} are allowed")
    tensors = [_tensor(path, name, entry, start, file.n_bytes, part) for name, entry in entries.items()]
    check_overlap(path, tensors)
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: str, name: str, raw: msgspec.Raw, start: int, n_bytes: int, part: int) -> TensorInfo:
    where = f"tensor {name!r}"
    if len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise GgufError(path, where, f"its name has more than {MAX_NAME_BYTES} bytes")
    try:
        entry = msgspec.json.decode(raw, type=_Entry)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise GgufError(path, where, f"its entry cannot be read ({error}): the file is damaged") from None
    if entry.dtype not in DENSE:  # whose names are those of the format
        raise GgufError(path, where, f"has dtype {entry.dtype!r}, known are {', '.join(sorted(DENSE))}: convert it")
    kind, (a, b) = BY_NAME[entry.dtype], entry.data_offsets
    if not 1 <= len(entry.shape) <= MAX_DIMENSIONS or min(entry.shape) < 1:
        raise GgufError(path, where, f"has shape {entry.shape}, expected 1 to {MAX_DIMENSIONS} dimensions")
    if a < 0 or b - a != prod(entry.shape) * kind.block_bytes:
        raise GgufError(path, where, f"shape {entry.shape} of {entry.dtype} does not take bytes {a} to {b}")
    if start + b > n_bytes:
        reason = f"its data ends at byte {start + b}, the file at {n_bytes}: the file is truncated, download it again"
        raise GgufError(path, where, reason)
    return TensorInfo(name, kind, tuple(entry.shape), start + a, b - a, part)
