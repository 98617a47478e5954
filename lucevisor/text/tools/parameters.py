"""The parameters of a function by its JSON schema, and their values read from text without quotes.

Knows what a schema says of types and constants, no formats.  Invariant: a value that cannot be read as its schema says
stays text; nothing a model wrote is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, Final

from lucevisor.text import json_text
from lucevisor.text.json_text import Number
from lucevisor.text.patterns import matches
from lucevisor.text.references import Schema, flattened, resolved
from lucevisor.text.tools.call import Tools, function_of

ANY_TYPE: Final = frozenset(["null", "boolean", "object", "array", "integer", "number", "string"])
"""All types; ``number`` without ``integer`` stands for numbers with a fraction."""

_PYTHON_TYPES: Final[Mapping[str, type]] = {"boolean": bool, "object": dict, "array": list, "null": type(None)}
# How templates that print values with Python's str() teach models to write JSON's words.
_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_BLANKS: Final = " \t\r\n"


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
        """The names that the schema declares."""
        return frozenset(_names(self._schema, self._definitions))

    @property
    def _definitions(self) -> Schema:
        found: Schema = self._schema.get("$defs", {})
        return found

    def read(self, name: str, text: str) -> object:
        """Return a value as the schema says, of a parameter that need not be declared."""
        return read_value(text, self.schema(name))

    def schema(self, name: str) -> Schema:
        """Return what the schema says of one parameter, as a flattened schema."""
        parts = list(_members(self._schema, name, self._definitions))
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
    """The index of the text that is the value: the first that is JSON where the schema allows more than text, else 0.

    ``texts``: what stands up to each closing tag, as a value may have such tags in it.
    """
    kinds = types(schema, schema.get("$defs", {}))
    for index, text in enumerate(texts):
        if index == 0 and (kinds == {"string"} or not text.lstrip(_BLANKS).startswith(("{", "[", '"'))):
            break
        if not isinstance(read_value(text, schema), str) or ("string" in kinds and _is_json(text)):
            return index
    return 0


def types(schema: object, definitions: Schema) -> frozenset[str]:
    """Return the types that a flattened schema allows, as far as it says."""
    return _types(schema, definitions, frozenset())


def type_names(named: object) -> frozenset[str]:
    """Return the types that the keyword ``type`` allows."""
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else None
    if names is None:
        return ANY_TYPE
    found = {name for name in names if isinstance(name, str)}
    return frozenset(found | {"integer"} if "number" in found else found)


def type_of(value: object) -> str:
    """Return the type of a JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), "null")


def _types(schema: object, definitions: Schema, inside: frozenset[str]) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return ANY_TYPE if schema is not False else frozenset()
    kinds = type_names(schema.get("type"))
    if "const" in schema:
        kinds &= {type_of(schema["const"])}
    if isinstance(choices := schema.get("enum"), list):
        kinds &= frozenset(map(type_of, choices))
    for part, within in _conjuncts(schema, definitions, inside):
        kinds &= _types(part, definitions, within)
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            kinds &= frozenset().union(*(_types(option, definitions, inside) for option in options))
    return kinds


def _conjuncts(schema: Schema, definitions: Schema, inside: frozenset[str]) -> Iterator[tuple[object, frozenset[str]]]:
    """Yield what holds beside a schema's own keywords; ``inside``: the references that led here."""
    if isinstance(reference := schema.get("$ref"), str) and reference not in inside:
        yield resolved(schema, definitions), inside | {reference}
    if isinstance(parts := schema.get("allOf"), list):
        for part in parts:
            yield part, inside


def _parts(
    schema: object, definitions: Schema, inside: frozenset[str] = frozenset()
) -> Iterator[tuple[Schema, frozenset[str]]]:
    """Yield a schema and all that it puts together or chooses from, for the same value."""
    if isinstance(schema, Mapping):
        yield schema, inside
        for part, within in _conjuncts(schema, definitions, inside):
            yield from _parts(part, definitions, within)
        for key in ("anyOf", "oneOf"):
            options = schema.get(key)
            for option in options if isinstance(options, list) else ():
                yield from _parts(option, definitions, inside)
        for option in _conditional(schema):
            yield from _parts(option, definitions, inside)


def _conditional(schema: Schema) -> list[object]:
    """The schemas of a schema that hold or not, as the value is."""
    found = [schema[key] for key in ("then", "else") if key in schema]
    for key in ("dependentSchemas", "dependencies"):
        if isinstance(named := schema.get(key), Mapping):
            found += named.values()
    return found


def _constant_texts(schema: object, definitions: Schema) -> set[str]:
    found = set[str]()
    for part, _ in _parts(schema, definitions):
        choices = part.get("enum")
        found.update(
            choice
            for choice in [part.get("const"), *(choices if isinstance(choices, list) else ())]
            if isinstance(choice, str)
        )
    return found


def _names(schema: object, definitions: Schema) -> Iterator[str]:
    for part, _ in _parts(schema, definitions):
        if isinstance(properties := part.get("properties"), Mapping):
            yield from properties
        if isinstance(required := part.get("required"), list):
            yield from (name for name in required if isinstance(name, str))


def _members(schema: object, name: str, definitions: Schema, inside: frozenset[str] = frozenset()) -> Iterator[Any]:
    """Yield schemas that hold for a property of an object that a schema describes."""
    if not isinstance(schema, Mapping):
        return
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    own = [properties[name]] if isinstance(properties, Mapping) and name in properties else []
    if isinstance(patterns, Mapping):
        own += [one for pattern, one in patterns.items() if matches(pattern, name)]
    if not own and isinstance(others := schema.get("additionalProperties"), Mapping):
        own = [others]
    yield from own
    for part, within in _conjuncts(schema, definitions, inside):
        yield from _members(part, name, definitions, within)
    chosen = [options for key in ("anyOf", "oneOf") if isinstance(options := schema.get(key), list)]
    for options in [*chosen, _conditional(schema)]:
        found = [list(_members(option, name, definitions, inside)) for option in options]
        if any(found):
            yield {"anyOf": [{"allOf": parts} for parts in found if parts]}


def _is_json(text: str) -> bool:
    try:
        json_text.parse(text)
    except ValueError:
        return False
    return True
