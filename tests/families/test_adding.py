"""docs/adding-a-family.md followed to the letter for a family that is not shipped: Qwen3 with routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import transformers

from daemons import models
from daemons.models.blocks import Block, PreNormLayer
from daemons.models.moe import MoeMlp, build_experts, build_router
from daemons.models.qwen3 import Qwen3Family
from lucevisor.model import families
from lucevisor.model.experts import Experts, read_experts, routed_tensors
from lucevisor.model.families.qwen3 import Qwen3Params, hyperparameters, layer_tensors
from lucevisor.model.gguf_files import GgufFiles
from lucevisor.model.spec import Keys, LayerSpec, ModelSpec, assemble, attention_state
from lucevisor.model.values import Space
from tests.families.generate.made import PLAIN, Draw, Made, build, ends, reference, renamed
from tests.families.generate.qwen import ATTENTION, HEAD_NORMS, heads, metadata_of
from tests.families.pipeline import Pipeline, load_stages

# ---- what would be lucevisor/model/families/qwen3moe.py


@dataclass(frozen=True, slots=True)
class Qwen3Moe(Qwen3Params):
    experts: Experts


def spec(files: GgufFiles, options: Mapping[str, str]) -> ModelSpec:
    keys = Keys(files.metadata, "qwen3moe", str(files.paths[0]))
    dense = hyperparameters(keys, options)
    experts = read_experts(keys, width=None, shared_width=0, gating=1)
    p = Qwen3Moe(**{f.name: getattr(dense, f.name) for f in fields(dense)}, experts=experts)
    state = attention_state(p.n_kv_heads, p.head_dim, p.head_dim)
    layers = []
    for i in range(p.n_layers):
        kept = {
            n: s for n, s in layer_tensors(p, i).items() if not n.endswith(("gate.weight", "up.weight", "down.weight"))
        }
        tensors = kept | routed_tensors(files, f"blk.{i}.", p.hidden_size, experts)
        layers.append(LayerSpec(i, Space.FULL, tensors, state, n_routed=experts.n_used))
    return assemble(files, keys, p, layers)


# ---- what would be daemons/models/qwen3moe.py


class Qwen3MoeFamily(Qwen3Family):
    def layer(self, index: int) -> Block:
        assert isinstance(self.p, Qwen3Moe)
        b = f"blk.{index}."
        mlp = MoeMlp(build_router(self.w, b, self.p.experts), build_experts(self.w, b, "silu"), None)
        norms = self.norm(b + "attn_norm.weight"), self.norm(b + "ffn_norm.weight")
        return PreNormLayer(norms[0], self.attention(index), norms[1], mlp, self.operations)


# ---- what would go into tests/families/generate/qwen.py


def qwen3moe(draw: Draw) -> Made:
    n_heads, n_kv, d = heads(draw)
    n_experts = draw.between(2, 9)
    config = transformers.Qwen3MoeConfig(
        vocab_size=draw.between(60, 200), hidden_size=draw.between(17, 70), num_hidden_layers=draw.between(2, 5),
        num_attention_heads=n_heads, num_key_value_heads=n_kv, head_dim=d, max_position_embeddings=512,
        num_experts=n_experts, num_experts_per_tok=draw.between(1, n_experts), norm_topk_prob=True,
        moe_intermediate_size=draw.between(9, 40), decoder_sparse_step=1, mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True, **PLAIN,
    )  # fmt: skip
    model = build(transformers.Qwen3MoeForCausalLM, config, draw)
    state = model.state_dict()
    names = ATTENTION | HEAD_NORMS | {"ffn_gate_inp.weight": "mlp.gate.weight"}
    names |= {"attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight"}
    names |= {"ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj", "ffn_down_exps.weight": "mlp.experts.down_proj"}
    metadata = metadata_of(config, d) | {
        "expert_count": n_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
    }
    return Made(model, "qwen3moe", metadata, renamed(state, names, config.num_hidden_layers) | ends(state, tied=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_a_family_added_by_the_book_agrees_with_transformers(seed: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "qwen3moe", spec)
    monkeypatch.setitem(models.FAMILIES, "qwen3moe", Qwen3MoeFamily)
    draw = Draw(seed)
    made = qwen3moe(draw)
    found = families.open_spec(made.write(tmp_path / "model.gguf"))
    assert found.skipped == ()
    ids = draw.ids(50, made.vocabulary)
    theirs, clear = reference(made.model, ids)
    assert clear
    c = Pipeline(found, load_stages(found, [1]))
    c.open(0)
    assert theirs.worst(c.run_in_chunks(0, ids, 17)) <= 1.0
