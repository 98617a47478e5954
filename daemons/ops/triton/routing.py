"""Routed experts beside their products: scores of few rows, the choice, and the weighted sum of what comes back.

Each is one launch where the torch form has up to ten.  Arithmetic is float32, rounded once where a result is stored.

Shapes: T tokens, E embedding, X experts, k chosen for each token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.router import SMALLEST_SUM, Chosen, Router

SCORED = 2
"""Rows of the router's matrix in a program: few, so that all multiprocessors read it."""
PART = 1024
"""Numbers of a row that a program reads at a time."""
SUMMED = 256
"""Columns of a weighted sum in a program."""


@triton.jit
def scores_kernel(x, weight, out, n_scores, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, t): ROWS products of row t of x [T, E].  ``weight`` float32 [n_scores, E], ``out`` [T, n_scores]."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = tl.minimum(row, n_scores - 1)[:, None] * E
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.static_range(0, E, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < E
        value = tl.load(x + token * E + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weight + kept + column[None, :], mask=inside[None, :], other=0.0) * value[None, :]
    tl.store(out + token * n_scores + row, tl.sum(total, axis=1), mask=row < n_scores)


@triton.jit
def choose_kernel(
    scores,  # float32 [T, X], or [T, X + 1] when OPENS
    bias,  # float32 [X] or None
    expert_scale,  # float32 [X] or None
    experts,  # int64 [T, K]
    weights,  # float32 [T, K]
    opening,  # float32 [T] or None
    scale,
    least,  # a sum of weights at least
    X: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    OPENS: tl.constexpr,
):
    """Program t: the choice for row t.  Of equal scores the first expert's counts as larger."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    there = index < X
    stride: tl.constexpr = X + 1 if OPENS else X
    score = tl.load(scores + token * stride + index, mask=there, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(score)
    else:
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    key = score
    if bias is not None:
        key += tl.load(bias + index, mask=there, other=0.0)
    key = tl.where(there, key, float("-inf"))
    slot = tl.arange(0, SLOTS)
    chosen = tl.zeros([SLOTS], tl.int32)
    weight = tl.zeros([SLOTS], tl.float32)
    for i in tl.static_range(K):
        best = tl.max(key, axis=0)
        # where all is no number, none is equal: the last expert, not one that is not there
        found = tl.minimum(tl.min(tl.where(key == best, index, BLOCK), axis=0), X - 1)
        chosen = tl.where(slot == i, found, chosen)
        weight = tl.where(slot == i, tl.sum(tl.where(index == found, score, 0.0), axis=0), weight)
        key = tl.where(index == found, float("-inf"), key)
    if NORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, axis=0), least)
    weight *= scale
    if expert_scale is not None:
        weight *= tl.load(expert_scale + chosen)
    tl.store(experts + token * K + slot, chosen.to(tl.int64), mask=slot < K)
    tl.store(weights + token * K + slot, weight, mask=slot < K)
    if OPENS:
        tl.store(opening + token, tl.sigmoid(tl.load(scores + token * stride + X)))


@triton.jit
def weighted_kernel(
    results,  # [T, K, n_columns] contiguous
    weights,  # float32 [T, K]
    shared,  # [T, n_columns] or None
    opening,  # float32 [T] or None
    out,  # [T, n_columns] contiguous
    n_columns,
    shared_stride,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, i): BLOCK columns of the sum of row t, in the order of the weights."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(K):
        row = tl.load(results + (token * K + i) * n_columns + column, mask=mask, other=0.0)
        total += tl.load(weights + token * K + i) * row.to(tl.float32)
    if shared is not None:
        beside = tl.load(shared + token * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
        if opening is not None:
            beside *= tl.load(opening + token)
        total += beside
    tl.store(out + token * n_columns + column, total.to(out.dtype.element_ty), mask=mask)


# ---- launches


def scores_few(x: Tensor, weight: Tensor) -> Tensor:
    """``x [T, E] weight'`` -> float32 [T, X] for float32 ``weight`` [X, E]: for few rows, each reads the matrix."""
    (tokens, width), n_scores = x.shape, weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    out = torch.empty(tokens, n_scores, dtype=torch.float32, device=x.device)
    block = min(PART, triton.next_power_of_2(width))
    scores_kernel[(triton.cdiv(n_scores, SCORED), tokens)](
        x, weight, out, n_scores, E=width, ROWS=SCORED, BLOCK=block, num_warps=4
    )
    return out


def choose(router: Router, scores: Tensor) -> Chosen:
    """:meth:`Router.choose` of contiguous scores."""
    tokens, x, k = scores.shape[0], router.n_experts, router.n_used
    assert scores.is_contiguous()
    experts = torch.empty(tokens, k, dtype=torch.int64, device=scores.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=scores.device)
    opening = torch.empty(tokens, dtype=torch.float32, device=scores.device) if router.opens else None
    choose_kernel[(tokens,)](
        scores,
        router.bias,
        router.expert_scale,
        experts,
        weights,
        opening,
        router.scale,
        SMALLEST_SUM,
        X=x,
        BLOCK=triton.next_power_of_2(x),
        K=k,
        SLOTS=triton.next_power_of_2(k),
        SIGMOID=router.gating == "sigmoid",
        NORMALISE=router.normalise,
        OPENS=router.opens,
        num_warps=1,
    )
    return Chosen(experts, weights, opening)


def weighted(results: Tensor, weights: Tensor, shared: Tensor | None, opening: Tensor | None) -> Tensor:
    """Sum of results [T, k, E] with weights float32 [T, k], plus ``shared`` [T, E] times ``opening`` float32 [T], or
    times 1: contiguous, of results' dtype.
    """
    tokens, k, width = results.shape
    assert results.is_contiguous()
    assert weights.is_contiguous()
    assert shared is None or (shared.shape == (tokens, width) and shared.stride(1) == 1)
    assert opening is None or opening.is_contiguous()
    out = torch.empty((tokens, width), dtype=results.dtype, device=results.device)
    weighted_kernel[(tokens, triton.cdiv(width, SUMMED))](
        results,
        weights,
        shared,
        opening,
        out,
        width,
        0 if shared is None else shared.stride(0),
        K=k,
        BLOCK=SUMMED,
        num_warps=4,
    )
    return out
