"""Random models of ``gpt-oss``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers

from tests.families.generate.llama import common, experts_of, made
from tests.families.generate.made import Draw, Made, build
from tests.families.generate.qwen import divided

NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp.weight": "mlp.router.weight",
    "ffn_gate_inp.bias": "mlp.router.bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
STRETCH = 6.0
"""Makes outputs of gate and up that reach the limits of the activation."""


def gpt_oss(draw: Draw) -> Made:
    """Any layers slide; plain positions or YaRN, whose ramp begins and ends between pairs."""
    settings, n_experts = common(draw), draw.between(2, 8)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw.one(1e4, 1.5e5)}
    if draw.flag():
        rope |= yarn(draw.one(4.0, 32.0), draw.one(16, 32))
    slides = [draw.flag() for _ in range(settings["num_hidden_layers"])]
    config = transformers.GptOssConfig(
        **settings, num_local_experts=n_experts, num_experts_per_tok=draw.between(1, n_experts),
        sliding_window=draw.between(4, 40), rope_parameters=rope,
        layer_types=["sliding_attention" if flag else "full_attention" for flag in slides],
    )  # fmt: skip
    return of_config(config, draw, divide=draw.flag(), pattern=slides)


def yarn(factor: float, original: int) -> dict[str, Any]:
    ends = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **ends}


def of_config(config: Any, draw: Draw, *, divide: bool, pattern: list[bool] | None) -> Made:
    """``divide``: gate and up of the experts are two tensors.  ``pattern`` None: the file does not say which layers
    slide."""
    model: Any = build(transformers.GptOssForCausalLM, config, draw)
    more = experts_of(config) | {"expert_feed_forward_length": config.intermediate_size}
    more["attention.sliding_window"] = config.sliding_window
    if pattern is not None:
        more["attention.sliding_window_pattern"] = pattern
    rope = config.rope_parameters
    if rope["rope_type"] == "yarn":
        more |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        more["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    tensors = {}
    for i, layer in enumerate(model.model.layers):
        experts, b = layer.mlp.experts, f"blk.{i}.ffn_"
        with torch.no_grad():
            experts.gate_up_proj *= STRETCH
            experts.down_proj /= STRETCH
        # gate and up alternate in a row of transformers'
        halves = [experts.gate_up_proj[..., at::2].transpose(1, 2) for at in (0, 1)]
        biases = [experts.gate_up_proj_bias[:, at::2] for at in (0, 1)]
        tensors[b + "gate_up_exps.weight"] = torch.cat(halves, dim=1)
        tensors[b + "down_exps.weight"] = experts.down_proj.transpose(1, 2)
        if divide:
            tensors |= {b + "gate_exps.bias": biases[0], b + "up_exps.bias": biases[1]}
        else:
            tensors[b + "gate_up_exps.bias"] = torch.cat(biases, dim=1)
    found = made(model, "gpt-oss", NAMES, more, tensors)
    renamed = {name.replace("ffn_norm", "post_attention_norm"): tensor for name, tensor in found.tensors.items()}
    return replace(found, tensors=divided(renamed) if divide else renamed)
