"""Muon for matrices (momentum, orthogonalised), Adam for the rest, under one learning rate schedule.

A step reads its rate from the device and never waits for it, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn


def orthogonal(x: Tensor) -> Tensor:
    """Matrices [n, rows, columns], rows <= columns, with their singular values moved near 1 (quintic Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    y = x.bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.float()


def wide(x: Tensor) -> Tensor:
    """A matrix, transposed if it has more rows than columns: those of one size are orthogonalised together."""
    return x.mT if x.shape[0] > x.shape[1] else x


class Optimizer:
    """Muon and Adam; ``rate`` [] on the device scales the peak rates of both."""

    def __init__(self, model: nn.Module, lr: float, adam_lr: float, decay: float) -> None:
        self.lr, self.adam_lr, self.decay = lr, adam_lr, decay
        self.parameters = list(model.parameters())
        self.rate = torch.zeros((), device=self.parameters[0].device)
        self.count = torch.zeros_like(self.rate)
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        self.others: list[nn.Parameter] = []
        for name, p in model.named_parameters():
            if p.ndim == 2 and not name.startswith(("selector.predecessor", "selector.successor")):
                groups[wide(p).shape].append(p)
            else:
                self.others.append(p)
        self.groups = list(groups.values())
        self.momentum = [torch.zeros(len(g), *wide(g[0]).shape, device=g[0].device) for g in self.groups]
        self.scales = [
            torch.tensor([lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 for p in g], device=g[0].device)[:, None, None]
            for g in self.groups
        ]
        self.first = [torch.zeros_like(p) for p in self.others]
        self.second = [torch.zeros_like(p) for p in self.others]

    @torch.no_grad()
    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        kept = 1 - self.lr * self.decay * self.rate
        for group, momentum, scale in zip(self.groups, self.momentum, self.scales, strict=True):
            grads = torch.stack([wide(p.grad) for p in group])
            momentum.lerp_(grads, 0.05)
            updates = orthogonal(grads.lerp(momentum, 0.95)) * (scale * self.rate)
            torch._foreach_mul_(group, kept)
            torch._foreach_sub_(
                group, [u.mT if p.shape[0] > p.shape[1] else u for p, u in zip(group, updates, strict=True)]
            )
        self.adam()
        for p in self.parameters:
            p.grad = None

    def adam(self) -> None:
        self.count += 1
        grads = [p.grad for p in self.others]
        torch._foreach_lerp_(self.first, grads, 0.1)
        torch._foreach_lerp_(self.second, torch._foreach_mul(grads, grads), 0.02)
        roots = torch._foreach_mul(self.second, 1 / (1 - 0.98**self.count))
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, 1e-8)
        updates = torch._foreach_div(self.first, roots)
        torch._foreach_mul_(updates, self.adam_lr * self.rate / (1 - 0.9**self.count))
        torch._foreach_sub_(self.others, updates)
