"""What all drafters have in common: the weights of the vocabulary, and the two things a drafter does.

Knows no step and no sampled tokens; a drafter works on batches, like the blocks it is made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from daemons.kv.batch import Batch
from daemons.ops.linear import Linear, Table


class VocabularyWeights(NamedTuple):
    """The embedding and the output matrix, in most cases the target's."""

    table: Table
    lm_head: Linear


class Drafts(NamedTuple):
    """Tokens [B, n], and the probability [B, n] float32 that the drafter gives each."""

    tokens: Tensor
    probabilities: Tensor


class Drafter(ABC):
    """A drafter model on one device."""

    starts_from_hidden = False
    """Whether a draft starts from the hidden state of the token before the newest."""

    first_row = 0
    """Where the rows of a draft begin, from the position of the newest token on."""

    def __init__(self, vocabulary: VocabularyWeights) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        """Add rows [T, n E] captured from the target to the context; returns hidden states [T, E]."""

    @abstractmethod
    def draft_tokens(self, newest: int, n: int) -> list[int]:
        """The tokens that are rows of a draft of ``n`` tokens behind ``newest``; the first is ``newest``."""

    @abstractmethod
    def first_visible(self, draft_from: int) -> int:
        """The first position that a draft attends to where the context begins at ``draft_from``."""

    @abstractmethod
    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        """Draft behind each slice of :meth:`draft_tokens`.  ``hidden`` [B, E]: see ``starts_from_hidden``."""


TOP_K_CHUNK = 128
"""Of a vocabulary, :func:`top_k` sorts the chunks of so many tokens that have the best ones."""


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` best values of each row [B, n, V] and their indices, best first, as ``torch.topk``.

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


def most_likely(logits: Tensor) -> Drafts:
    """The likeliest token of each row of float32 logits [..., V]."""
    best, tokens = logits.max(dim=-1)
    return Drafts(tokens, torch.exp(best - torch.logsumexp(logits, dim=-1)))
