"""Family ``qwen3``: dense, full attention in every layer, RMSNorm on queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lucevisor.model.experts import refuse_experts
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.rope import Rotary, read_rotary
from lucevisor.model.spec import (
    MAX_LAYERS,
    Keys,
    LayerSpec,
    ModelSpec,
    Shapes,
    assemble,
    attention_state,
    attention_tensors,
    swiglu_tensors,
)
from lucevisor.model.values import Space


@dataclass(frozen=True, slots=True)
class Qwen3Params:
    """Hyperparameters.  E embedding, F feed-forward, H/K query and kv heads of D (H D need not be E)."""

    n_layers: int
    hidden_size: int
    feed_forward: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary: Rotary
    eps: float


def layer_tensors(p: Qwen3Params, i: int) -> Shapes:
    b, e = f"blk.{i}.", p.hidden_size
    return {
        b + "attn_norm.weight": (e,),
        **attention_tensors(b, e, p.n_heads, p.n_kv_heads, p.head_dim),
        b + "ffn_norm.weight": (e,),
        **swiglu_tensors(b, e, p.feed_forward),
    }


def hyperparameters(keys: Keys, options: Mapping[str, str]) -> Qwen3Params:
    """Read and cross-check the metadata.  Raises GgufError naming the key."""
    d = keys.head_dim()
    p = Qwen3Params(
        n_layers=keys.integer("block_count", high=MAX_LAYERS),
        hidden_size=keys.integer("embedding_length"),
        feed_forward=keys.integer("feed_forward_length", 0, low=0),
        n_heads=keys.integer("attention.head_count"),
        n_kv_heads=keys.integer("attention.head_count_kv"),
        head_dim=d,
        rotary=read_rotary(keys, d, options),
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
    )
    keys.check_heads(p.n_heads, p.n_kv_heads)
    return p


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``qwen3`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, "qwen3", str(files.paths[0]))
    refuse_experts(keys)
    p = hyperparameters(keys, options)
    if not p.feed_forward:
        raise keys.error("feed_forward_length", "is missing")
    state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    layers = [LayerSpec(i, Space.FULL, layer_tensors(p, i), state) for i in range(p.n_layers)]
    return assemble(files, keys, p, layers)
