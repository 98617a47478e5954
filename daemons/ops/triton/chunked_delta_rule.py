"""The chunked gated delta net, for prefill; ``recurrent_delta_rule`` has the form for decode.

Four launches: :func:`causal_conv1d_kernel` makes q, k, v and the gates; :func:`delta_rule_solve_kernel` solves each
chunk, all chunks in parallel; :func:`delta_rule_state_kernel` carries the state S from chunk to chunk;
:func:`gated_rms_norm` norms the outputs.  Formulas and sources: docs/kernels.md.

Invariant: decays are multiplied, never taken as differences of summed logarithms: nothing overflows, and no digits are
lost after a token that resets the state.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.delta_rule import CHUNK
from daemons.ops.operations import GatedDeltaNetParams
from daemons.ops.triton.dependent_launch import dependent_launch
from daemons.ops.triton.recurrent_delta_rule import causal_conv1d_kernel, conv1d_options, gated_rms_norm

VALUES = 32
"""Columns of S per program of :func:`delta_rule_state_kernel`: with heads of 128, one slice fills an H200."""


@triton.jit
def _invert_unit_lower(lower, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular [SIZE, SIZE].

    Diagonal blocks of 16 by elimination, all at once, then merged in pairs: the inverse of [[A, 0], [C, B]] is
    D - D [[0, 0], [C, 0]] D with D = [[A^-1, 0], [0, B^-1]].  Intermediates stay about as small as the result;
    powers of ``lower``, for a series, grow where keys are similar.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    block, at = tl.arange(0, BLOCKS), tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    small = tl.sum(tl.where(diagonal, tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16]), 0.0), axis=2)
    row, column = at[None, :, None], at[None, None, :]
    found = tl.where(row == column, 1.0, tl.zeros_like(small))
    for i in range(15):
        done = tl.sum(tl.where(row == i, found, 0.0), axis=1)
        below = tl.sum(tl.where(column == i, small, 0.0), axis=2)
        found -= below[:, :, None] * done[:, None, :]
    inverse = tl.reshape(tl.where(diagonal, found[:, :, None, :], 0.0), [SIZE, SIZE])
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    for level in tl.static_range(2):
        corner = (i // (16 << level) != j // (16 << level)) & (i // (32 << level) == j // (32 << level))
        corner = tl.where(corner, lower, 0.0)
        corner = tl.dot(inverse, corner, input_precision=PRECISION)
        inverse -= tl.dot(corner, inverse, input_precision=PRECISION)
    return inverse


@triton.jit
def _load_span(spans, b):
    """How far inside a chunk slice b starts, and how many of its rows are tokens."""
    return tl.load(spans + 2 * b).to(tl.int32), tl.load(spans + 2 * b + 1).to(tl.int32)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["spans"])
def delta_rule_solve_kernel(
    qkv,  # [B n, C]
    gates,  # [B n, N_VALUE, 2]
    pairs,  # [B, chunks, N_VALUE, 2, SIZE, SIZE]: solve, within
    decays,  # [B, chunks, N_VALUE, 2, SIZE]: grown, left
    spans,  # [B, 2]
    n,
    N_KEY: tl.constexpr,
    N_VALUE: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Solve one chunk of one value head.  Grid [N_VALUE, chunks, B]; outer chunks may be partly empty, and those behind
    a slice's tokens are left out.
    """
    j, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    offset, length = _load_span(spans, b)
    if c * SIZE >= offset + length:
        return
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    at, channel = tl.arange(0, SIZE), tl.arange(0, WIDTH)
    token = c * SIZE - offset + at
    inside = (token >= 0) & (token < length)
    row = b.to(tl.int64) * n + token
    decay = tl.load(gates + (row * N_VALUE + j) * 2, mask=inside, other=1.0)  # an empty row leaves S as it is
    beta = tl.load(gates + (row * N_VALUE + j) * 2 + 1, mask=inside, other=0.0)
    qk, kk = tl.zeros([SIZE, SIZE], dtype=tl.float32), tl.zeros([SIZE, SIZE], dtype=tl.float32)
    at_q = qkv + row[:, None] * C + (j % N_KEY) * DIM + channel[None, :]
    for _ in range(DIM // WIDTH):
        q = tl.load(at_q, mask=inside[:, None], other=0.0)
        k = tl.load(at_q + N_KEY * DIM, mask=inside[:, None], other=0.0)
        qk = tl.dot(q, tl.trans(k), acc=qk, input_precision=PRECISION)
        kk = tl.dot(k, tl.trans(k), acc=kk, input_precision=PRECISION)
        at_q += WIDTH

    below = at[:, None] > at[None, :]
    ratio = tl.cumprod(tl.where(below, decay[:, None], 1.0), axis=0)
    ratio = tl.where(at[:, None] >= at[None, :], ratio, 0.0)
    place = (b.to(tl.int64) * tl.num_programs(1) + c) * N_VALUE + j
    decay_at = decays + place * (2 * SIZE) + at
    tl.store(decay_at, tl.cumprod(decay, axis=0))
    tl.store(decay_at + SIZE, tl.sum(tl.where(at[:, None] == SIZE - 1, ratio, 0.0), axis=0))

    pair_at = pairs + place * (2 * SIZE * SIZE) + at[:, None] * SIZE + at[None, :]
    tl.store(pair_at + SIZE * SIZE, qk * ratio)
    lower = tl.where(below, kk * ratio * beta[:, None], 0.0)
    tl.store(pair_at, _invert_unit_lower(lower, SIZE, PRECISION) * beta[None, :])


@triton.jit
def _dot_state(rows_at, inside, upper, lower, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Queries or keys [SIZE, 2 HALF] at ``rows_at`` times S, whose halves are ``upper`` and ``lower``."""
    rows = tl.load(rows_at, mask=inside, other=0.0)
    out = tl.dot(rows, upper, input_precision=PRECISION)
    rows = tl.load(rows_at + HALF, mask=inside, other=0.0)
    return tl.dot(rows, lower, acc=out, input_precision=PRECISION)


@triton.jit
def _store_window(window, end, y_stride, channels, C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Some channels of the last WIDTH - 1 tokens in front of ``end``, a row of y."""
    row, channel = tl.arange(0, ROWS)[:, None], channels[None, :]
    mine = (row < WIDTH - 1) & (channel < C)
    last = tl.load(end + (row - (WIDTH - 1)) * y_stride + channel, mask=mine, other=0.0)
    tl.store(window + row * C + channel, last.to(tl.float32), mask=mine)


@triton.jit(do_not_specialize=["n", "n_chunks"], do_not_specialize_on_alignment=["ids", "spans"])
def delta_rule_state_kernel(
    y,  # [B n, columns]
    qkv,  # [B n, C]
    pairs,  # [B, chunks, N_VALUE, 2, SIZE, SIZE]
    decays,  # [B, chunks, N_VALUE, 2, SIZE]
    conv_states,  # [states, CONV_WIDTH - 1, C]
    states,  # [states, N_VALUE, DIM, DIM]
    ids,  # [B]
    spans,  # [B, 2]
    n, n_chunks, y_stride,
    N_KEY: tl.constexpr, N_VALUE: tl.constexpr, DIM: tl.constexpr, CONV_WIDTH: tl.constexpr, SIZE: tl.constexpr,
    VALUES: tl.constexpr, WINDOW_CHANNELS: tl.constexpr, WINDOW_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """VALUES columns of S of one value head through all chunks of a slice; writes outputs in place of v.

    Grid [DIM / VALUES, N_VALUE, B].  Also stores WINDOW_CHANNELS channels of the new convolution window; a slice has at
    least its CONV_WIDTH - 1 tokens (WINDOW_ROWS: rounded up).
    """
    part, j, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    state, first = tl.load(ids + b), b.to(tl.int64) * n
    offset, length = _load_span(spans, b)

    channels = (j * (DIM // VALUES) + part) * WINDOW_CHANNELS + tl.arange(0, WINDOW_CHANNELS)
    window = conv_states + state * ((CONV_WIDTH - 1) * C)
    _store_window(window, y + (first + length) * y_stride, y_stride, channels, C, CONV_WIDTH, WINDOW_ROWS)

    HALF: tl.constexpr = DIM // 2
    at, channel, value = tl.arange(0, SIZE), tl.arange(0, HALF), part * VALUES + tl.arange(0, VALUES)
    matrix = states + (state * N_VALUE + j) * (DIM * DIM) + channel[:, None] * DIM + value[None, :]
    upper, lower = tl.load(matrix), tl.load(matrix + HALF * DIM)  # halves of S: all of it needs too many registers
    of_key, of_value = at[:, None] * C + channel[None, :], at[:, None] * C + value[None, :]
    of_pair = at[:, None] * SIZE + at[None, :]
    place = b.to(tl.int64) * n_chunks * N_VALUE + j
    pairs += place * (2 * SIZE * SIZE)
    decays += place * (2 * SIZE)
    qkv += (first - offset) * C
    begin = -offset
    for _ in range(tl.cdiv(offset + length, SIZE)):
        inside = (at[:, None] + begin >= 0) & (at[:, None] + begin < length)
        q_at = qkv + (j % N_KEY) * DIM
        k_at, v_at = q_at + N_KEY * DIM, qkv + (2 * N_KEY + j) * DIM
        grown, left, shrink = tl.load(decays + at), tl.load(decays + SIZE + at), tl.load(decays + SIZE - 1)
        u = _dot_state(k_at + of_key, inside, upper, lower, HALF, PRECISION)
        u = tl.load(v_at + of_value, mask=inside, other=0.0) - grown[:, None] * u
        u = tl.dot(tl.load(pairs + of_pair), u, input_precision=PRECISION)
        o = _dot_state(q_at + of_key, inside, upper, lower, HALF, PRECISION) * grown[:, None]
        o = tl.dot(tl.load(pairs + SIZE * SIZE + of_pair), u, acc=o, input_precision=PRECISION)
        tl.store(v_at + of_value, o, mask=inside)  # o depends on the v that it replaces, so v has been read
        u *= left[:, None]
        k = tl.load(k_at + of_key, mask=inside, other=0.0)  # loaded again: holding it costs registers
        upper = tl.dot(tl.trans(k), u, acc=upper * shrink, input_precision=PRECISION)
        k = tl.load(k_at + HALF + of_key, mask=inside, other=0.0)
        lower = tl.dot(tl.trans(k), u, acc=lower * shrink, input_precision=PRECISION)
        qkv += SIZE * C
        pairs += N_VALUE * (2 * SIZE * SIZE)
        decays += N_VALUE * (2 * SIZE)
        begin += SIZE
    tl.store(matrix, upper)
    tl.store(matrix + HALF * DIM, lower)


@cache
def _precision(device: torch.device) -> str:
    """Precision of float32 products: three TF32 products where tensor cores have them, else IEEE."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        return "tf32x3"
    return "ieee"


def solve_options(n_key: int, n_value: int, dim: int, precision: str) -> dict[str, int | str]:
    """What :func:`delta_rule_solve_kernel` is compiled for, and its warps."""
    heads: dict[str, int | str] = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim}
    return heads | {"SIZE": CHUNK, "WIDTH": min(dim, 32), "PRECISION": precision, "num_warps": 4}


def state_options(n_key: int, n_value: int, dim: int, conv_width: int, precision: str) -> dict[str, int | str]:
    """What :func:`delta_rule_state_kernel` is compiled for, and its warps."""
    values = min(dim, VALUES)
    part = triton.cdiv((2 * n_key + n_value) * dim, n_value * (dim // values))
    heads: dict[str, int | str] = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim, "CONV_WIDTH": conv_width}
    window = {"WINDOW_CHANNELS": triton.next_power_of_2(part), "WINDOW_ROWS": triton.next_power_of_2(conv_width - 1)}
    return heads | window | {"SIZE": CHUNK, "VALUES": values, "PRECISION": precision, "num_warps": 4, "num_stages": 1}


def chunked_gated_delta_net(
    y: Tensor, conv_states: Tensor, states: Tensor, ids: Tensor, spans: Tensor, params: GatedDeltaNetParams
) -> Tensor:
    """Input columns [B n, columns] to gated outputs [B n, n_value dim], in the dtype of ``y``; updates the states.

    Takes what :func:`recurrent_delta_rule.recurrent_gated_delta_net` takes but ``kept``, for n >= conv width - 1 and a
    ``dim`` that is a power of two, at least 32; updates rows ``ids``.  ``spans`` int64 [B, 2]: position of each slice's
    first token modulo CHUNK, and how many of its n rows are tokens, from conv width - 1 to n.  Pad rows behind them
    leave the states as they are, whatever they hold, also NaN; their outputs mean nothing.  Launches do not depend on
    spans.  Chunks start at multiples of CHUNK, so splitting a prompt into steps changes only roundings.
    """
    m, conv_width, channels = params, params.conv_weight.shape[0], params.channels
    rows, n_slices = y.shape[0], ids.shape[0]
    n = rows // n_slices
    assert y.shape == (n * n_slices, m.columns)
    assert y.stride(1) == 1
    assert n >= conv_width - 1
    assert spans.shape == (n_slices, 2)
    assert conv_states.shape[1:] == (conv_width - 1, channels)
    assert states.shape[1:] == (m.n_value, m.dim, m.dim)
    assert all(x.is_contiguous() for x in (conv_states, states, ids, spans))
    assert [x.dtype for x in (conv_states, states, ids, spans)] == [torch.float32] * 2 + [torch.int64] * 2
    n_chunks = triton.cdiv(CHUNK - 1 + n, CHUNK)  # at most

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=y.device)

    qkv, gates = scratch(rows, channels), scratch(rows, m.n_value, 2)
    pairs = scratch(n_slices, n_chunks, m.n_value, 2, CHUNK, CHUNK)
    decays = scratch(n_slices, n_chunks, m.n_value, 2, CHUNK)
    heads, precision = (m.n_key, m.n_value, m.dim), _precision(y.device)
    causal_conv1d_kernel[(2 * m.n_key + m.n_value, rows)](
        *(y, qkv, gates, conv_states, ids, ids, m.conv_weight, m.decay_rates, m.dt_bias, n, y.stride(0)),
        **conv1d_options(*heads, conv_width, keep=False),
        **dependent_launch(y.device),
    )
    delta_rule_solve_kernel[(m.n_value, n_chunks, n_slices)](
        *(qkv, gates, pairs, decays, spans, n), **solve_options(*heads, precision)
    )
    delta_rule_state_kernel[(m.dim // min(m.dim, VALUES), m.n_value, n_slices)](
        *(y, qkv, pairs, decays, conv_states, states, ids, spans, n, n_chunks, y.stride(0)),
        **state_options(*heads, conv_width, precision),
    )
    return gated_rms_norm(y, qkv, m)
