"""Harmony, the format of gpt-oss: an answer is several messages, each with a header that names its channel.

    <|channel|>analysis<|message|>REASONING<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{"key": 1}<|call|>

The recipient may stand before the channel. Text for the commentary channel without a recipient is for the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final

from lucevisor.text.deltas import AnswerParser, ContentDelta, ReasoningDelta, overlap
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.parameters import Tools
from lucevisor.text.reasoning import ReasoningTags
from lucevisor.text.tools.call import Function, ToolCall, ToolFormat
from lucevisor.text.tools.json_object import call_of

SIGN: Final = "<|channel|>analysis<|message|>"
"""What only a template of this format has in it."""
_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
HARMONY: Final = ReasoningTags(
    SIGN, _END, inline=True, between=f"{_START}assistant", answer=f"{_CHANNEL}final{_MESSAGE}"
)
_RECIPIENT: Final = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_HEADER: Final = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=[^\s<]*\s*)?<\|channel\|>"
    r"(?:(?!<\|(?:start|channel|end|call|return)\|>).)*",
    re.DOTALL,
)
_BEGUN: Final = ("<|start|>", "assistant", " to=", "to=", _CHANNEL)
_MAX_HEADER_CHARS: Final = 512
"""Characters after which a header without its end is taken for text."""


class HarmonyCalls(ToolFormat):
    """Calls as messages to `functions.NAME`, whose text is a JSON object; a body is the name, its tag and the text."""

    open: ClassVar[str] = f"{_CHANNEL}commentary to=functions."
    close: ClassVar[str] = _CALL
    tags = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """A text without anything in it is an empty object."""
        name, _, text = body.partition(_MESSAGE)
        return call_of(name, text if text.strip() else "{}")

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """As for JSON between tags."""
        name, _, text = body.partition(_MESSAGE)
        return call_of(name, text, repaired=True)

    def is_inside_value(self, body: str) -> bool:
        return False

    def grammar(self, rules: Rules, function: Function) -> str:
        head = rules.text(f"{function.name} {_CONSTRAIN}json{_MESSAGE}")
        return f"{head} {rules.json(function.schema, lenient=not function.strict)}"


@dataclass(frozen=True, slots=True)
class _Message:
    """A message that is being read: ``kind`` of its text, or the ``function`` that it calls."""

    kind: type[ContentDelta] | type[ReasoningDelta]
    function: str = ""


class HarmonyParser(AnswerParser):
    """An answer begins within a header; text that is none is content.  A call's text is collected to its end; if it is
    no object, it is content.
    """

    _ENDS: ClassVar[tuple[str, ...]] = (_END, _CALL, _RETURN, _START, _CHANNEL)

    def __init__(self, reasoning_open: bool, tools: Tools) -> None:
        super().__init__()
        self._tools, self._calls = tools, HarmonyCalls()
        self._message = _Message(ReasoningDelta) if reasoning_open else None
        self._seen: set[type] = set()  # kinds of text that were emitted
        self._fresh = not reasoning_open  # no text of the message was emitted

    def _read(self, final: bool) -> bool:
        return self._read_header(final) if self._message is None else self._read_text(self._message, final)

    def _read_header(self, final: bool) -> bool:
        """Take a header that is complete; text that begins none is content."""
        begun = self._text.lstrip()
        header, message, rest = begun.partition(_MESSAGE)
        if message and _HEADER.fullmatch(header):
            self._text = rest
            self._begin(header)
            return True
        if self._may_begin(begun) and not message and len(begun) <= _MAX_HEADER_CHARS:
            if final:
                self._text = ""  # a header without a message says nothing
            return False
        if not begun:
            return False
        if tag := next((tag for tag in self._ENDS if begun.startswith(tag)), ""):  # out of place: dropped
            self._text = begun[len(tag) :]
            return True
        self._message, self._fresh = _Message(ContentDelta), True
        return True

    def _may_begin(self, text: str) -> bool:
        """Return whether more text may make a header of it."""
        if _HEADER.fullmatch(text):
            return True
        text = text.removeprefix(_START).removeprefix("assistant").lstrip()
        if text.startswith("to="):
            return "<" not in text or _CHANNEL.startswith(text[text.index("<") :])
        return any(tag.startswith(text) for tag in ("to=", *_BEGUN, *self._ENDS))

    def _begin(self, header: str) -> None:
        named = _RECIPIENT.search(header)
        channel = header.partition(_CHANNEL)[2].strip()
        function = named[1] if named is not None and self._tools and "to=functions." in header else ""
        kind = ReasoningDelta if channel.startswith("analysis") else ContentDelta
        self._message, self._fresh = _Message(kind, function), True

    def _read_text(self, message: _Message, final: bool) -> bool:
        """Emit text up to the end of the message; return whether it was found."""
        found = [(at, tag) for tag in self._ENDS if (at := self._text.find(tag)) >= 0]
        if message.function:
            if not found and not final:
                return False
            at, tag = min(found, default=(len(self._text), ""))
            self._take_call(message.function, self._text[:at], is_whole=bool(tag) or not self._cut)
        elif found:
            at, tag = min(found)
            self._emit(message.kind, self._text[:at])
        else:
            held = 0 if final else max(overlap(self._text, tag) for tag in self._ENDS)
            text = self._text[: len(self._text) - held]
            self._emit(message.kind, text)
            self._text = self._text[len(text) :]
            return False
        keep = tag in (_START, _CHANNEL)
        self._text = self._text[at if keep else at + len(tag) :]
        self._message = None
        return bool(tag)

    def _take_call(self, function: str, text: str, *, is_whole: bool) -> None:
        body = f"{function}{_MESSAGE}{text}"
        call = (self._calls.parse(body, ()) or self._calls.repair(body, ())) if is_whole else None
        if call is None:
            self._emit(ContentDelta, text)
        else:
            self._emit_call(call.name, call.arguments)

    def _emit(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
        if not text:
            return
        if kind is ContentDelta:
            self.content.append(range(self.position, self.position + len(text)))
        super()._emit(kind, f"\n\n{text}" if self._fresh and kind in self._seen else text)
        self._fresh = False
        self._seen.add(kind)
