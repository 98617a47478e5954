"""Family ``gemma4``: sliding-window and full attention with different head sizes, norms before and after each block.

Variants by file: per-layer embeddings (E2B, E4B), layers that share an earlier KV cache, routed experts beside the
dense feed-forward.  A full layer without a value matrix uses its keys as values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lucevisor.model.experts import Experts, read_experts, routed_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.rope import Rotary, plain_rotary, scaling_type
from lucevisor.model.spec import (
    MAX_LAYERS,
    Keys,
    LayerSpec,
    MatrixPart,
    ModelSpec,
    Shapes,
    assemble,
    attention_state,
    swiglu_tensors,
    tensor,
)
from lucevisor.model.values import KvGroup

ID_WIDTH = 16
"""Numbers of a boundary row that repeat its token id; a multiple of the vector width of every dtype."""


@dataclass(frozen=True, slots=True)
class Gemma4Layer:
    """``source``: the layer whose keys and values this one reads.  ``key_values``: values are the raw keys."""

    sliding: bool
    n_kv_heads: int
    head_dim: int
    feed_forward: int
    source: int
    key_values: bool


@dataclass(frozen=True, slots=True)
class Gemma4Params:
    """Hyperparameters.  ``layer_input``: width P of the per-layer embeddings; ``softcap``: of the logits.  0: none."""

    hidden_size: int
    n_heads: int
    window: int
    layers: tuple[Gemma4Layer, ...]
    rotary: Rotary
    rotary_sliding: Rotary
    eps: float
    layer_input: int
    softcap: float
    experts: Experts | None

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def owns(self, i: int) -> bool:
        return self.layers[i].source == i


def sources(keys: Keys, sliding: list[bool]) -> list[int]:
    """For each layer, the one whose keys and values it reads: itself, or the last owner of the same type."""
    n_owning = len(sliding) - keys.integer("attention.shared_kv_layers", 0, low=0)
    last = {kind: max((i for i in range(n_owning) if sliding[i] is kind), default=-1) for kind in (True, False)}
    out = [i if i < n_owning else last[kind] for i, kind in enumerate(sliding)]
    if -1 in out:
        kind = "sliding" if sliding[out.index(-1)] else "full"
        raise keys.error(
            "attention.shared_kv_layers", f"leaves no {kind} layer that layer {out.index(-1)} could share from"
        )
    return out


def hyperparameters(files: GgufFiles, keys: Keys) -> Gemma4Params:
    n = keys.integer("block_count", high=MAX_LAYERS)
    sliding = keys.flags("attention.sliding_window_pattern", n)
    if sliding is None:
        raise keys.error("attention.sliding_window_pattern", "is missing")
    n_heads, kv_heads = keys.integer("attention.head_count"), keys.integers("attention.head_count_kv", n)
    for n_kv in kv_heads:
        keys.check_heads(n_heads, n_kv)
    full, narrow, widths = keys.head_dim(), keys.head_dim("_swa"), keys.integers("feed_forward_length", n)
    if 0 in widths:
        raise keys.error("feed_forward_length", f"is 0 in layer {widths.index(0)}")
    if (scaling := scaling_type(keys)) != "none":
        raise keys.error("rope.scaling.type", f"is {scaling!r}, which this family does not support")
    layers = tuple(
        Gemma4Layer(
            sliding=slides,
            n_kv_heads=kv_heads[i],
            head_dim=narrow if slides else full,
            feed_forward=widths[i],
            source=source,
            key_values=not slides and source == i and f"blk.{i}.attn_v.weight" not in files.tensors,
        )
        for i, (slides, source) in enumerate(zip(sliding, sources(keys, sliding), strict=True))
    )
    experts = None
    if keys.integer("expert_count", 0, low=0):
        experts = read_experts(keys, width=None, shared_width=0, gating=1)
    return Gemma4Params(
        hidden_size=keys.integer("embedding_length"),
        n_heads=n_heads,
        window=keys.integer("attention.sliding_window"),
        layers=layers,
        rotary=plain_rotary(keys, full, 1e6),
        rotary_sliding=plain_rotary(keys, narrow, 1e4, "_swa"),
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        layer_input=keys.integer("embedding_length_per_layer_input", 0, low=0),
        softcap=keys.number("final_logit_softcapping", 0.0),
        experts=experts,
    )


def attention_tensors(p: Gemma4Params, i: int) -> Shapes:
    b, e, layer = f"blk.{i}.", p.hidden_size, p.layers[i]
    d, kv = layer.head_dim, layer.n_kv_heads * layer.head_dim
    out: Shapes = {
        b + "attn_norm.weight": (e,),
        b + "attn_q.weight": (p.n_heads * d, e),
        b + "attn_q_norm.weight": (d,),
        b + "attn_output.weight": (e, p.n_heads * d),
        b + "post_attention_norm.weight": (e,),
    }
    if p.owns(i):
        out |= {b + "attn_k.weight": (kv, e), b + "attn_k_norm.weight": (d,)}
        if not layer.key_values:
            out[b + "attn_v.weight"] = (kv, e)
    return out


def feed_forward_tensors(files: GgufFiles, p: Gemma4Params, i: int) -> Shapes:
    b, e, f = f"blk.{i}.", p.hidden_size, p.layers[i].feed_forward
    out: Shapes = {
        b + "ffn_norm.weight": (e,),
        **swiglu_tensors(b, e, f),
        b + "post_ffw_norm.weight": (e,),
        b + "layer_output_scale.weight": (1,),
    }
    if p.experts is not None:
        out |= routed_tensors(files, b, e, p.experts)
        out |= {b + "ffn_gate_inp.scale": (e,), b + "ffn_down_exps.scale": (p.experts.n_experts,)}
        out |= {b + f"{name}.weight": (e,) for name in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")}
    if p.layer_input:
        out |= {
            b + "inp_gate.weight": (p.layer_input, e),
            b + "proj.weight": (e, p.layer_input),
            b + "post_norm.weight": (e,),
        }
    return out


def layer_parts(p: Gemma4Params, vocabulary: int, i: int) -> dict[str, MatrixPart]:
    if not p.layer_input:
        return {}
    width, start, stop = p.n_layers * p.layer_input, i * p.layer_input, (i + 1) * p.layer_input
    return {
        "per_layer_token_embd.weight": MatrixPart((vocabulary, width), 1, start, stop),
        "per_layer_model_proj.weight": MatrixPart((width, p.hidden_size), 0, start, stop),
    }


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``gemma4`` file.  No model options."""
    keys = Keys(files.metadata, "gemma4", str(files.paths[0]))
    p = hyperparameters(files, keys)
    vocabulary = tensor(files, "token_embd.weight").shape[0]
    layers = [
        LayerSpec(
            index=i,
            kv_group=KvGroup.WINDOW if layer.sliding else KvGroup.FULL,
            tensors=attention_tensors(p, i) | feed_forward_tensors(files, p, i),
            state=attention_state(layer.n_kv_heads, layer.head_dim, layer.head_dim) if p.owns(i) else (),
            window=p.window if layer.sliding else 0,
            shares_with=None if p.owns(i) else layer.source,
            parts=layer_parts(p, vocabulary, i),
            n_routed=p.experts.n_used if p.experts is not None else 0,
        )
        for i, layer in enumerate(p.layers)
    ]
    shared = {"rope_freqs.weight": (p.rotary.n // 2,)}
    if p.layer_input:
        shared["per_layer_proj_norm.weight"] = (p.layer_input,)
    # the embedding row and the id cross boundaries too: each shard computes its layers' inputs from them
    carried = p.hidden_size + ID_WIDTH if p.layer_input else 0
    scale = math.sqrt(p.hidden_size)
    found = assemble(files, keys, p, layers, carried=carried, shared=shared, embedding_scale=scale)
    # E2B and E4B alone are trained with causal attention inside images; no key says so
    return replace(found, whole_images=not p.layer_input)
