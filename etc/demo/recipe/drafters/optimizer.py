"""Muon for matrices (momentum, orthogonalised), Adam for the rest, under one learning rate schedule.

A step reads its rate from the device and never waits for it, so that a CUDA graph can hold it.
"""

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


class Optimizer:
    """Muon and Adam; ``rate`` [] on the device scales the peak rates of both."""

    def __init__(self, model: nn.Module, lr: float, adam_lr: float, decay: float) -> None:
        self.lr, self.adam_lr, self.decay = lr, adam_lr, decay
        self.parameters = list(model.parameters())
        self.rate = torch.zeros((), device=self.parameters[0].device)
        self.count = torch.zeros_like(self.rate)
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        self.others = []
        for name, p in model.named_parameters():
            if p.ndim == 2 and not name.startswith(("selector.predecessor", "selector.successor")):
                groups[p.shape[0], p.shape[1]].append(p)
            else:
                self.others.append(p)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]

    @torch.no_grad()
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            grads = torch.stack([p.grad for p in group])
            momentum.lerp_(grads, 0.05)
            scale = self.lr * max(1.0, group[0].shape[0] / group[0].shape[1]) ** 0.5
            updates = orthogonal(grads.lerp(momentum, 0.95)) * (scale * self.rate)
            for p, update in zip(group, updates, strict=True):
                p.mul_(1 - self.lr * self.decay * self.rate).sub_(update)
        self.count += 1
        bias1, bias2 = 1 - 0.9**self.count, 1 - 0.98**self.count
        for p, first, second in zip(self.others, self.first, self.second, strict=True):
            first.lerp_(p.grad, 0.1)
            second.lerp_(p.grad.square(), 0.02)
            p.sub_(self.adam_lr * self.rate / bias1 * first / ((second / bias2).sqrt() + 1e-8))
        for p in self.parameters:
            p.grad = None
