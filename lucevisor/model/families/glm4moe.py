"""Family ``glm4moe``: GLM-4.5, 4.6 and 4.7.  Llama's layers, first dense ones, then routed experts and a shared one.

An MTP block at the end of the file is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lucevisor.model.experts import read_experts
from lucevisor.model.families import llama
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import MAX_LAYERS, Keys, ModelSpec


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    """Read the spec of a ``glm4moe`` file.  Option ``yarn_attn_factor``: see :mod:`lucevisor.model.rope`."""
    keys = Keys(files.metadata, "glm4moe", str(files.paths[0]))
    qk_norm = "blk.0.attn_q_norm.weight" in files.tensors
    p = llama.hyperparameters(files, keys, options, qk_norm=qk_norm, experts=True)
    n_nextn = keys.integer("nextn_predict_layers", 0, low=0)
    if n_nextn >= p.n_layers:
        raise keys.error("nextn_predict_layers", f"is {n_nextn}, of {p.n_layers} blocks")
    width = keys.integer("expert_feed_forward_length")
    shared_width = width * keys.integer("expert_shared_count", 1, low=0, high=64)
    p = replace(
        p,
        n_layers=p.n_layers - n_nextn,
        n_dense=keys.integer("leading_dense_block_count", 0, low=0, high=MAX_LAYERS),
        experts=read_experts(keys, width=width, shared_width=shared_width, gating=2, biased=True),
        mlp_norm="post_attention_norm",
    )
    if p.n_dense and not p.feed_forward:
        raise keys.error("feed_forward_length", "is missing")
    return llama.build(files, keys, p)
