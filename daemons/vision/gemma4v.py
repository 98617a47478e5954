"""Projector ``gemma4v``: the encoder of Gemma 4.  Maths: docs/families.md."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.vision.blocks import Weight, attend, axial_angles, patches, rotate_halves
from lucevisor.model.vision import VisionSpec

_THETA = 100.0


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """RMS norm in float32; the result has the dtype of its input."""
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


@dataclass(frozen=True)
class Clamped:
    """``x W^T`` of clamped numbers, clamped; bounds that the file lacks are infinite."""

    weight: Tensor
    ends: tuple[float, float, float, float]

    @classmethod
    def of(cls, spec: VisionSpec, weight: Weight, name: str) -> Clamped:
        def bound(key: str, absent: float) -> float:
            return float(weight(f"{name}.{key}")) if f"{name}.{key}" in spec.tensors else absent

        takes = bound("input_min", -math.inf), bound("input_max", math.inf)
        gives = bound("output_min", -math.inf), bound("output_max", math.inf)
        return cls(weight(f"{name}.weight"), (*takes, *gives))

    def __call__(self, x: Tensor) -> Tensor:
        low, high, least, most = self.ends
        if math.isinf(low) and math.isinf(high) and math.isinf(least) and math.isinf(most):
            return F.linear(x, self.weight)
        return F.linear(x.clamp(low, high), self.weight).clamp(least, most)


class _Block:
    """``h += norm(attention(norm(h))); h += norm(mlp(norm(h)))``"""

    def __init__(self, spec: VisionSpec, weight: Weight, b: str) -> None:
        self.n_heads, self.eps = spec.n_heads, spec.eps
        self.q, self.k, self.v, self.out = (Clamped.of(spec, weight, f"{b}attn_{n}") for n in ("q", "k", "v", "out"))
        self.gate, self.up, self.down = (Clamped.of(spec, weight, f"{b}ffn_{n}") for n in ("gate", "up", "down"))
        self.q_norm, self.k_norm = weight(b + "attn_q_norm.weight"), weight(b + "attn_k_norm.weight")
        names = ("ln1", "attn_post_norm", "ln2", "ffn_post_norm")
        self.norms = [weight(f"{b}{name}.weight") for name in names]

    def __call__(self, h: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        before, behind, before_mlp, behind_mlp = self.norms
        x = rms(h, self.eps, before)
        q, k, v = (product(x).view(len(h), self.n_heads, -1) for product in (self.q, self.k, self.v))
        q, k = self._turned(rms(q, self.eps, self.q_norm), angles), self._turned(rms(k, self.eps, self.k_norm), angles)
        h = h + rms(self.out(attend(q, k, rms(v, self.eps), 1.0)), self.eps, behind)
        x = rms(h, self.eps, before_mlp)
        return h + rms(self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x)), self.eps, behind_mlp)

    @staticmethod
    def _turned(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Turn the first half of each head by the column, the second by the row."""
        halves = zip(x.chunk(2, dim=-1), angles, strict=True)
        return torch.cat([rotate_halves(half, by) for half, by in halves], dim=-1)


class Gemma4Encoder:
    """Pixels [H, W, 3] uint8 on the device to rows [tokens, output_size]."""

    def __init__(self, spec: VisionSpec, weight: Weight) -> None:
        self.spec = spec
        self.patch = weight("v.patch_embd.weight").flatten(1)
        self.positions = weight("v.position_embd.weight")
        self.blocks = [_Block(spec, weight, f"v.blk.{i}.") for i in range(spec.n_layers)]
        self.standard = None
        if "v.std_bias" in spec.tensors and "v.std_scale" in spec.tensors:
            self.standard = weight("v.std_bias"), weight("v.std_scale")
        self.projection = Clamped.of(spec, weight, "mm.input_projection")
        head = self.blocks[0].q_norm.shape[0] if self.blocks else 4
        self.n_pairs = head // 4

    def __call__(self, pixels: Tensor) -> Tensor:
        spec = self.spec
        x = patches(2.0 * (pixels.float() / 255.0 - 0.5), spec.patch)
        h, w, device = x.shape[0], x.shape[1], x.device
        rows = F.linear(x.flatten(0, 1).to(self.patch.dtype), self.patch)
        column, row = (at.flatten() for at in torch.meshgrid(*map(torch.arange, (w, h)), indexing="xy"))
        column, row = column.to(device), row.to(device)
        rows = rows + (self.positions[0, column] + self.positions[1, row]).to(rows.dtype)
        angles = axial_angles(column, self.n_pairs, _THETA), axial_angles(row, self.n_pairs, _THETA)
        for block in self.blocks:
            rows = block(rows, angles)
        m = spec.merge
        pooled = rows.float().view(h // m, m, w // m, m, -1).mean((1, 3)).flatten(0, 1) * math.sqrt(spec.hidden_size)
        if self.standard is not None:
            pooled = (pooled - self.standard[0]) * self.standard[1]
        return self.projection(rms(pooled.to(rows.dtype), spec.eps))
