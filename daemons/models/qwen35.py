"""Family ``qwen35``: three gated delta net layers, then one gated full-attention layer.  Maths: docs/families.md."""

from __future__ import annotations

from daemons.kv.pools import Pools
from daemons.models.blocks import (
    Attention,
    AttentionShape,
    Block,
    Family,
    GatedDeltaNet,
    GatedDeltaNetShape,
    GatedDeltaNetWeights,
    PreNormLayer,
    QkNormRope,
    gated_mlp,
)
from daemons.models.loader import Rows, WeightLoader
from lucevisor.model.families.qwen35 import Qwen35Params
from lucevisor.model.spec import ModelSpec


class Qwen35Family(Family):
    """Builds the blocks of one shard.  A family with another MLP overrides :meth:`mlp`."""

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, Qwen35Params)
        self.p, self.eps = spec.params, spec.params.eps
        self.rope = self.rotary(self.p.rotary)

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        mixer: Block = self.delta_net(index) if self.p.recurrent[index] else self.attention(index)
        norms = self.norm(b + "attn_norm.weight"), self.norm(b + "post_attention_norm.weight")
        return PreNormLayer(norms[0], mixer, norms[1], self.mlp(index), self.operations)

    def mlp(self, index: int) -> Block:
        return gated_mlp(self.w, f"blk.{index}.")

    def attention(self, index: int) -> Attention:
        p, b = self.p, f"blk.{index}."
        d = p.head_dim
        # rows of attn_q alternate per head, query then gate: take all queries first, so that q and k are adjacent
        q = Rows(b + "attn_q.weight", tuple((2 * h * d, 2 * h * d + d) for h in range(p.n_heads)))
        gate = Rows(b + "attn_q.weight", tuple((2 * h * d + d, 2 * h * d + 2 * d) for h in range(p.n_heads)))
        inputs = self.w.linear(q, b + "attn_k.weight", gate, b + "attn_v.weight")
        shape = AttentionShape(p.n_heads, p.n_kv_heads, d, p.scale, gate=p.n_heads * d)
        positions = QkNormRope(self.qk_norm(b, p.n_heads, p.n_kv_heads), self.rope, self.operations)
        output = self.w.linear(b + "attn_output.weight")
        return Attention(shape, inputs, output, self.pages(index), positions, self.operations)

    def delta_net(self, index: int) -> Block:
        states = self.pools.state(index, "conv"), self.pools.state(index, "delta")
        shape, weights = self.delta_shape(), self.delta_weights(f"blk.{index}.")
        return GatedDeltaNet(shape, weights, *states, self.pools.updates.of_layer(index), self.operations)

    def delta_shape(self) -> GatedDeltaNetShape:
        return GatedDeltaNetShape(self.p.delta_key_heads, self.p.delta_value_heads, self.p.delta_dim)

    def delta_weights(self, b: str) -> GatedDeltaNetWeights:
        return GatedDeltaNetWeights(
            inputs=self.w.linear(
                b + "attn_qkv.weight", b + "attn_gate.weight", b + "ssm_alpha.weight", b + "ssm_beta.weight"
            ),
            output=self.w.linear(b + "ssm_out.weight"),
            conv_weight=self.w.exact(b + "ssm_conv1d.weight").t().contiguous(),
            decay_rates=self.w.exact(b + "ssm_a"),
            dt_bias=self.w.exact(b + "ssm_dt.bias"),
            norm=self.norm(b + "ssm_norm.weight"),
        )
