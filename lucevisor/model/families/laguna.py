"""Family ``laguna``: full and sliding attention with gated heads; leading dense layers, then MoE with a shared expert.

The number of query heads differs by layer.  Only full-attention layers use YaRN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lucevisor.model.experts import Experts, read_experts, routed_tensors, shared_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.gguf_header import GgufError
from lucevisor.model.rope import Rotary, plain_rotary, read_rotary
from lucevisor.model.spec import (
    MAX_LAYERS,
    Keys,
    ModelSpec,
    Shapes,
    assemble,
    attention_layer,
    attention_state,
    attention_tensors,
    swiglu_tensors,
    tensor,
)


@dataclass(frozen=True, slots=True)
class LagunaParams:
    """Layer i has ``heads[i]`` query heads and ``gates[i]`` gate columns: one per head, one per element, or 0.

    ``window``: positions visible to layers with ``sliding[i]``.  The first ``n_dense`` layers have no experts.
    """

    hidden_size: int
    feed_forward: int
    heads: tuple[int, ...]
    n_kv_heads: int
    head_dim: int
    gates: tuple[int, ...]
    sliding: tuple[bool, ...]
    window: int
    rotary: Rotary
    rotary_sliding: Rotary
    eps: float
    n_dense: int
    experts: Experts | None

    @property
    def n_layers(self) -> int:
        return len(self.heads)


def gate_columns(files: GgufFiles, i: int, n_heads: int, head_dim: int) -> int:
    if "blk.0.attn_gate.weight" not in files.tensors:
        return 0
    name = f"blk.{i}.attn_gate.weight"
    shape = tensor(files, name).shape
    if shape[0] not in (n_heads, n_heads * head_dim):
        reason = f"has {shape[0]} rows: neither one for each of {n_heads} heads nor {n_heads * head_dim}"
        raise GgufError(str(files.paths[0]), f"tensor {name!r}", reason)
    return shape[0]


def hyperparameters(files: GgufFiles, keys: Keys, options: Mapping[str, str]) -> LagunaParams:
    n_layers = keys.integer("block_count", high=MAX_LAYERS)
    heads, n_kv_heads = keys.integers("attention.head_count", n_layers), keys.integer("attention.head_count_kv")
    for n in heads:
        keys.check_heads(n, n_kv_heads)
    d, window = keys.head_dim(), keys.integer("attention.sliding_window", 0, low=0)
    rotary = read_rotary(keys, d, options)
    sliding = plain_rotary(keys, d, rotary.theta, "_swa")
    n_dense = keys.integer("leading_dense_block_count", 1, low=0)
    experts = None
    if n_dense < n_layers:
        width = keys.integer("expert_feed_forward_length")
        experts = read_experts(keys, width=width, shared_width=width, gating=2, biased=True)
    return LagunaParams(
        hidden_size=keys.integer("embedding_length"),
        feed_forward=keys.integer("feed_forward_length", 0 if n_dense == 0 else None, low=int(n_dense > 0)),
        heads=tuple(heads),
        n_kv_heads=n_kv_heads,
        head_dim=d,
        gates=tuple(gate_columns(files, i, n, d) for i, n in enumerate(heads)),
        sliding=keys.sliding_layers(n_layers, window, 4, 0),
        window=window,
        rotary=rotary,
        rotary_sliding=sliding,
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        n_dense=n_dense,
        experts=experts,
    )


def layer_tensors(files: GgufFiles, p: LagunaParams, i: int) -> Shapes:
    b, e = f"blk.{i}.", p.hidden_size
    out: Shapes = {
        b + "attn_norm.weight": (e,),
        **attention_tensors(b, e, p.heads[i], p.n_kv_heads, p.head_dim),
        b + "ffn_norm.weight": (e,),
    }
    if p.gates[i]:
        out[b + "attn_gate.weight"] = (p.gates[i], e)
    if i < p.n_dense or p.experts is None:
        return out | swiglu_tensors(b, e, p.feed_forward)
    return out | routed_tensors(files, b, e, p.experts) | shared_tensors(b, e, p.experts)


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``laguna`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, "laguna", str(files.paths[0]))
    p = hyperparameters(files, keys, options)
    state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    layers = [
        attention_layer(
            i,
            layer_tensors(files, p, i),
            state,
            p.window if slides else 0,
            n_routed=p.experts.n_used if p.experts is not None and i >= p.n_dense else 0,
        )
        for i, slides in enumerate(p.sliding)
    ]
    return assemble(files, keys, p, layers)
