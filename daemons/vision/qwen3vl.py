"""Projector ``qwen3vl_merger``: the encoder of Qwen3.5 and Qwen3.6.  Maths: docs/families.md."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from daemons.vision.blocks import Affine, LayerNorm, Weight, attend, axial_angles, by_squares, patches, rotate_halves
from lucevisor.model.vision import VisionSpec

_THETA = 10000.0


class _Block:
    """``h += attention(norm(h)); h += mlp(norm(h))``"""

    def __init__(self, spec: VisionSpec, weight: Weight, b: str) -> None:
        self.n_heads, self.scale = spec.n_heads, (spec.hidden_size // spec.n_heads) ** -0.5
        self.norms = LayerNorm.of(weight, b + "ln1", spec.eps), LayerNorm.of(weight, b + "ln2", spec.eps)
        self.qkv, self.out = Affine.of(weight, b + "attn_qkv"), Affine.of(weight, b + "attn_out")
        self.up, self.down = Affine.of(weight, b + "ffn_up"), Affine.of(weight, b + "ffn_down")

    def __call__(self, h: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](h)).view(len(h), 3, self.n_heads, -1).unbind(1)
        h = h + self.out(attend(rotate_halves(q, angles), rotate_halves(k, angles), v, self.scale))
        return h + self.down(F.gelu(self.up(self.norms[1](h)), approximate="tanh"))


class Qwen3VlEncoder:
    """Pixels [H, W, 3] uint8 on the device to rows [tokens, output_size]."""

    def __init__(self, spec: VisionSpec, weight: Weight) -> None:
        self.spec = spec
        # Both of the frames that the projection takes are the image.
        first, second = weight("v.patch_embd.weight"), weight("v.patch_embd.weight.1")
        frames = (first.float() + second.float()).flatten(1).to(first.dtype)
        self.patch = Affine(frames, weight("v.patch_embd.bias").to(first.dtype))
        self.positions = weight("v.position_embd.weight").t().view(1, spec.hidden_size, spec.side, spec.side)
        self.mean, self.std = (torch.tensor(x, device=frames.device) for x in (spec.mean, spec.std))
        self.blocks = [_Block(spec, weight, f"v.blk.{i}.") for i in range(spec.n_layers)]
        self.norm = LayerNorm.of(weight, "v.post_ln", spec.eps)
        self.merger = Affine.of(weight, "mm.0"), Affine.of(weight, "mm.2")

    def __call__(self, pixels: Tensor) -> Tensor:
        spec = self.spec
        x = patches((pixels.float() / 255.0 - self.mean) / self.std, spec.patch)
        h, w = x.shape[:2]
        rows = self.patch(by_squares(x, spec.merge))
        learned = F.interpolate(self.positions, (h, w), mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
        rows = rows + by_squares(learned.contiguous(), spec.merge).to(rows.dtype)
        angles = self._angles(h, w)
        for block in self.blocks:
            rows = block(rows, angles)
        merged = self.norm(rows).view(-1, spec.merge * spec.merge * spec.hidden_size)
        return self.merger[1](F.gelu(self.merger[0](merged)))

    def _angles(self, h: int, w: int) -> Tensor:
        """Angles [N, D / 2] of the patches: half of the pairs turn by the row, half by the column."""
        device, n = self.mean.device, self.spec.hidden_size // self.spec.n_heads // 4
        grid = torch.meshgrid(torch.arange(h, device=device), torch.arange(w, device=device), indexing="ij")
        return torch.cat([axial_angles(by_squares(axis, self.spec.merge), n, _THETA) for axis in grid], dim=-1)
