"""Drafters with random weights for any target: what they draft is nearly always wrong, as a bad drafter's is."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from bench.gguf_writing import Value, finish, new_file
from lucevisor.model.families.gemma4 import Gemma4Params
from lucevisor.model.spec import ModelSpec

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 96
BLOCK = 8


def write_random_dflash(path: Path, target: ModelSpec, *, n_layers: int = 2, seed: int = 1) -> Path:
    """Write a drafter in llama.cpp's layout, whose layers alternate between sliding and full attention."""
    rng, e = np.random.default_rng(seed), target.hidden_size
    captures = sorted({0, target.n_layers // 2, target.n_layers - 2} - {-1})
    writer = gguf.GGUFWriter(path, "dflash")
    writer.add_name("random drafter")
    writer.add_block_count(n_layers)
    writer.add_context_length(target.context_tokens)
    writer.add_embedding_length(e)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_uint32("dflash.block_size", BLOCK)
    writer.add_array("dflash.target_layers", [layer + 1 for layer in captures])
    writer.add_sliding_window(24)
    writer.add_array("dflash.attention.sliding_window_pattern", [i % 2 == 0 for i in range(n_layers)])
    writer.add_mask_token_id(target.vocabulary - 1)

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, (1 + 0.05 * rng.standard_normal(width)).astype(np.float32))

    matrix("fc.weight", e, len(captures) * e)
    norm("enc.output_norm.weight", e)
    norm("output_norm.weight", e)
    for i in range(n_layers):
        b = f"blk.{i}."
        norm(b + "attn_norm.weight", e)
        norm(b + "ffn_norm.weight", e)
        norm(b + "attn_q_norm.weight", DIM)
        norm(b + "attn_k_norm.weight", DIM)
        matrix(b + "attn_q.weight", HEADS * DIM, e)
        matrix(b + "attn_k.weight", KV_HEADS * DIM, e)
        matrix(b + "attn_v.weight", KV_HEADS * DIM, e)
        matrix(b + "attn_output.weight", e, HEADS * DIM)
        matrix(b + "ffn_gate.weight", WIDTH, e)
        matrix(b + "ffn_up.weight", WIDTH, e)
        matrix(b + "ffn_down.weight", e, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_random_assistant(
    path: Path, target: ModelSpec, *, changes: dict[str, Value] | None = None, more: tuple[str, ...] = (), seed: int = 1
) -> Path:
    """Write a Gemma 4 assistant of two layers, sliding and full.  ``changes`` of its metadata, ``more`` tensors."""
    p, rng, e = target.params, np.random.default_rng(seed), 48
    assert isinstance(p, Gemma4Params)
    narrow, full = (next(x for x in p.layers if x.sliding is kind) for kind in (True, False))
    metadata: dict[str, Value] = {
        "block_count": 2,
        "nextn_predict_layers": 2,
        "context_length": 512,
        "embedding_length": e,
        "embedding_length_out": target.hidden_size,
        "feed_forward_length": WIDTH,
        "attention.head_count": p.n_heads,
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": narrow.head_dim,
        "attention.value_length_swa": narrow.head_dim,
        "attention.sliding_window": p.window,
        "attention.sliding_window_pattern": [True, False],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
    }
    writer = new_file(path, "gemma4-assistant", metadata | (changes or {}))

    def matrix(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, (1 + 0.05 * rng.standard_normal(width)).astype(np.float32))

    matrix("token_embd.weight", target.vocabulary, e)
    matrix("nextn.pre_projection.weight", e, 2 * target.hidden_size)
    matrix("nextn.post_projection.weight", target.hidden_size, e)
    norm("output_norm.weight", e)
    norm("rope_freqs.weight", full.head_dim // 2)
    for i, d in enumerate((narrow.head_dim, full.head_dim)):
        b = f"blk.{i}."
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            norm(f"{b}{name}.weight", e)
        norm(b + "attn_q_norm.weight", d)
        norm(b + "layer_output_scale.weight", 1)
        matrix(b + "attn_q.weight", p.n_heads * d, e)
        matrix(b + "attn_output.weight", e, p.n_heads * d)
        matrix(b + "ffn_gate.weight", WIDTH, e)
        matrix(b + "ffn_up.weight", WIDTH, e)
        matrix(b + "ffn_down.weight", e, WIDTH)
    for name in more:
        norm(name, 4)
    finish(writer)
    return path
