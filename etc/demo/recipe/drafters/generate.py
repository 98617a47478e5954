"""The target's own continuations of the prompts: mostly greedy, some with a sampled beginning, for other states to start from."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data import FLAG, Sequences
from target import State, Target

TEMPERATURE = 0.7


class Generator:
    """Batched continuation by at most ``new`` tokens; on a GPU each step is a replayed CUDA graph.

    A batch ends when all but a share ``left`` of its sequences have ended: few never do.
    """

    def __init__(self, target: Target, batch: int, new: int, left: float) -> None:
        self.target, self.batch, self.new, self.left = target, batch, new, left
        device = target.device
        self.end = torch.tensor([target.eos, target.meta["tokenizer.ggml.padding_token_id"]], device=device)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        self.positions, self.warm = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)
        self.step = torch.zeros(1, dtype=torch.long, device=device)
        self.out = torch.zeros(batch, new, dtype=torch.long, device=device)
        self.states: dict[int, State] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def select(self, logits: Tensor) -> None:
        """Take the next tokens: sampled during a sequence's first ``warm`` steps, then greedy."""
        noise = -torch.rand_like(logits, dtype=torch.float32).clamp_(1e-9, 1 - 1e-6).log().neg().log()
        heat = TEMPERATURE * (self.step < self.warm).float()[:, None]
        token = (logits.float() + heat * noise).argmax(-1)
        token = torch.where(self.done, self.end[0], token)
        self.out.index_copy_(1, self.step, token[:, None])
        self.done |= (token[:, None] == self.end).any(-1)
        self.tokens.copy_(token)
        self.step += 1

    def advance(self, state: State) -> None:
        logits = self.target.decode(self.tokens, self.positions, state)
        self.positions += 1
        self.select(logits)

    def graph(self, length: int) -> torch.cuda.CUDAGraph:
        if length not in self.graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.positions.zero_()
                self.step.zero_()
                for _ in range(2):
                    self.advance(self.states[length])
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.advance(self.states[length])
            self.graphs[length] = graph
        return self.graphs[length]

    def prefill(self, prompts: list[np.ndarray], state: State) -> Tensor:
        """Fill ``state``; the logits [B, V] after each prompt."""
        lengths = torch.tensor([len(p) for p in prompts])
        width = -(-int(lengths.max()) // 64) * 64
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        ids, lengths = ids.to(self.target.device), lengths.to(self.target.device)
        rows, found = max(1, 131_072 // width), []
        for a in range(0, len(prompts), rows):
            cut = slice(a, a + rows)
            hidden, _ = self.target.prefill(ids[cut], lengths[cut], state=state.part(cut))
            found.append(hidden[torch.arange(len(hidden), device=ids.device), lengths[cut] - 1])
        self.positions.copy_(lengths)
        return self.target.head(torch.cat(found))

    def run(self, prompts: list[np.ndarray], warm: np.ndarray) -> list[np.ndarray]:
        """Continuations, each with its end token when it has one.  Exactly ``batch`` prompts."""
        longest = max(map(len, prompts)) + self.new
        length = next(n for n in (192, 320, 512, 768, 1024) if n >= longest)
        if length not in self.states:
            self.states[length] = self.target.new_state(self.batch, length)
        state = self.states[length]
        graph = self.graph(length) if self.target.device == "cuda" else None
        logits = self.prefill(prompts, state)
        self.warm.copy_(torch.from_numpy(warm))
        self.done.zero_()
        self.step.zero_()
        self.select(logits)
        for n in range(1, self.new):
            if n % 16 == 0 and int((~self.done).sum()) <= self.left * self.batch:
                break
            if graph is None:
                self.advance(state)
            else:
                graph.replay()
        made, steps = self.out.cpu().numpy().astype(np.uint16), int(self.step)
        ends = self.end.cpu().numpy()
        out = []
        for row in made[:, :steps]:
            stop = np.flatnonzero(np.isin(row, ends))
            out.append(row[: stop[0] + 1] if len(stop) else row)
        return out


def load_prompts(path: Path, split: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Prompts of a split, the lengths expected of their answers, and their kinds."""
    data = np.load(path)
    tokens, starts = data["tokens"], data["starts"]
    chosen = np.flatnonzero(data["split"] == split)
    return [tokens[starts[i] : starts[i + 1]] for i in chosen], data["expected"][chosen], data["kinds"][chosen]


def pack(prompts: list[np.ndarray], made: list[np.ndarray], kinds: np.ndarray) -> Sequences:
    rows = [np.concatenate((p, m | FLAG)) for p, m in zip(prompts, made, strict=True)]
    return Sequences.join(rows, np.array([len(p) for p in prompts]), kinds)


def unlooped(row: np.ndarray, longest: int = 40, kept: int = 8) -> np.ndarray:
    """An answer cut where it only repeats itself, ``kept`` tokens after: such text is drafted well and teaches nothing."""
    for period in range(1, min(longest, len(row) // 3) + 1):
        differs = np.flatnonzero(row[period:] != row[:-period])
        first = int(differs[-1]) + 1 if len(differs) else 0  # from here each token is that of a period before
        if len(row) - period - first >= max(2 * period, 24):
            return row[: first + period + kept]
    return row


def continue_prompts(
    target: Target, path: Path, split: int, batch: int, new: int, seconds: float, seed: int, sampled: float, left: float
) -> Sequences:
    """Batches of prompts with answers of like length, in random order, until all are done or the time is over.

    ``sampled`` is the share that begins at TEMPERATURE; a quarter of those never turns greedy.
    """
    prompts, expected, kinds = load_prompts(path, split)
    rng, start = np.random.default_rng(seed), time.monotonic()
    lengths = np.array([len(p) for p in prompts])
    order = rng.permutation(len(prompts))
    order = order[np.lexsort((lengths[order] // 64, np.minimum(expected[order], new) // 16))]
    groups = [order[a : a + batch] for a in range(0, len(order), batch)]
    generator = Generator(target, batch, new, left)
    taken: list[np.ndarray] = []
    made: list[np.ndarray] = []
    for at in rng.permutation(len(groups)):
        group = groups[at]
        warm = np.where(rng.random(batch) < sampled, rng.integers(1, 54, batch), 0)
        warm = np.where(warm > 40, new, warm)
        padded = np.concatenate([group, rng.choice(order, batch - len(group))]) if len(group) < batch else group
        made += generator.run([prompts[i] for i in padded], warm)[: len(group)]
        taken.append(group)
        if time.monotonic() - start > seconds:
            break
    chosen = np.concatenate(taken)
    if split == 0:
        made = [unlooped(row) for row in made]
    return pack([prompts[i] for i in chosen], made, kinds[chosen])
