"""Family ``bert``: an encoder with norms after its blocks.  Maths: docs/families.md."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models.blocks import Attention, AttentionShape, BiasedLinear, Block, Family, Output, Pooler, advance_state
from daemons.models.loader import WeightLoader
from daemons.ops.linear import Linear, Table
from lucevisor.model.families.bert import CLASSIFIER, NORM, POSITIONS, SCORE, TYPES, BertParams
from lucevisor.model.spec import ModelSpec, PoolingType


class LayerNorm:
    """Norm with mean and bias, in float32."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


class BertFamily(Family):
    """Builds the blocks of one shard.  Pages hold the keys and values of the texts of a step, and of no other."""

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, BertParams)
        self.p = spec.params

    def layer(self, index: int) -> Block:
        b = f"blk.{index}."
        mlp = GeluMlp(self.biased(b, "ffn_up"), self.biased(b, "ffn_down"))
        norms = self.layer_norm(b + "attn_output_norm"), self.layer_norm(b + "layer_output_norm")
        return PostNormLayer(self.attention(index), norms[0], mlp, norms[1])

    def attention(self, index: int) -> Attention:
        p, b = self.p, f"blk.{index}."
        shape = AttentionShape(p.n_heads, p.n_heads, p.head_dim, p.head_dim**-0.5, causal=False)
        inputs, output = self.biased(b, "attn_q", "attn_k", "attn_v"), self.biased(b, "attn_output")
        return Attention(shape, inputs, output, self.pages(index), lambda x, batch: x, self.operations)

    def biased(self, prefix: str, *names: str) -> Linear:
        """The product with stacked matrices, plus their biases."""
        biases = torch.cat([self.w.exact(f"{prefix}{name}.bias") for name in names])
        linear = self.w.linear(*(f"{prefix}{name}.weight" for name in names))
        return BiasedLinear(linear, biases, self.w, self.operations)

    def layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(self.w.exact(f"{name}.weight"), self.w.exact(f"{name}.bias"), self.p.eps)

    def embedding(self) -> Callable[[Batch], Tensor]:
        positions, types = self.w.exact(POSITIONS), self.w.exact(TYPES) if self.p.has_types else None
        if types is not None:
            positions = positions + types[0]
        second = types[1] - types[0] if types is not None and self.p.separator >= 0 else None
        norm = self.layer_norm(NORM)
        return BertEmbedding(self.w.table("token_embd.weight"), positions, norm, second, self.p.separator)

    def output(self) -> Output:
        kind, head = self.spec.pooling.kind, None
        if kind is PoolingType.RANK:
            kind, head = PoolingType.CLS, self.classifier()
        return Output(None, None, self.operations, pooler=Pooler(kind, lambda h: h, head or (lambda pooled: pooled)))

    def classifier(self) -> Callable[[Tensor], Tensor]:
        """The score of a pair of texts from its first row."""
        names = [name for name in (CLASSIFIER, SCORE) if f"{name}.weight" in self.spec.output_tensors]
        parts = [(self.w.exact(f"{name}.weight"), self.w.exact(f"{name}.bias")) for name in names]

        def score(pooled: Tensor) -> Tensor:
            for weight, bias in parts[:-1]:
                pooled = torch.tanh(F.linear(pooled, weight, bias))
            return F.linear(pooled, *parts[-1])

        return score


class BertEmbedding:
    """Rows of the token table plus those of ``positions`` [context, E], and plus ``second`` [E] behind the first
    ``separator`` of a text, normed."""

    def __init__(self, table: Table, positions: Tensor, norm: LayerNorm, second: Tensor | None, separator: int) -> None:
        self.table, self.positions, self.norm = table, positions, norm
        self.second, self.separator = second, separator

    def __call__(self, batch: Batch) -> Tensor:
        rows = self.table(batch.ids)
        h = rows.float() + self.positions.index_select(0, batch.positions)
        if self.second is not None:
            ends = (batch.ids == self.separator).long()
            before = ends.cumsum(0) - ends
            of_text = before - torch.where(batch.positions == 0, before, 0).cummax(0).values
            h += (of_text > 0).unsqueeze(1) * self.second
        return self.norm(h).to(rows.dtype)


class GeluMlp:
    """``down(gelu(up x))``, exact."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up, self.down = up, down

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class PostNormLayer:
    """``h = norm(h + mixer(h)); h = norm(h + mlp(h))``."""

    def __init__(self, mixer: Block, mixer_norm: LayerNorm, mlp: Block, mlp_norm: LayerNorm) -> None:
        self.mixer, self.mixer_norm, self.mlp, self.mlp_norm = mixer, mixer_norm, mlp, mlp_norm

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        h = self.mixer_norm(h + self.mixer(h, batch))
        return self.mlp_norm(h + self.mlp(h, batch))

    def advance_state(self, h: Tensor, batch: Batch) -> None:
        """See the function."""
        advance_state(self.mixer, h, batch)
