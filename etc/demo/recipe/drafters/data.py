"""Training batches of like length from generated sequences, with the target's hidden states computed on the fly.

A batch holds more blocks than a step trains on, so it stays in a pool and is drawn ``reuse`` times on average.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from generate import Sequences
from target import Target

WIDTHS = (64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768)  # all divide the tokens of a batch

POOL = 16


@dataclass
class Batch:
    ids: Tensor  # [B, T], padded on the right
    prompt: Tensor  # [B] tokens of the prompt
    length: Tensor  # [B] tokens in all
    hidden: Tensor  # [B, T, E] after output_norm
    features: Tensor | None  # [B, T, n * E]


class Loader:
    """Batches of about ``tokens`` tokens, drawn from width classes by how many tokens each holds."""

    def __init__(
        self, target: Target, data: Sequences, tokens: int, capture: tuple[int, ...], seed: int, reuse: int = 1
    ) -> None:
        self.target, self.data, self.tokens, self.capture, self.reuse = target, data, tokens, capture, reuse
        self.pool: list[Batch] = []
        self.flat = torch.from_numpy(data.tokens.astype(np.int16)).to(target.device)
        lengths = data.lengths()
        useful = lengths - data.prompt >= 2
        limits = (0, *WIDTHS)
        self.classes = [
            np.flatnonzero(useful & (lengths > a) & (lengths <= b)) for a, b in zip(limits, WIDTHS, strict=False)
        ]
        mass = np.array([lengths[c].sum() for c in self.classes], float)
        self.share, self.rng = mass / mass.sum(), np.random.default_rng(seed)

    def rows(self, chosen: np.ndarray, width: int) -> Batch:
        device, data = self.target.device, self.data
        starts = torch.from_numpy(data.starts[chosen]).to(device)
        length = torch.from_numpy(data.starts[chosen + 1] - data.starts[chosen]).to(device)
        prompt = torch.from_numpy(data.prompt[chosen]).to(device)
        columns = torch.arange(width, device=device)
        at = (starts[:, None] + columns).clamp(max=len(self.flat) - 1)
        ids = torch.where(columns < length[:, None], self.flat[at].long(), 0)
        hidden, features = self.target.prefill(ids, capture=self.capture)
        return Batch(ids, prompt, length, hidden, features)

    def fresh(self) -> Batch:
        index = self.rng.choice(len(WIDTHS), p=self.share)
        chosen = self.rng.choice(self.classes[index], max(1, self.tokens // WIDTHS[index]))
        return self.rows(chosen, WIDTHS[index])

    def next(self) -> Batch:
        if len(self.pool) < POOL:
            self.pool.append(self.fresh())
        elif self.rng.random() < 1 / self.reuse:
            self.pool[self.rng.integers(POOL)] = self.fresh()
        return self.pool[self.rng.integers(len(self.pool))]
