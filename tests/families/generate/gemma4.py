"""Random models of ``gemma4`` in all its variations."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from bench.gguf_writing import Value
from tests.families.generate.made import PLAIN, Draw, Made, build, ends, renamed
from tests.families.generate.qwen import ATTENTION, DENSE, HEAD_NORMS, divided

NAMES = (
    DENSE
    | ATTENTION
    | HEAD_NORMS
    | {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "ffn_norm.weight": "pre_feedforward_layernorm.weight",
        "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate.weight": "per_layer_input_gate.weight",
        "proj.weight": "per_layer_projection.weight",
        "post_norm.weight": "post_per_layer_input_norm.weight",
        "ffn_gate_inp.weight": "router.proj.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    }
)
TABLES = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


def kinds_of(draw: Draw, n_layers: int) -> tuple[list[bool], int]:
    """Which layers slide, the last one never does (transformers insists), and how many at the end share keys and
    values.
    """
    sliding = [draw.one(True, True, False) for _ in range(n_layers)]
    sliding[-1] = False
    most = 0
    while most + 1 < n_layers and set(sliding[n_layers - most - 1 :]) <= set(sliding[: n_layers - most - 1]):
        most += 1
    return sliding, draw.between(0, most)


# Long: one statement per hyperparameter, and splitting it would hide which depend on which.
def text_config(draw: Draw, **more: Any) -> Any:
    """Per-layer inputs or experts or neither; sharing; values that are keys; heads of two sizes."""
    n_layers, n_heads = draw.between(3, 7), draw.one(2, 3, 4, 6)
    sliding, n_shared = kinds_of(draw, n_layers)
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    kv = draw.one(*divisors), draw.one(*divisors)
    d, wide = 4 * draw.between(2, 8), 8 * draw.between(2, 8)
    layer_input = draw.one(0, draw.between(8, 20))
    n_experts = draw.between(1, 9) if not layer_input and draw.flag() else 0
    key_values = draw.flag()
    vocabulary = draw.between(60, 200)
    full = {i: {"head_dim": wide, "num_key_value_heads": kv[1]} for i in range(n_layers) if not sliding[i]}
    return transformers.Gemma4TextConfig(
        vocab_size=vocabulary,
        vocab_size_per_layer_input=vocabulary,
        hidden_size=draw.between(17, 70),
        intermediate_size=draw.between(20, 90),
        num_hidden_layers=n_layers,
        num_attention_heads=n_heads,
        num_key_value_heads=kv[0],
        head_dim=d,
        max_position_embeddings=512,
        sliding_window=draw.between(2, 20),
        layer_types=["sliding_attention" if s else "full_attention" for s in sliding],
        per_layer_config=full,
        final_logit_softcapping=draw.one(30.0, 10.0),
        hidden_size_per_layer_input=layer_input,
        attention_k_eq_v=key_values,
        num_kv_shared_layers=n_shared,
        use_double_wide_mlp=bool(layer_input) and draw.flag(),
        enable_moe_block=bool(n_experts),
        num_experts=n_experts or None,
        top_k_experts=draw.between(1, n_experts) if n_experts else None,
        moe_intermediate_size=draw.between(9, 40) if n_experts else None,
        **PLAIN,
        **more,
        output_hidden_states=True,  # else prompt rows skip the sharing layers
        rope_parameters={
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    )


def gemma4(draw: Draw) -> Made:
    config = text_config(draw)
    model = build(transformers.Gemma4ForCausalLM, config, draw)
    return of_config(config, model, model.state_dict(), draw)


def of_config(config: Any, model: nn.Module, state: dict[str, Tensor], draw: Draw) -> Made:
    """The file of a model with this ``state``."""
    n_layers, n_heads, n_shared = config.num_hidden_layers, config.num_attention_heads, config.num_kv_shared_layers
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    of_full, of_window = (config.per_layer_config[sliding.index(s)] for s in (False, True))
    wide, d = of_full.head_dim, of_window.head_dim
    kv = of_window.num_key_value_heads, of_full.num_key_value_heads
    layer_input, n_experts = config.hidden_size_per_layer_input, config.num_experts or 0
    tensors = renamed(state, NAMES, n_layers)
    shared = range(n_layers - n_shared, n_layers)
    without = {f"blk.{i}.attn_{n}.weight" for i in shared for n in ("k", "v", "k_norm")}
    tensors = {name: t for name, t in tensors.items() if name not in without}
    if n_experts and draw.flag():
        tensors = divided(tensors)
    pairs = wide // 2
    turning = int(0.25 * wide / 2)
    tensors["rope_freqs.weight"] = torch.tensor([1.0] * turning + [1e30] * (pairs - turning))
    if layer_input:
        tensors |= {ours: state[theirs] for ours, theirs in TABLES.items()}
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": [tensors[f"blk.{i}.ffn_gate.weight"].shape[0] for i in range(n_layers)],
        "attention.head_count": n_heads,
        "attention.head_count_kv": [kv[0] if s else kv[1] for s in sliding],
        "attention.key_length": wide,
        "attention.value_length": wide,
        "attention.key_length_swa": d,
        "attention.value_length_swa": d,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.shared_kv_layers": n_shared,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": wide,
        "rope.dimension_count_swa": d,
        "embedding_length_per_layer_input": layer_input,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if n_experts:
        metadata |= {
            "expert_count": n_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return Made(model, "gemma4", metadata, tensors | ends(state, tied=True))
