"""Feed-forward blocks with routed experts.  Knows no family: which norms stand around them is the family's."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.models.blocks import GatedMlp
from daemons.ops.moe import ExpertMlp, Router
from daemons.state.batch import Batch
from daemons.weights import Weights
from lucevisor.wire.experts import Experts


class Mixture:
    """The routed experts of the rows, plus a shared part that every row goes through.

    ``gate`` float32 [1, E]: the shared part is multiplied by the sigmoid of its product with the row; None: by 1.
    """

    def __init__(self, router: Router, routed: ExpertMlp, shared: GatedMlp | None, gate: Tensor | None = None) -> None:
        self.router, self.routed, self.shared, self.gate = router, routed, shared, gate

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        out = self.routed(x, *self.router(x))
        if self.shared is None:
            return out
        shared = self.shared(x, batch)
        if self.gate is not None:
            shared = shared * torch.sigmoid(x.float() @ self.gate.t()).to(x.dtype)
        return out + shared


def build_router(w: Weights, prefix: str, x: Experts, bias: str = "", expert_scale: str = "") -> Router:
    """The router of the layer ``prefix`` ("blk.3."); ``bias`` and ``expert_scale`` name further tensors of it."""
    return Router(
        weight=w.exact(prefix + "ffn_gate_inp.weight"),
        n_used=x.n_used,
        gating=x.gating,
        normalise=x.normalise,
        scale=x.scale,
        bias=w.exact(prefix + bias) if bias else None,
        expert_scale=w.exact(prefix + expert_scale) if expert_scale else None,
    )


def build_routed(w: Weights, prefix: str, activation: str) -> ExpertMlp:
    """The routed experts of the layer ``prefix``, gate and up in one tensor or in two."""
    names = [prefix + "ffn_gate_up_exps.weight"]
    if names[0] not in w.files.tensors:
        names = [prefix + "ffn_gate_exps.weight", prefix + "ffn_up_exps.weight"]
    return ExpertMlp(w.experts(*names), w.experts(prefix + "ffn_down_exps.weight"), activation, w.chooser.operations)


def build_shared(w: Weights, prefix: str) -> GatedMlp:
    """The shared expert of the layer ``prefix``."""
    gate_up = w.linear(prefix + "ffn_gate_shexp.weight", prefix + "ffn_up_shexp.weight")
    return GatedMlp(gate_up, w.linear(prefix + "ffn_down_shexp.weight"), w.chooser.operations)
