"""A JSON schema as alternatives that each say in one place what their values are.

For formats whose values are no JSON, so that their grammars are put together here.  Knows flattened schemas, no
grammars.  Invariant: a value fits a schema if and only if it fits one of its alternatives; a keyword of a strict schema
that cannot be brought into this form is refused by its name, and left out of any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.patterns import MAX_FORCED, MAX_PATTERNS, PatternError, checked, matches
from lucevisor.text.references import Schema, resolved_name
from lucevisor.text.tools.parameters import ANY_TYPE, type_names, type_of

MAX_ALTERNATIVES: Final = 64
MAX_COMPARED: Final = 10_000
"""Pairs of alternatives of one tool that are told apart."""

_COMPOSING: Final = frozenset(
    [
        *("$ref", "$defs", "$schema", "allOf", "anyOf", "oneOf", "const", "nullable"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
    ]
)
_REFUSED: Final = ("not", "if", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
_LEAST: Final = frozenset(["minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"])
_MOST: Final = frozenset(["maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"])
_COUNTS: Final = frozenset(key for key in _LEAST | _MOST if not key.lower().endswith(("minimum", "maximum")))
_MOST_COUNTED: Final = 2**31 - 1  # llguidance counts so far
_BOTH_SCHEMAS: Final = frozenset(["items", "propertyNames", "contains"])
_BOTH_LISTS: Final = frozenset(["required", "patterns"])
_OBJECT: Final = frozenset(["properties", "patternProperties", "additionalProperties"])
_CONFLICTING: Final = frozenset(["multipleOf", "format", "prefixItems", "additionalItems", "contentEncoding"])


class Alternatives:
    """The alternatives of the schemas of one tool."""

    def __init__(self, definitions: Schema, *, strict: bool) -> None:
        self.definitions = definitions
        self.strict = strict
        self._known: dict[str, list[dict[str, Any]]] = {}  # of definitions
        self._active = set[str]()
        self._n_compared = 0

    def of(self, schema: object, where: str) -> list[dict[str, Any]]:
        """Return the alternatives of a schema at a place, none if it allows no value.

        Each has ``type``, a list; of keywords that compose schemas only ``properties``, ``items`` and the like.
        ``pattern`` becomes ``patterns``, a list.
        """
        found = map(_fitting, self._of(schema, where))
        return [one for one in found if one["type"] and one.get("enum") != []]

    def _of(self, schema: object, where: str) -> list[dict[str, Any]]:
        if not isinstance(schema, Mapping):
            return [{"type": sorted(ANY_TYPE)}] if schema is not False else []
        for key in _REFUSED:
            if key in schema:
                self.refuse(where, key)
        if len(schema.get("patternProperties") or ()) > MAX_PATTERNS:
            self.refuse(where, "patternProperties", f"of more than {MAX_PATTERNS} patterns")
            schema = {**schema, "patternProperties": {}, "additionalProperties": True}
        own = {key: value for key, value in schema.items() if key not in _COMPOSING and key not in _REFUSED}
        own["type"] = sorted(type_names(schema.get("type")))
        if "pattern" in own:
            self._set_pattern(own, where)
        for key in _COUNTS & own.keys():
            self._set_count(own, key, where)
        found = [own]
        if "const" in schema:
            found = self._both(found, [{"type": sorted(ANY_TYPE), "enum": [schema["const"]]}], where)
        if "$ref" in schema:
            found = self._both(found, self._of_definition(resolved_name(schema), where), where)
        for part in _list(schema, "allOf"):
            found = self._both(found, self._of(part, where), where)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                options = [self._of(option, where) for option in schema[key]]
                if key == "oneOf" and not self._one_fits(options, where):
                    self.refuse(where, "oneOf", "whose schemas may both fit")
                found = self._both(found, [one for option in options for one in option], where)
        for choice in _dependent(schema):
            found = self._both(found, [one for part in choice for one in self._of(part, where)], where)
        if "unevaluatedProperties" in schema:
            found = [{"additionalProperties": schema["unevaluatedProperties"]} | one for one in found]
        return found

    def _of_definition(self, name: str, where: str) -> list[dict[str, Any]]:
        if name in self._active:
            self.refuse(where, "$ref", "that leads back to itself")
            return [{"type": sorted(ANY_TYPE)}]
        if name not in self._known:
            self._active.add(name)
            self._known[name] = self._of(self.definitions[name], where)
            self._active.remove(name)
        return self._known[name]

    def _set_pattern(self, own: dict[str, Any], where: str) -> None:
        pattern = own.pop("pattern")
        try:
            checked(pattern)
            own["patterns"] = [pattern]
        except (PatternError, TypeError) as error:
            self.refuse(where, f"the pattern {json.dumps(pattern)}", f"({error})")

    def _set_count(self, own: dict[str, Any], key: str, where: str) -> None:
        """Make a count an integer that llguidance can read; leave out one that is none, or that no answer reaches."""
        count = own.pop(key)
        whole = not isinstance(count, bool) and isinstance(count, int | float) and 0 <= count == count // 1
        most = MAX_FORCED if key == "minLength" else _MOST_COUNTED
        if not whole or (count > most and key in _LEAST):
            self.refuse(where, key, f"as it is not a whole number from 0 to {most}")
        elif count <= _MOST_COUNTED:
            own[key] = int(count)

    def refuse(self, where: str, keyword: str, why: str = "") -> None:
        """Raise GrammarError for a keyword that cannot be enforced if the schema is strict."""
        if self.strict:
            told = f"{keyword} {why}".strip()
            raise GrammarError(f"{where}: this model's call format cannot enforce {told}")

    def _both(
        self, some: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], where: str
    ) -> list[dict[str, Any]]:
        """The alternatives that fit one of each."""
        if len(some) * len(others) > MAX_ALTERNATIVES:
            self.refuse(where, "so many alternatives of anyOf, oneOf and others", f"(more than {MAX_ALTERNATIVES})")
            return list(some)
        both = [self._merged(one, other, where) for one in some for other in others]
        return [one for one in both if one["type"]]

    def _merged(self, one: Mapping[str, Any], other: Mapping[str, Any], where: str) -> dict[str, Any]:
        merged: dict[str, Any] = dict(one)
        for key, value in other.items():
            if key in _OBJECT:
                continue
            mine = merged.get(key, value)
            if key == "type":
                merged[key] = [kind for kind in mine if kind in value]
            elif key not in merged or mine == value:
                merged[key] = value
            elif key in _LEAST | _MOST:
                merged[key] = (max if key in _LEAST else min)(mine, value)
            elif key in _BOTH_SCHEMAS:
                merged[key] = {"allOf": [mine, value]}
            elif key in _BOTH_LISTS:
                merged[key] = [*mine, *(item for item in value if item not in mine)]
            elif key == "enum":
                kept = {json.dumps(item, sort_keys=True) for item in value}
                merged[key] = [item for item in mine if json.dumps(item, sort_keys=True) in kept]
            elif key == "uniqueItems":
                merged[key] = True
            elif key in _CONFLICTING:
                self.refuse(where, key, "in two schemas")
        return merged | _merged_properties(one, other)

    def _one_fits(self, options: Sequence[Sequence[Mapping[str, Any]]], where: str) -> bool:
        """Whether no value can fit two of the options."""
        for index, option in enumerate(options):
            for later in options[index + 1 :]:
                if not all(self._disjoint(one, other, where, 3) for one in option for other in later):
                    return False
        return True

    def _disjoint(self, one: Mapping[str, Any], other: Mapping[str, Any], where: str, depth: int) -> bool:
        """Whether no value fits both alternatives, as far as is easily told."""
        self._n_compared += 1
        if self._n_compared > MAX_COMPARED:
            return False
        one, other = _fitting(dict(one)), _fitting(dict(other))
        kinds = set(one["type"]) & set(other["type"])
        if not kinds or self._merged(one, other, where).get("enum") == []:
            return True
        if kinds != {"object"} or depth == 0:
            return False
        for first, second in ((one, other), (other, one)):
            for key in first.get("required", ()):
                mine, others = (_property(schema, key) for schema in (first, second))
                if others is False:
                    return True
                options = [self._of(schema, where) for schema in (mine, others)]
                if all(self._disjoint(a, b, where, depth - 1) for a in options[0] for b in options[1]):
                    return True
        return False


def _list(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _dependent(schema: Schema) -> Iterator[list[dict[str, Any]]]:
    """Yield the alternatives of each dependency: its property is absent, or it is there and what it asks for holds."""
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        named = schema.get(keyword)
        for key, needed in named.items() if isinstance(named, Mapping) else ():
            then = (
                {"required": [key, *needed]} if isinstance(needed, list) else {"allOf": [{"required": [key]}, needed]}
            )
            yield [{"properties": {key: False}}, then]


def _fitting(one: dict[str, Any]) -> dict[str, Any]:
    """An alternative with constants of its types only, and with the types of its constants."""
    if not isinstance(one.get("enum"), list):
        return one
    kept = [value for value in one["enum"] if type_of(value) in one["type"]]
    return {**one, "enum": kept, "type": sorted({type_of(value) for value in kept})}


def _property(schema: Mapping[str, Any], key: str) -> Any:
    """What an object's schema says of one property."""
    named, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    found = [named[key]] if key in named else []
    found += [one for pattern, one in patterns.items() if matches(pattern, key)]
    if not found:
        return schema.get("additionalProperties", True)
    return False if any(one is False for one in found) else {"allOf": found} if len(found) > 1 else found[0]


def _merged_properties(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for properties that say what two schemas say."""
    result: dict[str, Any] = {}
    named = [*(one.get("properties") or {}), *(other.get("properties") or {})]
    if named:
        both = {key: (_property(one, key), _property(other, key)) for key in named}
        result["properties"] = {key: _all_of(mine, others) for key, (mine, others) in both.items()}
    patterns: dict[str, Any] = {}
    for first, second in ((one, other), (other, one)):
        others = second.get("patternProperties") or {}
        for pattern, value in (first.get("patternProperties") or {}).items():
            # A name that no pattern of the other schema matches is one of its further names.
            patterns[pattern] = _all_of(value, others.get(pattern, second.get("additionalProperties", True)))
    if patterns:
        result["patternProperties"] = patterns
    if "additionalProperties" in one or "additionalProperties" in other:
        result["additionalProperties"] = _all_of(*(part.get("additionalProperties", True) for part in (one, other)))
    return result


def _all_of(one: Any, other: Any) -> Any:
    if one is False or other is False:
        return False
    if one is True or one == {} or one == other:
        return other
    return one if other is True or other == {} else {"allOf": [one, other]}
