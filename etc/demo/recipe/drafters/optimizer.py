"""Muon for matrices (momentum, orthogonalised), Adam for the rest, under one learning rate schedule."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [n, rows, columns] with their singular values moved near 1 (quintic Newton-Schulz iteration)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y.mT if tall else y).float()


class Muon:
    """Steps of all parameters; ``rate`` scales the peak rates of both parts."""

    def __init__(self, model: nn.Module, lr: float, adam_lr: float, decay: float) -> None:
        self.lr, self.adam_lr, self.decay = lr, adam_lr, decay
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        others = []
        for name, p in model.named_parameters():
            if p.ndim == 2 and not name.startswith(("selector.predecessor", "selector.successor")):
                groups[p.shape[0], p.shape[1]].append(p)
            else:
                others.append(p)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.parameters = list(model.parameters())

    @torch.no_grad()
    def step(self, rate: float) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            grads = torch.stack([p.grad for p in group])
            momentum.lerp_(grads, 0.05)
            update = orthogonal(grads.lerp(momentum, 0.95))
            scale = self.lr * rate * max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            torch._foreach_mul_(group, 1 - self.lr * rate * self.decay)
            torch._foreach_sub_(group, list(update.unbind()), alpha=scale)
        for settings in self.adam.param_groups:
            settings["lr"] = self.adam_lr * rate
        self.adam.step()
        for p in self.parameters:
            p.grad = None
