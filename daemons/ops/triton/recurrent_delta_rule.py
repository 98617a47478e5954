"""The gated delta net mixer for few tokens a slice: decode, the check of a draft, the end of a prompt.

Input columns to gated outputs in two launches; the reference is ``daemons.models.blocks.GatedDeltaNet``.
The tokens of a slice follow each other in one program, which holds the matrix S of a value head in registers: long
slices are better off with the chunked form.  Knows no sequence and no step, only rows of the state pools.

Why a program holds all of S and not a part of its columns: 48 heads of 128 x 128 are 48 programs with 64 KiB each in
flight, which is enough to hide the latency of the memory; with parts, more processors would share the work of one
sequence, but the norm over a head would be a third launch, which costs more than that saves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.basic import l2_scale
from daemons.ops.operations import GatedDeltaNetParams

L2_EPS = 1e-6
"""Added to the squared length of a query or key."""


@triton.jit
def _softplus(x):
    """log(1 + exp x) without losing what the 1 drowns (Kahan's log1p); x itself above 20, as in torch."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    part = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, part)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids"])
def causal_conv1d_kernel(
    y,  # [B n, columns]
    qkv,  # [B n, C]
    gates,  # [B n, N_VALUE, 2]: what S keeps of itself, and beta
    conv_states,  # [states, TAPS - 1, C]
    ids,  # [B]
    conv_weight,  # [TAPS, C]
    decay_rates,  # [N_VALUE]
    dt_bias,  # [N_VALUE]
    n,
    y_stride,
    EPS: tl.constexpr,
    SCALE: tl.constexpr,
    N_KEY: tl.constexpr,
    N_VALUE: tl.constexpr,
    DIM: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One head (of q, k, v) of one token: convolution, silu, l2 norm of q and k, gates of v.

    Grid [2 N_KEY + N_VALUE, B n].  Only reads ``conv_states``, so tokens run in parallel;
    :func:`delta_rule_recurrent_kernel` updates them.
    """
    head, token = tl.program_id(0), tl.program_id(1) % n
    row = tl.program_id(1).to(tl.int64)
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    channel = head * DIM + at
    inputs = y + row * y_stride
    window = conv_states + tl.load(ids + row // n) * ((CONV_WIDTH - 1) * C) + channel
    x = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(CONV_WIDTH):
        back = CONV_WIDTH - 1 - i  # so many tokens before this one; what lies before the slice is in the window
        width = tl.where(token < back, DIM, 0)
        old = tl.load(window + (token + i) * C, mask=at < width, other=0.0)
        new = tl.load(inputs - back * y_stride + channel, mask=at < DIM - width, other=0.0)
        tap = tl.load(conv_weight + i * C + channel, mask=inside, other=0.0)
        x += (old + new.to(tl.float32)) * tap  # one of the two is 0
    x = x / (1.0 + tl.exp(-x))
    if head < 2 * N_KEY:
        # the l2 norm is the rms norm times a scale; queries also carry the rule's 1/sqrt(Dk), which is the same number
        x *= tl.rsqrt(tl.sum(x * x, axis=0) / DIM + EPS) * tl.where(head < N_KEY, SCALE * SCALE, SCALE)
    else:
        j = head - 2 * N_KEY
        alpha = tl.load(inputs + C + N_VALUE * DIM + j).to(tl.float32)
        beta = tl.load(inputs + C + N_VALUE * (DIM + 1) + j).to(tl.float32)
        decay = tl.exp(_softplus(alpha + tl.load(dt_bias + j)) * tl.load(decay_rates + j))
        tl.store(gates + (row * N_VALUE + j) * 2, decay)
        tl.store(gates + (row * N_VALUE + j) * 2 + 1, 1.0 / (1.0 + tl.exp(-beta)))
    tl.store(qkv + row * C + channel, x, mask=inside)


@triton.jit
def _load_token(qkv, gates, z, at, pair, value, width):
    """q and k [BLOCK, 2], v, z, decay and beta of one token, whose heads begin at ``pair`` [1, 2] and ``value``.

    ``width``: the heads' DIM, or 0 behind the last token: nothing is read.
    """
    qk = tl.load(qkv + pair + at[:, None], mask=at[:, None] < width, other=0.0)
    v = tl.load(qkv + value + at, mask=at < width, other=0.0)
    gate = tl.load(z + at, mask=at < width, other=0.0).to(tl.float32)
    decay = tl.load(gates, mask=width > 0, other=0.0)
    beta = tl.load(gates + 1, mask=width > 0, other=0.0)
    return qk, v, gate, decay, beta


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids"])
def delta_rule_recurrent_kernel(
    y,  # [B n, columns]
    qkv,  # [B n, C]
    gates,  # [B n, N_VALUE, 2]
    out,  # [B n, N_VALUE DIM]
    conv_states,  # [states, TAPS - 1, C]
    states,  # [states, N_VALUE, DIM, DIM]
    ids,  # [B]
    norm,  # [DIM]
    eps,
    n,
    y_stride,
    N_KEY: tl.constexpr,
    N_VALUE: tl.constexpr,
    DIM: tl.constexpr,
    CONV_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW_CHANNELS: tl.constexpr,
    WINDOW_ROWS: tl.constexpr,
) -> None:
    """One value head of one slice: the rule over its n tokens, the gated norm; S and the window move on in the pools.

    Grid [N_VALUE, B].  Of the window every program moves PART channels; KEPT is its TAPS - 1 rows, rounded up.
    """
    j, b = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    state = tl.load(ids + b)
    first = b.to(tl.int64) * n
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    square = inside[:, None] & inside[None, :]
    matrix = states + (state * N_VALUE + j) * (DIM * DIM) + at[:, None] * DIM + at[None, :]
    s = tl.load(matrix, mask=square, other=0.0)

    # rows n .. n + TAPS - 2 of (window, inputs); the convolution, which reads the window, is done by now
    row = tl.arange(0, WINDOW_ROWS)[:, None]
    channel = j * WINDOW_CHANNELS + tl.arange(0, WINDOW_CHANNELS)[None, :]
    mine, before = (row < CONV_WIDTH - 1) & (channel < C), row + n < CONV_WIDTH - 1
    window = conv_states + state * ((CONV_WIDTH - 1) * C) + channel
    old = tl.load(window + (row + n) * C, mask=mine & before, other=0.0)
    new = tl.load(
        y + (first + n - (CONV_WIDTH - 1) + row) * y_stride + channel,
        mask=mine & (row + n >= CONV_WIDTH - 1),
        other=0.0,
    )
    moved = old + new.to(tl.float32)  # one of the two is 0

    weight = tl.load(norm + at, mask=inside, other=0.0)
    heads = (j % N_KEY + N_KEY * tl.arange(0, 2)[None, :]) * DIM
    value = (2 * N_KEY + j) * DIM
    qkv += first * C
    gates += (first * N_VALUE + j) * 2
    z = y + first * y_stride + C + j * DIM
    out += first * (N_VALUE * DIM) + j * DIM
    qk, v, gate, decay, beta = _load_token(qkv, gates, z, at, heads, value, DIM)
    for token in range(n):
        qkv += C
        gates += 2 * N_VALUE
        z += y_stride
        # asked for before this token's sums are waited for
        later = _load_token(qkv, gates, z, at, heads, value, tl.where(token + 1 < n, DIM, 0))
        q, k = tl.split(qk)
        error = (v - decay * tl.sum(s * k[:, None], axis=0)) * beta
        s = s * decay + k[:, None] * error[None, :]
        o = tl.sum(s * q[:, None], axis=0)
        o *= tl.rsqrt(tl.sum(o * o, axis=0) / DIM + eps) * weight
        o *= gate / (1.0 + tl.exp(-gate))
        tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)
        out += N_VALUE * DIM
        qk, v, gate, decay, beta = later
    tl.store(matrix, s, mask=square)
    tl.debug_barrier()  # threads of this program write what others of it have read
    tl.store(window + row * C, moved, mask=mine)


def conv1d_options(n_key: int, n_value: int, dim: int, conv_width: int) -> dict[str, float]:
    """What :func:`causal_conv1d_kernel` is compiled for, and its warps."""
    heads = {
        "N_KEY": n_key,
        "N_VALUE": n_value,
        "DIM": dim,
        "CONV_WIDTH": conv_width,
        "BLOCK": triton.next_power_of_2(dim),
    }
    return heads | {"EPS": L2_EPS / dim, "SCALE": l2_scale(dim), "num_warps": 1}


def recurrent_options(n_key: int, n_value: int, dim: int, conv_width: int) -> dict[str, int]:
    """What :func:`delta_rule_recurrent_kernel` is compiled for, and its warps."""
    block, part = triton.next_power_of_2(dim), triton.cdiv((2 * n_key + n_value) * dim, n_value)
    heads = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim, "CONV_WIDTH": conv_width, "BLOCK": block}
    window = {"WINDOW_CHANNELS": triton.next_power_of_2(part), "WINDOW_ROWS": triton.next_power_of_2(conv_width - 1)}
    return heads | window | {"num_warps": 8 if block > 64 else 4}


def recurrent_gated_delta_net(
    y: Tensor, conv_states: Tensor, states: Tensor, ids: Tensor, params: GatedDeltaNetParams
) -> Tensor:
    """Input columns [B n, columns] to gated outputs [B n, n_value dim], in the dtype of ``y``; moves the states on.

    ``y``: columns q, k, v (the channels C), z, alpha, beta; slice b has rows b n .. b n + n - 1, n from 1 to a few
    dozen; the last dim contiguous.  Pools ``conv_states`` [states, taps - 1, C] and ``states``
    [states, n_value, Dk, Dv], float32, are changed in rows ``ids`` [B] int64, which differ from each other.
    """
    m, conv_width, channels = params, params.conv_weight.shape[0], params.channels
    rows, n_slices = y.shape[0], ids.shape[0]
    n = rows // n_slices
    assert y.shape == (n * n_slices, m.columns)
    assert y.stride(1) == 1
    assert conv_states.shape[1:] == (conv_width - 1, channels)
    assert states.shape[1:] == (m.n_value, m.dim, m.dim)
    assert all(x.is_contiguous() for x in (conv_states, states, ids))
    assert [x.dtype for x in (conv_states, states, ids)] == [torch.float32, torch.float32, torch.int64]
    qkv = torch.empty(rows, channels, dtype=torch.float32, device=y.device)
    gates = torch.empty(rows, m.n_value, 2, dtype=torch.float32, device=y.device)
    out = torch.empty(rows, m.n_value * m.dim, dtype=y.dtype, device=y.device)
    sizes = (m.n_key, m.n_value, m.dim, conv_width)
    causal_conv1d_kernel[(2 * m.n_key + m.n_value, rows)](
        *(y, qkv, gates, conv_states, ids, m.conv_weight, m.decay_rates, m.dt_bias, n, y.stride(0)),
        **conv1d_options(*sizes),
    )
    delta_rule_recurrent_kernel[(m.n_value, n_slices)](
        *(y, qkv, gates, out, conv_states, states, ids, m.norm.weight, m.norm.epsilon, n, y.stride(0)),
        **recurrent_options(*sizes),
    )
    return out
