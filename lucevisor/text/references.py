"""References of a JSON schema: each is resolved once, against the whole schema.

Knows the keywords that hold schemas, identifiers and references, not what a schema allows.  Invariant: the result of
``flattened`` says the same as the schema, and each reference in it is ``#/$defs/NAME``, with a definition at its root.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from lucevisor.errors import LucevisorError

Schema = Mapping[str, Any]

_PREFIX: Final = "#/$defs/"
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_VALUES: Final = frozenset(["enum", "const", "default", "example", "examples"])  # no schemas, whatever they look like
_NAMED: Final = frozenset(["properties", "patternProperties", "dependentSchemas", "dependencies"])  # schemas by name
_DEFINITIONS: Final = frozenset(["$defs", "definitions"])
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
_IDENTIFIERS: Final = frozenset(["$id", "$recursiveAnchor", *_ANCHORS])


class UnresolvedReferenceError(LucevisorError):
    """A reference leads nowhere within its schema."""


def flattened(schema: Schema, *, lenient: bool = True) -> dict[str, Any]:
    """Return the schema with its references resolved, and with the definitions that they reach.

    A reference is a JSON pointer to any part of the schema, an anchor, or an identifier that a part of it has.  One
    that leads nowhere is left out if ``lenient``, so that it allows anything.  Raises UnresolvedReferenceError.
    """
    return _Flattener(schema, lenient).whole()


def resolved(schema: Any, definitions: Schema) -> Any:
    """Return what the reference of a flattened schema leads to."""
    return definitions[schema["$ref"].removeprefix(_PREFIX)]


def with_definitions(schema: Schema, definitions: Schema) -> dict[str, Any]:
    """Return a part of a flattened schema as a schema of its own, with the definitions that it reaches."""
    found: dict[str, Any] = {}
    waiting: list[Any] = [schema]
    while waiting:
        for reference in _references(waiting.pop()):
            name = reference.removeprefix(_PREFIX)
            if name not in found:
                found[name] = definitions[name]
                waiting.append(found[name])
    return {**schema, "$defs": found} if found else dict(schema)


def _references(schema: Any) -> Iterator[str]:
    """Yield the references of a flattened schema, but not those of its definitions."""
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "$ref":
                yield value
            elif key in _NAMED and isinstance(value, Mapping):
                yield from _references(list(value.values()))
            elif key not in _VALUES and key not in _DEFINITIONS:
                yield from _references(value)


class _Flattener:
    """Flattens one schema."""

    def __init__(self, root: Schema, lenient: bool) -> None:
        self._root, self._lenient = root, lenient
        self._places: dict[str, tuple[Any, str]] = {"": (root, "")}  # schemas by URI, each with its own base
        self._index(root, "")
        self._names: dict[tuple[int, str], str] = {}  # of definitions, by their schema
        self._definitions: dict[str, Any] = {}

    def whole(self) -> dict[str, Any]:
        result: dict[str, Any] = self._flat(self._root, "")
        if "$schema" in self._root:
            result["$schema"] = self._root["$schema"]
        return {**result, "$defs": self._definitions} if self._definitions else result

    def _index(self, schema: Any, base: str) -> None:
        """Note the places that identifiers and anchors name."""
        if isinstance(schema, list):
            for one in schema:
                self._index(one, base)
        if not isinstance(schema, Mapping):
            return
        base = self._own_base(schema, base)
        if isinstance(schema.get("$id"), str):
            self._places.setdefault(base, (schema, base))
        for key in _ANCHORS:
            if isinstance(schema.get(key), str):
                self._places.setdefault(f"{base}#{schema[key]}", (schema, base))
        for key, value in schema.items():
            if key in _NAMED | _DEFINITIONS and isinstance(value, Mapping):
                self._index(list(value.values()), base)
            elif key not in _VALUES:
                self._index(value, base)

    def _flat(self, schema: Any, base: str) -> Any:
        if isinstance(schema, list):
            return [self._flat(one, base) for one in schema]
        if not isinstance(schema, Mapping):
            return schema
        base = self._own_base(schema, base)
        result: dict[str, Any] = {}
        more = list[dict[str, Any]]()
        for key, value in schema.items():
            if key in _REFERENCES:
                if (name := self._definition(value, base)) is not None:
                    more.append({"$ref": _PREFIX + name})
            elif key in _NAMED and isinstance(value, Mapping):
                result[key] = {name: self._flat(one, base) for name, one in value.items()}
            elif key in _VALUES:
                result[key] = value
            elif key not in _DEFINITIONS and key not in _IDENTIFIERS and key != "$schema":
                result[key] = self._flat(value, base)
        if len(more) == 1:
            return more[0] | result
        if more:
            others = result.get("allOf")
            result["allOf"] = [*(others if isinstance(others, list) else ()), *more]
        return result

    def _definition(self, reference: object, base: str) -> str | None:
        """The name of the definition that a reference leads to; None: nowhere."""
        found = self._find(reference, base) if isinstance(reference, str) else None
        if found is None or not isinstance(found[0], Mapping | bool):
            if self._lenient:
                return None
            raise UnresolvedReferenceError(f"the reference {reference!r} leads nowhere")
        target, target_base = found
        # There is one True and one False, and they need no more than one definition each.
        place = (id(target), target_base)
        if place not in self._names:
            stem = re.sub(r"[^A-Za-z0-9_.-]", "_", unquote(str(reference)).rpartition("/")[2]).strip("_") or "root"
            name, number = stem, 1
            while name in self._definitions:
                name, number = f"{stem}_{number}", number + 1
            self._names[place] = name
            self._definitions[name] = None  # its name is taken; it may refer to itself
            self._definitions[name] = self._flat(target, target_base)
        return self._names[place]

    def _find(self, reference: str, base: str) -> tuple[Any, str] | None:
        """The schema that a reference leads to, and the base of the references in it."""
        try:
            uri, fragment = urldefrag(urljoin(base, reference))
        except ValueError:  # it is no URI
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._places.get(f"{uri}#{fragment}")
        found = self._places.get(uri)
        if found is None:
            return None
        target, base = found
        for step in fragment.split("/")[1:]:
            if isinstance(target, Mapping):
                base = self._own_base(target, base)
                target = target.get(step.replace("~1", "/").replace("~0", "~"))
            elif isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                return None
        return target, base

    def _own_base(self, schema: Schema, base: str) -> str:
        """The base of the references in a schema, which may have an identifier of its own."""
        try:
            return urldefrag(urljoin(base, schema["$id"])).url if isinstance(schema.get("$id"), str) else base
        except ValueError:
            return base
