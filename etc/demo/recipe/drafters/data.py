"""Training batches of like length, with the target's hidden states computed on the fly.

Tokens are uint16 whose high bit marks those that count: what the target wrote, or should have (as encode.py marks
them).  A batch holds more blocks than a step trains on, so it stays in a pool and is drawn ``reuse`` times on average.
"""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from target import Target

WIDTHS = (64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768)  # all divide the tokens of a batch
POOL = 32
FLAG = np.uint16(0x8000)


@dataclass
class Sequences:
    """Sequence i is tokens[starts[i]:starts[i + 1]], the first prompt[i] of them its prompt."""

    tokens: np.ndarray  # uint16, high bit: counts
    starts: np.ndarray
    prompt: np.ndarray
    kinds: np.ndarray

    @staticmethod
    def join(rows: list[np.ndarray], prompt: np.ndarray, kinds: np.ndarray) -> Sequences:
        return Sequences(np.concatenate(rows), np.cumsum([0] + [len(r) for r in rows]), prompt, kinds)

    def save(self, path: Path) -> None:
        np.savez_compressed(path, tokens=self.tokens, starts=self.starts, prompt=self.prompt, kinds=self.kinds)

    @staticmethod
    def load(path: Path) -> Sequences:
        data = np.load(path)
        return Sequences(data["tokens"], data["starts"], data["prompt"], data["kinds"])

    def __len__(self) -> int:
        return len(self.prompt)

    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def made(self) -> int:
        return len(self.tokens) - int(self.prompt.sum())


def read_corpus(path: Path, end: int) -> Sequences:
    """The texts of a file written by encode.py: each ends with ``end``, some of it is filler."""
    tokens = np.frombuffer(lzma.decompress(path.read_bytes()), "<u2")
    stops = np.flatnonzero((tokens & ~FLAG) == end)
    starts = np.concatenate([[0], stops[:-1] + 1])
    kept = stops - starts > 8
    rows = [tokens[a:b] for a, b in zip(starts[kept], stops[kept], strict=True)]
    return Sequences.join(rows, np.zeros(len(rows), np.int64), np.full(len(rows), path.name.split("_")[0]))


@dataclass
class Batch:
    ids: Tensor  # [B, T], padded on the right
    counts: Tensor  # [B, T], which tokens count
    hidden: Tensor  # [B, T, E] after output_norm
    features: Tensor  # [B, T, n * E], n may be 0

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ids, self.counts, self.hidden, self.features


class Source:
    """Sequences on the device, by width class."""

    def __init__(self, data: Sequences, device: str) -> None:
        self.data = data
        self.flat = torch.from_numpy(data.tokens.view(np.int16).copy()).to(device)
        lengths = data.lengths()
        counted = np.add.reduceat((data.tokens >= FLAG).astype(np.int64), data.starts[:-1])
        limits = (0, *WIDTHS)
        self.classes = [
            np.flatnonzero((counted >= 2) & (lengths > a) & (lengths <= b))
            for a, b in zip(limits, WIDTHS, strict=False)
        ]
        mass = np.array([counted[c].sum() for c in self.classes], float)  # of long prompts little counts
        self.share = mass / mass.sum()


class Loader:
    """Batches of ``tokens`` tokens, from sources by their shares and from width classes by how many tokens count in each."""

    def __init__(  # noqa: PLR0913
        self, target: Target, sources: list[tuple[Sequences, float]], tokens: int, capture: tuple[int, ...], seed: int,
        reuse: int = 1,
    ) -> None:  # fmt: skip
        self.target, self.tokens, self.capture, self.reuse = target, tokens, capture, reuse
        self.sources = [Source(data, target.device) for data, _ in sources]
        shares = np.array([share for _, share in sources])
        self.shares = shares / shares.sum()
        self.pool: list[Batch] = []
        self.rng = np.random.default_rng(seed)

    def rows(self, source: Source, chosen: np.ndarray, width: int) -> Batch:
        starts, stops = (torch.from_numpy(source.data.starts[c]).to(self.target.device) for c in (chosen, chosen + 1))
        at = starts[:, None] + torch.arange(width, device=starts.device)
        tokens = torch.where(at < stops[:, None], source.flat[at.clamp(max=len(source.flat) - 1)], 0)
        ids = (tokens & 0x7FFF).long()
        hidden, features = self.target.prefill(ids, capture=self.capture)
        return Batch(ids, tokens < 0, hidden, hidden[..., :0] if features is None else features)

    def fresh(self) -> Batch:
        source = self.sources[self.rng.choice(len(self.sources), p=self.shares)]
        index = self.rng.choice(len(WIDTHS), p=source.share)
        chosen = self.rng.choice(source.classes[index], max(1, self.tokens // WIDTHS[index]))
        return self.rows(source, chosen, WIDTHS[index])

    def next(self) -> Batch:
        if self.reuse == 1:
            return self.fresh()
        if len(self.pool) < POOL:
            self.pool.append(self.fresh())
        elif self.rng.random() < 1 / self.reuse:
            self.pool[self.rng.integers(POOL)] = self.fresh()
        return self.pool[self.rng.integers(len(self.pool))]
