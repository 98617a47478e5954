"""Relevance of tokens to a question, window by window, by the scoring model of prompt compression and KV Flash.

Invariant: as many scores come back as tokens were given, whatever tokenizer the scoring model has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Protocol

from lucevisor.compression.parts import last_words_end
from lucevisor.model.values import PAGE_TOKENS
from lucevisor.text.tokenizer import Tokenizer

QUESTION_TOKENS: Final = 96
"""Last tokens of the question, which follow each window."""
QUERY_TOKENS: Final = 8
"""Its last tokens, whose attention is the score."""


class Scorer(Protocol):
    """The scoring model."""

    @property
    def window_tokens(self) -> int:
        """Tokens of the longest window, with those of the question."""

    async def score(self, tokens: Sequence[int], n_query: int) -> Sequence[float]:
        """Return the relevance of each token to the last ``n_query``; raises ScoringError."""


@dataclass(slots=True)
class Windows:
    """Scores tokens by windows.  ``scorer_tokenizer``: None if the scoring model has the served model's tokenizer."""

    tokenizer: Tokenizer
    scorer: Scorer
    scorer_tokenizer: Tokenizer | None = None
    n_windows: int = 0  # scored since the start
    n_tokens: int = 0  # of these windows

    async def scores(self, tokens: Sequence[int], question: Sequence[int], n_query: int = QUERY_TOKENS) -> list[float]:
        """Return a score for each token; ``question`` has at most QUESTION_TOKENS.  Raises ScoringError."""
        if self.scorer_tokenizer is None:
            return await self._scored(tokens, question, n_query)
        own, model = self.scorer_tokenizer, self.tokenizer

        def encode() -> tuple[list[int], list[int]]:
            encoded, asked = (own.encode(model.decode(part, skip_special=False)) for part in (tokens, question))
            return encoded, asked[-QUESTION_TOKENS:]

        encoded, asked = await asyncio.to_thread(encode)
        found = await self._scored(encoded, asked, n_query)

        def align() -> list[float]:
            both = ((own, encoded), (model, tokens))
            lengths, of_target = ([len(tokenizer.token_bytes(i)) for i in of] for tokenizer, of in both)
            return align_scores(found, lengths, of_target)

        return await asyncio.to_thread(align)

    async def page_scores(self, tokens: Sequence[int]) -> list[float]:
        """Return the relevance of each whole page of a text to its last words: that of its tokens together.

        Pages of the question itself have none.  Raises ScoringError.
        """
        end = last_words_end(tokens, self.tokenizer)
        start = max(0, end - QUESTION_TOKENS)
        scores = await self.scores([*tokens[:start]], [*tokens[start:end]])
        scores += [0.0] * (len(tokens) - start)
        n_pages = len(tokens) // PAGE_TOKENS
        return [sum(scores[start : start + PAGE_TOKENS]) for start in range(0, n_pages * PAGE_TOKENS, PAGE_TOKENS)]

    async def _scored(self, tokens: Sequence[int], question: Sequence[int], n_query: int) -> list[float]:
        scores: list[float] = []
        room = self.scorer.window_tokens - len(question)
        n_windows = max(1, -(-len(tokens) // room))
        size = -(-len(tokens) // n_windows) if tokens else 0
        for start in range(0, len(tokens), size or 1):
            window = tokens[start : start + size]
            found = await self.scorer.score([*window, *question], min(n_query, len(question)))
            # Attention is shared out over a window: times its length, windows of other lengths compare.
            scores += [score * len(window) for score in found[: len(window)]]
            self.n_windows += 1
            self.n_tokens += len(window) + len(question)
        return scores


def align_scores(scores: Sequence[float], lengths: Sequence[int], target_lengths: Sequence[int]) -> list[float]:
    """Carry scores to the tokens of another tokenizer: each gets that of the token in which its middle lies.

    ``lengths``, ``target_lengths``: bytes of each token of the two.  Normalisation may change how many bytes a text
    has, so places are shares of the whole.
    """
    total, target_total = sum(lengths), sum(target_lengths)
    if not total or not target_total:
        return [0.0] * len(target_lengths)
    ends = [end / total for end in accumulate(lengths)]
    out, at, done = [], 0, 0
    for length in target_lengths:
        middle = (done + length / 2) / target_total
        done += length
        while at < len(ends) - 1 and ends[at] < middle:
            at += 1
        out.append(scores[at])
    return out
