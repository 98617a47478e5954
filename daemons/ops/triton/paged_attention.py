"""Paged attention: attention of few query tokens per slice over keys and values in place, in their pages.

For decode, draft verification, the end of a prompt, and drafters, whose tokens may see each other.  Flash decoding in
two launches: each program computes the softmax of one split of a slice's visible positions, then splits are merged.
The torch form gathers the pages and calls ``daemons.ops.attention.reference``.

Invariant: launches depend only on values of the host (the number of splits), never on lengths on the device; a short
slice leaves some splits empty.

Shapes: B slices, n query tokens per slice, H query heads, K kv heads, G = H / K, D head dim of keys, Dv of values.  The
n G query rows of a slice that share a kv head are one tile, so keys are read once for all of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.paged import PagedTensor, Q8Pages
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from lucevisor.model.values import PAGE_TOKENS, Q8_GROUP

PROGRAMS_PER_PROCESSOR = 2
"""Programs that fit at once in shared memory: more would be a second wave."""
SPLIT_TOKENS = 128
"""Positions below which a split costs more to merge than it saves."""
LONGEST_SPLIT_TOKENS = 2048
"""Positions above which one long slice would delay all others."""
TILE_BYTES = 1 << 14
"""Keys per load: wide enough, and three stages with their values fit shared memory."""
MOST_ROWS = 64
"""Query rows per program."""
MAX_ACCUMULATOR = 1 << 14
"""Output numbers per program: 64 registers per thread with 8 warps."""
HIP_MATRIX = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx12")
"""AMD architectures with matrix units, without gfx11, whose units need their factors twice: too many registers."""

_LOWEST = tl.constexpr(-1.0e30)  # the maximum of no scores; finite, so that differences are not NaN
_PAGE = tl.constexpr(PAGE_TOKENS)
_GROUP = tl.constexpr(Q8_GROUP)


@triton.jit
def load_tile(pages, scales, base, inside, K: tl.constexpr, D: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr):
    """Rows ``base``, ``base + K``, ... of a pool seen as [rows, D], as [N, WIDTH]; zeros where not ``inside`` [N]."""
    row, d = tl.arange(0, N)[:, None] * K, tl.arange(0, WIDTH)[None, :]
    mask = inside[:, None] if WIDTH == D else inside[:, None] & (d < D)
    tile = tl.load(pages + base * D + row * D + d, mask=mask, other=0)
    if scales is not None:
        groups: tl.constexpr = D // _GROUP
        g = tl.arange(0, WIDTH // _GROUP)[None, :]
        scale = tl.load(scales + base * groups + row * groups + g, mask=inside[:, None] & (g < groups), other=0)
        by_group = tl.reshape(tile.to(tl.float32), (N, WIDTH // _GROUP, _GROUP))
        tile = tl.reshape(by_group * scale.to(tl.float32)[:, :, None], (N, WIDTH))
    return tile


@triton.jit
def _split_blocks(low, end, split, n_splits, N: tl.constexpr):
    """The blocks of N positions, first and last + 1, in ``split`` of the positions ``low`` .. ``end`` - 1."""
    first, n_blocks = low // N, (end + N - 1) // N - low // N
    # in 64 bits: blocks of the longest table times splits
    begin = first + (n_blocks.to(tl.int64) * split // n_splits).to(tl.int32)
    stop = first + (n_blocks.to(tl.int64) * (split + 1) // n_splits).to(tl.int32)
    return begin, stop


# Long: its parameters and one pass over a tile, which would be passed on whole.
@triton.jit(do_not_specialize=["table_rows", "starts", "lows", "window", "n", "n_splits", "table_stride", "n_rows"])
def paged_attention_kernel(
    q, keys, key_scales, values, value_scales, tables, table_rows, starts, lows, sinks, partials, sums,
    scale, softcap, window, n, n_splits, n_rows, table_stride, token_stride, head_stride,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DK_STORED: tl.constexpr,
    DV_STORED: tl.constexpr, CAPPED: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, PDL: tl.constexpr, SPLIT: tl.constexpr = 0,
):  # fmt: skip
    """One kv head of a slice, M query rows (token-major) and one split of its positions, N at a time.

    SPLIT, a multiple of N: a split has so many positions, counted from 0; 0: the n_splits share those that are visible.

    Writes the split's output, as a softmax of its own, to ``partials`` [splits, n_rows, K G, DV] and the log2 of the
    sum of its weights to ``sums`` [splits, n_rows, K G].  ``sinks`` float32 [K G]: the logits of one more key a head,
    whose value is zero; it belongs to the first split.
    """
    wait_for_inputs(PDL)
    b, kv = tl.program_id(2) // K, tl.program_id(2) % K
    split = tl.program_id(1)
    start = tl.load(starts + b).to(tl.int32)
    low, end = tl.maximum(start - window + 1, 0), start + n
    if lows is not None:
        low = tl.maximum(low, tl.load(lows + b).to(tl.int32))
    if SPLIT > 0:
        begin = tl.maximum(low // N, split * (SPLIT // N))
        stop = tl.minimum((end + N - 1) // N, (split + 1) * (SPLIT // N))
    else:
        begin, stop = _split_blocks(low, end, split, n_splits, N)

    m = tl.program_id(0) * M + tl.arange(0, M)
    token, head = m // G, kv * G + m % G
    row_mask = m < n * G
    d = tl.arange(0, WIDTH)
    rows = q + b.to(tl.int64) * n * token_stride + token * token_stride + head * head_stride
    queries = tl.load(rows[:, None] + d[None, :], mask=row_mask[:, None] & (d < D)[None, :], other=0)
    position = start + token
    to_log2 = 1.4426950408889634

    table = tables + tl.load(table_rows + b).to(tl.int64) * table_stride
    page = tl.load(table + begin * N // _PAGE, mask=begin < stop, other=0)
    top, total = tl.full([M], _LOWEST, tl.float32), tl.zeros([M], tl.float32)
    if sinks is not None:  # noqa: SIM102
        if split == 0:  # the first is decided when the kernel is compiled
            top, total = tl.load(sinks + head, mask=row_mask, other=0.0) * to_log2, total + 1.0
    acc = tl.zeros([M, VALUE_WIDTH], tl.float32)
    for block in range(begin, stop):
        at = block * N
        base = (page.to(tl.int64) * _PAGE + at % _PAGE) * K + kv
        page = tl.load(table + (block + 1) * N // _PAGE, mask=block + 1 < stop, other=0)  # prefetch the next one
        key = at + tl.arange(0, N)
        inside = (key >= low) & (key < end)  # the rest of a page may hold anything, NaN too
        k = load_tile(keys, key_scales, base, inside, K, DK_STORED, N, WIDTH).to(queries.dtype)
        s = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * to_log2 / softcap)) + 1.0)  # softcap tanh(s / softcap)
        visible = inside[None, :] & (key[None, :] > position[:, None] - window)
        if CAUSAL:
            visible = visible & (key[None, :] <= position[:, None])
        s = tl.where(visible, s * to_log2, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        weight = tl.exp2(s - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 1)
        v = load_tile(values, value_scales, base, inside, K, DV_STORED, N, VALUE_WIDTH).to(queries.dtype)
        acc = tl.dot(weight.to(queries.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = higher

    total = tl.where(total > 0.0, total, 1.0)
    out = (split.to(tl.int64) * n_rows + b * n + token) * (K * G) + head
    dv = tl.arange(0, VALUE_WIDTH)
    tl.store(
        partials + out[:, None] * DV + dv[None, :],
        (acc / total[:, None]).to(partials.dtype.element_ty),
        mask=row_mask[:, None] & (dv < DV)[None, :],
    )
    tl.store(sums + out, top + tl.log2(total), mask=row_mask)


@triton.jit(do_not_specialize=["n_splits", "n_rows"])
def paged_attention_merge_kernel(
    partials, sums, out, n_splits, n_rows,
    D: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """WIDTH columns of a row of ``out`` [n_rows, D], merged from ``partials`` [splits, n_rows, D] and ``sums``
    [splits, n_rows], SPLITS at a time.
    """
    wait_for_inputs(PDL)
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    top = tl.full([1], _LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([WIDTH], tl.float32)
    for first in range(0, n_splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        split_mask = split < n_splits
        at = split.to(tl.int64) * n_rows + row
        part = tl.load(partials + at[:, None] * D + d[None, :], mask=split_mask[:, None] & (d < D)[None, :], other=0.0)
        height = tl.load(sums + at, mask=split_mask, other=_LOWEST)
        higher = tl.maximum(top, tl.max(height, 0))
        weight, shrink = tl.exp2(height - higher), tl.exp2(top - higher)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        top = higher
    tl.store(out + row * D + d, (acc / total).to(out.dtype.element_ty), mask=d < D)


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Multiprocessors (compute units), shared memory per program, and the bytes of the widest numbers that matrix units
    multiply natively, 0 without such units.
    """

    processors: int
    shared_bytes: int
    matrix_itemsize: int


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    if device.type == "cpu":  # the interpreter: any small number of processors, and no registers to run out of
        return DeviceLimits(4, 1 << 16, 4)
    found = torch.cuda.get_device_properties(device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    matrix = found.gcnArchName.startswith(HIP_MATRIX) if torch.version.hip else found.major >= 8
    return DeviceLimits(found.multi_processor_count, shared_bytes, 2 if matrix else 0)


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Query rows and positions per program, warps and pipeline stages."""

    rows: int
    tokens: int
    n_warps: int
    n_stages: int


def attention_tile(n_query_rows: int, width: int, itemsize: int, device: DeviceLimits) -> AttentionTile:
    """The tile for ``n_query_rows`` per kv head; ``width``: the larger head dim, ``itemsize``: bytes of a number."""
    if itemsize > device.matrix_itemsize:
        # without matrix units, multiply-adds keep whole rows of both factors in registers
        return AttentionTile(16, 16, 4, 2 if device.shared_bytes > 1 << 16 else 1)
    width, budget = triton.next_power_of_2(width), 1 if device.shared_bytes > 1 << 16 else 2
    most_rows = max(16, min(MOST_ROWS, MAX_ACCUMULATOR // budget // width))
    rows = min(max(16, triton.next_power_of_2(n_query_rows)), most_rows)
    tokens = min(64, max(16, TILE_BYTES // budget // (width * itemsize)))
    n_warps = 8 if rows * width > MAX_ACCUMULATOR // 2 else 4
    return AttentionTile(rows, tokens, n_warps, 3 if device.shared_bytes > 1 << 17 else 2)


def numbers_of(pages: PagedTensor) -> Tensor:
    """[pages, 64, K, D], the last padded to whole groups in q8_0."""
    return pages.codes if isinstance(pages, Q8Pages) else pages.pages


def scales_of(pages: PagedTensor) -> Tensor | None:
    return pages.scales if isinstance(pages, Q8Pages) else None


def _width(pages: PagedTensor) -> int:
    return pages.width if isinstance(pages, Q8Pages) else pages.pages.shape[3]


def tile_width(pages: PagedTensor) -> int:
    """A power of two >= 16, the least inner dimension of a product, that holds a row."""
    return max(16, int(triton.next_power_of_2(numbers_of(pages).shape[3])))


def choose_n_splits(n_programs: int, n_tokens: int, n_processors: int) -> int:
    """Splits of up to ``n_tokens`` visible positions, for ``n_programs`` programs per split."""
    budget = PROGRAMS_PER_PROCESSOR * n_processors // n_programs
    return max(1, min(budget, -(-n_tokens // SPLIT_TOKENS)), -(-n_tokens // LONGEST_SPLIT_TOKENS))


def _check_layout(
    q: Tensor, keys: PagedTensor, values: PagedTensor, tables: Tensor, table_rows: Tensor, starts: Tensor
) -> None:
    assert q.stride(2) == 1
    assert starts.is_contiguous()
    assert table_rows.is_contiguous()
    assert tables.stride(1) == 1
    assert numbers_of(keys).shape[:3] == numbers_of(values).shape[:3]
    assert _width(keys) == q.shape[2]
    assert numbers_of(keys).is_contiguous()
    assert numbers_of(values).is_contiguous()


def paged_attention_splits(
    q: Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    tables: Tensor,
    table_rows: Tensor,
    starts: Tensor,
    n: int,
    *,
    window: int,
    scale: float,
    softcap: float,
    max_length: int,
    causal: bool = True,
    lows: Tensor | None = None,
    n_splits: int | None = None,
    split_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`paged_attention` before its splits are merged: outputs [S, B n, H, Dv], a softmax each, and the log2 of
    the sums of their weights, float32 [S, B n, H].  ``dtype``: of the outputs where there is one split, else float32.
    """
    n_rows, n_heads, d = q.shape
    n_slices, n_kv_heads, dv = n_rows // n, numbers_of(keys).shape[2], _width(values)
    group = n_heads // n_kv_heads
    assert n_rows == n_slices * n
    assert n_heads == group * n_kv_heads
    assert starts.shape == table_rows.shape == (n_slices,)
    assert lows is None or (lows.is_contiguous() and lows.shape == starts.shape)
    _check_layout(q, keys, values, tables, table_rows, starts)
    device = device_limits(q.device)
    # with splits of fixed lengths, tiles are the same for any number of rows, too
    tile = attention_tile(group * n if not split_tokens else MOST_ROWS, max(d, dv), q.element_size(), device)
    n_row_blocks = -(-group * n // tile.rows)
    if split_tokens:
        assert split_tokens % tile.tokens == 0
        n_splits = -(-max_length // split_tokens)
    elif n_splits is None:
        bound = min(max_length, window + n) if window else max_length
        n_splits = choose_n_splits(n_row_blocks * n_slices * n_kv_heads, bound, device.processors)
    sums = torch.empty(n_splits, n_rows, n_heads, dtype=torch.float32, device=q.device)
    kind = dtype if n_splits == 1 else torch.float32
    partials = torch.empty(n_splits, n_rows, n_heads, dv, dtype=kind, device=q.device)
    paged_attention_kernel[n_row_blocks, n_splits, n_slices * n_kv_heads](
        q, numbers_of(keys), scales_of(keys), numbers_of(values), scales_of(values), tables, table_rows, starts, lows,
        sinks, partials, sums, scale, softcap, window or 1 << 30, n, n_splits, n_rows,
        tables.stride(0), q.stride(0), q.stride(1),
        K=n_kv_heads, G=group, D=d, DV=dv, DK_STORED=numbers_of(keys).shape[3], DV_STORED=numbers_of(values).shape[3],
        CAPPED=softcap > 0.0, CAUSAL=causal, M=tile.rows, N=tile.tokens, WIDTH=tile_width(keys),
        VALUE_WIDTH=tile_width(values), SPLIT=split_tokens, num_warps=tile.n_warps, num_stages=tile.n_stages,
        **dependent_launch(q.device),
    )  # fmt: skip
    return partials, sums


def paged_attention(
    q: Tensor,
    keys: PagedTensor,
    values: PagedTensor,
    tables: Tensor,
    table_rows: Tensor,
    starts: Tensor,
    n: int,
    *,
    window: int,
    scale: float,
    softcap: float,
    max_length: int,
    causal: bool = True,
    lows: Tensor | None = None,
    n_splits: int | None = None,
    sinks: Tensor | None = None,
    split_tokens: int = 0,
) -> Tensor:
    """Attend ``q`` [B n, H, D], slice after slice, to the pages of their sequences; returns [B n, H, Dv] of q's dtype.

    Slice b is at positions ``starts[b]`` .. ``starts[b] + n - 1``; position p of it is in page
    ``tables[table_rows[b], p // 64]`` (integers [rows, pages], [B], [B], on the device).  A query sees positions up to
    its own, without ``causal`` up to the last one of its slice; with a ``window``, only those less than ``window``
    before it; with ``lows`` [B], only those from ``lows[b]`` on.  Pages before these are never read.  ``softcap`` 0:
    none.  ``sinks`` float32 [H]: the logit of a key of each head whose value is zero.  ``max_length``: an upper bound
    of the position after any slice's last token, not used with ``n_splits``.  ``split_tokens``: positions of each
    split, from 0 on, a multiple of 64; then a row's bits depend on its position and what it sees alone.  Arithmetic is
    float32, but factors of the two products have q's dtype.
    """
    partials, sums = paged_attention_splits(
        q, keys, values, tables, table_rows, starts, n, window=window, scale=scale, softcap=softcap,
        max_length=max_length, causal=causal, lows=lows, n_splits=n_splits, split_tokens=split_tokens, dtype=q.dtype,
        sinks=sinks,
    )  # fmt: skip
    found, n_rows, n_heads, dv = partials.shape
    if found == 1:
        return partials[0]
    out = torch.empty(n_rows, n_heads, dv, dtype=q.dtype, device=q.device)
    width = min(64, triton.next_power_of_2(dv))
    paged_attention_merge_kernel[n_rows * n_heads, -(-dv // width)](
        partials, sums, out, found, n_rows * n_heads, D=dv, SPLITS=64, WIDTH=width, num_warps=4,
        **dependent_launch(q.device),
    )  # fmt: skip
    return out
