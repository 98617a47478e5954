"""Schemas that refer to themselves so that each of their values would have no end.

Knows flattened schemas: each reference is ``#/$defs/NAME``.  Whatever follows such a grammar would never come to an end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from lucevisor.text.references import resolved_name


def is_endless(schema: Mapping[str, Any]) -> bool:
    """Return whether every value of a flattened schema has itself within itself."""
    waiting = list(schema.get("$defs", {}).items())
    if not waiting:
        return False
    ending = set[str]()
    n_before = -1
    while waiting and len(ending) > n_before:
        n_before = len(ending)
        # Definitions are listed in the order in which they were met, or are used: both ways, few rounds are enough.
        for name, definition in reversed(waiting):
            if _ends(definition, ending):
                ending.add(name)
        waiting = [(name, one) for name, one in reversed(waiting) if name not in ending]
    return not _ends(schema, ending)


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
