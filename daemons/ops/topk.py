"""The best of many logits, and the path of a drafter along candidates.

Shapes: B slices, n positions, K candidates of each, R rank of a candidate's rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TOP_K_CHUNK = 128
"""Of a vocabulary, :func:`top_k` sorts the chunks of so many tokens that have the best ones."""


class Candidates(NamedTuple):
    """Candidates ``tokens`` [B, n, K] with their float32 logits ``best``.

    Rows of the activations' dtype: ``before`` of a candidate as the token before [B, n, K, R], ``first`` of the newest
    token [B, R], ``after`` of a candidate as the token after [B, n, K, R], ``gate`` of a position [B, n, R].
    """

    best: Tensor
    tokens: Tensor
    first: Tensor
    before: Tensor
    after: Tensor
    gate: Tensor


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best values of each row [..., V] and their indices, best first, as ``torch.topk``.

    The best k are in the k chunks with the highest maxima, so the rest is read once.
    """
    vocabulary = logits.shape[-1]
    if vocabulary % TOP_K_CHUNK or vocabulary < TOP_K_CHUNK * max(k, TOP_K_CHUNK):
        best, tokens = logits.topk(k, dim=-1)
        return best, tokens
    chunks = logits.view(*logits.shape[:-1], -1, TOP_K_CHUNK)
    chosen = chunks.amax(dim=-1).topk(k, dim=-1).indices
    candidates = chunks.gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, TOP_K_CHUNK)).flatten(-2)
    best, at = candidates.topk(k, dim=-1)
    return best, chosen.gather(-1, at // TOP_K_CHUNK) * TOP_K_CHUNK + at % TOP_K_CHUNK


def most_likely(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row of float32 logits [..., V], and its probability."""
    best, tokens = logits.max(dim=-1)
    return tokens, torch.exp(best - torch.logsumexp(logits, dim=-1))


def likeliest(logits: Tensor) -> list[int]:
    """The first of the largest numbers of each row [n, V]; waits for the device."""
    if logits.device.type == "cpu":
        found: list[int] = logits.numpy().argmax(axis=-1).tolist()  # a tenth of the time of torch's
        return found
    return logits.argmax(dim=-1).tolist()


def candidate_scores(c: Candidates) -> Tensor:
    """Scores [B, n, K, K]: of each candidate of the position before, then of its own."""
    first = c.first[:, None, None].expand(-1, 1, c.tokens.shape[2], -1)
    before = torch.cat((first, c.before[:, :-1]), dim=1).float().mul(c.gate.float().unsqueeze(2))
    return before @ c.after.float().mT + c.best.unsqueeze(2)


def select_path(c: Candidates) -> tuple[Tensor, Tensor]:
    """Walk along the best candidates: tokens [B, n], and the probability of each among its candidates."""
    best, following = candidate_scores(c).softmax(dim=-1).max(dim=-1)  # of every candidate of the position before
    at = c.tokens.new_zeros(len(c.tokens), 1)
    steps, picked = [], []
    for position in range(c.tokens.shape[1]):
        steps.append(at)
        at = following[:, position].gather(1, at)
        picked.append(at)
    before, path = torch.stack(steps, dim=1), torch.stack(picked, dim=1)
    return c.tokens.gather(2, path).squeeze(-1), best.gather(2, before).squeeze(-1)
