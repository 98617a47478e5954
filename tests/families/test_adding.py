"""docs/adding-a-family.md followed to the letter for a family that is not shipped: Qwen2 with routed experts and a
gated shared one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from daemons import models
from daemons.models.blocks import Block, gated_mlp
from daemons.models.llama import LlamaFamily
from daemons.models.moe import MoeMlp, build_experts, build_router
from lucevisor.model import families
from lucevisor.model.experts import shared_tensors
from lucevisor.model.families.llama import hyperparameters, layer_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import Keys, LayerSpec, ModelSpec, assemble, attention_state
from lucevisor.model.values import KvGroup
from tests.families.generate import llama
from tests.families.generate.made import Draw, Made, build, reference
from tests.families.pipeline import Pipeline, load_stages

SHARED_GATE = "ffn_gate_inp_shexp.weight"

# ---- what would be lucevisor/model/families/qwen2moe.py


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    keys = Keys(files.metadata, "qwen2moe", str(files.paths[0]))
    p = hyperparameters(files, keys, options, experts=True)
    if p.experts is None:
        raise keys.error("expert_count", "is missing")
    p = replace(p, experts=replace(p.experts, normalise=keys.flag("expert_weights_norm", False)))
    layers = []
    for i in range(p.n_layers):
        b, e = f"blk.{i}.", p.hidden_size
        tensors = layer_tensors(files, p, i) | shared_tensors(b, e, p.experts) | {b + SHARED_GATE: (1, e)}
        state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
        layers.append(LayerSpec(i, KvGroup.FULL, tensors, state, n_routed=p.experts.n_used))
    return assemble(files, keys, p, layers)


# ---- what would be daemons/models/qwen2moe.py


class Qwen2MoeFamily(LlamaFamily):
    def mlp(self, index: int) -> Block:
        assert self.p.experts is not None
        b = f"blk.{index}."
        router = build_router(self.w, b, self.p.experts, shared_gate=SHARED_GATE)
        return MoeMlp(router, build_experts(self.w, b, "silu"), gated_mlp(self.w, b, "_shexp"))


# ---- what would go into tests/families/generate/llama.py


def qwen2moe(draw: Draw) -> Made:
    n_experts, settings = draw.between(2, 9), llama.common(draw)
    settings.pop("head_dim")
    settings["hidden_size"] *= 2
    config: Any = transformers.Qwen2MoeConfig(
        **settings, num_experts=n_experts, num_experts_per_tok=draw.between(1, n_experts), norm_topk_prob=False,
        moe_intermediate_size=draw.between(9, 40), shared_expert_intermediate_size=draw.between(9, 50),
        decoder_sparse_step=1, mlp_only_layers=[], rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_sliding_window=False,
    )  # fmt: skip
    model = build(transformers.Qwen2MoeForCausalLM, config, draw)
    config.head_dim = config.hidden_size // config.num_attention_heads
    names = llama.EXPERTS | {SHARED_GATE: "mlp.shared_expert_gate.weight"}
    names |= {f"ffn_{n}_shexp.weight": f"mlp.shared_expert.{n}_proj.weight" for n in ("gate", "up", "down")}
    more = llama.experts_of(config) | {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }
    return llama.made(model, "qwen2moe", names, more, {})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_a_family_added_by_the_book_agrees_with_transformers(seed: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "qwen2moe", spec)
    monkeypatch.setitem(models.FAMILIES, "qwen2moe", Qwen2MoeFamily)
    draw = Draw(seed)
    made = qwen2moe(draw)
    found = families.open_spec(made.write(tmp_path / "model.gguf"))
    assert found.skipped == ()
    ids = draw.ids(50, made.vocabulary)
    theirs, clear = reference(made.model, ids)
    assert clear
    c = Pipeline(found, load_stages(found, [1]))
    c.open(0)
    assert theirs.worst(c.run_in_chunks(0, ids, 17)) <= 1.0
