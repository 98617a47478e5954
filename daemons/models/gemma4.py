"""Family ``gemma4``: sliding and full attention with different head sizes, norms before and after each block, and
optionally per-layer embeddings, shared keys and values, and routed experts.  Maths: docs/families.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from daemons.kv.batch import Batch
from daemons.kv.pools import Pools
from daemons.models.blocks import Attention, AttentionShape, Block, Family, NormedBlock, QkNormRope, gated_mlp
from daemons.models.loader import WeightLoader
from daemons.models.moe import build_experts, build_router
from daemons.ops.linear import Linear
from daemons.ops.moe import ExpertMlp
from daemons.ops.operations import Norm, Operations
from daemons.ops.router import RouteFn
from lucevisor.model.families.gemma4 import ID_WIDTH, Gemma4Params
from lucevisor.model.spec import ModelSpec


@dataclass(frozen=True)
class RoutedBlock:
    """Routed experts in parallel to the dense MLP.  The router has a norm of its own."""

    router_norm: Norm
    route: RouteFn
    routed: ExpertMlp
    pre: Norm
    post: Norm

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        return self.post(self.routed(self.pre(h), self.route(self.router_norm.float32(h))))


@dataclass(frozen=True)
class InputBlock:
    """``post(project(gelu(gate h) * input))`` with the layer's row ``at`` of the step's per-layer inputs."""

    gate: Linear
    project: Linear
    post: Norm
    at: int
    operations: Operations

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        assert batch.layer_inputs is not None
        return self.post(self.project(self.operations.gelu(self.gate(h)) * batch.layer_inputs[:, self.at]))


@dataclass(frozen=True)
class Gemma4Block:
    """One layer.  ``parallel`` adds to ``mlp`` before their norm ``post``; ``scale`` [] scales the stream."""

    attention: Block
    mlp: Block
    parallel: Block | None
    post: Norm
    inputs: Block | None
    scale: Tensor

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        h = h + self.attention(h, batch)
        y = self.mlp(h, batch)
        if self.parallel is not None:
            y = y + self.parallel(h, batch)
        h = h + self.post(y)
        if self.inputs is not None:
            h = h + self.inputs(h, batch)
        return h * self.scale


class LayerInputs:
    """Per-layer inputs [T, layers of the shard, P] of a step, from its ids and its scaled embedding rows."""

    def __init__(self, p: Gemma4Params, weights: WeightLoader, n_layers: int) -> None:
        self.p, self.n_layers = p, n_layers
        self.table = weights.table("per_layer_token_embd.weight")
        self.project = weights.linear("per_layer_model_proj.weight")
        self.norm = weights.selector.operations.norm(weights.exact("per_layer_proj_norm.weight"), p.layer_input, p.eps)

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        shape = (-1, self.n_layers, self.p.layer_input)
        own = self.table(ids).view(shape) * math.sqrt(self.p.layer_input)
        context = self.project(embedded).view(shape) * (1.0 / math.sqrt(self.p.hidden_size))
        return (own + self.norm(context)) * math.sqrt(0.5)


class Gemma4Family(Family):
    """Builds the blocks of one shard.

    With per-layer embeddings a boundary row is h, the scaled embedding and the bytes of the token id: a step may be
    sent before its tokens are known, and only the first stage is told them.
    """

    def __init__(self, spec: ModelSpec, weights: WeightLoader, pools: Pools) -> None:
        super().__init__(spec, weights, pools)
        assert isinstance(spec.params, Gemma4Params)
        self.p, self.eps = spec.params, spec.params.eps
        self.softcap = self.p.softcap
        factors = weights.exact("rope_freqs.weight")
        self.ropes = {False: self.rotary(self.p.rotary, factors), True: self.rotary(self.p.rotary_sliding)}
        self.inputs = LayerInputs(self.p, weights, len(pools.layers)) if self.p.layer_input else None

    def embedding(self) -> Callable[[Batch], Tensor]:
        embedding = super().embedding()
        if self.inputs is None:
            return embedding

        def with_ids(batch: Batch) -> Tensor:
            h = embedding(batch)
            ids = batch.ids[:, None].expand(-1, ID_WIDTH * h.element_size() // batch.ids.element_size())
            return torch.cat((h, h, ids.contiguous().view(h.dtype)), dim=-1)

        return with_ids

    def from_boundary(self, rows: Tensor, batch: Batch) -> Tensor:
        if self.inputs is None:
            return rows
        e = self.p.hidden_size
        h, batch.carried = rows.split_with_sizes([e, e + ID_WIDTH], dim=-1)
        ids = batch.carried[:, e:].view(torch.int64)[:, 0]
        # rows that are not of a text, as those whose time is taken, have no ids
        batch.layer_inputs = self.inputs(ids.clamp(0, self.spec.vocabulary - 1), batch.carried[:, :e])
        return h

    def to_boundary(self, h: Tensor, batch: Batch) -> Tensor:
        return h if batch.carried is None else torch.cat((h, batch.carried), dim=-1)

    def layer(self, index: int) -> Block:
        b, moe = f"blk.{index}.", self.p.experts is not None
        mlp = gated_mlp(self.w, b, activation="gelu_tanh")
        pre, post = self.norm(b + "attn_norm.weight"), self.norm(b + "post_attention_norm.weight")
        mlp_norm = self.norm(b + "ffn_norm.weight")
        return Gemma4Block(
            attention=NormedBlock(pre, self.attention(index), post),
            mlp=NormedBlock(mlp_norm, mlp, self.norm(b + "post_ffw_norm_1.weight") if moe else None),
            parallel=self.routed(index) if moe else None,
            post=self.norm(b + "post_ffw_norm.weight"),
            inputs=self.input_block(index) if self.inputs is not None else None,
            scale=self.w.exact(b + "layer_output_scale.weight").view(()),
        )

    def routed(self, index: int) -> Block:
        p, b = self.p, f"blk.{index}."
        assert p.experts is not None
        scale = self.w.exact(b + "ffn_gate_inp.scale") / math.sqrt(p.hidden_size)
        return RoutedBlock(
            router_norm=self.operations.norm(scale, p.hidden_size, p.eps),
            route=build_router(self.w, b, p.experts, expert_scale="ffn_down_exps.scale"),
            routed=build_experts(self.w, b, "gelu_tanh"),
            pre=self.norm(b + "pre_ffw_norm_2.weight"),
            post=self.norm(b + "post_ffw_norm_2.weight"),
        )

    def input_block(self, index: int) -> Block:
        b = f"blk.{index}."
        gate, project = self.w.linear(b + "inp_gate.weight"), self.w.linear(b + "proj.weight")
        norm, at = self.norm(b + "post_norm.weight"), index - self.pools.layers.start
        return InputBlock(gate, project, norm, at, self.operations)

    def attention(self, index: int) -> Block:
        p, b, layer = self.p, f"blk.{index}.", self.p.layers[index]
        d, n_kv_heads = layer.head_dim, layer.n_kv_heads if p.owns(index) else 0
        names = [b + "attn_q.weight"]
        if n_kv_heads:
            names += [b + "attn_k.weight"] + ([] if layer.key_values else [b + "attn_v.weight"])
        spec = self.spec.layers[index]
        shape = AttentionShape(
            n_heads=p.n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=d,
            scale=1.0,
            kv_group=spec.kv_group,
            window=spec.window,
            key_values=layer.key_values,
        )
        norm, pages = self.qk_norm(b, p.n_heads, n_kv_heads), self.pages(layer.source)
        positions = QkNormRope(norm, self.ropes[layer.sliding], self.operations)
        value_norm = self.operations.norm(torch.ones(d, device=self.device), d, p.eps)
        output = self.w.linear(b + "attn_output.weight")
        return Attention(shape, self.w.linear(*names), output, pages, positions, self.operations, value_norm)
