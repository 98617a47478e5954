"""Family ``qwen35moe``: ``qwen35`` with routed experts and a gated shared one.  Maths: docs/families.md."""

from __future__ import annotations

from daemons.models.blocks import Block, gated_mlp
from daemons.models.moe import MoeMlp, build_experts, build_router
from daemons.models.qwen35 import Qwen35Family
from lucevisor.model.families.qwen35moe import Qwen35MoeParams


class Qwen35MoeFamily(Qwen35Family):
    """Builds the blocks of one shard."""

    def mlp(self, index: int) -> Block:
        assert isinstance(self.p, Qwen35MoeParams)
        b = f"blk.{index}."
        return MoeMlp(
            route=build_router(self.w, b, self.p.experts, shared_gate="ffn_gate_inp_shexp.weight"),
            routed=build_experts(self.w, b, "silu"),
            shared=gated_mlp(self.w, b, "_shexp"),
        )
