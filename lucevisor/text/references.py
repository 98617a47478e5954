"""References of a JSON schema, resolved within it by JSON pointer; in a flattened schema each is ``#/$defs/NAME``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from lucevisor.errors import show
from lucevisor.text.llguidance_limits import GrammarError

Schema = Mapping[str, Any]

REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
VALUES: Final = frozenset(["enum", "const", "default", "example", "examples"])
"""Keywords whose values are never schemas."""

NAMED: Final = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies"])
"""Keywords whose values are schemas by name."""

_SUBSCHEMAS: Final = frozenset(
    [
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "contentSchema"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else"),
    ]
)
_PREFIX: Final = "#/$defs/"
_DEFINITIONS: Final = frozenset(["$defs", "definitions"])
_LEFT_OUT: Final = frozenset(["$schema", "$id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", *_DEFINITIONS])


class UnresolvedReferenceError(GrammarError):
    """A reference leads nowhere within its schema."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema within a document.  ``path``: a pointer to it, for messages."""

    schema: Any
    path: str

    def child(self, *steps: str | int) -> Place:
        """Return what lies under these keys; raises LookupError."""
        value, path = self.schema, self.path
        for step in steps:
            value = value[step]
            path += "/" + str(step).replace("~", "~0").replace("/", "~1")
        return Place(value, path)


def flattened(schema: Schema, *, lenient: bool = True) -> dict[str, Any]:
    """Return the schema with its references resolved; ``lenient``: as far as it can.
    Raises UnresolvedReferenceError."""
    return Flattener(schema, lenient).flattened()


def resolved_name(schema: Schema) -> str:
    name: str = schema["$ref"].removeprefix(_PREFIX)
    return name


def resolved(schema: Schema, definitions: Schema) -> Any:
    return definitions[resolved_name(schema)]


def with_definitions(schema: Schema, definitions: Schema) -> dict[str, Any]:
    """Return a part of a flattened schema as a schema of its own, with the definitions that it reaches."""
    reached: dict[str, Any] = {}
    waiting: list[Any] = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            name = reference.removeprefix(_PREFIX)
            if name not in reached:
                reached[name] = definitions[name]
                waiting.append(reached[name])
    return {**schema, "$defs": reached} if reached else dict(schema)


def _references(schema: Any) -> Iterator[str]:
    """Yield the references of a flattened schema, but not those of its definitions."""
    if isinstance(schema, list):
        for item in schema:
            yield from _references(item)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            elif key in NAMED and isinstance(value, Mapping):
                yield from _references(list(value.values()))
            elif key not in VALUES and key not in _DEFINITIONS:
                yield from _references(value)


class Flattener:
    """Flattens one schema; ``paths``: pointers to its definitions in that schema."""

    def __init__(self, root: Schema, lenient: bool) -> None:
        self._root, self._lenient = Place(root, "#"), lenient
        self._names: dict[int, str] = {}  # of definitions, by their schema
        self._definitions: dict[str, Any] = {}
        self.paths: dict[str, str] = {}

    def flattened(self) -> dict[str, Any]:
        # Without ``$schema``, as in older dialects a keyword beside a reference would not count.
        result: dict[str, Any] = self._flat(self._root)
        return {**result, "$defs": self._definitions} if self._definitions else result

    def _flat(self, place: Place) -> Any:
        schema = place.schema
        if isinstance(schema, list):
            return [self._flat(place.child(i)) for i in range(len(schema))]
        if not isinstance(schema, Mapping):
            return schema
        result: dict[str, Any] = {}
        for key in schema:
            if key in REFERENCES:
                if (name := self._definition(place, key)) is not None:
                    result["$ref"] = _PREFIX + name
            elif key in NAMED and isinstance(schema[key], Mapping):
                result[key] = {name: self._flat(place.child(key, name)) for name in schema[key]}
            elif key in VALUES:
                result[key] = schema[key]
            elif key in _SUBSCHEMAS:
                result[key] = self._flat(place.child(key))
            elif key not in _LEFT_OUT and not any(True for _ in _references(schema[key])):
                result[key] = schema[key]
        return result

    def _definition(self, place: Place, key: str) -> str | None:
        """The name of the definition that a reference leads to; None: nowhere."""
        try:
            target = self._target(place, key)
        except UnresolvedReferenceError:
            if not self._lenient:
                raise
            return None
        # There is one True and one False, and they need no more than one definition each.
        if id(target.schema) not in self._names:
            self._names[id(target.schema)] = name = f"d{len(self._names)}"
            self.paths[name] = target.path
            self._definitions[name] = None  # its name is reserved first, because it may refer to itself
            self._definitions[name] = self._flat(target)
        return self._names[id(target.schema)]

    def _target(self, place: Place, key: str) -> Place:
        """Return what the reference that a schema has under a key leads to; raises UnresolvedReferenceError."""
        reference = place.schema[key]
        target = self._resolved(reference) if key == "$ref" and isinstance(reference, str) else None
        if target is None or not isinstance(target.schema, Mapping | bool):
            raise UnresolvedReferenceError(
                f"{key} at {place.path} leads nowhere: {show(reference)} is not in this schema"
            )
        return target

    def _resolved(self, reference: str) -> Place | None:
        pointer, *steps = unquote(reference).split("/")
        target = self._root
        try:
            for step in steps:
                key = step.replace("~1", "/").replace("~0", "~")
                target = target.child(int(key) if isinstance(target.schema, list) and key.isdigit() else key)
        except (LookupError, TypeError, ValueError):
            return None
        return target if pointer == "#" else None
