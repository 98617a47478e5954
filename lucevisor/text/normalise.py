"""Normalises system prompt lines that some agents change every turn, so that prompts share a prefix despite them.

Off by default, as it changes what the model reads: docs/prefix-cache.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Literal

Normalise = Literal["off", "fix", "move"]

FIXED: Final = "(not told)"
MOVED: Final = "(told at the end)"
"""Placeholders for a value."""

_OPENING: Final = ("system", "developer")
_LAST: Final = ("user", "tool")
_BILLING: Final = re.compile(r"^([ \t]*x-anthropic-billing-header:)[^\n]*$", re.MULTILINE | re.IGNORECASE)
_DATE: Final = re.compile(
    r"""^([ \t>*-]*                                              # a list item or a quotation, bold or not
        (?: (?:the[ ])? (?: today['\u2019]s[ ]date
                          | (?:current|local)[ ](?:date[ ]and[ ]time|date/time|datetime|date|time) )
            (?: \**[ \t]*[:=]\** | [ ]is(?:[ ]now)? :? )
          | today[ ]is:? )
       )[ \t]*([^\n]*\d[^\n]*)$                                  # the value holds a digit""",
    re.MULTILINE | re.IGNORECASE | re.VERBOSE,
)


def normalise_prompt(messages: Sequence[Mapping[str, object]], mode: Normalise) -> list[dict[str, object]]:
    """Return the messages with their volatile lines rewritten: "fix" replaces the values of billing headers and dates
    by fixed words, "move" appends date lines to the last message, if it is a user's or a tool's."""
    result = [dict(message) for message in messages]
    n_opening = next((i for i, m in enumerate(result) if m.get("role") not in _OPENING), len(result))
    if mode == "off":
        return result
    moved: list[str] = []

    def move(line: re.Match[str]) -> str:
        moved.append(line[0].strip())
        return f"{line[1]} {MOVED}"

    def rewrite(text: str) -> str:
        text = _BILLING.sub(rf"\1 {FIXED}", text)
        if mode == "fix":
            return _DATE.sub(rf"\1 {FIXED}", text)
        return _DATE.sub(move, text) if n_opening < len(result) and result[-1].get("role") in _LAST else text

    for message in result[:n_opening]:
        message["content"] = _rewritten(message.get("content"), rewrite)
    if moved:
        result[-1]["content"] = _extended(result[-1].get("content"), "\n".join(moved))
    return result


def _rewritten(content: object, rewrite: Callable[[str], str]) -> object:
    if isinstance(content, str):
        return rewrite(content)
    if not isinstance(content, list):
        return content
    return [
        {**part, "text": rewrite(part["text"])}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]


def _extended(content: object, lines: str) -> object:
    if isinstance(content, list):
        return [*content, {"type": "text", "text": lines}]
    return f"{content}\n\n{lines}" if content else lines
