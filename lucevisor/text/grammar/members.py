"""The members of an object by a JSON schema: those that it names, and names of others, in the order of the schema.

Knows the keywords for objects, no notation.  Invariant: members that are written so fit the schema, whatever their
number and names, if each value fits its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.rules import Rules, quoted
from lucevisor.text.grammar.texts import searched, text_terminal
from lucevisor.text.patterns import matches

MAX_COUNTED: Final = 4096
"""Rules for the numbers of members that an object may have."""

_NAME: Final = r"/[\w.$@\/+*-]+/"


@dataclass(frozen=True, slots=True)
class Members:
    """Members of an object.

    ``named``: name, schema and place of each; ``needed``: those that must be there; ``others``: of further members the
    terminal of the name and the schema; ``least`` and ``most``: their number.
    """

    named: list[tuple[str, Any, str]]
    needed: frozenset[str]
    others: list[tuple[str, Any]]
    least: int
    most: int | None


def members(schema: Mapping[str, Any], alternatives: Alternatives, where: str) -> Members | None:
    """Return the members of the objects that an alternative of a schema describes; None if one that must be there is
    forbidden.
    """
    properties, patterns = dict(schema.get("properties") or {}), dict(schema.get("patternProperties") or {})
    rest = schema.get("additionalProperties")
    needed = [name for name in schema.get("required") or () if isinstance(name, str)]
    for name in needed:
        if name not in properties and (rest is not False or any(matches(one, name) for one in patterns)):
            properties[name] = True
    for name in properties:
        found = [one for pattern, one in patterns.items() if matches(pattern, name)]
        if name not in (schema.get("properties") or {}) and not found:
            found = [True if rest is None else rest]
        if found and properties[name] is not False:
            properties[name] = {"allOf": [properties[name], *found]}
    if any(properties.get(name, False) is False for name in needed):
        return None
    others = _others(schema, properties, patterns, rest, alternatives, where)
    names = schema.get("propertyNames")
    if names is not None:
        properties, others = _with_names(names, properties, others, alternatives, f"{where}.propertyNames")
    possible = {name: one for name, one in properties.items() if one is not False}
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    needed = [name for name in needed if name in possible]
    if least > len(needed) and others:
        # A name may be written twice.
        alternatives.refuse(where, "minProperties", "beside properties that it does not name")
        least = 0
    if (len(possible) + 1) * (max(least, most or 0) + 2) > MAX_COUNTED:
        alternatives.refuse(where, "minProperties or maxProperties", "of so many properties")
        least, most = 0, None
    named = [(name, one, f"{where}.{name}") for name, one in possible.items()]
    return Members(named, frozenset(needed), others, least, most)


def _others(
    schema: Mapping[str, Any],
    properties: Mapping[str, Any],
    patterns: Mapping[str, Any],
    rest: Any,
    alternatives: Alternatives,
    where: str,
) -> list[tuple[str, Any]]:
    """Names of further members and their schemas: by their patterns, and all others where the schema says so."""
    but = "".join(f" & ~{quoted(name)}" for name in properties if name)
    found = list[tuple[str, Any]]()
    for pattern, one in patterns.items():
        if (term := searched(pattern)) is None:
            alternatives.refuse(where, f"the pattern {json.dumps(pattern)}")
            rest = True
            continue
        if one is not False:
            found.append((f"{_NAME} & {term}{but}", one))
        but += f" & ~{term}"
    if rest is None:
        rest = not schema.get("properties") and not patterns
    return found if rest is False else [*found, (f"{_NAME}{but}", rest)]


def _with_names(
    names: Any, properties: dict[str, Any], others: list[tuple[str, Any]], alternatives: Alternatives, where: str
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The members whose names fit a schema."""
    kept, limited = dict.fromkeys(properties, False) | {}, list[tuple[str, Any]]()
    for one in alternatives.of(names, where):
        if "string" not in one["type"]:
            continue
        if "enum" in one:
            kept |= {name: schema for name, schema in properties.items() if name in one["enum"]}
            free = [name for name in one["enum"] if isinstance(name, str) and name not in properties]
            kept |= dict.fromkeys(free, others[-1][1]) if len(others) == 1 else {}
            if free and len(others) > 1:
                alternatives.refuse(where, "enum", "beside patternProperties")
            continue
        limited += [(f"{term} & {text_terminal(one, alternatives, where)}", schema) for term, schema in others]
        for name, schema in properties.items():
            if _fits(one, name):
                kept[name] = schema
            elif "format" in one:
                alternatives.refuse(where, "format")
    return kept, limited


def _fits(schema: Mapping[str, Any], name: str) -> bool:
    """Whether a name fits the keywords for strings."""
    lengths = schema.get("minLength", 0) <= len(name) <= schema.get("maxLength", len(name))
    return lengths and "format" not in schema and all(matches(one, name) for one in schema.get("patterns", ()))


def sequence(
    rules: Rules,
    found: Members | None,
    named: Callable[[str, Any, str], str | None],
    other: Callable[[str, Any], str | None],
    comma: str = "",
) -> str | None:
    """An expression for the members one after another, with ``comma`` between them; None if there are none that fit.

    ``named`` and ``other`` write a member, or return None if its schema allows no value.
    """
    return None if found is None else _Sequence(rules, found, named, other, comma).whole()


class _Sequence:
    """Rules for what may follow the members so far, by the next that is named and their number as far as it matters."""

    def __init__(
        self,
        rules: Rules,
        found: Members,
        named: Callable[[str, Any, str], str | None],
        other: Callable[[str, Any], str | None],
        comma: str,
    ) -> None:
        self._rules, self._members, self._comma = rules, found, comma
        written = [(named(*one), one[0] in found.needed) for one in found.named]
        self._items = [(rules.add(item), needed) for item, needed in written if item is not None]
        self._complete = all(item is not None or not needed for item, needed in written)
        others = [item for one in found.others if (item := other(*one)) is not None]
        self._others = rules.add(" | ".join(others)) if others else None
        # Beyond this number nothing depends on it.
        self._cap = max(found.least, 0 if found.most is None else found.most + 1, 1 if comma else 0)
        self._known: dict[tuple[int, int], str | None] = {}

    def whole(self) -> str | None:
        if not self._complete:
            return None
        # From the last to the first, so that no recursion is as deep as an object has members.
        for index in range(len(self._items), -1, -1):
            for count in range(self._cap, -1, -1):
                self._known[index, count] = self._from(index, count)
        return self._known[0, 0]

    def _from(self, index: int, count: int) -> str | None:
        most = self._members.most
        if most is not None and count > most:
            return None
        before = self._comma if count else ""
        if index == len(self._items):
            return self._end(count, before)
        item, needed = self._items[index]
        after = self._known[index + 1, min(count + 1, self._cap)]
        options = [] if after is None else [f"{before} {item} {after}"]
        if not needed and (without := self._known[index + 1, count]) is not None:
            options.append(without)
        return self._rules.add(" | ".join(options)) if options else None

    def _end(self, count: int, before: str) -> str | None:
        most = self._members.most
        done = count >= self._members.least
        if self._others is None or count == most:
            return '""' if done else None
        if most is not None:
            more = self._known[len(self._items), count + 1]
            options = [f"{before} {self._others} {more}"] if more is not None else []
            options += ['""'] if done else []
            return self._rules.add(" | ".join(options)) if options else None
        if not done:
            return None
        rest = f"({self._comma} {self._others})*"
        return self._rules.add(f'{before} {self._others} {rest} | ""' if count == 0 and self._comma else rest)
