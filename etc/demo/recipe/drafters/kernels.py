"""Two Triton kernels: the gated delta net's mixer over whole sequences, and the drafters' loss with its gradient.

Both have a plain torch form, used on a CPU; ``TRITON_INTERPRET=1`` runs the kernels there for comparison.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _conv(row, before3, before2, before1, weight, channel):
    """SiLU of the convolution over this row and the three before it."""
    y = before3 * tl.load(weight + channel * 4) + before2 * tl.load(weight + channel * 4 + 1)
    y += before1 * tl.load(weight + channel * 4 + 2) + row * tl.load(weight + channel * 4 + 3)
    return y / (1 + tl.exp(-y))


@triton.jit
def _mixer(  # noqa: PLR0913
    rows, conv_state, weight, rates, bias, lengths, state, out, T, STRIDE, CHANNELS: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """One program: PART value columns of one value head of one sequence, token by token."""
    batch, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, D), part * PART + tl.arange(0, PART)
    at_q = (head % KEYS) * D + i
    at_k, at_v = KEYS * D + at_q, 2 * KEYS * D + head * D + j
    at_state = state + ((batch * VALUES + head) * D + i[:, None]) * D + j[None, :]
    s = tl.load(at_state)
    first = conv_state + batch * 3 * CHANNELS
    q3, q2, q1 = tl.load(first + at_q), tl.load(first + CHANNELS + at_q), tl.load(first + 2 * CHANNELS + at_q)
    k3, k2, k1 = tl.load(first + at_k), tl.load(first + CHANNELS + at_k), tl.load(first + 2 * CHANNELS + at_k)
    v3, v2, v1 = tl.load(first + at_v), tl.load(first + CHANNELS + at_v), tl.load(first + 2 * CHANNELS + at_v)
    rate, shift = tl.load(rates + head), tl.load(bias + head)
    row = rows + batch * T * STRIDE
    to = out + (batch * T * VALUES + head) * D + j
    alphas = CHANNELS + VALUES * D + head
    for _ in range(tl.load(lengths + batch)):
        q0, k0 = tl.load(row + at_q).to(tl.float32), tl.load(row + at_k).to(tl.float32)
        v0 = tl.load(row + at_v).to(tl.float32)
        alpha = tl.load(row + alphas).to(tl.float32) + shift
        beta = tl.load(row + alphas + VALUES).to(tl.float32)
        q, k = _conv(q0, q3, q2, q1, weight, at_q), _conv(k0, k3, k2, k1, weight, at_k)
        v = _conv(v0, v3, v2, v1, weight, at_v)
        q = q / tl.sqrt((tl.sum(q * q, 0) + 1e-6) * D)
        k = k / tl.sqrt(tl.sum(k * k, 0) + 1e-6)
        softplus = tl.where(alpha > 20, alpha, tl.log(1 + tl.exp(tl.minimum(alpha, 20.0))))
        s *= tl.exp(rate * softplus)
        update = (v - tl.sum(k[:, None] * s, 0)) / (1 + tl.exp(-beta))
        s += k[:, None] * update[None, :]
        tl.store(to, tl.sum(q[:, None] * s, 0).to(out.dtype.element_ty))
        q3, q2, q1, k3, k2, k1, v3, v2, v1 = q2, q1, q0, k2, k1, k0, v2, v1, v0
        row += STRIDE
        to += VALUES * D
    tl.store(at_state, s)


def mixer(  # noqa: PLR0913
    rows: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    rates: Tensor,
    bias: Tensor,
    lengths: Tensor,
    state: Tensor,
    keys: int,
) -> Tensor:
    """Output [B, T, H, D] of the delta rule, read with q / sqrt(D); ``state`` [B, H, D, D] moves on in place.

    rows [B, T, n]: columns q, k, v before the convolution, z (not read), decay inputs and betas before their
    activations; conv_state [B, 3, C]: the three rows before; lengths [B]: rows that count.
    """
    batch, length, _ = rows.shape
    _, heads, dim, _ = state.shape
    out = rows.new_zeros(batch, length, heads, dim)
    part = 16
    _mixer[(batch, heads, dim // part)](
        rows, conv_state, weight, rates, bias, lengths, state, out, length, rows.stride(1), conv_state.shape[2],
        keys, heads, dim, part, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _loss(  # noqa: PLR0913
    logits, pairs, teacher, labels, weights, losses, right, gradient, pair_gradient, soft,
    V: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, V)
    x, t = tl.load(logits + row * V + i).to(tl.float32), tl.load(teacher + row * V + i).to(tl.float32)
    here, weight = i == tl.load(labels + row), tl.load(weights + row)
    wanted = tl.exp(t - tl.max(t, 0))
    wanted = wanted * (soft / tl.sum(wanted, 0)) + tl.where(here, 1 - soft, 0.0)
    highest = tl.max(x, 0)
    e = tl.exp(x - highest)
    total = tl.sum(e, 0)
    loss = highest + tl.log(total) - tl.sum(wanted * x, 0)
    change = weight * (e / total - wanted)
    if PAIRED:
        x += tl.load(pairs + row * V + i).to(tl.float32)
        highest = tl.max(x, 0)
        e = tl.exp(x - highest)
        total = tl.sum(e, 0)
        loss += highest + tl.log(total) - tl.sum(wanted * x, 0)
        pair_change = weight * (e / total - wanted)
        tl.store(pair_gradient + row * V + i, pair_change.to(gradient.dtype.element_ty))
        change += pair_change
    tl.store(losses + row, weight * loss)
    tl.store(right + row, (tl.sum(tl.where(here, x, 0.0), 0) >= highest).to(tl.float32))
    tl.store(gradient + row * V + i, change.to(gradient.dtype.element_ty))


class MixedLoss(torch.autograd.Function):
    """Sum over rows of -weight * sum(wanted * log softmax(logits)), wanted = (1 - soft) onehot(label) + soft softmax(teacher).

    With ``pairs`` [R, V], what a selector adds to the logits, the same of logits + pairs is added.  Also gives which
    rows have their label as the highest of these [R].  Scale the weights, never the loss: the gradients are stored when
    the loss is computed, as those of the loss itself.
    """

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx: Any, logits: Tensor, pairs: Tensor | None, teacher: Tensor, label: Tensor, weight: Tensor, soft: float
    ) -> tuple[Tensor, Tensor]:
        if logits.is_cuda:
            gradient, losses, right = torch.empty_like(logits), torch.empty_like(weight), torch.empty_like(weight)
            pair_gradient = None if pairs is None else torch.empty_like(pairs)
            _loss[(len(logits),)](
                logits, logits if pairs is None else pairs, teacher, label, weight, losses, right, gradient,
                gradient if pairs is None else pair_gradient, soft, logits.shape[1], pairs is not None, num_warps=16,
            )  # fmt: skip
        else:
            losses, right, gradient = plain_loss(logits, teacher, label, weight, soft)
            pair_gradient = None
            if pairs is not None:
                paired, right, pair_gradient = plain_loss(logits + pairs, teacher, label, weight, soft)
                losses, gradient = losses + paired, gradient + pair_gradient
        ctx.save_for_backward(gradient, pair_gradient)
        ctx.mark_non_differentiable(right)
        return losses.sum(), right

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        return *ctx.saved_tensors, None, None, None, None


def plain_loss(
    logits: Tensor, teacher: Tensor, label: Tensor, weight: Tensor, soft: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted losses, right rows and the gradient of the losses' sum."""
    log_q = logits.float().log_softmax(-1)
    wanted = teacher.float().softmax(-1) * soft
    wanted.scatter_add_(1, label[:, None], torch.full_like(wanted[:, :1], 1 - soft))
    right = (logits.gather(1, label[:, None])[:, 0] >= logits.amax(-1)).float()
    gradient = weight[:, None] * (log_q.exp() - wanted)
    return -weight * (wanted * log_q).sum(-1), right, gradient.to(logits.dtype)
