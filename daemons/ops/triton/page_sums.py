"""Logs of the sums of the weights of whole pages by 1-bit sketches of their keys: what KV Flash ranks pages by.

A program has the pages one after the other, unpacks or makes a page's sketch in registers and multiplies it with all
queries of a kv head.  The torch form, which writes the unpacked signs to memory, is daemons/ops/page_sums.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.page_scores import Sketches
from daemons.ops.paged import PagedTensor
from daemons.ops.triton.paged_attention import load_tile, numbers_of, scales_of, tile_width
from lucevisor.model.values import PAGE_TOKENS

PAGES = 8
"""Sketched pages per program, so that queries are read once for all of them."""
MAX_QUERIES = 32
"""Queries per program: more of them and the signs would not fit into registers."""

_PAGE = tl.constexpr(PAGE_TOKENS)


@triton.jit
def _load_queries(q, kv, row, n_rows, D: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    return tl.load(
        q + (kv * n_rows + row)[:, None] * D + d[None, :], mask=(row < n_rows)[:, None] & (d < D)[None, :], other=0.0
    )


@triton.jit
def _log_sums(queries, signs, factors, mean):
    """Of the weights of a page's keys [M], from their signs [64, WIDTH], factors [64] and mean [WIDTH]."""
    products = tl.dot(queries, tl.trans(signs.to(queries.dtype)), input_precision="ieee") * factors[None, :]
    products += tl.sum(queries.to(tl.float32) * mean[None, :], 1)[:, None]
    top = tl.max(products, 1)
    return top + tl.log(tl.sum(tl.exp(products - top[:, None]), 1))


@triton.jit(do_not_specialize=["n_pages", "n_rows", "n_host"])
def sketched_pages_kernel(
    q,  # [K, n_rows, D]
    means,  # [K, n_host, D]
    signs,  # [K, n_host, 64, BYTES]
    factors,  # [K, n_host, 64]
    rows,  # [n_pages]
    sums,  # [K, n_rows, n_pages]
    n_pages,
    n_rows,
    n_host,
    D: tl.constexpr,
    BYTES: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    PAGES: tl.constexpr,
) -> None:
    first, kv, row = tl.program_id(0) * PAGES, tl.program_id(1), tl.program_id(2) * M + tl.arange(0, M)
    queries = _load_queries(q, kv, row, n_rows, D, WIDTH)
    key, byte, d = tl.arange(0, _PAGE), tl.arange(0, WIDTH // 8), tl.arange(0, WIDTH)
    for page in range(first, tl.minimum(first + PAGES, n_pages)):
        at = kv.to(tl.int64) * n_host + tl.load(rows + page)
        packed = tl.load(
            signs + (at * _PAGE + key)[:, None] * BYTES + byte[None, :], mask=(byte < BYTES)[None, :], other=0
        )
        bits = (packed.to(tl.int32)[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
        unpacked = tl.reshape((2 * bits - 1).to(tl.float32), (_PAGE, WIDTH))
        mean = tl.load(means + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        factor = tl.load(factors + at * _PAGE + key).to(tl.float32)
        found = _log_sums(queries, unpacked, factor, mean)
        tl.store(sums + (kv * n_rows + row).to(tl.int64) * n_pages + page, found, mask=row < n_rows)


@triton.jit(do_not_specialize=["n_pages", "n_rows"])
def resident_pages_kernel(
    q,  # [K, n_rows, D]
    keys,
    scales,
    pages,  # [n_pages]
    sums,  # [K, n_rows, n_pages]
    n_pages,
    n_rows,
    K: tl.constexpr,
    D: tl.constexpr,
    STORED: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
) -> None:
    page, kv, row = tl.program_id(0), tl.program_id(1), tl.program_id(2) * M + tl.arange(0, M)
    queries = _load_queries(q, kv, row, n_rows, D, WIDTH)
    inside = tl.arange(0, _PAGE) < _PAGE
    base = tl.load(pages + page) * _PAGE * K + kv
    k = load_tile(keys, scales, base, inside, K, STORED, _PAGE, WIDTH).to(tl.float32)
    mean = tl.sum(k, 0) / _PAGE
    rest = k - mean[None, :]
    factor = tl.sum(rest * rest, 1) / tl.maximum(tl.sum(tl.abs(rest), 1), 1e-30)
    found = _log_sums(queries, tl.where(rest > 0, 1.0, -1.0), factor, mean)
    tl.store(sums + (kv * n_rows + row).to(tl.int64) * n_pages + page, found, mask=row < n_rows)


def _block(n_rows: int) -> int:
    return 16 if n_rows <= 16 else MAX_QUERIES


def _warps(width: int) -> int:
    return 4 if width <= 128 else 8


class TritonPageSums:
    """See :class:`daemons.ops.operations.PageSums`."""

    def of_keys(self, q: Tensor, keys: PagedTensor, pages: Tensor) -> Tensor:
        n_heads, n_rows, width = q.shape
        numbers, scales = numbers_of(keys), scales_of(keys)
        assert q.is_contiguous()
        assert numbers.shape[2] == n_heads
        sums = torch.empty(n_heads, n_rows, len(pages), dtype=torch.float32, device=q.device)
        if len(pages):
            padded, block = tile_width(keys), _block(n_rows)
            resident_pages_kernel[len(pages), n_heads, -(-n_rows // block)](
                q, numbers, scales, pages, sums, len(pages), n_rows,
                K=n_heads, D=width, STORED=numbers.shape[3], WIDTH=padded, M=block, num_warps=_warps(padded),
            )  # fmt: skip
        return sums

    def of_sketches(self, q: Tensor, sketches: Sketches, rows: Tensor) -> Tensor:
        n_heads, n_rows, width = q.shape
        assert q.is_contiguous()
        assert sketches.means.shape[::2] == (n_heads, width)
        sums = torch.empty(n_heads, n_rows, len(rows), dtype=torch.float32, device=q.device)
        if len(rows):
            padded, block = max(16, int(triton.next_power_of_2(width))), _block(n_rows)
            sketched_pages_kernel[-(-len(rows) // PAGES), n_heads, -(-n_rows // block)](
                q, *sketches, rows, sums, len(rows), n_rows, sketches.means.shape[1],
                D=width, BYTES=sketches.signs.shape[3], WIDTH=padded, M=block, PAGES=PAGES, num_warps=_warps(padded),
            )  # fmt: skip
        return sums
