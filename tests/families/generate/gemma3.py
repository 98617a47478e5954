"""Random models of ``gemma3``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests.families.generate.made import PLAIN, Draw, Made, build, ends, renamed
from tests.families.generate.qwen import ATTENTION, DENSE, HEAD_NORMS, heads

NORMS = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}


def gemma3(draw: Draw) -> Made:
    """Any pattern of sliding layers or the published period, positions of full layers divided or not."""
    n_heads, n_kv, d = heads(draw)
    n_layers, period = draw.between(2, 7), draw.one(0, 2, 6)
    sliding = [draw.flag() if not period else i % period < period - 1 for i in range(n_layers)]
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
    if linear := draw.flag():
        full |= {"rope_type": "linear", "factor": 8.0}
    config = transformers.Gemma3TextConfig(
        vocab_size=draw.between(60, 200), hidden_size=n_heads * draw.between(4, 12),
        intermediate_size=draw.between(20, 90),
        num_hidden_layers=n_layers, num_attention_heads=n_heads, num_key_value_heads=n_kv, head_dim=d,
        max_position_embeddings=512, sliding_window=draw.between(2, 20), query_pre_attn_scalar=d,
        layer_types=["sliding_attention" if s else "full_attention" for s in sliding], pad_token_id=None,
        rope_parameters={
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        use_bidirectional_attention=False, **PLAIN,
    )  # fmt: skip
    return of_config(config, draw, pattern=None if period == 6 else period or sliding, linear=linear)


def of_config(config: Any, draw: Draw, *, pattern: Any, linear: bool) -> Made:
    model = build(transformers.Gemma3ForCausalLM, config, draw, centred_norms=True)
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": 512,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.sliding_window,
        "rope.freq_base": 1e6,
    }
    if pattern is not None:
        metadata["attention.sliding_window_pattern"] = pattern
    if linear:
        metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    state = model.state_dict()
    layers = renamed(state, DENSE | ATTENTION | HEAD_NORMS | NORMS, config.num_hidden_layers)
    layers = {name: t + 1.0 if name.endswith("norm.weight") else t for name, t in layers.items()}
    return Made(model, "gemma3", metadata, layers | ends(state, tied=True, norm_shift=1.0))


def gemma_embedding(draw: Draw, *, dense: bool | None = None) -> Made:
    """An encoder of the same layers, with or without matrices behind the mean."""
    n_heads, n_kv, d = heads(draw)
    n_layers, window = draw.between(3, 7), draw.between(4, 30)
    config = transformers.Gemma3TextConfig(
        vocab_size=draw.between(60, 200), hidden_size=n_heads * draw.between(4, 12),
        intermediate_size=draw.between(20, 90),
        num_hidden_layers=n_layers, num_attention_heads=n_heads, num_key_value_heads=n_kv, head_dim=d,
        max_position_embeddings=160, sliding_window=window, query_pre_attn_scalar=d,
        layer_types=["sliding_attention" if i % 6 < 5 else "full_attention" for i in range(n_layers)],
        pad_token_id=None, use_bidirectional_attention=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **PLAIN,
    )  # fmt: skip
    made = of_config(config, draw, pattern=None, linear=False)
    metadata = made.metadata | {"attention.sliding_window": window, "context_length": 160, "pooling_type": 1}
    e, tensors = config.hidden_size, dict(made.tensors)
    if draw.flag() if dense is None else dense:
        shapes = {"dense_2.weight": (2 * e, e), "dense_3.weight": (e, 2 * e)}
        for name, shape in shapes.items():
            tensors[name] = torch.from_numpy(draw.rng.normal(0.0, shape[1] ** -0.5, shape).astype("float32"))
    return Made(made.model, "gemma-embedding", metadata, tensors)


@torch.no_grad()
def pooled(made: Made, ids: list[int]) -> Tensor:
    """What transformers has of a text: the mean of its hidden states, through the matrices behind it."""
    found = made.model.model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    for name in ("dense_2.weight", "dense_3.weight"):
        found = made.tensors[name] @ found if name in made.tensors else found
    return found
