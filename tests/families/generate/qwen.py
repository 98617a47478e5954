"""Random models of ``qwen3``, ``qwen35``, ``qwen35moe`` and ``qwen3next``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from bench.gguf_writing import Value
from tests.families.generate.made import PLAIN, Draw, Made, build, ends, renamed

DENSE = {"ffn_gate.weight": "mlp.gate_proj.weight", "ffn_up.weight": "mlp.up_proj.weight"}
DENSE |= {"ffn_down.weight": "mlp.down_proj.weight"}
ATTENTION = {f"attn_{n}.weight": f"self_attn.{n}_proj.weight" for n in "qkv"}
ATTENTION |= {"attn_output.weight": "self_attn.o_proj.weight"}
EXPERTS = {"ffn_gate_inp.weight": "mlp.gate.weight", "ffn_down_exps.weight": "mlp.experts.down_proj"}
EXPERTS |= {f"ffn_{n}_shexp.weight": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")}
EXPERTS |= {"ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight"}
EXPERTS |= {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj"}
HEAD_NORMS = {"attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight"}


def heads(draw: Draw) -> tuple[int, int, int]:
    """Query heads, kv heads, head dim; their product is rarely the embedding."""
    n_kv = draw.between(1, 3)
    return n_kv * draw.between(1, 4), n_kv, 2 * draw.between(4, 20)


def metadata_of(config: Any, head_dim: int) -> dict[str, Value]:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def qwen3(draw: Draw) -> Made:
    """Dense, sometimes stretched by YaRN."""
    n_heads, n_kv, d = heads(draw)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.one(1e4, 1e6)}
    if draw.flag():
        rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0}
    tied = draw.flag()
    config = transformers.Qwen3Config(
        vocab_size=draw.between(60, 200),
        hidden_size=draw.between(17, 70),
        intermediate_size=draw.between(20, 90),
        num_hidden_layers=draw.between(2, 5),
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv,
        head_dim=d,
        max_position_embeddings=512,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        **PLAIN,
        use_sliding_window=False,
        rms_norm_eps=draw.one(1e-6, 1e-5),
        pad_token_id=None,
    )
    model = build(transformers.Qwen3ForCausalLM, config, draw)
    metadata = metadata_of(config, d) | {"feed_forward_length": config.intermediate_size}
    if rope["rope_type"] == "yarn":
        metadata |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        }
    names = DENSE | ATTENTION | HEAD_NORMS
    names |= {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
    state = model.state_dict()
    return Made(model, "qwen3", metadata, renamed(state, names, config.num_hidden_layers) | ends(state, tied=tied))


def qwen35(draw: Draw) -> Made:
    """The dense hybrid."""
    common, tied = hybrid(draw)
    config = transformers.Qwen3_5TextConfig(intermediate_size=draw.between(20, 90), **common)
    model = build(transformers.Qwen3_5ForCausalLM, config, draw, centred_norms=True)
    metadata = hybrid_metadata(config, draw) | {"feed_forward_length": config.intermediate_size}
    state = model.state_dict()
    tensors = hybrid_tensors(state, config, DENSE)
    return Made(model, "qwen35", metadata, tensors | ends(state, tied=tied, norm_shift=1.0))


def qwen35moe(draw: Draw) -> Made:
    """The hybrid with experts: one, some, or all of them chosen; gate and up in one tensor or in two."""
    common, tied = hybrid(draw)
    n_experts = draw.between(1, 9)
    config = transformers.Qwen3_5MoeTextConfig(
        num_experts=n_experts,
        num_experts_per_tok=draw.between(1, n_experts),
        moe_intermediate_size=draw.between(9, 40),
        shared_expert_intermediate_size=draw.between(9, 50),
        **common,
    )
    model = build(transformers.Qwen3_5MoeForCausalLM, config, draw, centred_norms=True)
    metadata = hybrid_metadata(config, draw) | expert_metadata(config)
    state = model.state_dict()
    tensors = hybrid_tensors(state, config, EXPERTS)
    if draw.flag():
        tensors = divided(tensors)
    if draw.flag():
        tensors = {n: t.flatten() if n.endswith("gate_inp_shexp.weight") else t for n, t in tensors.items()}
    return Made(model, "qwen35moe", metadata, tensors | ends(state, tied=tied, norm_shift=1.0))


def expert_metadata(config: Any) -> dict[str, Value]:
    return {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }


def qwen3next(draw: Draw) -> Made:
    """The hybrid before Qwen3.5, with experts; the delta net's inputs as converters wrote them first, or later."""
    common, _ = hybrid(draw)
    rope = {key: value for key, value in common["rope_parameters"].items() if not key.startswith("mrope")}
    n_experts = draw.between(1, 9)
    config: Any = transformers.Qwen3NextConfig(
        num_experts=n_experts,
        num_experts_per_tok=draw.between(1, n_experts),
        moe_intermediate_size=draw.between(9, 40),
        shared_expert_intermediate_size=draw.between(9, 50),
        intermediate_size=draw.between(20, 90),
        **common | {"rope_parameters": rope},
    )
    model = build(transformers.Qwen3NextForCausalLM, config, draw, centred_norms=True)
    return of_qwen3next(model, hybrid_metadata(config, draw), merged=draw.flag())


def of_qwen3next(model: Any, metadata: dict[str, Value], *, merged: bool) -> Made:
    """``merged``: q, k, v and z of the delta net are one tensor."""
    config, state = model.config, model.state_dict()
    metadata |= expert_metadata(config) | {"feed_forward_length": config.intermediate_size}
    tensors = divided(qwen3next_tensors(state, config, merged=merged))
    return Made(model, "qwen3next", metadata, tensors | ends(state, tied=config.tie_word_embeddings, norm_shift=1.0))


def divided(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gate and up of the experts as two tensors each, gate rows were first."""
    out = {}
    for name, tensor in tensors.items():
        if "gate_up_exps" in name:
            gate, up = tensor.chunk(2, dim=1)
            out[name.replace("gate_up", "gate")], out[name.replace("gate_up", "up")] = gate, up
        else:
            out[name] = tensor
    return out


def hybrid(draw: Draw) -> tuple[dict[str, Any], bool]:
    """Settings of attention and delta net, and whether the embedding is tied."""
    n_heads, n_kv, d = heads(draw)
    n_rotary = 2 * draw.between(1, d // 2)
    n_key = draw.between(1, 3)
    n_layers, interval = draw.between(2, 6), draw.between(2, 4)
    stretched = draw.one(False, False, True)
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    tied = draw.flag()
    third = n_rotary // 2 // 3
    return {
        "vocab_size": draw.between(60, 200),
        "hidden_size": draw.between(17, 70),
        "num_hidden_layers": n_layers,
        "layer_types": ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(n_layers)],
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv,
        "head_dim": d,
        "linear_conv_kernel_dim": draw.between(2, 5),
        "linear_key_head_dim": (dim := 4 * draw.between(2, 8)),
        "linear_value_head_dim": dim,
        "linear_num_key_heads": n_key,
        "linear_num_value_heads": n_key * draw.between(1, 3),
        "rope_parameters": {
            **(yarn if stretched else {"rope_type": "default"}),
            "rope_theta": draw.one(1e4, 1e7),
            "partial_rotary_factor": n_rotary / d,
            "mrope_interleaved": True,
            "mrope_section": [n_rotary // 2 - 2 * third, third, third],
        },
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        **PLAIN,
        "pad_token_id": None,
    }, tied


def hybrid_metadata(config: Any, draw: Draw) -> dict[str, Value]:
    """Written the old way (an interval) or the new one (a flag for each layer)."""
    d = config.head_dim
    out = metadata_of(config, d) | {
        "rope.dimension_count": round(d * config.rope_parameters["partial_rotary_factor"]),
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    if config.rope_parameters["rope_type"] == "yarn":
        out |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    if all(kinds) or draw.flag():
        return out | {"attention.recurrent_layers": kinds}
    return out | {"full_attention_interval": kinds.index(False) + 1}


def qwen3next_tensors(state: dict[str, Tensor], config: Any, *, merged: bool) -> dict[str, Tensor]:
    """Layers of Qwen3-Next: value heads stay grouped by key heads, as in transformers."""
    n_key, n_value, d = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim
    sizes = [d, d, n_value // n_key * d, n_value // n_key * d]

    def inputs(x: Tensor) -> dict[str, Tensor]:
        if merged:
            return {"ssm_in.weight": x}
        q, k, v, z = (part.flatten(0, 1) for part in x.unflatten(0, (n_key, -1)).split(sizes, dim=1))
        return {"attn_qkv.weight": torch.cat((q, k, v)), "attn_gate.weight": z}

    out = hybrid_layers(state, config, EXPERTS)
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            prefix = f"model.layers.{i}.linear_attn."
            found = inputs(state[prefix + "in_proj_qkvz.weight"]) | {
                "ssm_ba.weight": state[prefix + "in_proj_ba.weight"],
                "ssm_a": -state[prefix + "A_log"].exp(),
                "ssm_dt.bias": state[prefix + "dt_bias"],
                "ssm_conv1d.weight": state[prefix + "conv1d.weight"].squeeze(1),
                "ssm_norm.weight": state[prefix + "norm.weight"],
                "ssm_out.weight": state[prefix + "out_proj.weight"],
            }
            out |= {f"blk.{i}.{name}": tensor for name, tensor in found.items()}
    return out


def hybrid_layers(state: dict[str, Tensor], config: Any, mlp: dict[str, str]) -> dict[str, Tensor]:
    """The layers of a hybrid without gated delta nets: norms carry their one."""
    names = mlp | ATTENTION | HEAD_NORMS
    names |= {
        "attn_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
    }
    out = renamed(state, names, config.num_hidden_layers)
    return {name: t + 1.0 if name.endswith("norm.weight") else t for name, t in out.items()}


def hybrid_tensors(state: dict[str, Tensor], config: Any, mlp: dict[str, str]) -> dict[str, Tensor]:
    """Layers of the hybrid: value heads are tiled over key heads instead of grouped."""
    n_key, n_value, dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_key_head_dim
    ratio = n_value // n_key
    order = torch.tensor([g * ratio + t for t in range(ratio) for g in range(n_key)])
    rows = (order[:, None] * dim + torch.arange(dim)).flatten()

    def tiled(x: Tensor) -> Tensor:
        """The value part of rows q, k, v."""
        qk = 2 * n_key * dim
        return torch.cat((x[:qk], x[qk:][rows]))

    changes = {
        "attn_qkv.weight": ("in_proj_qkv.weight", tiled),
        "attn_gate.weight": ("in_proj_z.weight", lambda x: x[rows]),
        "ssm_beta.weight": ("in_proj_b.weight", lambda x: x[order]),
        "ssm_alpha.weight": ("in_proj_a.weight", lambda x: x[order]),
        "ssm_a": ("A_log", lambda x: -x.exp()[order]),
        "ssm_dt.bias": ("dt_bias", lambda x: x[order]),
        "ssm_conv1d.weight": ("conv1d.weight", lambda x: tiled(x.squeeze(1))),
        "ssm_norm.weight": ("norm.weight", lambda x: x),
        "ssm_out.weight": ("out_proj.weight", lambda x: x[:, rows]),
    }
    out = hybrid_layers(state, config, mlp)
    for i, kind in enumerate(config.layer_types):
        if kind == "linear_attention":
            prefix = f"model.layers.{i}.linear_attn."
            out |= {f"blk.{i}.{ours}": change(state[prefix + theirs]) for ours, (theirs, change) in changes.items()}
    return out
