"""DFlash drafters with random weights for any target: what they draft is nearly always wrong, as a bad drafter's is."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

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
