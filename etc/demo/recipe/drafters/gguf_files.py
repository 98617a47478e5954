"""Writes trained drafters as GGUF files: matrices Q4_0 of DFlash, Q8_0 of MTP, norms and convolution bases F32, the
tokenizer copied from the target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from dflash import DFlash
from mtp import Mtp
from target import Target

DFLASH_KIND, MTP_KIND = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0
FILE_TYPES = {DFLASH_KIND: gguf.LlamaFileType.MOSTLY_Q4_0, MTP_KIND: gguf.LlamaFileType.MOSTLY_Q8_0}
TOKENIZER = {
    "tokenizer.ggml.model": "add_tokenizer_model",
    "tokenizer.ggml.pre": "add_tokenizer_pre",
    "tokenizer.ggml.tokens": "add_token_list",
    "tokenizer.ggml.token_type": "add_token_types",
    "tokenizer.ggml.merges": "add_token_merges",
    "tokenizer.ggml.eos_token_id": "add_eos_token_id",
    "tokenizer.ggml.padding_token_id": "add_pad_token_id",
    "tokenizer.ggml.mask_token_id": "add_mask_token_id",
    "tokenizer.ggml.add_bos_token": "add_add_bos_token",
}


def begin(
    path: Path, architecture: str, name: str, description: str, target: Target, kind: gguf.GGMLQuantizationType
) -> gguf.GGUFWriter:
    w = gguf.GGUFWriter(str(path), architecture)
    w.add_type("model")
    w.add_name(name)
    w.add_description(description)
    w.add_license("PSF-2.0")
    w.add_file_type(int(FILE_TYPES[kind]))
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, method in TOKENIZER.items():
        getattr(w, method)(target.meta[key])
    return w


def finish(w: gguf.GGUFWriter, tensors: dict[str, Tensor], kind: gguf.GGMLQuantizationType) -> None:
    for name, tensor in tensors.items():
        data = np.ascontiguousarray(tensor.detach().float().cpu().numpy())
        if data.ndim == 2:
            w.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            w.add_tensor(name, data)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def add_settings(w: gguf.GGUFWriter, prefix: str, settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        (w.add_float32 if isinstance(value, float) else w.add_uint32)(f"{prefix}.{key}", value)


def write_dflash(path: Path, model: DFlash) -> None:
    s, target = model.shape, model.target
    version = "DFlash 2" if s.selector_rank else "DFlash"
    w = begin(path, "dflash", f"{path.stem}", f"{version} drafter of {target.meta['general.name']}", target, DFLASH_KIND)
    add_settings(w, "dflash", {
        "block_count": s.layers, "context_length": target.meta["qwen35.context_length"], "embedding_length": target.width,
        "feed_forward_length": s.ffn, "attention.head_count": s.heads, "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim, "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": target.eps, "rope.freq_base": s.theta, "block_size": s.block,
    })  # fmt: skip
    w.add_array("dflash.rope.dimension_sections", [s.head_dim // 2, 0, 0, 0])
    w.add_array("dflash.target_layers", [i + 1 for i in s.capture])  # inputs of the next layers
    w.add_bool("dflash.attention.causal", False)
    if s.selector_rank:
        add_settings(w, "dflash", {
            "conv_kernel_size": 2, "conv_group_size": s.conv_group,
            "selector_rank": s.selector_rank, "selector_top_k": s.selector_top_k,
        })  # fmt: skip
    finish(w, model.tensors(), DFLASH_KIND)


def write_mtp(path: Path, model: Mtp) -> None:
    """The head alone: the target's keys with one more block; embedding, output_norm and output are the target's."""
    target = model.target
    description = f"Multi-token-prediction head of {target.meta['general.name']}"
    w = begin(path, "qwen35", f"{path.stem}", description, target, MTP_KIND)
    own = {"block_count": target.n_layers + 1, "nextn_predict_layers": 1}
    lists = {"rope.dimension_sections", "attention.recurrent_layers"}
    kept = {k.removeprefix("qwen35."): v for k, v in target.meta.items() if k.startswith("qwen35.")}
    add_settings(w, "qwen35", {k: v for k, v in kept.items() if k not in lists} | own)
    w.add_array("qwen35.rope.dimension_sections", kept["rope.dimension_sections"])
    w.add_array("qwen35.attention.recurrent_layers", [*kept["attention.recurrent_layers"], False])
    finish(w, model.tensors(), MTP_KIND)
