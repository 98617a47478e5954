"""What parsers of answers yield: content, reasoning and tool calls; and what these parsers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
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


class AnswerParser(ABC):
    """Parses one answer.  ``content``: where in it its content is, in characters; the reader may clear it."""

    def __init__(self) -> None:
        self.content: list[range] = []
        self._text = ""  # received, not yet emitted
        self._n_chars = 0  # received
        self._events: list[OutputEvent] = []
        self._n_calls = 0
        self._cut = False

    @property
    def position(self) -> int:
        """Characters that were read completely."""
        return self._n_chars - len(self._text)

    def push(self, text: str) -> list[OutputEvent]:
        """Take more of the answer."""
        self._text += text
        self._n_chars += len(text)
        return self._advance(final=False)

    def flush(self, *, cut: bool = False) -> list[OutputEvent]:
        """Return the events of held-back text; ``cut``: the model did not end, so an unclosed call is text."""
        self._cut = cut
        return self._advance(final=True)

    def _advance(self, final: bool) -> list[OutputEvent]:
        while self._read(final):
            pass
        events, self._events = self._events, []
        return events

    @abstractmethod
    def _read(self, final: bool) -> bool:
        """Read up to the next tag; return whether one was found."""

    def _emit(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, kind):
            self._events[-1] = kind(last.text + text)
        else:
            self._events.append(kind(text))

    def _emit_call(self, name: str, arguments: str) -> None:
        self._events.append(ToolCallDelta(self._n_calls, name, arguments))
        self._n_calls += 1


def overlap(text: str, needle: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `needle`."""
    for length in range(min(len(text), len(needle) - 1), 0, -1):
        if text.endswith(needle[:length]):
            return length
    return 0
