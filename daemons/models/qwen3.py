"""Family ``qwen3``: dense, full attention in every layer, norms on queries and keys.  Maths: docs/families.md."""

from __future__ import annotations

import torch

from daemons.kv.pools import Pools
from daemons.models.blocks import (
    Attention,
    AttentionShape,
    Block,
    Family,
    GatedMlp,
    PreNormLayer,
    QkNormRope,
)
from daemons.models.loader import WeightLoader
from daemons.ops.basic import rope
from lucevisor.model.families.qwen3 import Qwen3Params
from lucevisor.model.spec import ModelSpec


class Qwen3Family(Family):
    """Builds the blocks of one shard."""

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, Qwen3Params)
        self.p, self.eps = spec.params, spec.params.eps
        self.rope = rope(self.p.rotary, self.device)

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        norms = self.norm(b + "attn_norm.weight"), self.norm(b + "ffn_norm.weight")
        return PreNormLayer(norms[0], self.attention(index), norms[1], self.mlp(index), self.operations)

    def mlp(self, index: int) -> Block:
        b = f"blk.{index}."
        gate_up = self.w.linear(b + "ffn_gate.weight", b + "ffn_up.weight")
        return GatedMlp(gate_up, self.w.linear(b + "ffn_down.weight"), self.operations)

    def attention_shape(self, index: int) -> AttentionShape:
        p = self.p
        return AttentionShape(p.n_heads, p.n_kv_heads, p.head_dim, p.head_dim**-0.5)

    def attention(self, index: int) -> Attention:
        p, b, d = self.p, f"blk.{index}.", self.p.head_dim
        inputs = self.w.linear(b + "attn_q.weight", b + "attn_k.weight", b + "attn_v.weight")
        q_norm, k_norm = self.w.exact(b + "attn_q_norm.weight"), self.w.exact(b + "attn_k_norm.weight")
        per_head = torch.cat((q_norm.expand(p.n_heads, -1), k_norm.expand(p.n_kv_heads, -1)))
        shape = self.attention_shape(index)
        pages = self.pools.paged(index, "k"), self.pools.paged(index, "v")
        positions = QkNormRope(self.operations.norm(per_head, d, p.eps), self.rope, self.operations)
        return Attention(shape, inputs, self.w.linear(b + "attn_output.weight"), pages, positions, self.operations)
