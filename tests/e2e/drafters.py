"""Drafters with random weights for any target: what they draft is nearly always wrong, as a bad drafter's is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bench.gguf_writing import Value, finish, new_file
from lucevisor.model.families.gemma4 import Gemma4Params
from lucevisor.model.spec import ModelSpec

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 96
BLOCK = 8


def _write(
    path: Path, architecture: str, metadata: Mapping[str, Value], shapes: Mapping[str, tuple[int, ...]],
    mask: int | None = None,
) -> Path:  # fmt: skip
    """Write random numbers: vectors near one, matrices scaled by their width.  ``mask``: the id of the mask token."""
    rng, writer = np.random.default_rng(1), new_file(path, architecture, metadata)
    if mask is not None:
        writer.add_mask_token_id(mask)
    for name, shape in shapes.items():
        x = rng.standard_normal(shape)
        writer.add_tensor(name, (1 + 0.05 * x if len(shape) == 1 else x / np.sqrt(shape[-1])).astype(np.float32))
    finish(writer)
    return path


def _feed_forward(b: str, e: int) -> dict[str, tuple[int, ...]]:
    return {f"{b}ffn_gate.weight": (WIDTH, e), f"{b}ffn_up.weight": (WIDTH, e), f"{b}ffn_down.weight": (e, WIDTH)}


def write_random_dflash(path: Path, target: ModelSpec, *, n_layers: int = 2) -> Path:
    """Write a drafter in llama.cpp's layout, whose layers alternate between sliding and full attention."""
    e = target.hidden_size
    captures = sorted({0, target.n_layers // 2, target.n_layers - 2} - {-1})
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": target.context_tokens,
        "embedding_length": e,
        "feed_forward_length": WIDTH,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "block_size": BLOCK,
        "target_layers": [layer + 1 for layer in captures],
        "attention.sliding_window": 24,
        "attention.sliding_window_pattern": [i % 2 == 0 for i in range(n_layers)],
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (e, len(captures) * e), "enc.output_norm.weight": (e,), "output_norm.weight": (e,)
    }  # fmt: skip
    for b in (f"blk.{i}." for i in range(n_layers)):
        shapes |= {b + name: (e,) for name in ("attn_norm.weight", "ffn_norm.weight")}
        shapes |= {b + name: (DIM,) for name in ("attn_q_norm.weight", "attn_k_norm.weight")}
        shapes |= {f"{b}attn_{name}.weight": (KV_HEADS * DIM, e) for name in "kv"}
        shapes |= {f"{b}attn_q.weight": (HEADS * DIM, e), f"{b}attn_output.weight": (e, HEADS * DIM)}
        shapes |= _feed_forward(b, e)
    return _write(path, "dflash", metadata, shapes, target.vocabulary - 1)


def write_random_assistant(
    path: Path, target: ModelSpec, *, changes: dict[str, Value] | None = None, more: tuple[str, ...] = ()
) -> Path:
    """Write a Gemma 4 assistant of two layers, sliding and full.  ``changes`` of its metadata, ``more`` tensors."""
    p, e = target.params, 48
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
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (target.vocabulary, e),
        "nextn.pre_projection.weight": (e, 2 * target.hidden_size),
        "nextn.post_projection.weight": (target.hidden_size, e),
        "output_norm.weight": (e,),
        "rope_freqs.weight": (full.head_dim // 2,),
    }
    for i, d in enumerate((narrow.head_dim, full.head_dim)):
        b = f"blk.{i}."
        norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        shapes |= {f"{b}{name}.weight": (e,) for name in norms}
        shapes |= {f"{b}attn_q_norm.weight": (d,), f"{b}layer_output_scale.weight": (1,)}
        shapes |= {f"{b}attn_q.weight": (p.n_heads * d, e), f"{b}attn_output.weight": (e, p.n_heads * d)}
        shapes |= _feed_forward(b, e)
    return _write(path, "gemma4-assistant", metadata | (changes or {}), shapes | dict.fromkeys(more, (4,)))
