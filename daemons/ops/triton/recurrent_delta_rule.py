"""The recurrent gated delta net, for decode: one or a few tokens per slice.

Two launches from input columns to gated outputs; the reference is ``daemons.models.blocks.GatedDeltaNet``.  A program
holds the whole state S of a value head in registers and walks the tokens of its slice, so long slices are faster with
``chunked_delta_rule``.  Knows no sequences or steps, only rows of the state pools: for each slice the row it reads, and
for each token the row that gets the state after it, or its update, or -1.

Invariant: a row that one slice reads is written by that slice alone, and only by the program that has read its part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from daemons.ops.basic import l2_scale
from daemons.ops.delta_rule import key_heads
from daemons.ops.operations import MAX_DECODE_TOKENS, DeltaNetPools, GatedDeltaNetParams
from daemons.ops.triton.dependent_launch import dependent_launch, wait_for_inputs
from lucevisor.model.spec import update_width

L2_EPS = 1e-6
"""Epsilon of the l2 norm of queries and keys."""
UPDATED_COLUMNS = 32
"""Columns of a state that a program of :func:`apply_updates_kernel` holds: with whole ones too few are at work."""


@triton.jit
def _softplus(x):
    """log(1 + exp x) with Kahan's log1p, which keeps small exp x; x itself above 20, as in torch."""
    e = tl.exp(tl.minimum(x, 20.0))
    u = 1.0 + e
    part = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 20.0, x, part)


# Long: its parameters and one pass over a tile, which would be passed on whole.
@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids", "kept"])
def causal_conv1d_kernel(
    y,  # [B n, columns]
    qkv,  # [B n, C]
    gates,  # [B n, N_VALUE, 2]: what S keeps of itself, and beta
    conv_states,  # [states, CONV_WIDTH - 1, C]
    ids,  # [B]
    kept,  # [B n] with KEEP, else unused
    conv_weight,  # [CONV_WIDTH, C]
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
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One head (of q, k, v) of one token: convolution, silu, l2 norm of q and k, gates of v.

    Grid [2 N_KEY + N_VALUE, B n].  Tokens run in parallel.  With KEEP, the windows after them go to their rows of
    ``conv_states``, except to the row that the slice's tokens read: :func:`delta_rule_recurrent_kernel` writes that.
    """
    wait_for_inputs(PDL)
    head, token = tl.program_id(0), tl.program_id(1) % n
    row = tl.program_id(1).to(tl.int64)
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    channel = head * DIM + at
    inputs = y + row * y_stride
    state = tl.load(ids + row // n)
    window = conv_states + state * ((CONV_WIDTH - 1) * C) + channel
    target, target_width = state, 0
    if KEEP:
        target = tl.load(kept + row)
        target_width = tl.where((target >= 0) & (target != state), DIM, 0)
    x = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(CONV_WIDTH):
        back = CONV_WIDTH - 1 - i  # tokens before this one; those before the slice are in the window
        width = tl.where(token < back, DIM, 0)
        old = tl.load(window + (token + i) * C, mask=at < width, other=0.0)
        new = tl.load(inputs - back * y_stride + channel, mask=at < DIM - width, other=0.0)
        tap = tl.load(conv_weight + i * C + channel, mask=inside, other=0.0)
        tap_input = old + new.to(tl.float32)  # one of the two is 0
        x += tap_input * tap
        if KEEP and i > 0:
            at_window = conv_states + (target * (CONV_WIDTH - 1) + i - 1) * C + channel
            tl.store(at_window, tap_input, mask=at < target_width)
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
def _load_token(qkv, gates, z, kept, at, pair, value, width):
    """q and k [BLOCK, 2], v, z, decay and beta of one token, and the row its state goes to; ``pair`` [1, 2] and
    ``value``: where its heads begin.

    ``width``: DIM, or 0 after the last token, where nothing is read.
    """
    qk = tl.load(qkv + pair + at[:, None], mask=at[:, None] < width, other=0.0)
    v = tl.load(qkv + value + at, mask=at < width, other=0.0)
    gate = tl.load(z + at, mask=at < width, other=0.0).to(tl.float32)
    decay = tl.load(gates, mask=width > 0, other=0.0)
    beta = tl.load(gates + 1, mask=width > 0, other=0.0)
    target = tl.load(kept, mask=width > 0, other=-1)
    return qk, v, gate, decay, beta, target


@triton.jit
def _shifted_window(window, y, first, row, channel, mine, n, y_stride, C: tl.constexpr, CONV_WIDTH: tl.constexpr):
    """The convolution window after n tokens: rows n .. n + CONV_WIDTH - 2 of the old window followed by the inputs."""
    inputs = y + (first + n - (CONV_WIDTH - 1) + row) * y_stride + channel
    old = tl.load(window + (row + n) * C, mask=mine & (row + n < CONV_WIDTH - 1), other=0.0)
    new = tl.load(inputs, mask=mine & (row + n >= CONV_WIDTH - 1), other=0.0)
    return old + new.to(tl.float32)  # one of the two is 0


@triton.jit
def _updated(s, k, error, decay):
    """S decay + k error', with one rounding of the sum wherever it is compiled."""
    k, error = tl.broadcast(k[:, None], s)[0], tl.broadcast(error[None, :], s)[0]
    return tl.fma(k, error, s * decay)


@triton.jit(do_not_specialize=["n", "source", "target", "states_stride", "updates_stride"])
def apply_updates_kernel(
    states,  # [layers, states, N_VALUE, DIM, DIM]
    updates,  # [layers, states, UPDATE_WIDTH]
    rows,  # [n]
    n,
    source,
    target,
    states_stride,
    updates_stride,
    N_KEY: tl.constexpr,
    N_VALUE: tl.constexpr,
    DIM: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one value head of one layer: S of row ``source`` with the updates of ``rows``, in order, to row
    ``target``.

    Grid [BLOCK / COLUMNS, N_VALUE, layers].  Formulas: :func:`daemons.ops.delta_rule.apply_updates`.
    """
    j, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, columns = tl.arange(0, BLOCK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside, within = at < DIM, columns < DIM
    both = inside[:, None] & within[None, :]
    matrix = states + layer * states_stride + j * (DIM * DIM) + at[:, None] * DIM + columns[None, :]
    s = tl.load(matrix + source.to(tl.int64) * (N_VALUE * DIM * DIM), mask=both, other=0.0)
    updates += layer * updates_stride
    for i in range(n):
        update = updates + tl.load(rows + i) * UPDATE_WIDTH
        k = tl.load(update + j % N_KEY * DIM + at, mask=inside, other=0.0)
        error = tl.load(update + (N_KEY + j) * DIM + columns, mask=within, other=0.0)
        s = _updated(s, k, error, tl.load(update + (N_KEY + N_VALUE) * DIM + j))
    tl.store(matrix + target.to(tl.int64) * (N_VALUE * DIM * DIM), s, mask=both)


# Long: its parameters and one pass over a tile, which would be passed on whole.
@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["ids", "kept"])
def delta_rule_recurrent_kernel(
    y,  # [B n, columns]
    qkv,  # [B n, C]
    gates,  # [B n, N_VALUE, 2]
    out,  # [B n, N_VALUE DIM]
    conv_states,  # [states, CONV_WIDTH - 1, C]
    states,  # [states, N_VALUE, DIM, DIM]
    updates,  # [states, UPDATE_WIDTH]
    ids,  # [B]
    kept,  # [B n]
    norm,  # [DIM]
    eps,
    n,
    y_stride,
    N_KEY: tl.constexpr, N_VALUE: tl.constexpr, DIM: tl.constexpr, CONV_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UPDATE_WIDTH: tl.constexpr,
    WINDOW_CHANNELS: tl.constexpr, WINDOW_ROWS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One value head of one slice: the delta rule over its n <= TOKENS tokens and the gated norm; keeps each S or its
    update, and the conv window that replaces the one the slice read.

    Grid [N_VALUE, B].  Each program writes WINDOW_CHANNELS channels of the window, WINDOW_ROWS >= CONV_WIDTH - 1 rows.
    """
    wait_for_inputs(PDL)
    j, b = tl.program_id(0), tl.program_id(1)
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    state, first = tl.load(ids + b), b.to(tl.int64) * n
    at = tl.arange(0, BLOCK)
    inside = at < DIM
    square = inside[:, None] & inside[None, :]
    matrix = states + j * (DIM * DIM) + at[:, None] * DIM + at[None, :]
    s = tl.load(matrix + state * (N_VALUE * DIM * DIM), mask=square, other=0.0)
    kept += first
    keeps_updates = (n > 1) & (tl.load(kept) >= 0)

    row = tl.arange(0, WINDOW_ROWS)[:, None]
    channel = j * WINDOW_CHANNELS + tl.arange(0, WINDOW_CHANNELS)[None, :]
    window = conv_states + state * ((CONV_WIDTH - 1) * C) + channel
    token = tl.arange(0, TOKENS)
    targets = tl.load(kept + token, mask=token < n, other=-1)
    n_moved = tl.max(tl.where(targets == state, token + 1, 0), axis=0)
    mine = (row < tl.where(n_moved > 0, CONV_WIDTH - 1, 0)) & (channel < C)  # none if the window stays
    moved = _shifted_window(window, y, first, row, channel, mine, n_moved, y_stride, C, CONV_WIDTH)

    weight = tl.load(norm + at, mask=inside, other=0.0)
    heads = (j % N_KEY + N_KEY * tl.arange(0, 2)[None, :]) * DIM
    value = (2 * N_KEY + j) * DIM
    qkv += first * C
    gates += (first * N_VALUE + j) * 2
    z = y + first * y_stride + C + j * DIM
    out += first * (N_VALUE * DIM) + j * DIM
    qk, v, gate, decay, beta, target = _load_token(qkv, gates, z, kept, at, heads, value, DIM)
    for i in range(n):
        qkv += C
        gates += 2 * N_VALUE
        z += y_stride
        kept += 1
        # prefetch the next token's inputs
        later = _load_token(qkv, gates, z, kept, at, heads, value, tl.where(i + 1 < n, DIM, 0))
        q, k = tl.split(qk)
        error = (v - decay * tl.sum(s * k[:, None], axis=0)) * beta
        s = _updated(s, k, error, decay)
        if target >= 0:
            if keeps_updates:
                update = updates + target * UPDATE_WIDTH
                tl.store(update + j * DIM + at, k, mask=at < tl.where(j < N_KEY, DIM, 0))
                tl.store(update + (N_KEY + j) * DIM + at, error, mask=inside)
                tl.store(update + (N_KEY + N_VALUE) * DIM + j, decay)
            else:
                tl.store(matrix + target * (N_VALUE * DIM * DIM), s, mask=square)
        o = tl.sum(s * q[:, None], axis=0)
        o *= tl.rsqrt(tl.sum(o * o, axis=0) / DIM + eps) * weight
        o *= gate / (1.0 + tl.exp(-gate))
        tl.store(out + at, o.to(out.dtype.element_ty), mask=inside)
        out += N_VALUE * DIM
        qk, v, gate, decay, beta, target = later
    tl.debug_barrier()  # every thread has read the window before any writes it
    tl.store(window + row * C, moved, mask=mine)


def conv1d_options(n_key: int, n_value: int, dim: int, conv_width: int, *, keep: bool) -> dict[str, float]:
    """What :func:`causal_conv1d_kernel` is compiled for, and its warps."""
    heads = {
        "N_KEY": n_key,
        "N_VALUE": n_value,
        "DIM": dim,
        "CONV_WIDTH": conv_width,
        "BLOCK": triton.next_power_of_2(dim),
        "KEEP": keep,
    }
    return heads | {"EPS": L2_EPS / dim, "SCALE": l2_scale(dim), "num_warps": 1}


def recurrent_options(
    n_key: int, n_value: int, dim: int, conv_width: int, max_tokens: int = MAX_DECODE_TOKENS
) -> dict[str, int]:
    """What :func:`delta_rule_recurrent_kernel` is compiled for, and its warps."""
    block, part = triton.next_power_of_2(dim), triton.cdiv((2 * n_key + n_value) * dim, n_value)
    heads = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim, "CONV_WIDTH": conv_width, "BLOCK": block}
    window = {"WINDOW_CHANNELS": triton.next_power_of_2(part), "WINDOW_ROWS": triton.next_power_of_2(conv_width - 1)}
    heads["UPDATE_WIDTH"] = update_width(n_key, n_value, dim)
    return heads | window | {"TOKENS": max_tokens, "num_warps": 8 if block > 64 else 4}


def updates_options(n_key: int, n_value: int, dim: int) -> dict[str, int]:
    """What :func:`apply_updates_kernel` is compiled for, and its warps."""
    block = triton.next_power_of_2(dim)
    heads = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim, "UPDATE_WIDTH": update_width(n_key, n_value, dim)}
    return heads | {"BLOCK": block, "COLUMNS": min(block, UPDATED_COLUMNS), "num_warps": 4}


def apply_updates(states: Tensor, updates: Tensor, source: int, rows: Tensor, target: int) -> None:
    """See :func:`daemons.ops.delta_rule.apply_updates`."""
    layers, _, n_value, dim = states.shape[:4]
    n_key = key_heads(updates.shape[2], n_value, dim)
    assert states[0].is_contiguous()
    assert updates[0].is_contiguous()
    options = updates_options(n_key, n_value, dim)
    apply_updates_kernel[(options["BLOCK"] // options["COLUMNS"], n_value, layers)](
        *(states, updates, rows, len(rows), source, target, states.stride(0), updates.stride(0)), **options
    )


def recurrent_gated_delta_net(
    y: Tensor,
    pools: DeltaNetPools,
    ids: Tensor,
    kept: Tensor,
    params: GatedDeltaNetParams,
    max_tokens: int = MAX_DECODE_TOKENS,
) -> Tensor:
    """Input columns [B n, columns] to gated outputs [B n, n_value dim], in the dtype of ``y``; writes states.

    ``y``: columns q, k, v (the C channels), z, alpha, beta; slice b has rows b n .. b n + n - 1, n from 1 to
    ``max_tokens``, a power of two; its last dimension is contiguous.  Slices start from rows ``ids`` [B] int64 of the
    float32 pools ``conv_states`` [states, conv width - 1, C] and ``states`` [states, n_value, Dk, Dv], and write the
    state after each token to its row in ``kept`` [B, n] int64; -1: to none.  If the first of several tokens has a row,
    all have, and the rows of ``updates`` get what the tokens do to S instead.  All rows of a slice differ from all rows
    of another.
    """
    conv_states, states, updates = pools
    m, conv_width, channels = params, params.conv_weight.shape[0], params.channels
    rows, n_slices = y.shape[0], ids.shape[0]
    n = rows // n_slices
    assert y.shape == (n * n_slices, m.columns)
    assert y.stride(1) == 1
    assert conv_states.shape[1:] == (conv_width - 1, channels)
    assert states.shape[1:] == (m.n_value, m.dim, m.dim)
    assert 1 <= n <= max_tokens
    assert kept.shape == (n_slices, n)
    assert updates.shape[1] == update_width(m.n_key, m.n_value, m.dim)
    assert all(x.is_contiguous() for x in (*pools, ids, kept))
    assert [x.dtype for x in (*pools, ids, kept)] == [torch.float32] * 3 + [torch.int64] * 2
    qkv = torch.empty(rows, channels, dtype=torch.float32, device=y.device)
    gates = torch.empty(rows, m.n_value, 2, dtype=torch.float32, device=y.device)
    out = torch.empty(rows, m.n_value * m.dim, dtype=y.dtype, device=y.device)
    sizes = (m.n_key, m.n_value, m.dim, conv_width)
    causal_conv1d_kernel[(2 * m.n_key + m.n_value, rows)](
        *(y, qkv, gates, conv_states, ids, kept, m.conv_weight, m.decay_rates, m.dt_bias, n, y.stride(0)),
        **conv1d_options(*sizes, keep=True),
        **dependent_launch(y.device),
    )
    delta_rule_recurrent_kernel[(m.n_value, n_slices)](
        *(y, qkv, gates, out, *pools, ids, kept, m.norm.weight, m.norm.epsilon, n, y.stride(0)),
        **recurrent_options(*sizes, max_tokens),
        **dependent_launch(y.device),
    )
    return out
