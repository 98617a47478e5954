"""One decoding step of the gated delta rule as one kernel: the state is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _kernel(q, k, v, g, beta, state, out, D: tl.constexpr):  # noqa: N803
    head = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, D)
    x_q, x_k, x_v = tl.load(q + head * D + i), tl.load(k + head * D + i), tl.load(v + head * D + i)
    kept, rate = tl.exp(tl.load(g + head)), tl.load(beta + head)
    at = state + head * D * D + i[:, None] * D + i[None, :]
    s = tl.load(at) * kept
    update = rate * (x_v - tl.sum(x_k[:, None] * s, 0))
    s += x_k[:, None] * update[None, :]
    tl.store(at, s)
    tl.store(out + head * D + i, tl.sum(x_q[:, None] * s, 0))


def delta_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """q^T S after S <- exp(g) S + k (beta (v - exp(g) S^T k))^T, in place.  q, k, v [B, H, D], g and beta [B, H]."""
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    out = torch.empty_like(v)
    _kernel[(g.numel(),)](q, k, v, g, beta, state, out, D=q.shape[-1], num_warps=4)
    return out


def plain(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The same without a kernel."""
    state.mul_(g.exp()[..., None, None])
    update = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state.addcmul_(k[..., None], update[..., None, :])
    return (q[..., None, :] @ state)[..., 0, :]
