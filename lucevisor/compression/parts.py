"""Parts of a prompt that may be shortened, from its tokens, its chat turns and their roles.

Text of the chat template, the system prompt, tools, the assistant's messages and the last turns of a longer chat are
never shortened.  Invariant: a part has no marker and lies in one turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from lucevisor.text.tokenizer import Tokenizer

HOT_TURNS: Final = 2
"""Last complete turns that stay whole in a chat in which the assistant has answered."""
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
    """Return the parts, ascending.

    ``turn_ends``: offsets at which chat turns are complete; ``roles``: of the request's messages, [] for a raw prompt.
    A raw prompt with chat turns, or turns that do not match the messages, have none, because their roles are unknown.
    """
    if not roles:
        return [] if turn_ends else list(_between_markers(ids, 0, len(ids), tokenizer))
    of_turns = roles_of_turns(roles, len(turn_ends))
    if of_turns is None:
        return []
    if "assistant" in roles:
        of_turns = of_turns[:-HOT_TURNS]
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
