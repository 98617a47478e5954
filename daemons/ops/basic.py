"""RMSNorm, rotary position embedding (RoPE), activations: the small operations every family uses.

Invariant: statistics are float32 whatever the activations are; unless said otherwise a result has its input's dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lucevisor.model.rope import Rotary, Yarn

ACTIVATIONS = ("silu", "gelu_tanh", "swiglu_oai")
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class RmsNorm:
    """``x rsqrt(mean(x²) + eps) weight`` over the last dimension, weight as stored.

    ``weight`` float32, broadcast against the last dimensions of x: ``[D]``, or ``[H, D]`` for a weight per head; None
    is 1.  The product with the weight is float32, then cast (Qwen3.5, Gemma 4, llama.cpp).
    """

    __slots__ = ("eps", "epsilon", "weight", "width")

    def __init__(self, weight: Tensor | None, width: int, eps: float, device: torch.device | None = None) -> None:
        self.weight, self.width, self.epsilon = weight, width, eps
        where = device if weight is None else weight.device
        self.eps = torch.tensor(eps, dtype=torch.float32, device=where)

    def float32(self, x: Tensor) -> Tensor:
        """The norm of x, float32."""
        if x.dtype != torch.float32:
            x = x.float()
        # few calls: they are the cost of a decode row
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        out = x * torch.addcmul(self.eps, length, length, value=1.0 / self.width).rsqrt_()
        return out if self.weight is None else out.mul_(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        out = self.float32(x)
        return out if out.dtype == x.dtype else out.to(x.dtype)

    def rounded(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The norm of x in another dtype."""
        return self.float32(x).to(dtype)

    def fused_add(self, h: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """``h + delta`` and its norm."""
        h = h + delta
        return h, self(h)


@dataclass(frozen=True)
class Rope:
    """Rotary positions over the first ``n_rotary`` dims of a head, NEOX: dims j and j + n_rotary / 2 are paired.

    ``inverse_frequencies`` float32 [n_rotary / 2]; ``magnitude`` multiplies cos and sin (YaRN).  ``axes`` int64
    [n_rotary / 2]: which of a token's three positions a pair turns by (M-RoPE); None: they have one.
    Layers with equal parameters share one object, so that cos and sin are computed once per step.
    """

    n_rotary: int
    inverse_frequencies: Tensor
    magnitude: float = 1.0
    axes: Tensor | None = None

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin ``[T, 1, n_rotary / 2]`` float32 of positions ``[T]``, or ``[T, 3]``: those of all axes."""
        if positions.dim() == 1:
            positions = positions[:, None, None]
        else:
            positions = (positions[:, :1] if self.axes is None else positions.index_select(1, self.axes))[:, None]
        angle = positions.to(torch.float32) * self.inverse_frequencies
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.magnitude == 1.0 else (cos * self.magnitude, sin * self.magnitude)


def plain_rope(n_rotary: int, theta: float, device: torch.device) -> Rope:
    """Frequencies ``theta^(-2j / n_rotary)``."""
    exponent = torch.arange(0, n_rotary, 2, dtype=torch.float32) / n_rotary
    return Rope(n_rotary, (1.0 / torch.pow(torch.tensor(theta, dtype=torch.float32), exponent)).to(device))


def rope(rotary: Rotary, device: torch.device, factors: Tensor | None = None) -> Rope:
    """Frequencies ``theta^(-2j / n)``, stretched by YaRN where the file says so, divided by ``factors`` [n / 2] when
    given.

    YaRN: arXiv 2309.00071, section 3.2 and 3.4.  Pairs between the two rotation counts are interpolated
    linearly by index.
    """
    plain = plain_rope(rotary.n, rotary.theta, device)
    inverse, yarn = plain.inverse_frequencies, rotary.yarn
    if factors is not None:
        inverse = inverse / factors
    axes = None
    if rotary.sections:
        axes = torch.tensor([rotary.axis(pair) for pair in range(rotary.n // 2)], device=device)
    if yarn is None:
        return Rope(rotary.n, inverse, axes=axes)
    low, high = _pair_of(yarn.beta_fast, rotary, yarn), _pair_of(yarn.beta_slow, rotary, yarn)
    if yarn.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.n - 1)
    pair = torch.arange(rotary.n // 2, dtype=torch.float32, device=device)
    slowed = ((pair - low) / max(high - low, 0.001)).clamp_(0.0, 1.0)
    inverse = inverse * (1.0 - slowed) + inverse / yarn.factor * slowed
    formula = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1.0 else 1.0
    magnitude = yarn.extra * (formula if yarn.attention_factor is None else yarn.attention_factor)
    return Rope(rotary.n, inverse, magnitude, axes)


def _pair_of(turns: float, rotary: Rotary, yarn: Yarn) -> float:
    """The fractional index of the pair that rotates ``turns`` times within the original context."""
    wave = yarn.original_context / (2.0 * math.pi * turns)
    return rotary.n * math.log(wave) / (2.0 * math.log(rotary.theta))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dims of ``x`` ``[T, H, D]`` float32 in place by tables ``[T, 1, n / 2]``, and return it."""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    rotated = a * sin
    a.mul_(cos).addcmul_(b, sin, value=-1.0)
    b.mul_(cos).add_(rotated)
    return x


def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``act(gate) * up`` of ``x`` ``[T, 2F]``, gate columns first.  ``activation``: silu, gelu in its tanh form, or
    swiglu_oai: both sides clamped, 1 added to ``up``, the gate times sigmoid(SWIGLU_ALPHA gate).
    """
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return F.gelu(gate, approximate="tanh").mul_(up)
    if activation == "swiglu_oai":
        gate, up = gate.float().clamp(max=SWIGLU_LIMIT), up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return ((up + 1.0) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))).to(x.dtype)  # rounded once, as silu is
    raise ValueError(f"activation {activation!r} is neither of {', '.join(ACTIVATIONS)}")


def block_convolution(x: Tensor, delta: Tensor, base: Tensor, side: int, n: int) -> Tensor:
    """See :meth:`daemons.ops.operations.Operations.block_convolution`.  Tap o is the row o before; before the first row
    of a slice there are zeros.
    """
    width, taps = x.shape[1], base.shape[1]
    delta = delta.view(len(x), 2, taps, -1, 1)[:, side].float()
    kernels = (base[side].view(taps, delta.shape[2], -1) + delta).view(-1, n, taps, width)
    rows = x.float().view(-1, n, width)
    out = kernels[:, :, 0] * rows
    for tap in range(1, min(taps, n)):
        out[:, tap:].addcmul_(kernels[:, tap:, tap], rows[:, :-tap])
    return out.view(x.shape).to(x.dtype)


def shift_rows(x: Tensor, pool: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    """See :meth:`daemons.ops.operations.Operations.shift_rows`; the same launches for all ids."""
    shifted = torch.cat((pool.index_select(0, ids).unsqueeze(1), x[:, :-1]), dim=1)
    last, unkept = kept[:, -1:], kept < 0
    # the row after the last token is always kept: the others write the same there
    values = torch.where(unkept.unsqueeze(-1), x[:, -1:], x)
    pool.index_copy_(0, torch.where(unkept, last, kept).reshape(-1), values.flatten(0, 1))
    return shifted


def l2_scale(width: int) -> float:
    """Factor between the rms norm and the l2 norm of a vector of ``width`` numbers."""
    return 1.0 / math.sqrt(width)
