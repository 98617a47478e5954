"""What parsers of answers yield: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A complete tool call; `index` counts the calls of this answer from 0, `arguments` is a JSON object as text."""

    index: int
    name: str
    arguments: str


OutputEvent = ContentDelta | ReasoningDelta | ToolCallDelta


def overlap(text: str, needle: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `needle`."""
    for length in range(min(len(text), len(needle) - 1), 0, -1):
        if text.endswith(needle[:length]):
            return length
    return 0
