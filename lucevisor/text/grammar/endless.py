"""Schemas that refer to themselves so that each of their values would have no end.

Knows flattened schemas: each reference is ``#/$defs/NAME``.  What follows a grammar of such a schema never ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from lucevisor.text.references import NAMED, VALUES, resolved_name


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
        waiting = [(name, one) for name, one in reversed(waiting) if name not in ending]
    if not waiting:
        return dict(schema)
    kept = {name: one for name, one in definitions.items() if name in ending}
    found: dict[str, Any] | bool = _limited({**schema, "$defs": kept}, ending)
    return found


def _limited(schema: Any, names: Set[str]) -> Any:
    """The schema with False for each reference to a definition of another name."""
    if isinstance(schema, list):
        return [_limited(one, names) for one in schema]
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
    """Whether a schema has a value, if definitions of these names have one."""
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
        needed = [one for name in _list(schema, "required") if (one := _item(properties, name)) is not None]
        return all(_ends(one, ending) for one in needed)
    if kind == "array":
        first, least = _list(schema, "prefixItems"), schema.get("minItems", 0)
        if not isinstance(least, int | float):
            return True
        ends = [_ends(one, ending) for one in first] + [_ends(schema.get("items"), ending)]
        return all(ends[: math.ceil(min(least, len(ends)))])
    return True


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _item(properties: object, name: object) -> Any:
    return properties.get(name) if isinstance(properties, Mapping) and isinstance(name, str) else None
