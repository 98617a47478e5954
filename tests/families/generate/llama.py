"""Random models of ``llama`` and of the families that differ from it by parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families.generate.made import PLAIN, Draw, Made, build, ends, renamed
from tests.families.generate.qwen import ATTENTION, DENSE, HEAD_NORMS, divided, heads, metadata_of

NORMS = {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
BIASES = {f"attn_{n}.bias": f"self_attn.{n}_proj.bias" for n in "qkv"} | {"attn_output.bias": "self_attn.o_proj.bias"}

EXPERTS = {"ffn_gate_inp.weight": "mlp.gate.weight", "ffn_down_exps.weight": "mlp.experts.down_proj"}
EXPERTS |= {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}


def adjacent(x: Tensor, n_heads: int) -> Tensor:
    """Rows of queries or keys as llama.cpp's converter writes them: those of a rotary pair side by side."""
    return x.unflatten(0, (n_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def common(draw: Draw) -> dict[str, Any]:
    n_heads, n_kv, d = heads(draw)
    return {
        "vocab_size": draw.between(60, 200), "hidden_size": n_heads * draw.between(4, 12),
        "intermediate_size": draw.between(20, 90),
        "num_hidden_layers": draw.between(2, 5), "num_attention_heads": n_heads, "num_key_value_heads": n_kv,
        "head_dim": d, "max_position_embeddings": 512, "tie_word_embeddings": draw.flag(),
        "rms_norm_eps": draw.one(1e-6, 1e-5), "pad_token_id": None, **PLAIN,
    }  # fmt: skip


def made(
    model: Any, architecture: str, names: dict[str, str], more: dict[str, Any], tensors: dict[str, Tensor]
) -> Made:
    """The file of a model of which each layer is full attention and an MLP."""
    config, state = model.config, model.state_dict()
    metadata = metadata_of(config, config.head_dim) | {"feed_forward_length": config.intermediate_size} | more
    layers = renamed(state, names | ATTENTION | BIASES | NORMS, config.num_hidden_layers)
    return Made(model, architecture, metadata, layers | tensors | ends(state, tied=config.tie_word_embeddings))


def experts_of(config: Any) -> dict[str, Any]:
    used = config.num_experts_per_tok
    n_experts = getattr(config, "num_local_experts", None) or config.num_experts
    return {"expert_count": n_experts, "expert_used_count": used}


def llama(draw: Draw) -> Made:
    """Plain, with Llama 3's frequencies, with linear scaling, with biases, or Mixtral's experts."""
    kind = draw.one("plain", "llama3", "linear", "biases", "experts")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.one(1e4, 5e5)}
    if kind == "llama3":
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 64}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": 4.0}
    settings = common(draw) | {"rope_parameters": rope}
    more: dict[str, Any] = {}
    if kind == "experts":
        n_experts = draw.between(2, 8)
        settings |= {"num_local_experts": n_experts, "num_experts_per_tok": draw.between(1, n_experts)}
        config: Any = transformers.MixtralConfig(**settings, sliding_window=None)
        model = build(transformers.MixtralForCausalLM, config, draw)
    else:
        config = transformers.LlamaConfig(**settings, attention_bias=kind == "biases")
        model = build(transformers.LlamaForCausalLM, config, draw)
    if kind == "linear":
        more = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    if draw.flag():
        more["rope.dimension_count"] = config.head_dim
    return of_llama(model, more)


def of_llama(model: Any, more: dict[str, Any]) -> Made:
    """The file of a Llama or Mixtral: pairs side by side, ``rope_freqs`` where its frequencies are Llama 3's."""
    config, tensors, names = model.config, dict[str, Tensor](), DENSE
    if isinstance(config, transformers.MixtralConfig):
        names = EXPERTS
        more = more | experts_of(config)
    if config.rope_parameters["rope_type"] == "llama3":
        exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        plain = 1.0 / config.rope_parameters["rope_theta"] ** exponents
        tensors["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    return paired(made(model, "llama", names, more, tensors))


def paired(found: Made) -> Made:
    """The file with the rows of rotary pairs side by side."""
    config: Any = found.model.config
    counts = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in found.tensors.items():
        if n_heads := counts.get(name.split(".")[-2]):
            found.tensors[name] = adjacent(tensor, n_heads)
    return replace(found, tensors=divided(found.tensors))


def glm4moe(draw: Draw) -> Made:
    """Some dense layers first; with or without biases and norms of queries and keys; any part of a head rotates."""
    settings, n_experts = common(draw), draw.between(2, 9)
    d = settings["head_dim"]
    rotary = 2 * draw.between(1, d // 2)
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": rotary / d}
    config: Any = transformers.Glm4MoeConfig(
        **settings, rope_parameters=rope, attention_bias=draw.flag(), use_qk_norm=draw.flag(),
        n_routed_experts=n_experts, num_experts_per_tok=draw.between(1, n_experts), n_shared_experts=draw.one(1, 2),
        moe_intermediate_size=draw.between(9, 40), routed_scaling_factor=draw.one(1.0, 2.5), n_group=1, topk_group=1,
        first_k_dense_replace=draw.between(0, 2), norm_topk_prob=draw.flag(),
    )  # fmt: skip
    return of_glm4moe(build(transformers.Glm4MoeForCausalLM, config, draw), rotary, divide=draw.flag())


def of_glm4moe(model: Any, rotary: int, *, divide: bool) -> Made:
    config = model.config
    names = DENSE | HEAD_NORMS | EXPERTS
    names |= {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
    names |= {f"ffn_{n}_shexp.weight": f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")}
    more = {
        "rope.dimension_count": rotary,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_gating_func": 2,
        "leading_dense_block_count": config.first_k_dense_replace,
    }
    found = made(model, "glm4moe", names, more, {})
    tensors = {name.replace("ffn_norm", "post_attention_norm"): tensor for name, tensor in found.tensors.items()}
    return replace(found, tensors=divided(tensors) if divide else tensors)


def granite_settings(draw: Draw) -> dict[str, Any]:
    """Scales of four places."""
    settings = common(draw)
    settings.pop("head_dim")
    settings["hidden_size"] *= 2
    settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": draw.one(1e4, 1e7)}}
    settings |= {"embedding_multiplier": draw.one(6.0, 12.0), "residual_multiplier": draw.one(0.22, 0.25, 1.0)}
    settings |= {"attention_multiplier": draw.one(0.015625, 0.3), "logits_scaling": draw.one(8.0, 13.0)}
    return settings


def granite(draw: Draw) -> Made:
    config: Any = transformers.GraniteConfig(**granite_settings(draw))
    return of_granite(build(transformers.GraniteForCausalLM, config, draw))


def granitemoe(draw: Draw) -> Made:
    """With or without a shared expert."""
    n_experts = draw.between(2, 9)
    config: Any = transformers.GraniteMoeSharedConfig(
        **granite_settings(draw), num_local_experts=n_experts, num_experts_per_tok=draw.between(1, n_experts),
        shared_intermediate_size=draw.one(0, draw.between(9, 50)),
    )  # fmt: skip
    return of_granitemoe(build(transformers.GraniteMoeSharedForCausalLM, config, draw))


def of_granitemoe(model: Any) -> Made:
    names = {name: theirs.replace("mlp.", "block_sparse_moe.") for name, theirs in EXPERTS.items()}
    names["ffn_gate_inp.weight"] = "block_sparse_moe.router.weight"
    more, tensors = experts_of(model.config), dict[str, Tensor]()
    if width := model.config.shared_intermediate_size:
        more["expert_shared_feed_forward_length"] = width
        for i in range(model.config.num_hidden_layers):
            shared = model.model.layers[i].shared_mlp
            gate, up = shared.input_linear.weight.detach().chunk(2)
            tensors |= {f"blk.{i}.ffn_gate_shexp.weight": gate, f"blk.{i}.ffn_up_shexp.weight": up}
            tensors[f"blk.{i}.ffn_down_shexp.weight"] = shared.output_linear.weight.detach()
    return of_granite(model, "granitemoe", names, more, tensors)


def of_granite(
    model: Any,
    architecture: str = "granite",
    names: dict[str, str] = DENSE,
    more: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Made:
    config = model.config
    config.head_dim = config.hidden_size // config.num_attention_heads
    scales = {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }
    return paired(without_head_dim(made(model, architecture, names, scales | (more or {}), tensors or {})))


def mistral3(draw: Draw) -> Made:
    """YaRN, and queries that grow within the text."""
    rope = {"rope_type": "yarn", "rope_theta": draw.one(1e4, 1e6), "factor": draw.one(4.0, 16.0)}
    rope |= {"original_max_position_embeddings": draw.one(16, 32), "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"mscale": 1.0, "mscale_all_dim": draw.one(1.0, 0.5), "llama_4_scaling_beta": draw.one(0.1, 0.4)}
    config: Any = transformers.Ministral3Config(**common(draw), rope_parameters=rope)
    return of_mistral3(build(transformers.Ministral3ForCausalLM, config, draw))


def of_mistral3(model: Any) -> Made:
    rope = model.config.rope_parameters
    more = {
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
    }
    return paired(made(model, "mistral3", DENSE, more, {}))


def without_head_dim(found: Made) -> Made:
    """The file without keys that no published one of its family has."""
    for key in ("attention.key_length", "attention.value_length"):
        del found.metadata[key]
    return found


def qwen2(draw: Draw) -> Made:
    """With biases on queries, keys and values."""
    settings = common(draw)
    settings.pop("head_dim")
    settings["hidden_size"] *= 2
    rope = {"rope_type": "default", "rope_theta": draw.one(1e4, 1e6)}
    config: Any = transformers.Qwen2Config(**settings, rope_parameters=rope, use_sliding_window=False)
    return of_qwen2(build(transformers.Qwen2ForCausalLM, config, draw))


def of_qwen2(model: Any) -> Made:
    config = model.config
    config.head_dim = config.hidden_size // config.num_attention_heads
    return without_head_dim(made(model, "qwen2", DENSE, {}, {}))


def qwen3moe(draw: Draw) -> Made:
    n_experts = draw.between(2, 9)
    config: Any = transformers.Qwen3MoeConfig(
        **common(draw), num_experts=n_experts, num_experts_per_tok=draw.between(1, n_experts), norm_topk_prob=True,
        moe_intermediate_size=draw.between(9, 40), decoder_sparse_step=1, mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    return of_qwen3moe(build(transformers.Qwen3MoeForCausalLM, config, draw), divide=draw.flag())


def of_qwen3moe(model: Any, *, divide: bool) -> Made:
    """``divide``: gate and up of the experts are two tensors."""
    more = experts_of(model.config) | {"expert_feed_forward_length": model.config.moe_intermediate_size}
    found = made(model, "qwen3moe", HEAD_NORMS | EXPERTS, more, {})
    return replace(found, tensors=divided(found.tensors)) if divide else found
