"""Tokens per verify step of greedy speculative decoding, from sequences that the target decoded greedily.

Greedy verification is lossless, so the tokens are known beforehand: drafts of all anchors are made at once, and
the walk from anchor to anchor gives what decoding would have accepted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from data import FLAG, Batch, Loader, Sequences
from dflash import DFlash
from mtp import Mtp


def walk(tokens: np.ndarray, prompt: int, drafts: np.ndarray) -> list[int]:
    """Accepted drafts of each verify step.  drafts[i] follow the token at prompt + i, the first from the prefill."""
    at, found = prompt, []
    while at < len(tokens) - 1:
        rest = tokens[at + 1 :]
        guess = drafts[at - prompt][: len(rest)]
        wrong = np.flatnonzero(guess != rest[: len(guess)])
        accepted = int(wrong[0]) if len(wrong) else len(guess)
        found.append(accepted)
        at += accepted + 1
    return found


def summary(accepted: dict[str, list[tuple[int, list[int]]]], n: int) -> dict[str, Any]:
    """Figures over all sequences and per kind; accepted[kind] holds (tokens produced, accepted drafts of each step)."""
    every = [x for group in accepted.values() for x in group]
    steps = np.array([a for _, found in every for a in found])
    made = sum(m for m, _ in every)
    return {
        "tokens_per_step": round(made / len(steps), 3),
        "steps": len(steps),
        "accepted_at_least": [round(float((steps >= j).mean()), 4) for j in range(1, n + 1)],
        "by_kind": {
            k: round(sum(m for m, _ in group) / sum(len(f) for _, f in group), 2)
            for k, group in sorted(accepted.items())
        },
    }


Draft = Callable[[Batch, torch.Tensor, int], torch.Tensor]


def _evaluate(loader: Loader, rows: int, draft: Draft, n: int) -> dict[str, Any]:
    source = loader.sources[0]
    held, lengths = source.data, source.data.lengths()
    accepted: dict[str, list[tuple[int, list[int]]]] = defaultdict(list)
    order = np.argsort(lengths[:rows], kind="stable")
    order = order[lengths[order] - held.prompt[order] >= 2]
    for a in range(0, len(order), 16):
        chosen = order[a : a + 16]
        batch = loader.rows(source, chosen, -(-int(lengths[chosen].max()) // 32) * 32)
        prompt, made = held.prompt[chosen], lengths[chosen] - held.prompt[chosen]
        drafts = draft(batch, torch.from_numpy(prompt).to(batch.ids.device), int(made.max())).cpu().numpy()
        for row, i in enumerate(chosen):
            tokens = (held.tokens[held.starts[i] : held.starts[i + 1]] & ~FLAG).astype(np.int64)
            accepted[str(held.kinds[i])].append((made[row] - 1, walk(tokens, int(prompt[row]), drafts[row])))
    return summary(accepted, n)


def evaluate_dflash(model: DFlash, held: Sequences, rows: int) -> dict[str, Any]:
    target = model.target

    def draft(batch: Batch, prompt: torch.Tensor, count: int) -> torch.Tensor:
        anchors = (prompt[:, None] + torch.arange(count, device=prompt.device)).clamp(max=batch.ids.shape[1] - 1)
        with torch.autocast("cuda", torch.bfloat16, enabled=target.device == "cuda"):
            return model.drafts(batch.features, batch.ids, anchors)

    return _evaluate(Loader(target, [(held, 1.0)], 1, model.shape.capture, 0), rows, draft, model.shape.block - 1)


def evaluate_mtp(model: Mtp, held: Sequences, rows: int, n: int) -> dict[str, Any]:
    target = model.target

    def draft(batch: Batch, prompt: torch.Tensor, count: int) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=target.device == "cuda"):
            drafts = model.drafts(batch.hidden, batch.ids, n)
        columns = (prompt[:, None] - 1 + torch.arange(count, device=prompt.device)).clamp(max=drafts.shape[1] - 1)
        return drafts.gather(1, columns[..., None].expand(-1, -1, n))

    return _evaluate(Loader(target, [(held, 1.0)], 1, (), 0), rows, draft, n)
