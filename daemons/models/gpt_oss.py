"""Family ``gpt-oss``: Llama's layers with attention sinks, sliding and full in turn, and experts with biases.  Maths:
docs/families.md.
"""

from __future__ import annotations

from torch import Tensor

from daemons.models.blocks import AttentionShape, Block
from daemons.models.llama import LlamaFamily
from daemons.models.moe import MoeMlp, build_experts, build_router
from lucevisor.model.families.gpt_oss import SINKS


class GptOssFamily(LlamaFamily):
    """Builds the blocks of one shard."""

    def mlp(self, index: int) -> Block:
        b, x = f"blk.{index}.", self.p.experts
        assert x is not None
        return MoeMlp(build_router(self.w, b, x), build_experts(self.w, b, "swiglu_oai", x), None)

    def attention_shape(self, index: int) -> AttentionShape:
        p, layer = self.p, self.spec.layers[index]
        return AttentionShape(
            p.n_heads, p.n_kv_heads, p.head_dim, p.scale, kv_group=layer.kv_group, window=layer.window
        )

    def sinks(self, prefix: str) -> Tensor:
        return self.w.exact(prefix + SINKS)
