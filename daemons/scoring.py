"""Log-probabilities of tokens that are given, not drawn: those of prompts, on the output stage.

Knows rows and ids only.  A few rows are turned into logits at a time, so that a long prompt takes no more memory than
a decode of as many sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lucevisor.protocol.steps import Scored, Slice

ROWS = 16
"""Rows whose logits are in memory at once."""


def score(
    slices: Sequence[Slice], logits_of: Callable[[Sequence[int]], Tensor], n_top: Callable[[int], int]
) -> list[Scored]:
    """Score what the slices of a step ask for.

    ``logits_of``: float32 logits [n, V] of rows of the step.  ``n_top``: how many of the best a sequence wants.
    """
    found, first = list[Scored](), 0
    for slice_ in slices:
        if slice_.scored:
            found.append(_score(slice_, first, logits_of, n_top(slice_.sequence)))
        first += len(slice_.tokens)
    return found


def _score(slice_: Slice, first: int, logits_of: Callable[[Sequence[int]], Tensor], n_top: int) -> Scored:
    logprobs, tops = list[float](), list[list[tuple[int, float]]]()
    for at in range(0, len(slice_.scored), ROWS):
        ids = slice_.scored[at : at + ROWS]
        report = torch.log_softmax(logits_of(range(first + at, first + at + len(ids))), dim=-1)
        logprobs += report.gather(1, torch.tensor(ids, device=report.device).unsqueeze(1)).squeeze(1).tolist()
        best = report.topk(max(0, min(n_top, report.shape[-1])))
        tops += [list(zip(i, v, strict=True)) for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return Scored(slice_.sequence, slice_.start + 1, logprobs, tops)
