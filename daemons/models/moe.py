"""Mixture-of-experts MLP blocks.  Knows no family: the norms around them are the family's."""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.kv.batch import Batch
from daemons.models.blocks import Block, GatedMlp, gated_mlp
from daemons.models.loader import WeightLoader
from daemons.ops.moe import ExpertMlp
from daemons.ops.router import RouteFn, Router
from lucevisor.model.experts import Experts


class MoeMlp:
    """Routed experts, plus a shared expert for every row, weighted by the router's shared gate if it has one."""

    def __init__(self, route: RouteFn, routed: ExpertMlp, shared: GatedMlp | None) -> None:
        self.route, self.routed, self.shared = route, routed, shared

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        return self.routed(x, self.route(x), None if self.shared is None else self.shared(x, batch))


def build_router(w: WeightLoader, prefix: str, x: Experts, *, expert_scale: str = "", shared_gate: str = "") -> RouteFn:
    """The router of the layer ``prefix`` ("blk.3."); ``expert_scale`` and ``shared_gate`` name tensors."""
    weight = w.exact(prefix + "ffn_gate_inp.weight")
    if shared_gate:
        weight = torch.cat((weight, w.exact(prefix + shared_gate).view(1, -1)))
    router = Router(
        weight=weight,
        n_used=x.n_used,
        gating=x.gating,
        normalise=x.normalise,
        scale=x.scale,
        bias=w.exact(prefix + "exp_probs_b.bias") if x.biased else None,
        expert_scale=w.exact(prefix + expert_scale) if expert_scale else None,
        has_shared_gate=bool(shared_gate),
        logit_bias=w.exact(prefix + "ffn_gate_inp.bias") if x.has_biases else None,
    )
    return w.selector.operations.router(router)


def build_experts(w: WeightLoader, prefix: str, activation: str, x: Experts | None = None) -> ExpertMlp:
    """The routed experts of the layer ``prefix``, gate and up in one tensor or in two; with biases if ``x`` says so."""
    down, names = prefix + "ffn_down_exps", [prefix + "ffn_gate_up_exps"]
    if names[0] + ".weight" not in w.files.tensors:
        names = [prefix + "ffn_gate_exps", prefix + "ffn_up_exps"]
    biases = None
    if x is not None and x.has_biases:
        gate_up = torch.cat([w.exact(name + ".bias") for name in names], dim=1)
        biases = gate_up.to(w.selector.dtype), w.exact(down + ".bias").to(w.selector.dtype)
    matrices = w.experts(*(name + ".weight" for name in names)), w.experts(down + ".weight")
    return ExpertMlp(*matrices, activation, w.selector.operations, biases)


def build_mlp(w: WeightLoader, prefix: str, x: Experts | None) -> Block:
    """The MLP of the layer ``prefix``: dense where ``x`` is None, else routed experts and a shared one if there is
    one."""
    if x is None:
        return gated_mlp(w, prefix)
    shared = gated_mlp(w, prefix, "_shexp") if x.shared_width else None
    return MoeMlp(build_router(w, prefix, x), build_experts(w, prefix, "silu"), shared)
