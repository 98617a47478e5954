"""Relevance of tokens to a question, window by window, by the scoring model of prompt compression and KV Flash.

Text of the chat template, the system prompt, tools, the assistant's messages and the last turns of a longer chat are
never shortened.  Invariants: as many scores come back as tokens were given, whatever tokenizer the scoring model has; a
part that may be shortened has no marker and lies in one turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, Protocol

from lucevisor.model.values import PAGE_TOKENS
from lucevisor.model.vision import IMAGE_ID
from lucevisor.text.tokenizer import Tokenizer

MIN_PART_TOKENS: Final = 256
"""Minimum length of a part in tokens; shortening a shorter one saves little."""
_HEADER_TOKENS: Final = 8
_ROLE_TOKENS: Final = 2
_SHORTENED: Final = frozenset({"user", "tool"})


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Tokens ``[start, stop)`` of a prompt that may be shortened."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def parts_of(
    ids: Sequence[int], turn_ends: Sequence[int], roles: Sequence[str], tokenizer: Tokenizer
) -> list[PromptPart]:
    """Return the parts, ascending; none where the turns do not match the messages. ``turn_ends``: offsets at which chat
    turns are complete; ``roles``: of the request's messages, [] for a raw prompt."""
    if not roles:
        return [] if turn_ends else list(_between_markers(ids, 0, len(ids), tokenizer))
    of_turns = roles_of_turns(roles, len(turn_ends))
    if of_turns is None:
        return []
    if "assistant" in roles:
        of_turns = of_turns[:-2]  # the last complete turns stay whole
    parts: list[PromptPart] = []
    for role, start, stop in zip(of_turns, [0, *turn_ends], turn_ends, strict=False):
        if role in _SHORTENED:
            parts += _between_markers(ids, _content_start(ids, start, stop, tokenizer), stop, tokenizer)
    return parts


def question_end(ids: Sequence[int], turn_ends: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the end of the question: of the content of the last complete turn, before text that the template adds."""
    end = turn_ends[-1] if turn_ends else len(ids)
    while end and turn_ends and (tokenizer.is_marker(ids[end - 1]) or tokenizer.token_bytes(ids[end - 1]).isspace()):
        end -= 1
    return end


def last_words_end(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the end of the last words of a prompt whose turns are not known, before text that a template adds:
    markers, blanks and at most _ROLE_TOKENS other tokens between two markers.  The whole length if there is no more."""
    end = n_words = 0
    for at in range(len(ids) - 1, -1, -1):
        if tokenizer.is_marker(ids[at]):
            end = n_words = 0
        elif not tokenizer.token_bytes(ids[at]).isspace():
            end, n_words = end or at + 1, n_words + 1
            if n_words > _ROLE_TOKENS:
                return end
    return len(ids)


def roles_of_turns(roles: Sequence[str], n_turns: int) -> list[str] | None:
    """Return the role of each chat turn; None if the turns cannot be told apart.

    Templates may add a system turn, write consecutive tool results as one turn, or write them into the assistant's.
    """
    opening = [role for role in roles if role in ("system", "developer")][:1]
    rest = [role for role in roles if role not in ("system", "developer")]
    if n_turns == len(roles):
        return list(roles)
    joined = [role for role, group in groupby(rest) for _ in (range(1) if role == "tool" else group)]
    embedded = [role for role in rest if role != "tool"]
    for candidate in (rest, joined, embedded):
        if n_turns == len(opening) + len(candidate):
            return [*opening, *candidate]
        if not opening and n_turns == 1 + len(candidate):
            return ["system", *candidate]
    return None


def _content_start(ids: Sequence[int], start: int, stop: int, tokenizer: Tokenizer) -> int:
    """Return where a turn's content begins: after the line in which the template names the role."""
    for at in range(start, min(stop, start + _HEADER_TOKENS)):
        if tokenizer.token_bytes(ids[at]).endswith(b"\n"):
            return at + 1
    return min(stop, start + _HEADER_TOKENS)


def _between_markers(ids: Sequence[int], start: int, stop: int, tokenizer: Tokenizer) -> Iterator[PromptPart]:
    markers = [at for at in range(start, stop) if tokenizer.is_marker(ids[at])]
    for low, high in zip([start - 1, *markers], [*markers, stop], strict=True):
        if high - low - 1 >= MIN_PART_TOKENS:
            yield PromptPart(low + 1, high)


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
class WindowScorer:
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

        Pages of the question itself have none.  Images are no words.  Raises ScoringError.
        """
        tokens = [token if token < IMAGE_ID else 0 for token in tokens]
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
