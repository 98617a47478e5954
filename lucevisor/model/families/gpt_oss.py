"""Family ``gpt-oss``: Llama's layers with attention sinks, sliding and full in turn, and experts with biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from lucevisor.model.experts import read_experts
from lucevisor.model.families import llama
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import Keys, ModelSpec, assemble, attention_layer, attention_state

ARCHITECTURE = "gpt-oss"
SINKS = "attn_sinks.weight"


@dataclass(frozen=True, slots=True)
class GptOssParams(llama.LlamaParams):
    """``window``: positions visible to layers with ``sliding[i]``."""

    sliding: tuple[bool, ...]
    window: int


def hyperparameters(files: GgufFiles, keys: Keys, options: Mapping[str, str]) -> GptOssParams:
    p = llama.hyperparameters(files, keys, options, experts=True)
    experts = read_experts(keys, width=p.feed_forward or None, shared_width=0, gating=1, has_biases=True)
    rotary = p.rotary
    if rotary.yarn is not None:  # as trained; files do not say
        rotary = replace(rotary, yarn=replace(rotary.yarn, whole_pairs=False))
    p = replace(p, experts=experts, rotary=rotary, mlp_norm="post_attention_norm")
    window = keys.integer("attention.sliding_window", 0, low=0)
    same = {field.name: getattr(p, field.name) for field in fields(p)}
    return GptOssParams(**same, sliding=keys.sliding_layers(p.n_layers, window, 2, -1), window=window)


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``gpt-oss`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, ARCHITECTURE, str(files.paths[0]))
    p = hyperparameters(files, keys, options)
    assert p.experts is not None
    state, sinks = attention_state(p.n_kv_heads, p.head_dim, p.head_dim), (p.n_heads,)
    layers = [
        attention_layer(
            i,
            llama.layer_tensors(files, p, i) | {f"blk.{i}.{SINKS}": sinks},
            state,
            p.window if slides else 0,
            n_routed=p.experts.n_used,
        )
        for i, slides in enumerate(p.sliding)
    ]
    return assemble(files, keys, p, layers)
