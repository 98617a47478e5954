"""Families ``llama``, ``qwen2``, ``qwen3``, ``qwen3moe``, ``granite``, ``granitemoe``, ``mistral3`` and ``glm4moe``:
full attention in every layer; norms on queries and keys, biases, experts, scales and temperature where the parameters
say so.  Maths: docs/families.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.kv.pools import Pools
from daemons.models.blocks import (
    Attention,
    AttentionShape,
    BiasedLinear,
    Block,
    Family,
    PreNormLayer,
    QkNormRope,
    no_norm,
)
from daemons.models.loader import Rows, WeightLoader, halves_of_pairs
from daemons.models.moe import build_mlp
from daemons.ops.linear import Linear
from daemons.ops.operations import Norm
from lucevisor.model.families.llama import INPUTS, ROPE_FACTORS, LlamaParams
from lucevisor.model.spec import ModelSpec


class LlamaFamily(Family):
    """Builds the blocks of one shard.

    Kernels rotate dims half a head apart.  Where a file has the rows of a rotary pair side by side, those of queries
    and keys are reordered when they are loaded: scores are sums over all dims of a head, in whichever order.
    """

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, LlamaParams)
        self.p, self.eps, self.logit_divisor = spec.params, spec.params.eps, spec.params.logit_divisor
        self.rope = self.rotary(self.p.rotary, weights.exact(ROPE_FACTORS) if self.p.rope_factors else None)

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        norms = self.norm(b + "attn_norm.weight"), self.norm(f"{b}{self.p.mlp_norm}.weight")
        blocks = (norms[0], self.attention(index), norms[1], self.mlp(index))
        return PreNormLayer(*blocks, self.operations, self.p.residual_scale)

    def mlp(self, index: int) -> Block:
        return build_mlp(self.w, f"blk.{index}.", None if index < self.p.n_dense else self.p.experts)

    def attention_shape(self, index: int) -> AttentionShape:
        p = self.p
        temperature = (p.temperature_scale, p.temperature_length)
        return AttentionShape(p.n_heads, p.n_kv_heads, p.head_dim, p.scale, temperature=temperature)

    def attention(self, index: int) -> Attention:
        b, shape = f"blk.{index}.", self.attention_shape(index)
        p, pages = self.p, self.pages(index)
        norm = self.qk_norm(b, p.n_heads, p.n_kv_heads)
        positions = QkNormRope(norm, self.rope, self.operations)
        output = self.biased(b, self.w.linear(b + "attn_output.weight"), "attn_output")
        return Attention(shape, self.inputs(b), output, pages, positions, self.operations, sinks=self.sinks(b))

    def sinks(self, prefix: str) -> Tensor | None:
        """See :class:`daemons.models.blocks.Attention`."""
        return None

    def inputs(self, prefix: str) -> Linear:
        pairs = (self.p.head_dim, self.p.rotary.n) if self.p.adjacent_pairs else None
        q, k, v = (f"{prefix}{name}.weight" for name in INPUTS)
        return self.biased(prefix, self.w.linear(Rows(q, pairs=pairs), Rows(k, pairs=pairs), v), *INPUTS)

    def biased(self, prefix: str, linear: Linear, *names: str) -> Linear:
        """The product with the stacked matrices ``names``, plus the biases of those that have one."""
        if not self.p.biases.intersection(names):
            return linear
        return BiasedLinear(linear, torch.cat([self.bias(prefix, name) for name in names]), self.w, self.operations)

    def bias(self, prefix: str, name: str) -> Tensor:
        p = self.p
        if name not in p.biases:
            n_rows = self.w.files.tensors[f"{prefix}{name}.weight"].shape[0]
            return torch.zeros(n_rows, device=self.device)
        bias = self.w.exact(f"{prefix}{name}.bias")
        paired = p.adjacent_pairs and name in INPUTS[:2]
        return halves_of_pairs(bias.unsqueeze(1), p.head_dim, p.rotary.n).flatten() if paired else bias

    def qk_norm(self, prefix: str, n_heads: int, n_kv_heads: int) -> Norm:
        if self.p.qk_norm:
            return super().qk_norm(prefix, n_heads, n_kv_heads)
        return no_norm(self.operations, n_heads + n_kv_heads, self.p.head_dim, self.device)
