"""The operations of a layer on Triton kernels, for GPUs: one launch where plain torch has up to sixty."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from daemons.ops.host_pages import PageCopy
from daemons.ops.operations import (
    MAX_DECODE_TOKENS,
    SHORT_SLICE,
    DeltaNetPools,
    GatedDeltaNetOp,
    GatedDeltaNetParams,
    Norm,
    PagedAttention,
    PagedQuery,
    PageSums,
    PartialAttention,
    TorchOperations,
)
from daemons.ops.paged import DensePages, PagedTensor
from daemons.ops.partial_attention import Partial, merged
from daemons.ops.router import RoutedExperts, RouteFn, Router
from daemons.ops.topk import Candidates
from daemons.ops.triton import basic
from daemons.ops.triton.block_convolution import block_convolution
from daemons.ops.triton.chunked_delta_rule import chunked_gated_delta_net
from daemons.ops.triton.moe import moe_combine, router_gemv, select_experts
from daemons.ops.triton.page_copy import copy_pages
from daemons.ops.triton.page_sums import TritonPageSums
from daemons.ops.triton.paged_attention import paged_attention, paged_attention_splits
from daemons.ops.triton.recurrent_delta_rule import apply_updates, recurrent_gated_delta_net
from daemons.ops.triton.topk import most_likely, select_path, top_k

RecurrentDeltaNet = Callable[[Tensor, DeltaNetPools, Tensor, Tensor, GatedDeltaNetParams], Tensor]
"""See :func:`daemons.ops.triton.recurrent_delta_rule.recurrent_gated_delta_net`."""


class TritonRmsNorm:
    """See :class:`daemons.ops.basic.RmsNorm`."""

    __slots__ = ("epsilon", "weight")

    def __init__(self, weight: Tensor | None, epsilon: float) -> None:
        self.weight = None if weight is None else weight.contiguous()
        self.epsilon = epsilon

    def __call__(self, x: Tensor) -> Tensor:
        return basic.rms_norm(x, self.weight, self.epsilon)

    def float32(self, x: Tensor) -> Tensor:
        return basic.rms_norm(x, self.weight, self.epsilon, torch.float32)

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.float32(x).to(dtype)

    def fused_add(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        return basic.add_rms_norm(h, delta, self.weight, self.epsilon)


class TritonGatedDeltaNet:
    """See :class:`daemons.ops.operations.GatedDeltaNetOp`.  The chunked form needs heads of 32, 64, 128, ...

    ``recurrent``: what computes short slices.
    """

    __slots__ = ("max_tokens", "params", "recurrent")

    def __init__(self, w: GatedDeltaNetParams, recurrent: RecurrentDeltaNet = recurrent_gated_delta_net) -> None:
        self.params, self.recurrent = w, recurrent
        self.max_tokens = None if w.dim >= 32 and w.dim & (w.dim - 1) == 0 else MAX_DECODE_TOKENS

    def __call__(self, y: Tensor, pools: DeltaNetPools, ids: Tensor, kept: Tensor, spans: Tensor) -> Tensor:
        if y.shape[0] // ids.shape[0] <= MAX_DECODE_TOKENS:
            return self.recurrent(y, pools, ids, kept, self.params)
        return chunked_gated_delta_net(y, pools.conv_states, pools.states, ids, spans, self.params)


class TritonRouter:
    """See :class:`daemons.ops.router.Router`."""

    __slots__ = ("router",)

    def __init__(self, router: Router) -> None:
        self.router = router

    def __call__(self, x: Tensor) -> RoutedExperts:
        decode = x.shape[0] <= MAX_DECODE_TOKENS
        return select_experts(
            self.router,
            router_gemv(x.contiguous(), self.router.weight, self.router.logit_bias)
            if decode
            else self.router.scores(x),
        )


class TritonOperations(TorchOperations):
    """See :class:`daemons.ops.operations.Operations`."""

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        return TritonRmsNorm(weight, eps)

    def act_and_mul(self, x: Tensor, activation: str) -> Tensor:
        return basic.act_and_mul(x, activation)

    def add_bias(self, x: Tensor, bias: Tensor, ids: Tensor | None = None) -> Tensor:
        return basic.add_bias(x, bias, ids)

    def output_gate(self, x: Tensor, gate: Tensor, softplus: bool) -> Tensor:
        return basic.output_gate(x, gate, "softplus" if softplus else "sigmoid")

    def qk_norm_rope(self, x: Tensor, norm: Norm, cos: Tensor, sin: Tensor) -> Tensor:
        assert norm.weight is not None
        return basic.qk_norm_rope(x, norm.weight, norm.epsilon, cos, sin)

    def write_pages(self, keys: PagedTensor, values: PagedTensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if isinstance(keys, DensePages) and isinstance(values, DensePages):
            basic.write_pages(keys.slots, values.slots, slots, k, v)
        else:
            super().write_pages(keys, values, slots, k, v)

    def router(self, router: Router) -> RouteFn:
        return TritonRouter(router)

    def moe_combine(
        self, results: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None
    ) -> Tensor:
        return moe_combine(results, weights, shared, shared_gate)

    def paged_attention(
        self, *, window: int, scale: float, softcap: float, causal: bool = True, sinks: Tensor | None = None
    ) -> PagedAttention | None:
        def attend(q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery) -> Tensor:
            return paged_attention(
                q,
                keys,
                values,
                where.tables,
                where.rows,
                where.starts,
                where.n_tokens,
                window=window,
                scale=scale,
                softcap=softcap,
                max_length=where.max_length,
                causal=causal,
                lows=where.lows,
                sinks=sinks,
            )

        return attend

    def partial_attention(self, *, scale: float, softcap: float) -> PartialAttention | None:
        def attend(q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery, causal: bool) -> Partial:
            n = where.n_tokens
            found = paged_attention_splits(
                q,
                keys,
                values,
                where.tables,
                where.rows,
                where.starts,
                n,
                window=0,
                scale=scale,
                softcap=softcap,
                max_length=where.max_length,
                causal=causal,
                lows=where.lows,
                n_splits=None if n <= SHORT_SLICE else 1,  # many rows fill the device, and splits take memory
            )
            parts, sums = (x.view(len(x), -1, n, *x.shape[2:]) for x in found)
            return merged(parts, sums)

        return attend

    def page_copy(self) -> PageCopy | None:
        return copy_pages

    def page_sums(self) -> PageSums:
        return TritonPageSums()

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        return TritonGatedDeltaNet(weights)

    def apply_updates(self, states: Tensor, updates: Tensor, source: int, rows: Tensor, target: int) -> None:
        apply_updates(states, updates, source, rows, target)

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return top_k(logits, k)

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return most_likely(logits)

    def select_path(self, candidates: Candidates) -> tuple[Tensor, Tensor]:
        return select_path(candidates)

    def block_convolution(self, x: Tensor, delta: Tensor, base: Tensor, side: int, n: int) -> Tensor:
        return block_convolution(x, delta, base, side, n)
