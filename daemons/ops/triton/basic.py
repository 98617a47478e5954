"""RMSNorm, QK norm with RoPE, act-and-mul and output gates of a decoder layer, one launch each.

Invariant: arithmetic is float32 for any activations, rounded once, when a result is stored.  The number of tokens never
causes a compilation; widths and head dims are compile-time constants.

Shapes: T tokens, H heads, D the last dimension, F columns of an activation.  The last dimension of an operand is
contiguous; its rows may be strided, as columns of a wider product are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.basic import ACTIVATIONS, SWIGLU_ALPHA, SWIGLU_LIMIT
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs

TILE = 1024
"""Numbers per program: 16 bytes of half precision per thread."""


# ---- norms
_ALPHA, _LIMIT = tl.constexpr(SWIGLU_ALPHA), tl.constexpr(SWIGLU_LIMIT)


@triton.jit(do_not_specialize=["n_rows"])
def rms_norm_kernel(
    x,  # [T, H, D]
    weight,  # [H, D], [D] when weight_stride is 0, or None
    out,  # [T, H, D] contiguous
    n_rows,  # T H
    n_heads,
    token_stride,
    head_stride,
    weight_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < n_rows)[:, None] & (column < D)
    head = row % n_heads
    at = (row // n_heads).to(tl.int64) * token_stride + head * head_stride
    value = tl.load(x + at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:  # loaded before the sum is needed
        scale = tl.load(weight + (head * weight_stride)[:, None] + column, mask=mask, other=0.0)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    if weight is not None:
        value *= scale
    tl.store(out + row.to(tl.int64)[:, None] * D + column, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_rms_norm_kernel(
    h,  # [T, D]
    delta,  # [T, D]
    weight,  # [D]
    total,  # [T, D] contiguous
    out,  # [T, D] contiguous
    h_stride,
    delta_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < D
    value = tl.load(h + row * h_stride + column, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(delta + row * delta_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=mask, other=0.0)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row * D + column, rounded, mask=mask)
    value = rounded.to(tl.float32)  # the norm is that of the stored residual
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    tl.store(out + row * D + column, (value * scale).to(out.dtype.element_ty), mask=mask)


def norm_tile(d: int) -> tuple[int, int, int]:
    """Columns (a power of two), rows and warps per program."""
    block = triton.next_power_of_2(d)
    return block, max(1, TILE // block), min(max(block // 512, 4), 16)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, out_dtype: torch.dtype | None = None) -> Tensor:
    """``x rsqrt(mean(x²) + eps) weight`` over the last dimension of x ``[..., D]``; contiguous, of ``out_dtype`` or
    x's.

    ``weight`` float32 contiguous: ``[D]``, ``[H, D]`` for one per head of x ``[..., H, D]``, or None for 1.
    """
    d = x.shape[-1]
    heads = x.view(-1, 1, d) if x.dim() < 3 else x if x.dim() == 3 else x.view(-1, *x.shape[-2:])
    tokens, n_heads = heads.shape[:2]
    assert heads.stride(2) == 1
    assert weight is None or (weight.shape in ((d,), (n_heads, d)) and weight.is_contiguous())
    out = torch.empty(x.shape, dtype=x.dtype if out_dtype is None else out_dtype, device=x.device)
    block, rows, warps = norm_tile(d)
    rms_norm_kernel[(triton.cdiv(tokens * n_heads, rows),)](
        heads,
        weight,
        out,
        tokens * n_heads,
        n_heads,
        heads.stride(0),
        heads.stride(1),
        d if weight is not None and weight.dim() == 2 else 0,
        eps,
        D=d,
        BLOCK=block,
        ROWS=rows,
        num_warps=warps,
        **dependent_launch(x.device),
    )
    return out


def add_rms_norm(h: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``h + delta`` of ``[T, D]``, rounded to h's dtype, and the norm of that rounded sum with weight float32 ``[D]``.

    Both contiguous and of h's dtype.
    """
    tokens, d = h.shape
    assert (delta.shape, weight.shape) == (h.shape, (d,))
    assert h.stride(1) == delta.stride(1) == weight.stride(0) == 1
    total = torch.empty((tokens, d), dtype=h.dtype, device=h.device)
    out = torch.empty_like(total)
    block, _, warps = norm_tile(d)
    add_rms_norm_kernel[(tokens,)](
        *(h, delta, weight, total, out, h.stride(0), delta.stride(0), eps),
        D=d,
        BLOCK=block,
        num_warps=warps,
        **dependent_launch(h.device),
    )
    return total, out


# ---- queries and keys


@triton.jit(do_not_specialize=["n_rows"])
def qk_norm_rope_kernel(
    x,  # [T, H, D]
    weight,  # [H, D]
    cos,  # [T, HALF]
    sin,  # [T, HALF]
    out,  # [T, H, D] contiguous
    n_rows,  # T H
    n_heads,
    token_stride,
    head_stride,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0: every dim is rotated
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, token = row % n_heads, (row // n_heads).to(tl.int64)
    x += (token * token_stride + head * head_stride)[:, None]
    weight += (head * D)[:, None]
    out += (row.to(tl.int64) * D)[:, None]
    inside = (row < n_rows)[:, None]

    j = tl.arange(0, BLOCK_HALF)[None, :]  # dims j and j + HALF are rotated together
    rotated = inside & (j < HALF)
    a = tl.load(x + j, mask=rotated, other=0.0).to(tl.float32)
    b = tl.load(x + HALF + j, mask=rotated, other=0.0).to(tl.float32)
    c = tl.load(cos + (token * HALF)[:, None] + j, mask=rotated, other=0.0)
    s = tl.load(sin + (token * HALF)[:, None] + j, mask=rotated, other=0.0)
    a_scale = tl.load(weight + j, mask=rotated, other=0.0)
    b_scale = tl.load(weight + HALF + j, mask=rotated, other=0.0)
    squares = tl.sum(a * a + b * b, axis=1)
    if BLOCK_REST > 0:
        k = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        unrotated = inside & (k < D)
        rest = tl.load(x + k, mask=unrotated, other=0.0).to(tl.float32)
        rest_scale = tl.load(weight + k, mask=unrotated, other=0.0)
        squares += tl.sum(rest * rest, axis=1)
    inverse = tl.rsqrt(squares / D + eps)[:, None]
    a *= inverse * a_scale
    b *= inverse * b_scale
    tl.store(out + j, (a * c - b * s).to(out.dtype.element_ty), mask=rotated)
    tl.store(out + HALF + j, (b * c + a * s).to(out.dtype.element_ty), mask=rotated)
    if BLOCK_REST > 0:
        tl.store(out + k, (rest * inverse * rest_scale).to(out.dtype.element_ty), mask=unrotated)


def qk_norm_rope_tile(d: int, half: int) -> tuple[int, int, int]:
    """Columns per program for half of the rotated dims and for the other dims (powers of two or 0), and rows."""
    block_half = triton.next_power_of_2(half)
    block_rest = triton.next_power_of_2(d - 2 * half) if d > 2 * half else 0
    return block_half, block_rest, max(1, TILE // max(2 * block_half, block_rest))


def qk_norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RMSNorm of each head of x ``[T, H, D]`` with weights float32 ``[H, D]``, then RoPE: contiguous, of x's dtype.

    ``cos`` and ``sin`` float32 ``[T, 1, half]`` rotate dims j and j + half; dims from 2 half on are only normed.
    """
    tokens, n_heads, d = x.shape
    half = cos.shape[-1]
    assert x.stride(2) == 1
    assert 2 * half <= d
    assert weight.shape == (n_heads, d)
    assert cos.shape == sin.shape == (tokens, 1, half)
    assert all(table.is_contiguous() for table in (weight, cos, sin))
    out = torch.empty((tokens, n_heads, d), dtype=x.dtype, device=x.device)
    block_half, block_rest, rows = qk_norm_rope_tile(d, half)
    qk_norm_rope_kernel[(triton.cdiv(tokens * n_heads, rows),)](
        x,
        weight,
        cos,
        sin,
        out,
        tokens * n_heads,
        n_heads,
        x.stride(0),
        x.stride(1),
        eps,
        D=d,
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_REST=block_rest,
        ROWS=rows,
        num_warps=4,
        **dependent_launch(x.device),
    )
    return out


# ---- pages


@triton.jit
def write_pages_kernel(
    k,  # [T, K, D], a token contiguous
    v,  # [T, K, D], likewise
    slots,  # [T]; -1: a pad row
    keys,  # [slots, K, D]
    values,  # [slots, K, D]
    n_columns,  # K D
    k_stride,
    v_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    mask = column < tl.where(slot >= 0, n_columns, 0)
    to = slot * n_columns + column
    tl.store(keys + to, tl.load(k + row * k_stride + column, mask=mask).to(keys.dtype.element_ty), mask=mask)
    tl.store(values + to, tl.load(v + row * v_stride + column, mask=mask).to(values.dtype.element_ty), mask=mask)


def write_pages(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store ``k`` and ``v`` [T, K, D] at ``slots`` int64 [T] of ``keys`` and ``values`` [slots, K, D]; -1: nowhere."""
    tokens, n_heads, d = k.shape
    assert v.shape == k.shape
    assert keys.shape[1:] == values.shape[1:] == (n_heads, d)
    assert all(rows.stride(2) == 1 and (n_heads == 1 or rows.stride(1) == d) for rows in (k, v))
    assert keys.is_contiguous()
    assert values.is_contiguous()
    write_pages_kernel[(tokens, triton.cdiv(n_heads * d, TILE))](
        *(k, v, slots, keys, values, n_heads * d, k.stride(0), v.stride(0)),
        BLOCK=TILE,
        num_warps=4,
        **dependent_launch(k.device),
    )


# ---- gates


@triton.jit
def act_and_mul_kernel(
    x,  # [T, 2F]
    out,  # [T, F] contiguous
    n_columns,  # F
    row_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    gate = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + n_columns + column, mask=mask, other=0.0).to(tl.float32)
    # for gelu: 0.5 (1 + tanh(u)) is sigmoid(2u), and 2 sqrt(2/pi) is 1.59...
    inner = gate
    if ACTIVATION == "gelu_tanh":
        inner = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    elif ACTIVATION == "swiglu_oai":  # the limits leave NaN as it is
        gate = tl.where(gate > _LIMIT, _LIMIT, gate)
        up = tl.where(up > _LIMIT, _LIMIT, tl.where(up < -_LIMIT, -_LIMIT, up)) + 1.0
        inner = _ALPHA * gate
    tl.store(out + row * n_columns + column, (gate * tl.sigmoid(inner) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_bias_kernel(
    x,  # [T, N]
    bias,  # [N], or [X, N] when there are ids
    ids,  # int64 [T] or None
    out,  # [T, N] contiguous
    n_columns,  # N
    row_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    wait_for_inputs(PDL)
    if ids is not None:
        bias += tl.load(ids + row) * n_columns
    number = tl.load(x + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
    number += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * n_columns + column, number.to(out.dtype.element_ty), mask=mask)


@triton.jit
def output_gate_kernel(
    x,  # [T, H, D]
    gate,  # [T, H D], or [T, H] when PER_HEAD
    out,  # [T, H D] contiguous
    n_columns,  # H D
    token_stride,
    head_stride,
    gate_stride,
    D: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n_columns
    head = column // D
    value = tl.load(x + row * token_stride + head * head_stride + column % D, mask=mask, other=0.0).to(tl.float32)
    gate_value = tl.load(gate + row * gate_stride + (head if PER_HEAD else column), mask=mask, other=0.0).to(tl.float32)
    if SOFTPLUS:
        # log(1 + e) loses small e: use its series there
        e = tl.exp(-tl.abs(gate_value))
        factor = tl.maximum(gate_value, 0.0) + tl.where(e < 0.0078125, e * (1.0 - e * (0.5 - e / 3.0)), tl.log(1.0 + e))
    else:
        factor = tl.sigmoid(gate_value)
    tl.store(out + row * n_columns + column, (value * factor).to(out.dtype.element_ty), mask=mask)


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of x ``[T, 2F]``, gate columns first.  ``activation``: one of ACTIVATIONS.

    Rounded once: in half precision the torch form rounds ``act(gate)`` before the product too.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is neither of {', '.join(ACTIVATIONS)}")
    tokens, f = x.shape[0], x.shape[1] // 2
    assert x.shape == (tokens, 2 * f)
    assert x.stride(1) == 1
    out = torch.empty((tokens, f), dtype=x.dtype, device=x.device)
    act_and_mul_kernel[(tokens, triton.cdiv(f, TILE))](
        *(x, out, f, x.stride(0)),
        ACTIVATION=activation,
        BLOCK=TILE,
        num_warps=4,
        **dependent_launch(x.device),
    )
    return out


def add_bias(x: Tensor, bias: Tensor, ids: Tensor | None) -> Tensor:
    """x ``[T, N]`` plus ``bias`` ``[N]``, or plus rows ``ids`` int64 ``[T]`` of ``bias`` ``[X, N]``."""
    tokens, n = x.shape
    assert x.stride(1) == 1
    assert bias.is_contiguous()
    assert bias.shape[-1] == n
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    add_bias_kernel[(tokens, triton.cdiv(n, TILE))](
        *(x, bias, ids, out, n, x.stride(0)), BLOCK=TILE, num_warps=4, **dependent_launch(x.device)
    )
    return out


def output_gate(out: Tensor, gate: Tensor, kind: str) -> Tensor:
    """``out`` ``[T, H, D]`` times ``act(gate)``: contiguous ``[T, H D]`` of out's dtype.

    ``gate`` ``[T, H D]``, or ``[T, H]`` for one a head; ``kind``: sigmoid or softplus.  Rounded once: in half precision
    the torch form rounds ``act(gate)`` before the product too.
    """
    if kind not in ("sigmoid", "softplus"):
        raise ValueError(f"gate {kind!r} is neither sigmoid nor softplus")
    tokens, n_heads, d = out.shape
    columns = n_heads * d
    assert gate.shape in ((tokens, columns), (tokens, n_heads))
    assert out.stride(2) == gate.stride(1) == 1
    result = torch.empty((tokens, columns), dtype=out.dtype, device=out.device)
    output_gate_kernel[(tokens, triton.cdiv(columns, TILE))](
        out,
        gate,
        result,
        columns,
        out.stride(0),
        out.stride(1),
        gate.stride(0),
        D=d,
        PER_HEAD=gate.shape[1] != columns,
        SOFTPLUS=kind == "softplus",
        BLOCK=TILE,
        num_warps=4,
        **dependent_launch(out.device),
    )
    return result
