"""Base class of drafters (draft models): the weights of the vocabulary, and the two operations of a drafter.

Knows no step and no sampled tokens; a drafter works on batches, like the blocks it is made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from daemons.kv.batch import Batch
from daemons.ops.linear import Linear, Table, logits_product
from daemons.ops.operations import Operations


class VocabularyWeights(NamedTuple):
    """The embedding and the output matrix, in most cases the target's.

    ``ids`` [N] int64: the token of each row of ``lm_head``, if it has the rows of a draft vocabulary alone.
    """

    table: Table
    lm_head: Linear
    ids: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, N] of hidden states [n, E] and the rows of ``lm_head``."""
        return logits_product(self.lm_head)(hidden)

    def tokens_of(self, rows: Tensor) -> Tensor:
        """The tokens of rows of ``lm_head``, in any shape."""
        return rows if self.ids is None else self.ids.index_select(0, rows.flatten()).view(rows.shape)


class Drafts(NamedTuple):
    """Tokens [B, n], and the probability [B, n] float32 that the drafter gives each."""

    tokens: Tensor
    probabilities: Tensor


class Drafter(ABC):
    """A drafter model on one device."""

    starts_from_hidden = False
    """Whether a draft starts from the hidden state of the token before the newest."""

    attends_to_context = False
    """Whether rows of the context attend to those before them."""

    first_row = 0
    """Where the rows of a draft begin, from the position of the newest token on."""

    def __init__(self, vocabulary: VocabularyWeights, operations: Operations) -> None:
        self.vocabulary, self.operations = vocabulary, operations

    def most_likely(self, logits: Tensor) -> Drafts:
        """The likeliest token of each row of logits [..., N] of ``lm_head``, and its probability among them."""
        rows, probabilities = self.operations.most_likely(logits)
        return Drafts(self.vocabulary.tokens_of(rows), probabilities)

    @abstractmethod
    def extend(self, captures: Tensor | None, batch: Batch) -> Tensor:
        """Add rows [T, n E] captured from the target to the context; returns hidden states [T, E]."""

    def draft_tokens(self, newest: int, n: int) -> list[int]:
        """The tokens that are rows of a draft of ``n`` tokens behind ``newest``; the first is ``newest``."""
        return [newest] + [0] * (n - 1)  # the others follow from the drafts

    def first_visible(self, draft_from: int) -> int:
        """The first position that a draft attends to where the context begins at ``draft_from``."""
        return draft_from

    @abstractmethod
    def draft(self, hidden: Tensor | None, batch: Batch) -> Drafts:
        """Draft behind each slice of :meth:`draft_tokens`.  ``hidden`` [B, E]: see ``starts_from_hidden``."""


def joined(found: Sequence[Drafts], operations: Operations) -> Drafts:
    """Drafts [B] of one position after the other."""
    tokens, probabilities = (
        operations.concatenate([x.unsqueeze(1) for x in part]) for part in zip(*found, strict=True)
    )
    return Drafts(tokens, probabilities)
