"""The parameters of a function by its JSON schema, and their values read from text without quotes.

A value that does not match its schema stays text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from lucevisor.text import json_text
from lucevisor.text.json_text import Number
from lucevisor.text.patterns import MAX_PATTERNS, matches
from lucevisor.text.references import Schema, flattened, resolved

Tools = Sequence[Mapping[str, object]]
"""Tools as OpenAI clients send them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

ANY_TYPE: Final = frozenset(["null", "boolean", "object", "array", "integer", "number", "string"])
"""All types; ``number`` without ``integer`` stands for numbers with a fraction."""

_PYTHON_TYPES: Final[Mapping[str, type]] = {"boolean": bool, "object": dict, "array": list, "null": type(None)}
# How templates that print values with Python's str() teach models to write JSON's words.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_BLANKS: Final = " \t\r\n"


def has_tool(tools: Tools, name: str) -> bool:
    """Return whether a function of this name was offered."""
    return any(function_of(tool).get("name") == name for tool in tools)


def function_of(tool: Mapping[str, object]) -> Mapping[str, object]:
    """Return the function of a tool; without one the tool itself."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}


class Parameters:
    """The parameters of one of the offered functions; none are declared if it is not among them."""

    def __init__(self, tools: Tools, name: str) -> None:
        self._functions = (function for tool in tools if (function := function_of(tool)).get("name") == name)

    @cached_property
    def _schema(self) -> Schema:
        schema = next(self._functions, {}).get("parameters")
        try:
            return flattened(schema) if isinstance(schema, Mapping) else {}
        except RecursionError:
            return {}

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(_names(self._schema, self._definitions))

    @property
    def _definitions(self) -> Schema:
        definitions: Schema = self._schema.get("$defs", {})
        return definitions

    def read(self, name: str, text: str) -> object:
        """Return the value of a parameter, typed by the schema.  The parameter need not be declared."""
        return read_value(text, self.schema(name))

    def schema(self, name: str) -> Schema:
        """Return the flattened schema of one parameter; empty if it is not declared."""
        parts = _members(self._schema, name, self._definitions, {})
        return {"allOf": parts, "$defs": self._definitions} if parts else {}


def read_value(text: str, schema: Schema) -> object:
    """Return a value written without quotes: a constant text, JSON of a type that the schema allows, or the text."""
    definitions = schema.get("$defs", {})
    kinds = types(schema, definitions)
    if kinds == {"string"} or ("string" in kinds and text in _constant_texts(schema, definitions)):
        return text
    try:
        value = json_text.parse(_PYTHON_WORDS.get(text.strip(_BLANKS), text))
    except ValueError:
        return text
    if kinds == ANY_TYPE:
        return value
    if isinstance(value, Number):
        return value if "number" in kinds else (value.as_integer() if "integer" in kinds else None) or text
    return value if any(isinstance(value, _PYTHON_TYPES[kind]) for kind in kinds & _PYTHON_TYPES.keys()) else text


def first_readable(texts: Iterable[str], schema: Schema) -> int:
    """The index of the value: the first text that is JSON where the schema allows more than text, else 0."""
    kinds = types(schema, schema.get("$defs", {}))
    for index, text in enumerate(texts):
        if index == 0 and (kinds == {"string"} or not text.lstrip(_BLANKS).startswith(("{", "[", '"'))):
            break
        if not isinstance(read_value(text, schema), str):
            return index
        if "string" in kinds:
            with suppress(ValueError):
                json_text.parse(text)
                return index
    return 0


def types(schema: object, definitions: Schema) -> frozenset[str]:
    return _types(schema, definitions, {})


def type_names(type_: object) -> frozenset[str]:
    names = [type_] if isinstance(type_, str) else type_ if isinstance(type_, list) else None
    if names is None:
        return ANY_TYPE
    kinds = {name for name in names if isinstance(name, str)}
    return frozenset(kinds | {"integer"} if "number" in kinds else kinds)


def type_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "null")


def _types(schema: object, definitions: Schema, known: dict[int, frozenset[str]]) -> frozenset[str]:
    """``known``: of schemas looked at before; one that refers to itself adds nothing."""
    if not isinstance(schema, Mapping):
        return ANY_TYPE if schema is not False else frozenset()
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = ANY_TYPE
    kinds = type_names(schema.get("type"))
    if "const" in schema:
        kinds &= {type_of(schema["const"])}
    if isinstance(choices := schema.get("enum"), list):
        kinds &= frozenset(map(type_of, choices))
    for part in _conjuncts(schema, definitions):
        kinds &= _types(part, definitions, known)
    for options in _choices(schema):
        kinds &= frozenset().union(*(_types(option, definitions, known) for option in options))
    known[id(schema)] = kinds
    return kinds


def _conjuncts(schema: Schema, definitions: Schema) -> list[Any]:
    target = [resolved(schema, definitions)] if isinstance(schema.get("$ref"), str) else []
    return target + (parts if isinstance(parts := schema.get("allOf"), list) else [])


def _choices(schema: Schema) -> list[list[Any]]:
    return [options for key in ("anyOf", "oneOf") if isinstance(options := schema.get(key), list)]


def _parts(schema: object, definitions: Schema) -> Iterator[Schema]:
    """Yield a schema and the schemas for the same value that it combines (allOf, anyOf and the like), each once."""
    waiting, seen = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += _conjuncts(part, definitions) + _conditional(part)
            waiting += [option for options in _choices(part) for option in options]


def _conditional(schema: Schema) -> list[object]:
    """The subschemas that apply to some values only (if, then, else and the like)."""
    schemas = [schema[key] for key in ("then", "else") if key in schema]
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(by_name := schema.get(key), Mapping):
            schemas += by_name.values()
    return schemas


def _constant_texts(schema: object, definitions: Schema) -> set[str]:
    texts = set[str]()
    for part in _parts(schema, definitions):
        choices = part.get("enum")
        constants = [part.get("const"), *(choices if isinstance(choices, list) else ())]
        texts.update(constant for constant in constants if isinstance(constant, str))
    return texts


def _names(schema: object, definitions: Schema) -> Iterator[str]:
    for part in _parts(schema, definitions):
        if isinstance(properties := part.get("properties"), Mapping):
            yield from properties
        if isinstance(required := part.get("required"), list):
            yield from (name for name in required if isinstance(name, str))


def _members(schema: object, name: str, definitions: Schema, known: dict[int, list[Any]]) -> list[Any]:
    """The schemas that hold for a property of an object that a schema describes; ``known``: see ``_types``."""
    if not isinstance(schema, Mapping):
        return []
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = []
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    schemas = [properties[name]] if isinstance(properties, Mapping) and name in properties else []
    if isinstance(patterns, Mapping):
        schemas += [patterns[pattern] for pattern in [*patterns][:MAX_PATTERNS] if matches(pattern, name)]
    if not schemas and isinstance(additional := schema.get("additionalProperties"), Mapping):
        schemas = [additional]
    for part in _conjuncts(schema, definitions):
        for member in _members(part, name, definitions, known):
            if not any(member is other for other in schemas):
                schemas.append(member)
    for options in [*_choices(schema), _conditional(schema)]:
        by_option = [_members(option, name, definitions, known) for option in options]
        if any(by_option):
            schemas.append({"anyOf": [{"allOf": parts} for parts in by_option if parts]})
    known[id(schema)] = schemas
    return schemas
