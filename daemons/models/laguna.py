"""Family ``laguna``: full and sliding attention with gated heads; dense layers first, then routed experts and a shared
one.  Maths: docs/families.md.
"""

from __future__ import annotations

from daemons.kv.pools import Pools
from daemons.models.blocks import (
    Attention,
    AttentionShape,
    Block,
    Family,
    PreNormLayer,
    QkNormRope,
)
from daemons.models.loader import WeightLoader
from daemons.models.moe import build_mlp
from lucevisor.model.families.laguna import LagunaParams
from lucevisor.model.spec import ModelSpec


class LagunaFamily(Family):
    """Builds the blocks of one shard."""

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, LagunaParams)
        self.p, self.eps = spec.params, spec.params.eps
        self.ropes = {False: self.rotary(self.p.rotary), True: self.rotary(self.p.rotary_sliding)}

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        norms = self.norm(b + "attn_norm.weight"), self.norm(b + "ffn_norm.weight")
        return PreNormLayer(norms[0], self.attention(index), norms[1], self.mlp(index), self.operations)

    def mlp(self, index: int) -> Block:
        return build_mlp(self.w, f"blk.{index}.", None if index < self.p.n_dense else self.p.experts)

    def attention(self, index: int) -> Block:
        p, b, d = self.p, f"blk.{index}.", self.p.head_dim
        n_heads, layer = p.heads[index], self.spec.layers[index]
        gate = [b + "attn_gate.weight"] if p.gates[index] else []
        inputs = self.w.linear(b + "attn_q.weight", b + "attn_k.weight", *gate, b + "attn_v.weight")
        shape = AttentionShape(
            n_heads,
            p.n_kv_heads,
            d,
            d**-0.5,
            gate=p.gates[index],
            kv_group=layer.kv_group,
            window=layer.window,
            softplus=True,
        )
        positions = QkNormRope(self.qk_norm(b, n_heads, p.n_kv_heads), self.ropes[p.sliding[index]], self.operations)
        output = self.w.linear(b + "attn_output.weight")
        return Attention(shape, inputs, output, self.pages(index), positions, self.operations)
