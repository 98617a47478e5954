"""`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:42}<tool_call|>`, as Gemma 4 writes calls.

The arguments are JSON with bare keys and with `<|"|>` for the quotes of strings, which are not escaped inside.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from lucevisor.text.json_text import MAX_DEPTH, parse
from lucevisor.text.tools.call import ToolCall, Tools, make_call
from lucevisor.text.tools.parameters import Parameters

_QUOTE: Final = '<|"|>'
_HEAD: Final = re.compile(r"\s*call:\s*([^\s{]+)\s*\{")
_KEY: Final = re.compile(r"\s*([^\s:,{}\[\]][^:,{}\[\]\n]*?)\s*:")
_LENIENT_KEY: Final = re.compile(r"\s*([^\s:=,{}\[\]][^:=,{}\[\]\n]*?)\s*[:=]")
_NOT_BARE: Final = frozenset("\"'<>:=\n")  # in a word without quotes: more than a word is missing there
_BLANKS: Final = re.compile(r"\s*")
_JSON_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE: Final = re.compile(r"[^,{}\[\]]+")
_SINGLE: Final = re.compile(r"'([^'\\]*)'(?=\s*[,}\]])")


class _Malformed(Exception):
    """The text is no call."""


class Gemma4:
    """Calls in Gemma 4's own notation."""

    open = "<|tool_call>"
    close = "<tool_call|>"
    bare = ("", "")
    tags: Sequence[str] = (open, close, _QUOTE)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when a brace, key or quote is missing."""
        return self._read(body, tools, lenient=False)

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Take a missing comma between arguments, `=` for `:`, single quotes, and bare words for strings."""
        return self._read(body, tools, lenient=True)

    def _read(self, body: str, tools: Tools, *, lenient: bool) -> ToolCall | None:
        head = _HEAD.match(body)
        if head is None:
            return None
        names = Parameters(tools, head[1]).names
        reader = _ValueReader(body, head.end() - 1, names, lenient=lenient)
        try:
            arguments = reader.value(0)
        except _Malformed:
            return None
        if not isinstance(arguments, dict) or body[reader.position :].strip():
            return None
        return make_call(head.group(1), arguments)

    def is_inside_value(self, body: str) -> bool:
        """Say whether the text ends between a pair of string quotes."""
        return body.count(_QUOTE) % 2 == 1


class _ValueReader:
    """Reads one value after another; `position` is the next character to read, `names` those of the arguments."""

    def __init__(self, text: str, position: int, names: Collection[str], *, lenient: bool) -> None:
        self._text = text
        self._names = names
        self._lenient = lenient
        self.position = position

    def value(self, depth: int) -> object:
        """Read an object, a list, a string or a bare JSON value."""
        if depth >= MAX_DEPTH:
            raise _Malformed
        if self._take("{"):
            return self._object(depth)
        if self._take("["):
            return self._list(depth)
        if self._take(_QUOTE):
            end = self._text.find(_QUOTE, self.position)
            if end < 0:
                raise _Malformed
            text, self.position = self._text[self.position : end], end + len(_QUOTE)
            return text
        if self._lenient and (quoted := _SINGLE.match(self._text, self.position)):
            self.position = quoted.end()
            return quoted.group(1)
        match = _JSON_STRING.match(self._text, self.position) or _BARE.match(self._text, self.position)
        if match is None:
            raise _Malformed
        self.position = match.end()
        try:
            return parse(match.group())
        except ValueError as error:
            word = match.group().strip()
            if self._lenient and not set(word) & _NOT_BARE:
                return word
            raise _Malformed from error

    def _object(self, depth: int) -> dict[str, object]:
        result: dict[str, object] = {}
        while not self._take("}"):
            if result and not self._take(",") and not self._lenient:
                raise _Malformed
            key = self._declared_key() if depth == 0 else None
            key = self._key() if key is None else key
            result[key] = self.value(depth + 1)
        return result

    def _list(self, depth: int) -> list[object]:
        result: list[object] = []
        while not self._take("]"):
            if result and not self._take(","):
                raise _Malformed
            result.append(self.value(depth + 1))
        return result

    def _declared_key(self) -> str | None:
        """A name that is declared, which may have in it what ends a name."""
        self._take("")
        found = [name for name in self._names if self._text.startswith(f"{name}:", self.position)]
        key = max(found, key=len, default=None)
        self.position += 0 if key is None else len(key) + 1
        return key

    def _key(self) -> str:
        if self._take(_QUOTE):
            end = self._text.find(_QUOTE, self.position)
            key, self.position = self._text[self.position : end], end + len(_QUOTE)
            if end < 0 or not self._take(":"):
                raise _Malformed
            return key
        match = (_LENIENT_KEY if self._lenient else _KEY).match(self._text, self.position)
        if match is None:
            raise _Malformed
        self.position = match.end()
        return match.group(1).strip('"')

    def _take(self, what: str) -> bool:
        """Skip blanks, and then `what` if it comes next."""
        blanks = _BLANKS.match(self._text, self.position)
        start = blanks.end() if blanks else self.position
        if not self._text.startswith(what, start):
            return False
        self.position = start + len(what)
        return True
