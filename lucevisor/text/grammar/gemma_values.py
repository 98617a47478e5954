"""Values of Gemma 4's calls by a JSON schema: bare keys, strings between quote markers, the rest as JSON.

Knows JSON schemas and one notation.  Invariant: what the grammar allows is read as a value that fits the schema; a
keyword of a strict schema is enforced or refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.grammar.members import members, sequence
from lucevisor.text.grammar.rules import ANYTHING, Rules
from lucevisor.text.grammar.texts import text_terminal
from lucevisor.text.patterns import matches
from lucevisor.text.references import Schema
from lucevisor.text.tools.parameters import ANY_TYPE

MAX_DEPTH: Final = 24
"""Schemas within schemas, references aside."""

_QUOTE: Final = '<|"|>'
_BARE_KEY: Final = re.compile(r"[^\s:=,{}\[\]<>\"']+")
_SCALARS: Final = ("null", "boolean", "integer", "number")
_OF_SCALARS: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])


def gemma_object(rules: Rules, schema: Schema, *, strict: bool) -> str:
    """An expression for an object.  Raises GrammarError for a strict schema that cannot be enforced."""
    found = _ValueWriter(rules, schema.get("$defs", {}), strict).value(schema, "parameters", 0)
    if found is None:
        raise GrammarError("they allow no arguments, as required properties are forbidden")
    return found


class _ValueWriter:
    """Writes the rules of the schemas of one tool, each once, so that they may refer to themselves."""

    def __init__(self, rules: Rules, definitions: Schema, strict: bool) -> None:
        self._rules = rules
        self._alternatives = Alternatives(definitions, strict=strict)
        self._named: dict[str, str | None] = {}
        self._any = ""

    def value(self, schema: object, where: str, depth: int) -> str | None:
        """The rule of a schema; None if it allows no value."""
        key = json.dumps(schema, sort_keys=True)
        if key in self._named:
            return self._named[key]
        if depth > MAX_DEPTH:
            raise GrammarError(f"{where}: it is nested too deep")
        found = self._alternatives.of(schema, where)
        if any(_is_anything(one) for one in found):
            self._named[key] = self._anything()
            return self._named[key]
        name = self._named[key] = self._rules.reserve()
        written = [text for one in found for text in self._written(one, where, depth + 1)]
        if written:
            self._rules.define(name, " | ".join(written))
            return name
        self._named[key] = None
        self._rules.define(name, '"" | ""')  # what refers to it has no end, or is another alternative
        return None

    def _written(self, one: Mapping[str, Any], where: str, depth: int) -> list[str]:
        """Expressions for the values of an alternative, by type."""
        if "enum" in one:
            return [self._constant(value) for value in one["enum"] if self._fits(value, one, where)]
        kinds = one["type"]
        found = [self._string(one, where)] if "string" in kinds else []
        if "object" in kinds and (written := self._object(one, where, depth)) is not None:
            found.append(written)
        if "array" in kinds and (written := self._array(one, where, depth)) is not None:
            found.append(written)
        if scalars := [kind for kind in _SCALARS if kind in kinds]:
            kept = {key: value for key, value in one.items() if key in _OF_SCALARS}
            found.append(self._rules.json({"type": scalars, **kept}, lenient=not self._alternatives.strict))
        return found

    def _fits(self, value: object, one: Mapping[str, Any], where: str) -> bool:
        """Whether a constant fits the other keywords of its alternative."""
        if _has_quote(value):
            self._alternatives.refuse(where, "a constant with a quote marker in it")
            return False
        if isinstance(value, str):
            lengths = one.get("minLength", 0) <= len(value) <= one.get("maxLength", len(value))
            return lengths and all(matches(each, value) for each in one.get("patterns", ()))
        if _OF_SCALARS & one.keys() and isinstance(value, int | float):
            self._alternatives.refuse(where, min(_OF_SCALARS & one.keys()), "beside enum")
        return True

    def _object(self, one: Mapping[str, Any], where: str, depth: int) -> str | None:
        def named(key: str, schema: object, place: str) -> str | None:
            if _QUOTE in key:
                self._alternatives.refuse(place, "a name with a quote marker in it")
                return None
            value = self.value(schema, place, depth)
            return None if value is None else f"{self._key(key)} {value}"

        def other(name: str, schema: object) -> str | None:
            value = self.value(schema, f"{where}.additionalProperties", depth)
            return None if value is None else f'{self._rules.terminal(name)} ":" {value}'

        inner = sequence(self._rules, members(one, self._alternatives, where), named, other, '","')
        return None if inner is None else f'"{{" {inner} "}}"'

    def _array(self, one: Mapping[str, Any], where: str, depth: int) -> str | None:
        for keyword in ("contains", "uniqueItems"):
            if one.get(keyword, False) is not False and one.get("maxItems") != 1:
                self._alternatives.refuse(where, keyword)
        first, rest = one.get("prefixItems", []), one.get("items", True)
        if isinstance(rest, list):
            first, rest = rest, one.get("additionalItems", True)
        least, most = one.get("minItems", 0), one.get("maxItems")
        item = self.value(rest, f"{where}.items", depth)
        if item is None:
            most = len(first) if most is None else min(most, len(first))
        items = [self.value(schema, f"{where}.prefixItems", depth) for schema in first]
        # From the last to the first: what may follow, or nothing where there are enough.
        tail: str | None = ""
        if most is None or most > len(first):
            n_least = max(0, least - len(first))
            if first:
                tail = _times(f'"," {item}', n_least, None if most is None else most - len(first))
            else:
                more = _times(f'"," {item}', max(0, n_least - 1), None if most is None else most - 1)
                tail = f"{item} {more}" if n_least else f"({item} {more})?"
        elif least > len(first):
            tail = None
        for index in range(min(len(first), len(first) if most is None else most) - 1, -1, -1):
            if items[index] is None or tail is None:
                tail = None if index < least else ""
                continue
            comma = '","' if index else ""
            tail = self._rules.add(
                f"{comma} {items[index]} {tail}" if index < least else f"({comma} {items[index]} {tail})?"
            )
        return None if tail is None else f'"[" {tail} "]"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._quoted(self._rules.text(value))
        if isinstance(value, Mapping):
            inner = ' "," '.join(f"{self._key(key)} {self._constant(one)}" for key, one in value.items())
            return f'"{{" {inner} "}}"'
        if isinstance(value, list):
            inner = ' "," '.join(self._constant(one) for one in value)
            return f'"[" {inner} "]"'
        return self._rules.text(json.dumps(value))

    def _anything(self) -> str:
        if not self._any:
            self._any = self._rules.reserve()
            plain = self._rules.json({"type": ["number", "boolean", "null"]}, lenient=True)
            array = f'"[" ({self._any} ("," {self._any})*)? "]"'
            self._rules.define(self._any, f"{plain} | {self._text(ANYTHING)} | {array} | {self._free_object()}")
        return self._any

    def _free_object(self) -> str:
        pair = f'/[a-zA-Z0-9_-]+/ ":" {self._any}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _string(self, one: Mapping[str, Any], where: str) -> str:
        return self._text(text_terminal(one, self._alternatives, where))

    def _text(self, terminal: str) -> str:
        but = r"~/(.|\n)*<\|\"\|>(.|\n)*/"
        return f"{self._rules.text(_QUOTE)} {self._rules.ended(f'({terminal}) & {but}', _QUOTE)}"

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


def _is_anything(one: Mapping[str, Any]) -> bool:
    """Whether an alternative allows any value: it has no keyword but annotations."""
    return len(one["type"]) == len(ANY_TYPE) and not _LIMITS & one.keys()


_LIMITS: Final = frozenset(
    [
        *("enum", "properties", "patternProperties", "additionalProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("contains", "uniqueItems", "minLength", "maxLength", "patterns", "format"),
        *_OF_SCALARS,
    ]
)


def _times(item: str, least: int, most: int | None) -> str:
    """An item so many times."""
    if most == 0:
        return ""
    return f"({item}){{{least},{'' if most is None else most}}}"
