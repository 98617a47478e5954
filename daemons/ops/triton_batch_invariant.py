"""Operations and products on Triton kernels whose results for a row have the same bits whatever rows are beside it.

One kernel with one tile for any number of rows, attention in splits by position, the delta rule token by token, and no
kernel that joins operations at some places alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from daemons.ops.batch_invariant import in_short_slices
from daemons.ops.expert_pairs import ExpertPairs
from daemons.ops.operations import (
    MAX_DECODE_TOKENS,
    DeltaNetPools,
    GatedDeltaNetOp,
    GatedDeltaNetParams,
    Norm,
    PagedAttention,
    PagedQuery,
)
from daemons.ops.packed_linear import PackedExperts
from daemons.ops.paged import PagedTensor
from daemons.ops.router import RoutedExperts, RouteFn, Router
from daemons.ops.triton.grouped_gemm import GroupedGemmConfig, packed_gemm, packed_grouped_gemm
from daemons.ops.triton.moe import router_gemv, select_experts
from daemons.ops.triton.paged_attention import paged_attention
from daemons.ops.triton.recurrent_delta_rule import recurrent_gated_delta_net
from daemons.ops.triton_operations import TritonOperations, TritonRmsNorm
from daemons.weights.packed import PackedWeights

TILES = [GroupedGemmConfig(rows, 64, 4, n_stages, 1) for rows, n_stages in ((16, 3), (32, 3), (64, 2))]
"""Of a product with a matrix: the first that holds all rows, else the last.  Matrix units sum 16 columns at a time in
each, so a row's bits are the same.
"""
EXPERT_TILE = GroupedGemmConfig(16, 64, 4, 2, 2)
"""The same for experts, which have fewer rows each."""
SPLIT_TOKENS = 512
"""Positions of a split of attention."""
PARTIAL_BYTES = 1 << 27
"""Memory for the splits of attention of a part of a long slice."""
DELTA_NET_TOKENS = 256
"""Tokens of a slice that a launch of the delta net walks."""


class BatchInvariantPackedLinear:
    """See :class:`daemons.ops.packed_linear.PackedLinear`."""

    implementation = "packed, triton batch-invariant"

    def __init__(self, packed: PackedWeights, n_columns: int) -> None:
        self.packed, self.n_out, self.n_bytes = packed, packed.n_rows, packed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        tile = next((tile for tile in TILES if x.shape[0] <= tile.rows), TILES[-1])
        return packed_gemm(self.packed, x.contiguous(), tile)


class BatchInvariantPackedExperts(PackedExperts):
    """See :class:`daemons.ops.packed_linear.PackedExperts`."""

    implementation = "packed, triton batch-invariant"

    def linear(self, expert: int) -> BatchInvariantPackedLinear:  # type: ignore[override]  # has no kernels to choose
        return BatchInvariantPackedLinear(self.packed.matrix(expert), self.n_columns)

    def grouped_gemm(self, x: Tensor, pairs: ExpertPairs, pairs_per_row: int) -> Tensor:
        return packed_grouped_gemm(self.packed, x.contiguous(), pairs, pairs_per_row, EXPERT_TILE)


class BatchInvariantRmsNorm(TritonRmsNorm):
    """See :class:`daemons.ops.basic.RmsNorm`."""

    __slots__ = ()

    def fused_add(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        # not in one kernel, which sums in another order: the first layer of a stage gets its sum from the one before
        total = h + delta
        return total, self(total)


class BatchInvariantDeltaNet:
    """See :class:`daemons.ops.operations.GatedDeltaNetOp`."""

    max_tokens: int | None = None

    def __init__(self, params: GatedDeltaNetParams) -> None:
        self.params = params

    def __call__(self, y: Tensor, pools: DeltaNetPools, ids: Tensor, kept: Tensor, spans: Tensor) -> Tensor:
        n_slices, n = len(ids), y.shape[0] // len(ids)
        if n <= MAX_DECODE_TOKENS:
            return recurrent_gated_delta_net(y, pools, ids, kept, self.params, DELTA_NET_TOKENS)
        parts = []
        for part in y.view(n_slices, n, -1).split(DELTA_NET_TOKENS, dim=1):  # type: ignore[no-untyped-call]
            last = ids.new_full((n_slices, part.shape[1]), -1)
            last[:, -1] = ids
            found = recurrent_gated_delta_net(part.flatten(0, 1), pools, ids, last, self.params, DELTA_NET_TOKENS)
            parts.append(found.view(n_slices, -1, found.shape[1]))
        return torch.cat(parts, dim=1).flatten(0, 1)


class BatchInvariantRouter:
    """See :class:`daemons.ops.router.Router`."""

    def __init__(self, router: Router) -> None:
        self.router = router

    def __call__(self, x: Tensor) -> RoutedExperts:
        scores = router_gemv(x.contiguous(), self.router.weight, self.router.logit_bias)
        return select_experts(self.router, scores)


class BatchInvariantTritonOperations(TritonOperations):
    """See :class:`daemons.ops.operations.Operations`."""

    batch_invariant = True
    longest_paged_slice = 1 << 30

    def norm(self, weight: Tensor | None, width: int, eps: float) -> Norm:
        return BatchInvariantRmsNorm(weight, eps)

    def router(self, router: Router) -> RouteFn:
        return BatchInvariantRouter(router)

    def paged_attention(
        self, *, window: int, scale: float, softcap: float, causal: bool = True, sinks: Tensor | None = None
    ) -> PagedAttention | None:
        if not causal:
            return super().paged_attention(window=window, scale=scale, softcap=softcap, causal=causal, sinks=sinks)

        def attend(q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery) -> Tensor:
            return paged_attention(
                q, keys, values, where.tables, where.rows, where.starts, where.n_tokens, window=window, scale=scale,
                softcap=softcap, max_length=where.max_length, lows=where.lows, sinks=sinks, split_tokens=SPLIT_TOKENS,
            )  # fmt: skip

        def attend_all(q: Tensor, keys: PagedTensor, values: PagedTensor, where: PagedQuery) -> Tensor:
            n_splits, n_slices = -(-where.max_length // SPLIT_TOKENS), len(where.starts)
            token_bytes = n_slices * n_splits * q[0].numel() * 4
            return in_short_slices(attend, max(MAX_DECODE_TOKENS, PARTIAL_BYTES // token_bytes), q, keys, values, where)

        return attend_all

    def gated_delta_net(self, weights: GatedDeltaNetParams) -> GatedDeltaNetOp | None:
        return BatchInvariantDeltaNet(weights)

    def gelu(self, x: Tensor) -> Tensor:
        return self.act_and_mul(torch.cat((x, torch.ones_like(x)), dim=1), "gelu_tanh")
