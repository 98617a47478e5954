"""The recurrent gated delta net, for decode: one or a few tokens per slice.

Three launches from input columns to gated outputs; the reference is ``daemons.models.blocks.GatedDeltaNet``.  A
program holds some columns of the state S of a value head in registers and walks the tokens of its slice, so long slices
are faster with ``chunked_delta_rule``.  There are no sequences or steps here, only rows of the state pools: for each
slice the row it reads, and for each token the row that gets the state after it, or its update, or -1.

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
RECURRENT_COLUMNS = 16
"""The same for :func:`delta_rule_recurrent_kernel`, whose one warp adds up without a barrier.  With 32 columns decodes
of 32 slices are a fifth faster on an H200, and prompts of the deterministic mode a seventh slower.
"""
NORM_ROWS = 16
"""Tokens per program of :func:`gated_rms_norm_kernel`."""


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
def _load_token(qkv, gates, kept, key, value, at, columns, N_KEY: tl.constexpr, DIM: tl.constexpr, width):
    """q and k [BLOCK], v [COLUMNS], decay and beta of one token, and the row its state goes to; ``key`` and ``value``:
    where the numbers of its heads are.

    ``width``: DIM, or 0 after the last token, where nothing is read.
    """
    q = tl.load(qkv + key, mask=at < width, other=0.0)
    k = tl.load(qkv + N_KEY * DIM + key, mask=at < width, other=0.0)
    v = tl.load(qkv + value, mask=columns < width, other=0.0)
    decay = tl.load(gates, mask=width > 0, other=0.0)
    beta = tl.load(gates + 1, mask=width > 0, other=0.0)
    target = tl.load(kept, mask=width > 0, other=-1)
    return q, k, v, decay, beta, target


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
    qkv,  # [B n, C]; its columns of v get the outputs
    gates,  # [B n, N_VALUE, 2]
    conv_states,  # [states, CONV_WIDTH - 1, C]
    states,  # [states, N_VALUE, DIM, DIM]
    updates,  # [states, UPDATE_WIDTH]
    ids,  # [B]
    kept,  # [B n]
    n,
    y_stride,
    N_KEY: tl.constexpr, N_VALUE: tl.constexpr, DIM: tl.constexpr, CONV_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, UPDATE_WIDTH: tl.constexpr,
    WINDOW_CHANNELS: tl.constexpr, WINDOW_ROWS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of one value head of one slice: the delta rule over its n <= TOKENS tokens; keeps each S or its
    update, and the conv window that replaces the one the slice read.

    Grid [BLOCK / COLUMNS, N_VALUE, B].  Each program writes WINDOW_CHANNELS channels of the window, WINDOW_ROWS >=
    CONV_WIDTH - 1 rows.
    """
    wait_for_inputs(PDL)
    part, j, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    state, first = tl.load(ids + b), b.to(tl.int64) * n
    at, columns = tl.arange(0, BLOCK), part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < DIM
    square = (at < DIM)[:, None] & inside[None, :]
    matrix = states + j * (DIM * DIM) + at[:, None] * DIM + columns[None, :]
    s = tl.load(matrix + state * (N_VALUE * DIM * DIM), mask=square, other=0.0)
    kept += first
    keeps_updates = (n > 1) & (tl.load(kept) >= 0)

    row = tl.arange(0, WINDOW_ROWS)[:, None]
    channel = (j * tl.num_programs(0) + part) * WINDOW_CHANNELS + tl.arange(0, WINDOW_CHANNELS)[None, :]
    window = conv_states + state * ((CONV_WIDTH - 1) * C) + channel
    token = tl.arange(0, TOKENS)
    targets = tl.load(kept + token, mask=token < n, other=-1)
    n_moved = tl.max(tl.where(targets == state, token + 1, 0), axis=0)
    mine = (row < tl.where(n_moved > 0, CONV_WIDTH - 1, 0)) & (channel < C)  # none if the window stays
    moved = _shifted_window(window, y, first, row, channel, mine, n_moved, y_stride, C, CONV_WIDTH)

    key = j % N_KEY * DIM + at
    value = (2 * N_KEY + j) * DIM + columns
    k_width = tl.where((part == 0) & (j < N_KEY), DIM, 0)  # the program that keeps the key
    qkv += first * C
    gates += (first * N_VALUE + j) * 2
    q, k, v, decay, beta, target = _load_token(qkv, gates, kept, key, value, at, columns, N_KEY, DIM, DIM)
    for i in range(n):
        later = qkv + C
        gates += 2 * N_VALUE
        kept += 1
        # prefetch the next token's inputs
        width = tl.where(i + 1 < n, DIM, 0)
        next_q, next_k, next_v, next_decay, next_beta, next_target = _load_token(
            later, gates, kept, key, value, at, columns, N_KEY, DIM, width
        )
        error = (v - decay * tl.sum(s * k[:, None], axis=0)) * beta
        s = _updated(s, k, error, decay)
        if target >= 0:
            if keeps_updates:
                update = updates + target * UPDATE_WIDTH
                tl.store(update + j * DIM + at, k, mask=at < k_width)
                tl.store(update + (N_KEY + j) * DIM + columns, error, mask=inside)
                tl.store(update + (N_KEY + N_VALUE) * DIM + j, decay)
            else:
                tl.store(matrix + target * (N_VALUE * DIM * DIM), s, mask=square)
        tl.store(qkv + value, tl.sum(s * q[:, None], axis=0), mask=inside)
        qkv = later
        q, k, v, decay, beta, target = next_q, next_k, next_v, next_decay, next_beta, next_target
    tl.debug_barrier()  # every thread has read the window before any writes it
    tl.store(window + row * C, moved, mask=mine)


@triton.jit(do_not_specialize=["n_rows"])
def gated_rms_norm_kernel(
    y,  # [n_rows, columns]
    qkv,  # [n_rows, C]: q, k, and outputs in place of v
    out,  # [n_rows, N_VALUE DIM]
    norm,  # [DIM]
    eps,
    n_rows,
    y_stride,
    N_KEY: tl.constexpr,
    N_VALUE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """ROWS tokens of one value head: RMSNorm times silu(z).  Grid [N_VALUE, ceil(n_rows / ROWS)]."""
    wait_for_inputs(PDL)
    j, row = tl.program_id(0), tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    C: tl.constexpr = (2 * N_KEY + N_VALUE) * DIM
    at = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (at < DIM)
    o = tl.load(qkv + row * C + (2 * N_KEY + j) * DIM + at, mask=inside, other=0.0)
    z = tl.load(y + row * y_stride + C + j * DIM + at, mask=inside, other=0.0).to(tl.float32)
    o *= tl.rsqrt(tl.sum(o * o, axis=1) / DIM + eps)[:, None] * tl.load(norm + at, mask=at < DIM, other=0.0)
    o *= z / (1.0 + tl.exp(-z))
    tl.store(out + row * (N_VALUE * DIM) + j * DIM + at, o.to(out.dtype.element_ty), mask=inside)


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
    block = triton.next_power_of_2(dim)
    columns = min(block, RECURRENT_COLUMNS)
    part = triton.cdiv((2 * n_key + n_value) * dim, n_value * (block // columns))
    heads = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim, "CONV_WIDTH": conv_width, "BLOCK": block}
    window = {"WINDOW_CHANNELS": triton.next_power_of_2(part), "WINDOW_ROWS": triton.next_power_of_2(conv_width - 1)}
    heads |= {"COLUMNS": columns, "UPDATE_WIDTH": update_width(n_key, n_value, dim)}
    return heads | window | {"TOKENS": max_tokens, "num_warps": 1}


def gated_norm_options(n_key: int, n_value: int, dim: int) -> dict[str, int]:
    """What :func:`gated_rms_norm_kernel` is compiled for, and its warps."""
    heads = {"N_KEY": n_key, "N_VALUE": n_value, "DIM": dim, "BLOCK": triton.next_power_of_2(dim)}
    return heads | {"ROWS": NORM_ROWS, "num_warps": 4}


def gated_rms_norm(y: Tensor, qkv: Tensor, params: GatedDeltaNetParams) -> Tensor:
    """The outputs that are in ``qkv`` in place of v, normed and gated by the columns z of ``y``."""
    m, rows = params, y.shape[0]
    out = torch.empty(rows, m.n_value * m.dim, dtype=y.dtype, device=y.device)
    gated_rms_norm_kernel[(m.n_value, triton.cdiv(rows, NORM_ROWS))](
        *(y, qkv, out, m.norm.weight, m.norm.epsilon, rows, y.stride(0)),
        **gated_norm_options(m.n_key, m.n_value, m.dim),
        **dependent_launch(y.device),
    )
    return out


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
    sizes = (m.n_key, m.n_value, m.dim, conv_width)
    causal_conv1d_kernel[(2 * m.n_key + m.n_value, rows)](
        *(y, qkv, gates, conv_states, ids, kept, m.conv_weight, m.decay_rates, m.dt_bias, n, y.stride(0)),
        **conv1d_options(*sizes, keep=True),
        **dependent_launch(y.device),
    )
    options = recurrent_options(*sizes, max_tokens)
    delta_rule_recurrent_kernel[(options["BLOCK"] // options["COLUMNS"], m.n_value, n_slices)](
        *(y, qkv, gates, *pools, ids, kept, n, y.stride(0)), **options, **dependent_launch(y.device)
    )
    return gated_rms_norm(y, qkv, m)
