"""Random models of ``laguna``."""

from __future__ import annotations

from typing import Any

import transformers

from bench.gguf_writing import Value
from tests.families.generate.made import PLAIN, Draw, Made, build, ends, renamed
from tests.families.generate.qwen import ATTENTION, DENSE, HEAD_NORMS, divided


# Long: one statement per hyperparameter, and splitting it would hide which depend on which.
def laguna(draw: Draw) -> Made:
    """Heads that differ by layer, a gate for each head or each element, any pattern of sliding layers."""
    n_layers, n_kv, d = draw.between(2, 6), draw.between(1, 3), 4 * draw.between(2, 9)
    counts = [n_kv * draw.between(1, 4) for _ in range(n_layers)]
    explicit = draw.flag()
    full = [draw.flag() if explicit else i % 4 == 0 for i in range(n_layers)]
    full[0] = True
    n_dense = draw.between(0, min(2, n_layers))
    n_experts = draw.between(1, 9)
    elementwise, tied = draw.flag(), draw.flag()
    rotary = {"full": draw.one(0.5, 1.0), "sliding": draw.one(0.5, 1.0)}
    yarn: dict[str, Any] = {"rope_type": "default"}
    if draw.flag():
        yarn = {"rope_type": "yarn", "factor": draw.one(4.0, 32.0), "original_max_position_embeddings": 64}
        yarn |= {"beta_fast": draw.one(32.0, 64.0), "beta_slow": 1.0}
    config = transformers.LagunaConfig(
        vocab_size=draw.between(60, 200),
        hidden_size=draw.between(17, 70),
        intermediate_size=draw.between(20, 90),
        num_hidden_layers=n_layers,
        num_attention_heads=counts[0],
        num_attention_heads_per_layer=counts,
        num_key_value_heads=n_kv,
        head_dim=d,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        layer_types=["full_attention" if f else "sliding_attention" for f in full],
        sliding_window=draw.between(2, 20),
        mlp_layer_types=["dense" if i < n_dense else "sparse" for i in range(n_layers)],
        num_experts=n_experts,
        num_experts_per_tok=draw.between(1, n_experts),
        moe_intermediate_size=draw.between(9, 40),
        shared_expert_intermediate_size=draw.between(9, 40),
        moe_routed_scaling_factor=draw.one(1.0, 2.5),
        gating="per-element" if elementwise else "per-head",
        **PLAIN,
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": rotary["full"], **yarn},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": rotary["sliding"],
            },
        },
    )
    model = build(transformers.LagunaForCausalLM, config, draw)
    metadata: dict[str, Value] = {
        "block_count": n_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": counts,
        "attention.head_count_kv": n_kv,
        "attention.key_length": d,
        "attention.value_length": d,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": int(d * rotary["full"]),
        "rope.dimension_count_swa": int(d * rotary["sliding"]),
        "expert_count": n_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        "expert_weights_norm": True,
        "expert_weights_scale": config.moe_routed_scaling_factor,
        "expert_gating_func": 2,
        "leading_dense_block_count": n_dense,
    }
    if explicit:
        metadata["attention.sliding_window_pattern"] = [not f for f in full]
    if yarn["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": yarn["factor"],
            "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_beta_fast": yarn["beta_fast"],
            "rope.scaling.yarn_beta_slow": 1.0,
        }
    state = model.state_dict()
    names = DENSE | ATTENTION | HEAD_NORMS | {"attn_gate.weight": "self_attn.g_proj.weight"}
    names |= {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
    names |= {"ffn_gate_inp.weight": "mlp.gate.weight", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
    names |= {"ffn_down_exps.weight": "mlp.experts.down_proj", "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}
    names |= {f"ffn_{n}_shexp.weight": f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")}
    tensors = renamed(state, names, n_layers)
    if draw.flag():
        tensors = divided(tensors)
    return Made(model, "laguna", metadata, tensors | ends(state, tied=tied))
