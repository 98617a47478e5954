"""References of a JSON schema, resolved within it by pointer, identifier and anchor; nothing is fetched.

In a flattened schema each reference is ``#/$defs/NAME``, with a definition at its root.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

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
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
_LEFT_OUT: Final = frozenset(["$schema", "$id", "$recursiveAnchor", *_ANCHORS, *_DEFINITIONS])
_OLD_DRAFTS: Final = ("draft-03", "draft-04", "draft-06", "draft-07")


class UnresolvedReferenceError(GrammarError):
    """A reference leads nowhere within its schema."""


@dataclass(frozen=True, slots=True)
class Place:
    """A schema within a document.  ``path``: a pointer to it, for messages; ``base``: its base URI, where it counts."""

    schema: Any
    path: str
    base: str = ""

    def child(self, *steps: str | int) -> Place:
        """Return what lies under these keys; raises LookupError."""
        value, path = self.schema, self.path
        for step in steps:
            value = value[step]
            path += "/" + str(step).replace("~", "~0").replace("/", "~1")
        return Place(value, path, self.base)


class Document:
    """A root schema, and what may be referred to in it."""

    def __init__(self, root: Schema) -> None:
        dialect = root.get("$schema")
        self.ref_stands_alone = isinstance(dialect, str) and any(draft in dialect for draft in _OLD_DRAFTS)
        """Whether the dialect ignores keywords beside ``$ref``."""
        self._id_key = "id" if isinstance(dialect, str) and "draft-04" in dialect else "$id"
        self.root = Place(root, "#", self._base(root, ""))
        self._resources: dict[str, Place] = {}  # the root, and every schema with an identifier of its own
        self._anchors: dict[tuple[str, str], Place] = {}
        self._n_dynamic: dict[str, int] = {}
        self._index()

    def child(self, place: Place, *steps: str | int) -> Place:
        """Return what lies under these keys, with its base; raises LookupError."""
        for step in steps:
            place = place.child(step)
            if isinstance(place.schema, Mapping):
                place = replace(place, base=self._base(place.schema, place.base))
        return place

    def target(self, place: Place, key: str) -> Place:
        """Return what the reference that a schema has under a key leads to; raises UnresolvedReferenceError."""
        reference = place.schema[key]
        try:
            if key == "$recursiveRef" and len({id(resource.schema) for resource in self._resources.values()}) > 1:
                raise LookupError(reference)
            if key == "$dynamicRef" and self._n_dynamic.get(reference.partition("#")[2], 0) > 1:
                raise LookupError(reference)
            target = self._resolve(reference, place.base)
        except (LookupError, TypeError, ValueError, AttributeError):  # a reference may be anything that JSON can be
            target = None
        if target is None or not isinstance(target.schema, Mapping | bool):
            raise UnresolvedReferenceError(
                f"{key} at {place.path} leads nowhere: {show(reference)} is not in this schema"
            )
        return target

    def _resolve(self, reference: str, base: str) -> Place:
        uri, fragment = urldefrag(base + reference if reference.startswith("#") else urljoin(base, reference))
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors[uri, fragment]
        place = self._resources[uri]
        for step in fragment.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(place.schema, Mapping | list):
                raise LookupError(reference)
            place = self.child(place, int(key) if isinstance(place.schema, list) and key.isdigit() else key)
        return place

    def _base(self, schema: Schema, base: str) -> str:
        identifier = schema.get(self._id_key)
        if (
            not isinstance(identifier, str)
            or identifier.startswith("#")
            or (self.ref_stands_alone and "$ref" in schema)
        ):
            return base
        try:
            return urldefrag(urljoin(base, identifier)).url
        except ValueError:  # it is no URI
            return base

    def _index(self) -> None:
        self._resources[""] = self._resources[self.root.base] = self.root
        waiting: list[tuple[Place, bool]] = [(self.root, False)]
        while waiting:
            place, by_name = waiting.pop()
            if isinstance(place.schema, list):
                waiting += [(self.child(place, i), False) for i in range(len(place.schema))]
            if not isinstance(place.schema, Mapping):
                continue
            if not by_name:
                self._add(place)
            for key in place.schema:
                if by_name or key not in VALUES:
                    waiting.append((self.child(place, key), not by_name and key in NAMED | _DEFINITIONS))

    def _add(self, place: Place) -> None:
        self._resources.setdefault(place.base, place)
        identifier = place.schema.get(self._id_key)
        if isinstance(identifier, str) and identifier.startswith("#"):
            self._anchors.setdefault((place.base, identifier[1:]), place)
        for key in _ANCHORS:
            anchor = place.schema.get(key)
            if isinstance(anchor, str):
                self._anchors.setdefault((place.base, anchor), place)
                self._n_dynamic[anchor] = self._n_dynamic.get(anchor, 0) + (key == "$dynamicAnchor")


def flattened(schema: Schema, *, lenient: bool = True) -> dict[str, Any]:
    """Return the schema with its references resolved, and the definitions that they reach; ``lenient``: as far as it
    can.  Raises UnresolvedReferenceError.
    """
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


def without_endless(schema: Mapping[str, Any]) -> dict[str, Any] | bool:
    """Return a flattened schema with False for each reference to a schema that has no value with an end."""
    definitions = schema.get("$defs", {})
    waiting, ending, n_before = list(definitions.items()), set[str](), -1
    while waiting and len(ending) > n_before:
        n_before = len(ending)
        # Definitions are listed in the order in which they were met, or are used: both ways, few rounds are enough.
        for name, definition in reversed(waiting):
            if _ends(definition, ending):
                ending.add(name)
        waiting = [(name, definition) for name, definition in reversed(waiting) if name not in ending]
    if not waiting:
        return dict(schema)
    definitions = {name: definition for name, definition in definitions.items() if name in ending}
    limited: dict[str, Any] | bool = _limited({**schema, "$defs": definitions}, ending)
    return limited


def _limited(schema: Any, names: Set[str]) -> Any:
    """The schema with False for each reference to a definition of another name."""
    if isinstance(schema, list):
        return [_limited(item, names) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema and resolved_name(schema) not in names:
        return False
    return {
        key: {name: _limited(inner, names) for name, inner in value.items()}
        if key in NAMED | {"$defs"} and isinstance(value, Mapping)
        else value if key in VALUES else _limited(value, names)
        for key, value in schema.items()
    }  # fmt: skip


def _ends(schema: object, ending: Set[str]) -> bool:
    """Return whether a schema has a value, if definitions of these names have one."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "$ref" in schema and resolved_name(schema) not in ending:
        return False
    if not all(_ends(part, ending) for part in _list(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        options = _list(schema, key)
        if options and not any(_ends(option, ending) for option in options):
            return False
    kinds = schema.get("type", "null")
    return any(_kind_ends(kind, schema, ending) for kind in (kinds if isinstance(kinds, list) else [kinds]))


def _kind_ends(kind: object, schema: Mapping[str, Any], ending: Set[str]) -> bool:
    if kind == "object":
        properties = schema.get("properties")
        required = [_item(properties, name) for name in _list(schema, "required")]
        return all(_ends(value, ending) for value in required if value is not None)
    if kind == "array":
        min_items = schema.get("minItems", 0)
        if not isinstance(min_items, int | float):
            return True
        ends = [_ends(item, ending) for item in [*_list(schema, "prefixItems"), schema.get("items")]]
        return all(ends[: math.ceil(min(min_items, len(ends)))])
    return True


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _item(properties: object, name: object) -> Any:
    return properties.get(name) if isinstance(properties, Mapping) and isinstance(name, str) else None


class Flattener:
    """Flattens one schema; ``paths``: pointers to its definitions in that schema."""

    def __init__(self, root: Schema, lenient: bool) -> None:
        self._document, self._lenient = Document(root), lenient
        self._names: dict[tuple[int, str], str] = {}  # of definitions, by their schema and its base
        self._definitions: dict[str, Any] = {}
        self.paths: dict[str, str] = {}

    def flattened(self) -> dict[str, Any]:
        # Without ``$schema``, as in older dialects a keyword beside a reference would not count.
        result: dict[str, Any] = self._flat(self._document.root)
        return {**result, "$defs": self._definitions} if self._definitions else result

    def _flat(self, place: Place) -> Any:
        schema = place.schema
        if isinstance(schema, list):
            return [self._flat(self._document.child(place, i)) for i in range(len(schema))]
        if not isinstance(schema, Mapping):
            return schema
        alone = self._document.ref_stands_alone and "$ref" in schema
        result: dict[str, Any] = {}
        references = list[dict[str, Any]]()
        for key in ["$ref"] if alone else schema:
            if key in REFERENCES:
                if (name := self._definition(place, key)) is not None:
                    references.append({"$ref": _PREFIX + name})
            elif key in NAMED and isinstance(schema[key], Mapping):
                result[key] = {name: self._flat(self._document.child(place, key, name)) for name in schema[key]}
            elif key in VALUES:
                result[key] = schema[key]
            elif key in _SUBSCHEMAS:
                result[key] = self._flat(self._document.child(place, key))
            elif key not in _LEFT_OUT and not any(True for _ in _references(schema[key])):
                result[key] = schema[key]
        if len(references) == 1:
            return references[0] | result
        if references:
            conjuncts = result.get("allOf")
            result["allOf"] = [*(conjuncts if isinstance(conjuncts, list) else ()), *references]
        return result

    def _definition(self, place: Place, key: str) -> str | None:
        """The name of the definition that a reference leads to; None: nowhere."""
        try:
            target = self._document.target(place, key)
        except UnresolvedReferenceError:
            if not self._lenient:
                raise
            return None
        # There is one True and one False, and they need no more than one definition each.
        place_key = (id(target.schema), target.base)
        if place_key not in self._names:
            last = unquote(place.schema[key]).rpartition("/")[2]
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", last).strip("_") or "root"
            name, number = stem, 1
            while name in self._definitions:
                name, number = f"{stem}_{number}", number + 1
            self._names[place_key] = name
            self.paths[name] = target.path
            self._definitions[name] = None  # its name is reserved first, because it may refer to itself
            self._definitions[name] = self._flat(target)
        return self._names[place_key]
