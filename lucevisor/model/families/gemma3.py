"""Family ``gemma3``: sliding and full attention, norms before and after each block, positions of two kinds.

Text only.  ``rope.scaling`` is of full layers alone.  ``gemma-embedding`` is an encoder of the same layers: tokens see
those after them, and a window lies on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.rope import Rotary, plain_rotary, read_rotary
from lucevisor.model.spec import (
    MAX_LAYERS,
    Keys,
    ModelSpec,
    Pooling,
    PoolingType,
    Shapes,
    assemble,
    attention_layer,
    attention_state,
    attention_tensors,
    swiglu_tensors,
    tensor,
)


@dataclass(frozen=True, slots=True)
class Gemma3Params:
    """``window``: positions visible to layers with ``sliding[i]``; half of them on each side if ``bidirectional``."""

    hidden_size: int
    feed_forward: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    sliding: tuple[bool, ...]
    window: int
    rotary: Rotary
    rotary_sliding: Rotary
    eps: float
    scale: float
    softcap: float
    bidirectional: bool = False


def hyperparameters(keys: Keys) -> Gemma3Params:
    n_layers, window = keys.integer("block_count", high=MAX_LAYERS), keys.integer("attention.sliding_window", 0, low=0)
    e, n_heads, n_kv_heads = (
        keys.integer(key) for key in ("embedding_length", "attention.head_count", "attention.head_count_kv")
    )
    keys.check_heads(n_heads, n_kv_heads)
    d = keys.head_dim()
    rotary = read_rotary(keys, d, {})
    if rotary.yarn is not None:
        raise keys.error("rope.scaling.type", "is 'yarn', which this family does not support")
    return Gemma3Params(
        hidden_size=e,
        feed_forward=keys.integer("feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d,
        sliding=keys.sliding_layers(n_layers, window, 6, -1),
        window=window,
        rotary=rotary,
        rotary_sliding=plain_rotary(keys, d, 1e4, "_swa"),
        eps=keys.number("attention.layer_norm_rms_epsilon", above=0.0),
        # Gemma 3 27B alone scales by (E / H)^-0.5, and its files do not say so.
        scale=keys.number("attention.scale", 0.0) or (e / n_heads if n_layers == 62 else d) ** -0.5,
        softcap=keys.number("final_logit_softcapping", 0.0),
    )


def layer_tensors(p: Gemma3Params, i: int) -> Shapes:
    b, e = f"blk.{i}.", p.hidden_size
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    return {
        **{f"{b}{name}.weight": (e,) for name in norms},
        **attention_tensors(b, e, p.n_heads, p.n_kv_heads, p.head_dim),
        **swiglu_tensors(b, e, p.feed_forward),
    }


DENSE = ("dense_2.weight", "dense_3.weight")
"""Matrices behind the mean of ``gemma-embedding``."""


def embedding_spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``gemma-embedding`` file.  No model options."""
    keys = Keys(files.metadata, "gemma-embedding", str(files.paths[0]))
    p = replace(hyperparameters(keys), bidirectional=True)
    if keys.integer("pooling_type", PoolingType.MEAN, low=0) != PoolingType.MEAN:
        raise keys.error("pooling_type", f"is {keys.raw('pooling_type')}; this family pools by 1 (mean)")
    state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    layers = [attention_layer(i, layer_tensors(p, i), state) for i in range(len(p.sliding))]
    outputs: Shapes = {"output_norm.weight": (p.hidden_size,)}
    width = p.hidden_size
    for name in DENSE:
        if name in files.tensors:
            outputs[name] = (tensor(files, name).shape[0], width)
            width = outputs[name][0]
    pooling = Pooling(PoolingType.MEAN, width, bidirectional=True, generates=False)
    scale = math.sqrt(p.hidden_size)
    return assemble(files, keys, p, layers, embedding_scale=scale, pooling=pooling, outputs=outputs)


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``gemma3`` file.  No model options."""
    keys = Keys(files.metadata, "gemma3", str(files.paths[0]))
    p = hyperparameters(keys)
    state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    layers = [
        attention_layer(i, layer_tensors(p, i), state, p.window if slides else 0) for i, slides in enumerate(p.sliding)
    ]
    return assemble(files, keys, p, layers, embedding_scale=math.sqrt(p.hidden_size))
