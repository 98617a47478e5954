"""`<|tool_call>call:NAME{key:<|"|>text<|"|>,other:42}<tool_call|>`, as Gemma 4 writes calls.

The arguments are JSON with bare keys and with `<|"|>` for the quotes of strings, which are not escaped inside.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.members import fits_as_text, member_sequence, members, text_terminal
from lucevisor.text.grammar.rules import ANYTHING, Rules
from lucevisor.text.json_text import MAX_DEPTH, parse
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.parameters import ANY_TYPE, Parameters, Tools
from lucevisor.text.tools.call import Function, ToolCall, ToolFormat, make_call

_QUOTE: Final = '<|"|>'
_HEAD: Final = re.compile(r"\s*call:\s*([^\s{]+)\s*\{")
_KEY: Final = re.compile(r"\s*([^\s:,{}\[\]][^:,{}\[\]\n]*?)\s*:")
_LENIENT_KEY: Final = re.compile(r"\s*([^\s:=,{}\[\]][^:=,{}\[\]\n]*?)\s*[:=]")
_NOT_BARE: Final = frozenset("\"'<>:=\n")  # in a word without quotes: more than a word is missing there
_BLANKS: Final = re.compile(r"\s*")
_JSON_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_BARE: Final = re.compile(r"[^,{}\[\]]+")
_SINGLE: Final = re.compile(r"'([^'\\]*)'(?=\s*[,}\]])")
_BARE_KEY: Final = re.compile(r"[^\s:=,{}\[\]<>\"']+")
_SCALARS: Final = ("null", "boolean", "integer", "number")
_OF_SCALARS: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_KEYWORDS: Final = frozenset(
    [
        *("enum", "properties", "patternProperties", "additionalProperties", "required"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("contains", "uniqueItems", "minLength", "maxLength", "patterns", "format"),
        *_OF_SCALARS,
    ]
)


class _Malformed(Exception):
    """The text is no call."""


class Gemma4(ToolFormat):
    """Calls in Gemma 4's own notation."""

    open = "<|tool_call>"
    close = "<tool_call|>"
    tags = (open, close, _QUOTE)

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
        return body.count(_QUOTE) % 2 == 1

    def grammar(self, rules: Rules, function: Function) -> str:
        arguments = _ValueWriter(rules, function).value(function.schema, "parameters", 0)
        if arguments is None:
            raise GrammarError("they allow no arguments, as required properties are forbidden")
        return f"{rules.text(f'call:{function.name}')} {arguments} {rules.text(self.close)}"


class _ValueReader:
    """Reads one value after another; `position` is the next character to read, `names` those of the arguments."""

    def __init__(self, text: str, position: int, names: Collection[str], *, lenient: bool) -> None:
        self._text = text
        self._names = names
        self._lenient = lenient
        self.position = position

    def value(self, depth: int) -> object:
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
        """A declared name, which may contain characters that end other names."""
        self._take("")
        matching = [name for name in self._names if self._text.startswith(f"{name}:", self.position)]
        key = max(matching, key=len, default=None)
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
        """Skip blanks, then `what` if it follows."""
        blanks = _BLANKS.match(self._text, self.position)
        start = blanks.end() if blanks else self.position
        if not self._text.startswith(what, start):
            return False
        self.position = start + len(what)
        return True


class _ValueWriter:
    """Writes the rules of the schemas of one tool, each once, so that they may refer to themselves."""

    def __init__(self, rules: Rules, function: Function) -> None:
        self._rules = rules
        self._alternatives = Alternatives(function.schema.get("$defs", {}), strict=function.strict)
        self._names: dict[str, str | None] = {}  # of rules, by their schemas
        self._any = ""

    def value(self, schema: object, where: str, depth: int) -> str | None:
        key = json.dumps(schema, sort_keys=True)
        if key in self._names:
            return self._names[key]
        if depth > 24:
            raise GrammarError(f"{where}: it is nested too deep")
        alternatives = self._alternatives.of(schema, where)
        if any(len(option["type"]) == len(ANY_TYPE) and not _KEYWORDS & option.keys() for option in alternatives):
            self._names[key] = self._anything()
            return self._names[key]
        name = self._names[key] = self._rules.reserve()
        values = [value for option in alternatives for value in self._values(option, where, depth + 1)]
        if values:
            self._rules.define(name, " | ".join(values))
            return name
        self._names[key] = None
        self._rules.define(name, '"" | ""')  # a reference to it has no end, or is in another alternative
        return None

    def _values(self, alternative: Mapping[str, Any], where: str, depth: int) -> list[str]:
        if "enum" in alternative:
            return [self._constant(value) for value in alternative["enum"] if self._fits(value, alternative, where)]
        kinds, values = alternative["type"], list[str]()
        if "string" in kinds:
            values.append(self._text(text_terminal(alternative, self._alternatives, where)))
        if "object" in kinds and (value := self._object(alternative, where, depth)) is not None:
            values.append(value)
        if "array" in kinds and (value := self._array(alternative, where, depth)) is not None:
            values.append(value)
        if scalars := [kind for kind in _SCALARS if kind in kinds]:
            keywords = {key: value for key, value in alternative.items() if key in _OF_SCALARS}
            values.append(self._rules.json({"type": scalars, **keywords}, lenient=not self._alternatives.strict))
        return values

    def _fits(self, value: object, alternative: Mapping[str, Any], where: str) -> bool:
        """Return whether a constant fits the other keywords of its alternative."""
        if _has_quote(value):
            self._alternatives.refuse(where, "a constant with a quote marker in it")
            return False
        if isinstance(value, str):
            return fits_as_text(value, alternative)
        if _OF_SCALARS & alternative.keys() and isinstance(value, int | float):
            self._alternatives.refuse(where, min(_OF_SCALARS & alternative.keys()), "beside enum")
        return True

    def _object(self, alternative: Mapping[str, Any], where: str, depth: int) -> str | None:
        def of_name(key: str, schema: object, place: str) -> str | None:
            if _QUOTE in key:
                self._alternatives.refuse(place, "a name with a quote marker in it")
                return None
            value = self.value(schema, place, depth)
            return None if value is None else f"{self._key(key)} {value}"

        def of_names(terminal: str, schema: object) -> str | None:
            value = self.value(schema, f"{where}.additionalProperties", depth)
            return None if value is None else f'{self._rules.terminal(terminal)} ":" {value}'

        if (allowed := members(alternative, self._alternatives, where)) is None:
            return None
        inner = member_sequence(self._rules, allowed, of_name, of_names, '","')
        return None if inner is None else f'"{{" {inner} "}}"'

    def _array(self, alternative: Mapping[str, Any], where: str, depth: int) -> str | None:
        for keyword in ("contains", "uniqueItems"):
            if alternative.get(keyword, False) is not False and alternative.get("maxItems") != 1:
                self._alternatives.refuse(where, keyword)
        prefix, items = alternative.get("prefixItems", []), alternative.get("items", True)
        if isinstance(items, list):
            prefix, items = items, alternative.get("additionalItems", True)
        min_items, max_items = alternative.get("minItems", 0), alternative.get("maxItems")
        item = self.value(items, f"{where}.items", depth)
        if item is None:
            max_items = len(prefix) if max_items is None else min(max_items, len(prefix))
        first = [self.value(schema, f"{where}.prefixItems", depth) for schema in prefix]
        # From the last to the first: what may follow, or nothing where there are enough.
        tail: str | None = ""
        if max_items is None or max_items > len(prefix):
            n_more = max(0, min_items - len(prefix))
            if prefix:
                tail = _times(f'"," {item}', n_more, None if max_items is None else max_items - len(prefix))
            else:
                further = _times(f'"," {item}', max(0, n_more - 1), None if max_items is None else max_items - 1)
                tail = f"{item} {further}" if n_more else f"({item} {further})?"
        elif min_items > len(prefix):
            tail = None
        for index in range(min(len(prefix), len(prefix) if max_items is None else max_items) - 1, -1, -1):
            is_optional = index >= min_items
            if first[index] is None or tail is None:
                tail = "" if is_optional else None
                continue
            comma = '","' if index else ""
            from_here = f"{comma} {first[index]} {tail}"
            tail = self._rules.add(f"({from_here})?" if is_optional else from_here)
        return None if tail is None else f'"[" {tail} "]"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._quoted(self._rules.text(value))
        if isinstance(value, Mapping):
            inner = ' "," '.join(f"{self._key(key)} {self._constant(item)}" for key, item in value.items())
            return f'"{{" {inner} "}}"'
        if isinstance(value, list):
            inner = ' "," '.join(self._constant(item) for item in value)
            return f'"[" {inner} "]"'
        return self._rules.text(json.dumps(value))

    def _anything(self) -> str:
        if not self._any:
            self._any = self._rules.reserve()
            plain = self._rules.json({"type": ["number", "boolean", "null"]}, lenient=True)
            array = f'"[" ({self._any} ("," {self._any})*)? "]"'
            pair = f'/[a-zA-Z0-9_-]+/ ":" {self._any}'
            free = f'"{{" ({pair} ("," {pair})*)? "}}"'
            self._rules.define(self._any, f"{plain} | {self._text(ANYTHING)} | {array} | {free}")
        return self._any

    def _text(self, terminal: str) -> str:
        no_quote = r"~/(.|\n)*<\|\"\|>(.|\n)*/"
        return f"{self._rules.text(_QUOTE)} {self._rules.ended(f'({terminal}) & {no_quote}', _QUOTE)}"

    def _quoted(self, inner: str) -> str:
        quote = self._rules.text(_QUOTE)
        return f"{quote} {inner} {quote}"

    def _key(self, key: str) -> str:
        if _BARE_KEY.fullmatch(key):
            return self._rules.text(f"{key}:")
        return f"{self._quoted(self._rules.text(key))} {self._rules.text(':')}"


def _has_quote(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_quote, [*value, *value.values()]))
    return _QUOTE in value if isinstance(value, str) else isinstance(value, list) and any(map(_has_quote, value))


def _times(item: str, min_times: int, max_times: int | None) -> str:
    if max_times == 0:
        return ""
    return f"({item}){{{min_times},{'' if max_times is None else max_times}}}"
