"""MoE around the experts' products: router GEMV, top-k of experts, and the weighted combination of their results.

One launch each, where torch needs up to ten.  Invariant: arithmetic is float32, rounded once, when a result is stored.

Shapes: T tokens, E embedding, X experts, k experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.router import MIN_WEIGHT_SUM, RoutedExperts, Router
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs

ROUTER_ROWS = 2
"""Rows of the router's matrix per program: few, so that all multiprocessors read it."""
ROUTER_BLOCK = 1024
"""Columns of a row per load."""
COMBINE_BLOCK = 256
"""Columns of the result per program of :func:`moe_combine_kernel`."""


@triton.jit
def router_gemv_kernel(
    x, weight, bias, out, n_scores, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Program (i, t): ROWS products of row t of x [T, E].  ``weight`` float32 [n_scores, E], ``out`` [T, n_scores].

    ``bias`` [n_scores] is added, if it is not None.
    """
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = tl.minimum(row, n_scores - 1)[:, None] * E
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.static_range(0, E, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < E
        value = tl.load(x + token * E + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weight + weight_row + column[None, :], mask=inside[None, :], other=0.0) * value[None, :]
    score = tl.sum(total, axis=1)
    if bias is not None:
        score += tl.load(bias + row, mask=row < n_scores, other=0.0)
    tl.store(out + token * n_scores + row, score, mask=row < n_scores)


@triton.jit
def router_topk_kernel(
    scores,  # float32 [T, X], or [T, X + 1] when HAS_SHARED_GATE
    bias,  # float32 [X] or None
    expert_scale,  # float32 [X] or None
    experts,  # int64 [T, K]
    weights,  # float32 [T, K]
    shared_gate,  # float32 [T] or None
    scale,
    min_sum,  # lower bound of the sum of weights
    X: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_SHARED_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program t: the top-k experts of row t.  Ties go to the first expert."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < X
    stride: tl.constexpr = X + 1 if HAS_SHARED_GATE else X
    score = tl.load(scores + token * stride + index, mask=mask, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(score)
    else:
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    key = score
    if bias is not None:
        key += tl.load(bias + index, mask=mask, other=0.0)
    key = tl.where(mask, key, float("-inf"))
    slot = tl.arange(0, SLOTS)
    selected = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(K):
        best = tl.max(key, axis=0)
        # NaN equals nothing: clamp to the last expert, so that none out of range is selected
        found = tl.minimum(tl.min(tl.where(key == best, index, BLOCK), axis=0), X - 1)
        selected = tl.where(slot == i, found, selected)
        weight = tl.where(slot == i, tl.sum(tl.where(index == found, score, 0.0), axis=0), weight)
        key = tl.where(index == found, float("-inf"), key)
    if NORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), min_sum)
    weight *= scale
    if expert_scale is not None:
        weight *= tl.load(expert_scale + selected)
    tl.store(experts + token * K + slot, selected.to(tl.int64), mask=slot < K)
    tl.store(weights + token * K + slot, weight, mask=slot < K)
    if HAS_SHARED_GATE:
        tl.store(shared_gate + token, tl.sigmoid(tl.load(scores + token * stride + X)))


@triton.jit
def moe_combine_kernel(
    results,  # [T, K, n_columns] contiguous
    weights,  # float32 [T, K]
    shared,  # [T, n_columns] or None
    shared_gate,  # float32 [T] or None
    out,  # [T, n_columns] contiguous
    n_columns,
    shared_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (t, i): BLOCK columns of row t, summed in the order of the weights."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        row = tl.load(results + (token * K + i) * n_columns + column, mask=mask, other=0.0)
        total += tl.load(weights + token * K + i) * row.to(tl.float32)
    if shared is not None:
        beside = tl.load(shared + token * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
        if shared_gate is not None:
            beside *= tl.load(shared_gate + token)
        total += beside
    tl.store(out + token * n_columns + column, total.to(out.dtype.element_ty), mask=mask)


# ---- launches


def router_gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, E] weight' + bias`` -> float32 [T, X], ``weight`` float32 [X, E].

    For few rows: each reads the matrix.
    """
    (tokens, width), n_scores = x.shape, weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty(tokens, n_scores, dtype=torch.float32, device=x.device)
    block = min(ROUTER_BLOCK, triton.next_power_of_2(width))
    router_gemv_kernel[(triton.cdiv(n_scores, ROUTER_ROWS), tokens)](
        *(x, weight, bias, out, n_scores),
        E=width,
        ROWS=ROUTER_ROWS,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(x.device),
    )
    return out


def select_experts(router: Router, scores: Tensor) -> RoutedExperts:
    """:meth:`Router.select_experts` of contiguous scores."""
    tokens, x, k = scores.shape[0], router.n_experts, router.n_used
    assert scores.is_contiguous()
    experts = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=scores.device)
    shared_gate = torch.empty(tokens, dtype=torch.float32, device=scores.device) if router.has_shared_gate else None
    router_topk_kernel[(tokens,)](
        scores,
        router.bias,
        router.expert_scale,
        experts,
        weights,
        shared_gate,
        router.scale,
        MIN_WEIGHT_SUM,
        X=x,
        BLOCK=triton.next_power_of_2(x),
        K=k,
        SLOTS=triton.next_power_of_2(k),
        SIGMOID=router.gating == "sigmoid",
        NORMALISE=router.normalise,
        HAS_SHARED_GATE=router.has_shared_gate,
        num_warps=1,
        **dependent_launch(scores.device),
    )
    return RoutedExperts(experts, weights, shared_gate)


def moe_combine(results: Tensor, weights: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> Tensor:
    """The sum of ``results`` [T, k, E] weighted by ``weights`` float32 [T, k], plus ``shared`` [T, E] times
    ``shared_gate`` float32 [T] (None: 1).  Contiguous, of the dtype of ``results``.
    """
    tokens, k, width = results.shape
    assert results.is_contiguous()
    assert weights.is_contiguous()
    assert shared is None or (shared.shape == (tokens, width) and shared.stride(1) == 1)
    assert shared_gate is None or shared_gate.is_contiguous()
    out = torch.empty((tokens, width), dtype=results.dtype, device=results.device)
    moe_combine_kernel[(tokens, triton.cdiv(width, COMBINE_BLOCK))](
        results,
        weights,
        shared,
        shared_gate,
        out,
        width,
        0 if shared is None else shared.stride(0),
        K=k,
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
        **dependent_launch(results.device),
    )
    return out
