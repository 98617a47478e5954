"""Family ``llama``: full attention in every layer, gated MLP or routed experts, norms before both.

Llama, Mistral, SmolLM2, TinyLlama, Mixtral.  Granite also scales embedding, residual stream and logits, and Ministral 3
its queries by position.  Families that differ in one of the switches of :class:`LlamaParams` are read by the same
function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lucevisor.model.experts import Experts, read_experts, refuse_experts, routed_tensors, shared_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.rope import Rotary, read_rotary
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
)

ROPE_FACTORS = "rope_freqs.weight"
INPUTS = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True, slots=True)
class LlamaParams:
    """Hyperparameters.  E embedding, F feed-forward, H/K query and kv heads of D (H D need not be E).

    ``adjacent_pairs``: the rows of a rotary pair are neighbours in the file, else half the rotary dims apart.
    ``biases``: names in a layer of the matrices that have one.  ``rope_factors``: the file has ``rope_freqs``.
    The first ``n_dense`` layers have no experts; ``mlp_norm``: the name of the norm before the MLP.
    A query at position i is multiplied by 1 + ``temperature_scale`` ln(1 + floor(i / ``temperature_length``)).
    ``residual_scale`` multiplies what a block adds to the residual stream, ``logit_divisor`` divides the logits.
    """

    n_layers: int
    hidden_size: int
    feed_forward: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rotary: Rotary
    eps: float
    scale: float
    temperature_scale: float
    temperature_length: int
    residual_scale: float
    logit_divisor: float
    adjacent_pairs: bool
    qk_norm: bool
    biases: frozenset[str]
    rope_factors: bool
    experts: Experts | None
    n_dense: int
    mlp_norm: str


def hyperparameters(
    files: GgufFiles,
    keys: Keys,
    options: Mapping[str, str],
    *,
    adjacent_pairs: bool = False,
    qk_norm: bool = False,
    experts: bool = False,
    scaled: bool = False,
) -> LlamaParams:
    """Read and cross-check the metadata.  ``scaled``: the file must say how logits are scaled."""
    e, n_heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    n_kv_heads = keys.integer("attention.head_count_kv", n_heads)
    keys.check_heads(n_heads, n_kv_heads)
    d = keys.head_dim(default=e // n_heads if e % n_heads == 0 else None)
    feed_forward = keys.integer("feed_forward_length", 0, low=0)
    routed = None
    if experts and keys.integer("expert_count", 0, low=0):
        routed = read_experts(keys, width=feed_forward or None, shared_width=0, gating=1)
    else:
        refuse_experts(keys)
        if not feed_forward:
            raise keys.error("feed_forward_length", "is missing")
    if scaled and not keys.flag("rope.scaling.finetuned", True):
        raise keys.error("rope.scaling.finetuned", "is false: attention without positions is not supported")
    rotary = read_rotary(keys, d, options)
    temperature = keys.number("attention.temperature_scale", 0.0, low=0.0)
    original = rotary.yarn.original_context if rotary.yarn is not None else None
    return LlamaParams(
        n_layers=keys.integer("block_count", high=MAX_LAYERS),
        hidden_size=e,
        feed_forward=feed_forward,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d,
        rotary=rotary,
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        scale=keys.number("attention.scale", 0.0) or d**-0.5,
        temperature_scale=temperature,
        temperature_length=keys.integer("attention.temperature_length", original if temperature else 1),
        residual_scale=keys.number("residual_scale", 1.0, above=0.0),
        logit_divisor=keys.number("logit_scale", None if scaled else 1.0, above=0.0),
        adjacent_pairs=adjacent_pairs,
        qk_norm=qk_norm,
        biases=frozenset(name for name in (*INPUTS, "attn_output") if f"blk.0.{name}.bias" in files.tensors),
        rope_factors=ROPE_FACTORS in files.tensors,
        experts=routed,
        n_dense=0,
        mlp_norm="ffn_norm",
    )


def layer_tensors(files: GgufFiles, p: LlamaParams, i: int) -> Shapes:
    b, e = f"blk.{i}.", p.hidden_size
    attention = attention_tensors(b, e, p.n_heads, p.n_kv_heads, p.head_dim, qk_norm=p.qk_norm)
    return {
        b + "attn_norm.weight": (e,),
        **attention,
        **{f"{b}{name}.bias": attention[f"{b}{name}.weight"][:1] for name in p.biases},
        f"{b}{p.mlp_norm}.weight": (e,),
        **mlp_tensors(files, p, i),
    }


def mlp_tensors(files: GgufFiles, p: LlamaParams, i: int) -> Shapes:
    b, e, x = f"blk.{i}.", p.hidden_size, p.experts
    if x is None or i < p.n_dense:
        return swiglu_tensors(b, e, p.feed_forward)
    return routed_tensors(files, b, e, x) | shared_tensors(b, e, x)


def read(files: GgufFiles, options: Mapping[str, str], architecture: str, **switches: bool) -> ModelSpec:
    """Read the spec of a file of ``architecture`` with the ``switches`` of :func:`hyperparameters`."""
    keys = Keys(files.metadata, architecture, str(files.paths[0]))
    return build(files, keys, hyperparameters(files, keys, options, **switches))


def build(files: GgufFiles, keys: Keys, p: LlamaParams) -> ModelSpec:
    state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    n_routed = p.experts.n_used if p.experts is not None else 0
    layers = [
        attention_layer(i, layer_tensors(files, p, i), state, n_routed=n_routed if i >= p.n_dense else 0)
        for i in range(p.n_layers)
    ]
    shared = {ROPE_FACTORS: (p.rotary.n // 2,)} if p.rope_factors else {}
    embedding_scale = keys.number("embedding_scale", 1.0, above=0.0)
    return assemble(files, keys, p, layers, shared=shared, embedding_scale=embedding_scale)


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    return read(files, options, "llama", adjacent_pairs=True, experts=True)
