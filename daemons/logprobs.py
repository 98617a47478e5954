"""Log-probabilities on the output stage: of tokens that were drawn, and of given ones, those of prompts.

Knows rows and ids only.  Of a prompt a few rows are turned into logits at a time, so that it takes no more memory than
a decode of as many sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lucevisor.protocol.steps import PromptLogprobs, Sampled, Slice

ROWS = 16
"""Rows whose logits are in memory at once, of whichever slices."""


def log_probabilities(logits: Tensor, *, by_row: bool = False) -> Tensor:
    """Logarithms of the softmax of rows [n, V].  ``by_row``: of each alone, so that its bits are always the same."""
    if not by_row:
        return torch.log_softmax(logits, dim=-1)
    # copied: a GPU's sums depend on where a row begins
    return torch.cat([torch.log_softmax(row.clone(), dim=-1) for row in logits.unsqueeze(1)])


def prompt_logprobs(
    slices: Sequence[Slice],
    logits_of: Callable[[Sequence[int]], Tensor],
    n_top: Callable[[int], int],
    *,
    by_row: bool = False,
) -> list[PromptLogprobs]:
    """Return the log-probabilities of tokens of prompts that the slices of a step ask for.

    ``logits_of``: float32 logits [n, V] of rows of the step.  ``n_top``: how many of the best a sequence wants.
    ``by_row`` as in :func:`log_probabilities`.
    """
    rows, ids, tops = list[int](), list[int](), list[int]()
    first = 0
    for slice_ in slices:
        rows += range(first, first + len(slice_.logprob_targets))
        ids += slice_.logprob_targets
        tops += [n_top(slice_.sequence)] * len(slice_.logprob_targets) if slice_.logprob_targets else []
        first += len(slice_.tokens)
    logprobs, best = list[float](), list[list[tuple[int, float]]]()
    for at in range(0, len(rows), ROWS):  # of several slices at once: the output matrix is read once for all
        report = log_probabilities(logits_of(rows[at : at + ROWS]), by_row=by_row)
        named = torch.tensor(ids[at : at + ROWS], device=report.device).unsqueeze(1)
        logprobs += report.gather(1, named).squeeze(1).tolist()
        counts = [max(0, min(n, report.shape[-1])) for n in tops[at : at + ROWS]]
        found = report.topk(max(counts))
        likeliest = zip(counts, found.indices.tolist(), found.values.tolist(), strict=True)
        best += [list(zip(i[:n], v[:n], strict=True)) for n, i, v in likeliest]
    answers, at = list[PromptLogprobs](), 0
    for slice_ in slices:
        if n := len(slice_.logprob_targets):
            answers.append(PromptLogprobs(slice_.sequence, slice_.start + 1, logprobs[at : at + n], best[at : at + n]))
            at += n
    return answers


@dataclass(slots=True)
class TokenReport:
    """Log-probabilities of the model itself, before penalties, masks and temperature: [n, V]; the best of each row."""

    logprobs: Tensor
    values: Tensor
    ids: Tensor


def report_of(logits: Tensor, n_top: int, token_ids: Sequence[int] = (), *, by_row: bool = False) -> TokenReport | None:
    """The report of rows [n, V], which may then be changed; None unless asked for.  ``token_ids`` follow the best."""
    if n_top < 0:
        return None
    logprobs = log_probabilities(logits, by_row=by_row)
    values, ids = logprobs.topk(min(n_top, logits.shape[-1]))
    if token_ids:
        named = torch.tensor(token_ids, device=logits.device).expand(len(logits), -1)
        values, ids = torch.cat((values, logprobs.gather(1, named)), dim=1), torch.cat((ids, named), dim=1)
    return TokenReport(logprobs, values, ids)


def sampled_of(sequence: int, tokens: list[int], report: TokenReport | None, mus: list[float]) -> list[Sampled]:
    """Tokens that were drawn, with what their report says of them and mirostat's ``mus``."""
    standing: Sequence[float | None] = mus or [None] * len(tokens)
    if report is None:
        return [Sampled(sequence, token, mu=mu) for token, mu in zip(tokens, standing, strict=True)]
    n = len(tokens)
    index = torch.tensor(tokens, device=report.logprobs.device).unsqueeze(1)
    own = report.logprobs[:n].gather(1, index).squeeze(1).tolist()
    top = zip(report.ids[:n].tolist(), report.values[:n].tolist(), strict=True)
    return [
        Sampled(sequence, token, logprob, list(zip(ids, values, strict=True)), mu)
        for token, logprob, (ids, values), mu in zip(tokens, own, top, standing, strict=True)
    ]
