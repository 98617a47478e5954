"""Building blocks of vision encoders: plain torch, as an image is one batch of thousands of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Weight = Callable[[str], Tensor]
"""A tensor of the file on the device: matrices in the compute dtype, the rest in float32."""


@dataclass(frozen=True)
class Affine:
    """``x W^T + b``, in the dtype of the matrix."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, weight: Weight, name: str) -> Affine:
        matrix = weight(f"{name}.weight")
        return cls(matrix, weight(f"{name}.bias").to(matrix.dtype))

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


@dataclass(frozen=True)
class LayerNorm:
    """Layer norm in float32; the result has the dtype of its input."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, weight: Weight, name: str, eps: float) -> LayerNorm:
        return cls(weight(f"{name}.weight"), weight(f"{name}.bias"), eps)

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


def by_squares(x: Tensor, side: int) -> Tensor:
    """Reorder [h, w, ...], rows of a grid, to [h w, ...] such that each square of ``side`` x ``side`` is adjacent."""
    h, w, *rest = x.shape
    return x.view(h // side, side, w // side, side, *rest).transpose(1, 2).reshape(h * w, *rest)


def patches(pixels: Tensor, side: int) -> Tensor:
    """Cut [H, W, 3] into [H / side, W / side, 3 side side]: the numbers of each patch by colour, row and column."""
    h, w = pixels.shape[0] // side, pixels.shape[1] // side
    return pixels.view(h, side, w, side, 3).permute(0, 2, 4, 1, 3).reshape(h, w, -1)


def axial_angles(positions: Tensor, n: int, theta: float) -> Tensor:
    """Angles [N, n] of positions [N] for ``n`` pairs of an axis: position times ``theta^(-j / n)``."""
    exponents = torch.arange(n, dtype=torch.float32, device=positions.device) / n
    return positions.float()[:, None] * torch.pow(torch.tensor(theta, device=positions.device), -exponents)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate [N, H, D] in float32, dim j with dim j + D / 2, by angles [N, D / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention [N, H, D] of all rows to all rows."""
    q, k, v = (x.to(v.dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=scale).squeeze(0).transpose(0, 1).flatten(1)
