"""Values of Gemma 4's calls by a JSON schema: bare keys, strings between quote markers, the rest as JSON.

Knows JSON schemas and one notation.  Invariant: a keyword of a strict schema is enforced or refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.grammar.rules import ANYTHING, Rules, repeated

_Schema = Mapping[str, Any]
_QUOTE: Final = '<|"|>'
_ENFORCED: Final = frozenset(
    [
        *("type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const"),
        *("anyOf", "oneOf", "$ref", "$defs", "definitions", "minLength", "maxLength"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"),
    ]
)
_ALL_TYPES: Final = ("object", "array", "string", "number", "boolean", "null")


def gemma_value(rules: Rules, schema: _Schema, *, strict: bool) -> str:
    """An expression for a value.  Raises GrammarError for a strict schema that cannot be enforced."""
    return _ValueWriter(rules, schema, strict).value(schema)


class _ValueWriter:
    """Writes the rules of one schema; ``named``: those of its definitions, by reference."""

    def __init__(self, rules: Rules, root: _Schema, strict: bool) -> None:
        self._rules, self._root, self._strict = rules, root, strict
        self._named: dict[str, str] = {}
        self._any = ""

    def value(self, schema: object) -> str:
        if schema is True or schema == {}:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise GrammarError("a schema of false allows no value")
        if self._strict and (unknown := schema.keys() - _ENFORCED):
            raise GrammarError(f"this model's call format cannot enforce {min(unknown)}")
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "const" in schema or "enum" in schema:
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(self._constant(choice) for choice in choices)})"
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return f"({' | '.join(self.value(option) for option in schema[key])})"
        kinds = schema.get("type", _ALL_TYPES if "properties" not in schema else "object")
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return f"({' | '.join(self._typed(kind, schema) for kind in kinds)})"

    def _typed(self, kind: str, schema: _Schema) -> str:
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return self._string(f"/(.|\\n){repeated(schema, 'minLength', 'maxLength')}/")
        kept = {key: value for key, value in schema.items() if key not in ("anyOf", "oneOf", "properties", "items")}
        return self._rules.json({**kept, "type": kind}, lenient=not self._strict)

    def _object(self, schema: _Schema) -> str:
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties:
            return self._free_object() if schema.get("additionalProperties") is not False else '"{" "}"'
        # Commas stand between those that are there: all that may follow the first, by what comes first.
        items = [(self._rules.add(f"{self._key(key)} {self.value(one)}"), key in required)
                 for key, one in properties.items()]  # fmt: skip
        tail, whole = "", list[str]()
        for item, needed in reversed(items):
            whole.append(f"{item} {tail}")
            if needed:
                whole = [whole[-1]]
            tail = self._rules.add(f'"," {item} {tail}' if needed else f'("," {item})? {tail}')
        if not any(needed for _, needed in items):
            whole.append('""')
        return f'"{{" ({" | ".join(reversed(whole))}) "}}"'

    def _array(self, schema: _Schema) -> str:
        item = self._rules.add(self.value(schema.get("items", True)))
        repeated(schema, "minItems", "maxItems")  # they are numbers
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        bounds = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} ("," {item}){bounds}){"?" if least == 0 else ""} "]"'

    def _constant(self, value: object) -> str:
        if isinstance(value, str):
            return self._string(self._rules.text(value))
        if isinstance(value, Mapping):
            inner = ' "," '.join(f"{self._key(key)} {self._constant(one)}" for key, one in value.items())
            return f'"{{" {inner} "}}"'
        if isinstance(value, list):
            inner = ' "," '.join(self._constant(one) for one in value)
            return f'"[" {inner} "]"'
        return self._rules.json({"const": value}, lenient=False)

    def _reference(self, reference: str) -> str:
        """The rule of a definition; one that is being written may refer to itself."""
        if reference not in self._named:
            target: object = self._root
            for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
                target = target.get(step) if isinstance(target, Mapping) else None
            if not reference.startswith("#") or target is None:
                raise GrammarError(f"the reference {reference} leads nowhere")
            self._named[reference] = self._rules.reserve()
            self._rules.define(self._named[reference], self.value(target))
        return self._named[reference]

    def _anything(self) -> str:
        if not self._any:
            self._any = self._rules.reserve()
            plain = self._rules.json({"type": ["number", "boolean", "null"]}, lenient=True)
            array = f'"[" ({self._any} ("," {self._any})*)? "]"'
            text = self._string(ANYTHING)
            self._rules.define(self._any, f"{plain} | {text} | {array} | {self._free_object()}")
        return self._any

    def _free_object(self) -> str:
        pair = f'/[a-zA-Z0-9_-]+/ ":" {self._anything()}'
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _string(self, inner: str) -> str:
        quote = self._rules.text(_QUOTE)
        return f"{quote} {inner} {quote}"

    def _key(self, key: str) -> str:
        return self._rules.text(f"{key}:")
