"""Families ``gemma3`` and ``gemma-embedding``: sliding and full attention, norms before and after each block.  Maths:
docs/families.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from daemons.kv.pools import Pools
from daemons.models.blocks import (
    Attention,
    AttentionShape,
    Block,
    Family,
    NormedBlock,
    Pooler,
    QkNormRope,
    SandwichNormLayer,
    gated_mlp,
)
from daemons.models.loader import WeightLoader
from lucevisor.model.families.gemma3 import DENSE, Gemma3Params
from lucevisor.model.spec import ModelSpec


class Gemma3Family(Family):
    """Builds the blocks of one shard."""

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, Gemma3Params)
        self.p, self.eps, self.softcap = spec.params, spec.params.eps, spec.params.softcap
        self.ropes = {False: self.rotary(self.p.rotary), True: self.rotary(self.p.rotary_sliding)}

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        mlp = gated_mlp(self.w, b, activation="gelu_tanh")
        norms = [self.norm(f"{b}{n}.weight") for n in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")]
        return SandwichNormLayer(
            NormedBlock(norms[0], self.attention(index), norms[1]),
            NormedBlock(norms[2], mlp, norms[3]),
            self.operations,
        )

    def attention(self, index: int) -> Attention:
        p, b, layer = self.p, f"blk.{index}.", self.spec.layers[index]
        inputs = self.w.linear(b + "attn_q.weight", b + "attn_k.weight", b + "attn_v.weight")
        shape = AttentionShape(
            p.n_heads, p.n_kv_heads, p.head_dim, p.scale, kv_group=layer.kv_group, window=layer.window
        )
        if p.bidirectional:
            window = p.window // 2 + 1 if p.sliding[index] else 0
            shape = replace(shape, causal=False, window=window, symmetric=True)
        positions = QkNormRope(self.qk_norm(b, p.n_heads, p.n_kv_heads), self.ropes[p.sliding[index]], self.operations)
        output = self.w.linear(b + "attn_output.weight")
        return Attention(shape, inputs, output, self.pages(index), positions, self.operations)

    def pooler(self, norm: Callable[[Tensor], Tensor]) -> Pooler:
        dense = [self.w.exact(name) for name in DENSE if name in self.spec.output_tensors]

        def head(pooled: Tensor) -> Tensor:
            for weight in dense:
                pooled = F.linear(pooled, weight)
            return pooled

        return Pooler(self.spec.pooling.kind, norm, head)
