"""Log-probabilities on the output stage: of tokens that were drawn, and of given ones, those of prompts.

Knows rows and ids only.  Of a prompt a few rows are turned into logits at a time, so that it takes no more memory than
a decode of as many sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lucevisor.protocol.steps import PromptLogprobs, SamplingParams, Slice

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


Top = list[tuple[int, float]]
"""Tokens and their log-probabilities."""


class TokenReport:
    """Log-probabilities of the model itself, before penalties, masks and temperature, of the rows [n, V] of a step that
    want them: all in a few operations, as each costs a GPU's host as much as a decode's."""

    def __init__(self, logits: Tensor, rows: Sequence[SamplingParams], *, by_row: bool = False) -> None:
        """``rows``: what each row wants.  ``logits`` may then be changed."""
        self._at = {row: at for at, row in enumerate(i for i, s in enumerate(rows) if s.n_top_logprobs >= 0)}
        self._wanted = [rows[row] for row in self._at]
        self._logprobs = logits[:0]
        if self._at:
            wanted = logits if len(self._at) == len(rows) else logits[torch.tensor([*self._at], device=logits.device)]
            self._logprobs = log_probabilities(wanted, by_row=by_row)

    def of(self, tokens: Sequence[int]) -> list[tuple[float | None, Top]]:
        """Return of each row the log-probability of the token that was drawn from it, then the best tokens, which the
        named ones follow."""
        found: list[tuple[float | None, Top]] = [(None, []) for _ in tokens]
        if not self._at:
            return found
        n_most = min(max(s.n_top_logprobs for s in self._wanted), self._logprobs.shape[-1])
        best = self._logprobs.topk(n_most)
        named = [(tokens[row], *s.logprob_token_ids) for row, s in zip(self._at, self._wanted, strict=True)]
        width = max(map(len, named))
        index = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in named], device=self._logprobs.device)
        values = self._logprobs.gather(1, index).tolist()
        tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        for row, s, ids, of_named, (top_ids, top) in zip(self._at, self._wanted, named, values, tops, strict=True):
            n = s.n_top_logprobs
            pairs = [*zip(top_ids[:n], top, strict=False), *zip(ids[1:], of_named[1:], strict=False)]
            found[row] = of_named[0], pairs
        return found
