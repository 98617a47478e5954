"""The gated delta rule and the short convolution in front of it, float32.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (2024), sections 2-3, with the conventions of docs/families.md.
Forms: ``step`` for one token per sequence, ``chunked`` for longer slices, and ``by_token``, which keeps the state after
each token: for up to 16 tokens that is faster than to compute them from a chunk.  All take and return the state
``S`` [B, N, Dk, Dv] (N value heads); neither depends on where it is stored.  Of verified tokens only what each does to
S is kept, its update (k, e, exp(g)), of which ``apply_updates`` makes the state that is used.

    S <- exp(g) S;  e = beta (v - k' S);  S <- S + k e';  o = q' S        (q is already scaled by 1/sqrt(Dk))
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from lucevisor.model.spec import update_width

CHUNK = 64
"""Tokens per chunk.  Chunks start at positions that are multiples of it, wherever a step begins."""


def convolve(inputs: Tensor, left: Tensor, conv_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Depth-wise causal convolution without activation.

    ``inputs`` [B, n, C], ``left`` [B, W - 1, C] the inputs before them, ``conv_weight`` [W, C], last row for
    the current token.  Returns [B, n, C] and the window [B, W - 1 + n, C]; its rows from n on are the next ``left``.
    """
    n, conv_width = inputs.shape[1], conv_weight.shape[0]
    window = torch.cat((left, inputs), dim=1)
    if n == 1:
        return (window * conv_weight).sum(dim=1, keepdim=True), window
    out = window[:, :n] * conv_weight[0]
    for j in range(1, conv_width):
        out.addcmul_(window[:, j : j + n], conv_weight[j])
    return out, window


def step(state: Tensor, qk: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One token per sequence: update ``state`` [B, N, Dk, Dv] in place, return o [B, 1, N, Dv].

    ``qk`` [B, 1, 2, N, Dk] queries and keys; v [B, 1, N, Dv]; ``decay`` = exp(g) and beta [B, 1, N].
    """
    b, n, dk, dv = state.shape
    q, k = qk.transpose(0, 2).reshape(2, b * n, 1, dk).unbind(0)
    s = state.view(b * n, dk, dv)
    s.mul_(decay.reshape(-1, 1, 1))
    error = torch.baddbmm(v.reshape(b * n, 1, dv), k, s, alpha=-1.0).mul_(beta.reshape(-1, 1, 1))
    s.addcmul_(k.transpose(1, 2), error)
    return torch.bmm(q, s).view(b, 1, n, dv)


def by_token(
    state: Tensor, qk: Tensor, v: Tensor, gates: tuple[Tensor, Tensor], after: Iterable[Tensor]
) -> tuple[Tensor, Tensor]:
    """:func:`step` for each of n tokens, with the same numbers; ``after``: memory for the state after each token.

    ``gates`` = (exp(g), beta).  An element of ``after`` may be the memory of ``state``, or of the element before, and
    is filled when the next is taken.  Returns o and e, [B, n, N, Dv].
    """
    b, n, heads, dv = v.shape
    rows = b * heads
    q, k = qk.permute(2, 1, 0, 3, 4).reshape(2, n, rows, 1, -1).unbind(0)
    decay, beta = (x.transpose(0, 1).reshape(n, rows, 1, 1) for x in gates)
    v, out, errors = v.transpose(0, 1).reshape(n, rows, 1, dv), *v.new_empty(2, n, rows, 1, dv).unbind(0)
    s = state.view(rows, -1, dv)
    tokens = zip(*(x.unbind(0) for x in (q, k, k.transpose(2, 3), v, decay, beta, out, errors)), strict=True)
    for (q_i, k_i, k_column, v_i, decay_i, beta_i, out_i, e_i), target in zip(tokens, after, strict=True):
        s = torch.mul(s, decay_i, out=target.view(s.shape))
        s.addcmul_(k_column, torch.baddbmm(v_i, k_i, s, alpha=-1.0, out=e_i).mul_(beta_i))
        torch.bmm(q_i, s, out=out_i)
    return out.view(n, b, heads, dv).transpose(0, 1), errors.view(n, b, heads, dv).transpose(0, 1)


def joined_updates(k: Tensor, errors: Tensor, decay: Tensor) -> Tensor:
    """The updates of tokens [B, n, ``update_width``], from k [B, n, N_key, Dk], e [B, n, N, Dv], exp(g) [B, n, N]."""
    n_value, dim = errors.shape[2:]
    n_pads = update_width(0, n_value, dim) - n_value * (dim + 1)
    return F.pad(torch.cat((k.flatten(2), errors.flatten(2), decay), dim=2), (0, n_pads))


def key_heads(width: int, n_value: int, dim: int) -> int:
    """Key heads of a layer whose updates take ``width`` numbers."""
    return (width - update_width(0, n_value, dim)) // dim


def apply_updates(states: Tensor, updates: Tensor, source: int, rows: Tensor, target: int) -> None:
    """Row ``target`` of ``states``, which may be ``source``, becomes row ``source`` with the updates of some tokens, in
    order.

    For all layers at once: states [layers, rows, N, Dk, Dv]; updates [layers, rows, ``update_width``]: of a token its
    keys, errors and decays, by heads.  ``rows`` int64 [n] lie on the same device.  Value head j reads key head j mod
    N_key.
    """
    layers, _, n, dk, dv = states.shape
    n_key = key_heads(updates.shape[2], n, dk)
    s = states[:, source].clone()
    for row in rows.unbind(0):  # none of these numbers is read: that would wait for a device
        k, error, decay, _ = (
            updates.index_select(1, row.view(1))
            .squeeze(1)
            .tensor_split([n_key * dk, n_key * dk + n * dv, n_key * dk + n * (dv + 1)], 1)
        )
        k = k.view(layers, n_key, dk, 1).repeat(1, n // n_key, 1, 1)
        s = torch.addcmul(s * decay.view(layers, n, 1, 1), k, error.view(layers, n, 1, dv))
    states[:, target] = s


def chunked(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, gates: tuple[Tensor, Tensor], offset: int
) -> tuple[Tensor, Tensor]:
    """A slice of tokens; returns o [B, n, N, Dv] and S.

    q, k [B, n, N, Dk]; v [B, n, N, Dv]; ``gates`` = (g, beta), each [B, n, N].
    ``offset``: position of the first token modulo CHUNK.  The outer chunks are zero-padded; a zero row
    (k = v = g = beta = 0) does not change S.
    """
    b, n, heads, dk = q.shape
    dv = v.shape[-1]
    fits = offset + n <= CHUNK
    front, size = (0, n) if fits else (offset, CHUNK)
    back = -(front + n) % size
    q, k, v = (_frames(x, front, back, size) for x in (q, k, v))  # [B N, chunks, size, D]
    g, beta = (_frames(x.unsqueeze(-1), front, back, size).squeeze(-1) for x in gates)
    total = g.cumsum(dim=-1)
    ratio = total.unsqueeze(-1) - total.unsqueeze(-2)
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    ratio = ratio.masked_fill_(above, float("-inf")).exp_()  # masked first: above the diagonal exp would overflow
    kt, beta, grown = k.transpose(-1, -2), beta.unsqueeze(-1), total.exp().unsqueeze(-1)
    mixing = (k @ kt).mul_(ratio).mul_(beta)
    unit = torch.eye(size, device=q.device).expand_as(mixing)
    solve = torch.linalg.solve_triangular(mixing, unit, upper=False, unitriangular=True)
    solve = solve * beta.transpose(-1, -2)
    within = (q @ kt).mul_(ratio)
    last = total[..., -1:]
    k_left = k.mul((last - total).exp().unsqueeze(-1)).transpose(-1, -2)
    q_grown, k_grown, shrink = q * grown, k * grown, last.exp().unsqueeze(-1)
    s = state.reshape(b * heads, dk, dv)
    parts = []
    for i in range(q.shape[1]):
        u = solve[:, i] @ torch.baddbmm(v[:, i], k_grown[:, i], s, alpha=-1.0)  # what S does not predict yet
        parts.append(torch.baddbmm(q_grown[:, i] @ s, within[:, i], u))
        s = torch.baddbmm(s * shrink[:, i], k_left[:, i], u)
    out = torch.cat(parts, dim=1)[:, front : front + n]
    return out.view(b, heads, n, dv).transpose(1, 2), s.view(b, heads, dk, dv)


def _frames(x: Tensor, front: int, back: int, size: int) -> Tensor:
    """[B, n, N, D] -> [B N, chunks, size, D], zero-padded at both ends."""
    b, n, heads, d = x.shape
    x = x.transpose(1, 2).reshape(b * heads, n, d)
    if front or back:
        x = F.pad(x, (0, 0, front, back))
    return x.view(b * heads, -1, size, d)
