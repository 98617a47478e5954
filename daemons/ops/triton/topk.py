"""The best of many logits, and the path of a drafter along candidates, in one or two launches each.

The torch forms are those of :mod:`daemons.ops.topk`; of equal logits the first is the best here.  Shapes as there.

A logit and its place are one number to the kernels, a *key*: the bits of the logit in an order that integers have, and
below them what is left of 2^31 behind the place.  So one maximum finds both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.topk import TOP_K_CHUNK, Candidates

BLOCK = 2048
"""Logits per program of the first launch."""
NO_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Below all keys."""


@triton.jit
def ordered(x):
    """The bits of float32 numbers as int32 that are ordered as they are; its own inverse on such bits."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def keys_of(x, place):
    """float32 ``x`` and int32 ``place`` as int64 keys."""
    return (ordered(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def place_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def logit_of(key):
    return ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def chunk_keys_kernel(x, keys, n, stride, BLOCK: tl.constexpr, CHUNK: tl.constexpr) -> None:
    """Program (row, block): the best key of each CHUNK in BLOCK of the ``n`` logits x [rows, n]: [rows, chunks]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * (BLOCK // CHUNK) + tl.arange(0, BLOCK // CHUNK)
    place = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = tl.load(x + row * stride + place, mask=place < n, other=float("-inf")).to(tl.float32)
    n_chunks = tl.cdiv(n, CHUNK)
    best = tl.max(tl.where(place < n, keys_of(value, place), NO_KEY), axis=1)
    tl.store(keys + row * n_chunks + chunk, best, mask=chunk < n_chunks)


@triton.jit(do_not_specialize=["n"])
def best_of_chunks_kernel(
    x, keys, best, tokens, n, stride, K: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Program (row): the K best of ``n`` logits x [rows, n], by the best keys of their chunks: [rows, K], best first.

    They are in the K chunks with the best keys.
    """
    row, at, slot = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BK)
    n_chunks = tl.cdiv(n, CHUNK)
    chunks = tl.load(keys + row * n_chunks + at, mask=at < n_chunks, other=NO_KEY)
    chosen = tl.full([BK], -1, tl.int64)
    for i in range(K):
        found = tl.max(chunks, axis=0)
        chosen = tl.where((slot == i) & (found > NO_KEY), place_of(found) // CHUNK, chosen)
        chunks = tl.where(chunks == found, NO_KEY, chunks)
    place = chosen[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    known = (chosen[:, None] >= 0) & (place < n)
    value = tl.load(x + row * stride + place, mask=known, other=float("-inf")).to(tl.float32)
    left = tl.where(known, keys_of(value, place.to(tl.int32)), NO_KEY)
    for i in range(K):
        found = tl.max(tl.max(left, axis=1), axis=0)
        tl.store(best + row * K + i, logit_of(found))
        tl.store(tokens + row * K + i, place_of(found))
        left = tl.where(left == found, NO_KEY, left)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See :func:`daemons.ops.topk.top_k`; the values are float32."""
    n = logits.shape[-1]
    x = logits.reshape(-1, n)
    n_rows, n_chunks = len(x), triton.cdiv(n, TOP_K_CHUNK)
    keys = torch.empty(n_rows, n_chunks, dtype=torch.int64, device=x.device)
    chunk_keys_kernel[n_rows, triton.cdiv(n, BLOCK)](
        x, keys, n, x.stride(0), BLOCK=BLOCK, CHUNK=TOP_K_CHUNK, num_warps=4
    )
    best = torch.empty(n_rows, k, dtype=torch.float32, device=x.device)
    tokens = torch.empty(n_rows, k, dtype=torch.int64, device=x.device)
    best_of_chunks_kernel[(n_rows,)](
        x, keys, best, tokens, n, x.stride(0), K=k, BK=triton.next_power_of_2(k),
        BLOCK=triton.next_power_of_2(n_chunks), CHUNK=TOP_K_CHUNK, num_warps=4,
    )  # fmt: skip
    shape = (*logits.shape[:-1], k)
    return best.view(shape), tokens.view(shape)


@triton.jit(do_not_specialize=["n"])
def best_and_sums_kernel(x, keys, sums, n, stride, BLOCK: tl.constexpr) -> None:
    """Program (row, split): of BLOCK of the ``n`` logits x [rows, n] the best key, and the sum of exp(logit - best)."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + place, mask=place < n, other=float("-inf")).to(tl.float32)
    best = tl.max(tl.where(place < n, keys_of(value, place), NO_KEY), axis=0)
    to = row * tl.num_programs(1) + split
    tl.store(keys + to, best)
    tl.store(sums + to, tl.sum(tl.where(value > float("-inf"), tl.exp(value - logit_of(best)), 0.0), axis=0))


@triton.jit(do_not_specialize=["n"])
def likeliest_kernel(keys, sums, tokens, probabilities, n, BLOCK: tl.constexpr) -> None:
    """Program (row): the likeliest token of ``n`` splits, and its probability."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    key = tl.load(keys + row * n + at, mask=at < n, other=NO_KEY)
    part = tl.load(sums + row * n + at, mask=at < n, other=0.0)
    best = tl.max(key, axis=0)
    scale = tl.where(at < n, tl.exp(logit_of(key) - logit_of(best)), 0.0)
    tl.store(tokens + row, place_of(best))
    tl.store(probabilities + row, 1.0 / tl.sum(part * scale, axis=0))


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`daemons.ops.topk.most_likely`."""
    n = logits.shape[-1]
    x = logits.reshape(-1, n)
    n_rows, n_splits = len(x), triton.cdiv(n, BLOCK)
    keys = torch.empty(n_rows, n_splits, dtype=torch.int64, device=x.device)
    sums = torch.empty(n_rows, n_splits, dtype=torch.float32, device=x.device)
    best_and_sums_kernel[n_rows, n_splits](x, keys, sums, n, x.stride(0), BLOCK=BLOCK, num_warps=4)
    tokens = torch.empty(n_rows, dtype=torch.int64, device=x.device)
    probabilities = torch.empty(n_rows, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(n_splits)
    likeliest_kernel[(n_rows,)](keys, sums, tokens, probabilities, n_splits, BLOCK=width, num_warps=1)
    return tokens.view(logits.shape[:-1]), probabilities.view(logits.shape[:-1])


@triton.jit(do_not_specialize=["n"])
def select_path_kernel(
    best,  # [B, n, K] float32
    candidates,  # [B, n, K] int64
    first,  # [B, R]
    before,  # [B, n, K, R]
    after,  # [B, n, K, R]
    gate,  # [B, n, R]
    tokens,  # [B, n] int64
    probabilities,  # [B, n] float32
    n,
    K: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
) -> None:
    """Program (slice): one position after the other.  All operands are contiguous."""
    start = tl.program_id(0).to(tl.int64) * n
    candidate, column = tl.arange(0, BK), tl.arange(0, BR)
    known = (candidate < K)[:, None] & (column < R)[None, :]
    newest = tl.load(first + tl.program_id(0) * R + column, mask=column < R, other=0.0).to(tl.float32)
    for position in range(n):
        at = start + position
        gates = tl.load(gate + at * R + column, mask=column < R, other=0.0).to(tl.float32)
        rows = tl.load(after + (at * K + candidate)[:, None] * R + column[None, :], mask=known, other=0.0)
        unary = tl.load(best + at * K + candidate, mask=candidate < K, other=float("-inf"))
        score = tl.sum(rows.to(tl.float32) * (newest * gates)[None, :], axis=1) + unary
        highest = tl.max(score, axis=0)
        chosen = tl.min(tl.where(score == highest, candidate, K - 1), axis=0)
        tl.store(tokens + at, tl.load(candidates + at * K + chosen))
        tl.store(probabilities + at, 1.0 / tl.sum(tl.exp(score - highest), axis=0))
        newest = tl.load(before + (at * K + chosen) * R + column, mask=column < R, other=0.0).to(tl.float32)


def select_path(c: Candidates) -> tuple[Tensor, Tensor]:
    """See :func:`daemons.ops.topk.select_path`."""
    (n_slices, n, k), rank = c.tokens.shape, c.gate.shape[-1]
    assert all(x.is_contiguous() for x in c)
    tokens, probabilities = torch.empty_like(c.tokens[..., 0]), torch.empty_like(c.best[..., 0])
    select_path_kernel[(n_slices,)](
        c.best, c.tokens, c.first, c.before, c.after, c.gate, tokens, probabilities, n,
        K=k, R=rank, BK=triton.next_power_of_2(k), BR=triton.next_power_of_2(rank), num_warps=4,
    )  # fmt: skip
    return tokens, probabilities
