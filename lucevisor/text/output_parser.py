"""Reasoning parser: the format of a model's output (reasoning tags, tool-call format), and its streaming parser.

The parser splits output into content, reasoning and tool calls, however it was chunked.

CONTENT and REASONING pass text on, and hold back what may be the start of a tag and whitespace that a tag may follow.
CALL collects a call up to its closing tag; if it is not a call, its opening tag is text and the rest is parsed again.
A call may lack its opening tag, where the format says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from lucevisor.text.deltas import AnswerParser, ContentDelta, ReasoningDelta, overlap
from lucevisor.text.harmony import HARMONY, SIGN, HarmonyCalls, HarmonyParser
from lucevisor.text.reasoning import CHANNEL, THINK, ReasoningTags
from lucevisor.text.tokenizer import Segment, Tokenizer
from lucevisor.text.tools import ToolFormat, Tools, detect_tool_format, has_tool, read_call


@dataclass(frozen=True)
class OutputFormat:
    """The tags of one model's output; None for unsupported features."""

    reasoning: ReasoningTags | None = None
    tools: ToolFormat | None = None

    def visible_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Return the control tokens whose text the output parser needs, for Detokenizer's `visible`."""
        reasoning = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        ids = map(tokenizer.token_id, (*reasoning, *(self.tools.tags if self.tools else ())))
        return frozenset(i for i in ids if i is not None and i not in tokenizer.eos_ids)

    def reasoning_open_after(self, segments: Sequence[Segment]) -> bool:
        """Return whether a prompt ends inside a reasoning block that its template opened."""
        if self.reasoning is None:
            return False
        for segment in reversed(segments):
            if segment.trusted:
                opened = segment.text.rfind(self.reasoning.open)
                closed = segment.text.rfind(self.reasoning.close)
                if max(opened, closed) >= 0:
                    return opened > closed
        return False

    def reasoning_after(self, prompt: str) -> ReasoningTags | None:
        """Return the tags of the reasoning that may follow a prompt: none after a block that the template closed."""
        if self.reasoning is None or prompt.rstrip().endswith(self.reasoning.close):
            return None
        return self.reasoning

    def parser(self, reasoning_open: bool, tools: Tools) -> AnswerParser:
        """Return the parser of one answer; the arguments are those of :class:`OutputParser`."""
        if isinstance(self.tools, HarmonyCalls):
            return HarmonyParser(reasoning_open, tools)
        return OutputParser(reasoning_open, tools, self)


def detect_format(template: str) -> OutputFormat:
    if SIGN in template:
        return OutputFormat(HARMONY, HarmonyCalls())
    reasoning = next((tags for tags in (CHANNEL, THINK) if tags.close in template), None)
    return OutputFormat(reasoning, detect_tool_format(template))


_LINE_ENDS: Final = "\n"
_BLANKS: Final = " \t\r\n"


class _ParserState(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class OutputParser(AnswerParser):
    """`reasoning_open`: as in RenderedPrompt; `tools`: those offered (none: calls are content)."""

    def __init__(self, reasoning_open: bool, tools: Tools, format: OutputFormat) -> None:
        super().__init__()
        self._tags = format.reasoning
        self._tools = tools
        self._calls = format.tools if tools else None
        self._state = _ParserState.CONTENT
        self._skip = _LINE_ENDS if format.reasoning else ""  # characters to drop at the start of a section
        self._label = ""  # to drop at the start of a reasoning block
        self._fresh = True  # only whitespace so far, so a reasoning tag counts
        self._call_in = _ParserState.CONTENT  # the state that a call interrupts
        self._call_blanks = ""  # whitespace before its opening tag
        self._searched = 0  # in a call: how much of _text has been searched for the closing tag
        self._unclosed = -1  # in a call: the first closing tag that may be part of a value
        self._close = ""  # in a call: the closing tag
        self._opening = ""  # the opening tag of the call
        self._orphan = ""  # closing tag of a call without an opening one, to drop if it follows
        if reasoning_open:
            self._begin(_ParserState.REASONING, _LINE_ENDS)

    def _read(self, final: bool) -> bool:
        return self._read_call(final) if self._state is _ParserState.CALL else self._read_text(final)

    def _read_text(self, final: bool) -> bool:
        """Emit text up to the next tag; return whether one was found and consumed."""
        if not self._read_beginning(final):
            return False
        if self._state is _ParserState.CONTENT and self._fresh and self._tags and not self._tags.inline:
            start = self._text.lstrip()
            if start.startswith(self._tags.open):
                self._text = start[len(self._tags.open) :]
                self._begin(_ParserState.REASONING, _LINE_ENDS)
                return True
            if not final and self._tags.open.startswith(start):
                return False
        tags = self._tags_to_find()
        matches = [(position, tag) for tag in tags if (position := self._text.find(tag)) >= 0]
        if matches:
            self._take_tag(*min(matches))
            return True
        held = 0
        if tags and not final:
            held = max(overlap(self._text, tag) for tag in tags)
            held = len(self._text) - len(self._text[: len(self._text) - held].rstrip())
        self._show(self._text[: len(self._text) - held], self.position)
        self._text = self._text[len(self._text) - held :]
        return False

    def _read_beginning(self, final: bool) -> bool:
        """Drop the label and the whitespace at the start of a section; return whether they are complete."""
        if self._orphan:
            start = self._text.lstrip()
            if start.startswith(self._orphan):
                self._text = start[len(self._orphan) :]
            elif not final and self._orphan.startswith(start):
                return False
            self._orphan = ""
        if self._label:
            if self._text.startswith(self._label):
                self._text = self._text[len(self._label) :]
            elif not final and self._label.startswith(self._text):
                return False
            self._label = ""
        if self._skip:
            self._text = self._text.lstrip(self._skip)
            if not self._text:
                return False
            self._skip = ""
        return bool(self._text)

    def _tags_to_find(self) -> Sequence[str]:
        tags = [tag for tag in (self._calls.open, self._calls.bare[0]) if tag] if self._calls else []
        if self._tags and self._state is _ParserState.REASONING:
            tags.append(self._tags.close)
        elif self._tags and self._tags.inline:
            tags.append(self._tags.open)
        return tags

    def _take_tag(self, position: int, tag: str) -> None:
        before, after = self._text[:position], self._text[position + len(tag) :]
        text = before.rstrip()
        self._show(text, self.position)
        self._text = after
        if self._calls and tag in (self._calls.open, self._calls.bare[0]):
            self._call_in, self._state = self._state, _ParserState.CALL
            self._call_blanks = before[len(text) :]
            self._searched, self._unclosed = 0, -1
            self._opening = tag
            self._close = self._calls.close if tag == self._calls.open else self._calls.bare[1]
        else:
            self._begin(
                _ParserState.CONTENT if self._state is _ParserState.REASONING else _ParserState.REASONING, _LINE_ENDS
            )

    def _read_call(self, final: bool) -> bool:
        """Parse a call up to its closing tag; return whether it is decided."""
        assert self._calls is not None  # only a call's tag leads to CALL
        reasoning_end = -1
        if self._call_in is _ParserState.REASONING and self._tags:
            reasoning_end = self._text.find(self._tags.close)
        while (end := self._text.find(self._close, self._searched)) >= 0:
            if 0 <= reasoning_end < end:
                return self._reject_call()
            if self._accept_call(self._text[:end], self._text[end + len(self._close) :]):
                return True
            if not self._calls.is_inside_value(self._text[:end]):
                return self._reject_call()
            if self._unclosed < 0:
                self._unclosed = end
            self._searched = end + len(self._close)
        if reasoning_end >= 0:
            return self._reject_call()
        if final:  # some models stop before the closing tag: the call is complete
            body = self._text[: len(self._text) - overlap(self._text, self._close)]
            if not self._cut and self._accept_call(body, "", whole=False):
                return True
            end = self._unclosed  # a closing tag that was part of a value, only if the value went on
            if not self._cut and end >= 0:
                rest = self._text[end + len(self._close) :]
                return self._accept_call(self._text[:end], rest, repair=True) or self._reject_call()
            return self._reject_call()
        self._searched = max(self._searched, len(self._text) - len(self._close) + 1)
        return False

    def _accept_call(self, body: str, rest: str, *, whole: bool = True, repair: bool = False) -> bool:
        assert self._calls is not None
        bare = self._opening != self._calls.open
        if bare:
            calls = [self._calls.parse(self._opening + body + (self._close if whole else ""), self._tools)]
        elif whole and (repair or not self._calls.is_inside_value(body)):
            calls = [read_call(self._calls, part, self._tools) for part in self._calls.split(body)]
        else:
            calls = [self._calls.parse(part, self._tools) for part in self._calls.split(body)]
        # Reasoning and answers may quote the format: there it is a call only if it names an offered tool.
        doubtful = bare or self._call_in is _ParserState.REASONING
        found = [call for call in calls if call is not None and not (doubtful and not has_tool(self._tools, call.name))]
        if not found or len(found) < len(calls):
            return False
        for call in found:
            self._emit_call(call.name, call.arguments)
        self._text = rest
        self._begin(_ParserState.CONTENT, _BLANKS)
        self._orphan = self._calls.close if bare else ""
        return True

    def _reject_call(self) -> bool:
        self._state = self._call_in
        opening = self._call_blanks + self._opening
        self._show(opening, self.position - len(opening))
        return True

    def _begin(self, state: _ParserState, skip: str) -> None:
        self._state, self._skip, self._fresh = state, skip, True
        self._label = self._tags.label if self._tags and state is _ParserState.REASONING else ""

    def _show(self, text: str, start: int) -> None:
        if not text:
            return
        self._fresh = False
        if self._state is _ParserState.CONTENT:
            self.content.append(range(start, start + len(text)))
        self._emit(ReasoningDelta if self._state is _ParserState.REASONING else ContentDelta, text)


class StopMatcher:
    """Holds back text that may start a stop string; the one that completes first wins, then the longest."""

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`included`: a stop string is text, too."""
        self._stops = tuple(dict.fromkeys(stops))
        self._included = included
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        pending = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if matches:
            end, start, self.matched = min(matches)
            self._held = ""
            return pending[: end if self._included else start]
        held = max(overlap(pending, stop) for stop in self._stops)
        self._held = pending[len(pending) - held :]
        return pending[: len(pending) - held]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held
