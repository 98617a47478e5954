"""Tokens per verify step of greedy speculative decoding, from sequences that the target decoded greedily.

Greedy verification is lossless, so the tokens are known beforehand: drafts of all anchors are made at once, and
the walk from anchor to anchor gives what decoding would have accepted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from data import Loader
from dflash import DFlash
from generate import Sequences
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


def _evaluate(loader: Loader, held: Sequences, rows: int, draft: Any, n: int) -> dict[str, Any]:
    accepted: dict[str, list[tuple[int, list[int]]]] = defaultdict(list)
    lengths = held.lengths()
    order = np.argsort(lengths[:rows], kind="stable")
    order = order[lengths[order] - held.prompt[order] >= 2]
    for a in range(0, len(order), 16):
        chosen = order[a : a + 16]
        batch = loader.rows(chosen, -(-int(lengths[chosen].max()) // 32) * 32)
        drafts = draft(batch).cpu().numpy()
        for row, i in enumerate(chosen):
            tokens = held.tokens[held.starts[i] : held.starts[i + 1]].astype(np.int64)
            found = walk(tokens, int(held.prompt[i]), drafts[row])
            accepted[str(held.kinds[i])].append((len(tokens) - int(held.prompt[i]) - 1, found))
    return summary(accepted, n)


def evaluate_dflash(model: DFlash, held: Sequences, rows: int) -> dict[str, Any]:
    target = model.target
    loader = Loader(target, held, 1, model.shape.capture, 0)

    def draft(batch: Any) -> torch.Tensor:
        count = int((batch.length - batch.prompt).max())
        anchors = (batch.prompt[:, None] + torch.arange(count, device=target.device)).clamp(max=batch.ids.shape[1] - 1)
        with torch.autocast("cuda", torch.bfloat16, enabled=target.device == "cuda"):
            return model.drafts(batch.features, batch.ids, anchors)

    return _evaluate(loader, held, rows, draft, model.shape.block - 1)


def evaluate_mtp(model: Mtp, held: Sequences, rows: int, count: int) -> dict[str, Any]:
    target = model.target
    loader = Loader(target, held, 1, (), 0)

    def draft(batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=target.device == "cuda"):
            drafts = model.drafts(batch.hidden, batch.ids, count)
        columns = (
            batch.prompt[:, None] - 1 + torch.arange(int((batch.length - batch.prompt).max()), device=target.device)
        )
        index = columns.clamp(max=drafts.shape[1] - 1)[..., None].expand(-1, -1, count)
        return drafts.gather(1, index)

    return _evaluate(loader, held, rows, draft, count)
