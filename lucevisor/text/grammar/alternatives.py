"""A JSON schema in disjunctive form: alternatives without references, allOf, anyOf and the like.

For formats whose values are no JSON, so that llguidance cannot read the schema itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any, Final

from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.parameters import ANY_TYPE, type_names, type_of
from lucevisor.text.patterns import MAX_PATTERNS, PatternError, checked, matches
from lucevisor.text.references import Schema, resolved_name

MAX_ALTERNATIVES: Final = 64

_COMPOSING: Final = frozenset(
    [
        *("$ref", "$defs", "$schema", "allOf", "anyOf", "oneOf", "const", "nullable"),
        "unevaluatedProperties",
    ]
)
_REFUSED: Final = (
    *("not", "if", "unevaluatedItems", "propertyNames", "minProperties", "maxProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_MINIMA: Final = frozenset(["minimum", "exclusiveMinimum", "minLength", "minItems", "minContains"])
_MAXIMA: Final = frozenset(["maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxContains"])
_COUNTS: Final = frozenset(key for key in _MINIMA | _MAXIMA if not key.lower().endswith(("minimum", "maximum")))
_MAX_COUNT: Final = 2**31 - 1  # of llguidance
_SUBSCHEMAS: Final = frozenset(["items", "contains"])
_LISTS: Final = frozenset(["required", "patterns"])
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
        """Return the alternatives of a schema: ``type`` is a list, ``pattern`` becomes ``patterns``, a list."""
        alternatives = map(_fitting, self._of(schema, where))
        return [option for option in alternatives if option["type"] and option.get("enum") != []]

    def _of(self, schema: object, where: str) -> list[dict[str, Any]]:
        if not isinstance(schema, Mapping):
            return [{"type": sorted(ANY_TYPE)}] if schema is not False else []
        for key in _REFUSED:
            if key in schema:
                self.refuse(where, key)
        if len(schema.get("patternProperties") or ()) > MAX_PATTERNS:
            self.refuse(where, "patternProperties", f"of more than {MAX_PATTERNS} patterns")
            schema = {**schema, "patternProperties": {}, "additionalProperties": True}
        keywords = {key: value for key, value in schema.items() if key not in _COMPOSING and key not in _REFUSED}
        keywords["type"] = sorted(type_names(schema.get("type")))
        if "pattern" in keywords:
            self._set_pattern(keywords, where)
        for key in _COUNTS & keywords.keys():
            self._set_count(keywords, key, where)
        alternatives = [keywords]
        if "const" in schema:
            constant = [{"type": sorted(ANY_TYPE), "enum": [schema["const"]]}]
            alternatives = self._intersection(alternatives, constant, where)
        if "$ref" in schema:
            target = self._of_definition(resolved_name(schema), where)
            alternatives = self._intersection(alternatives, target, where)
        for part in list_in(schema, "allOf"):
            alternatives = self._intersection(alternatives, self._of(part, where), where)
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                branches = [self._of(branch, where) for branch in schema[key]]
                if key == "oneOf" and not self._disjoint_branches(branches, where):
                    self.refuse(where, "oneOf", "whose schemas may both fit")
                alternatives = self._intersection(alternatives, list(chain.from_iterable(branches)), where)
        if "unevaluatedProperties" in schema:
            unevaluated = {"additionalProperties": schema["unevaluatedProperties"]}
            alternatives = [unevaluated | option for option in alternatives]
        return alternatives

    def _of_definition(self, name: str, where: str) -> list[dict[str, Any]]:
        if name in self._active:
            self.refuse(where, "$ref", "that leads back to itself")
            return [{"type": sorted(ANY_TYPE)}]
        if name not in self._known:
            self._active.add(name)
            self._known[name] = self._of(self.definitions[name], where)
            self._active.remove(name)
        return self._known[name]

    def _set_pattern(self, keywords: dict[str, Any], where: str) -> None:
        pattern = keywords.pop("pattern")
        try:
            checked(pattern)
            keywords["patterns"] = [pattern]
        except (PatternError, TypeError) as error:
            self.refuse(where, f"the pattern {json.dumps(pattern)}", f"({error})")

    def _set_count(self, keywords: dict[str, Any], key: str, where: str) -> None:
        """Make a count an integer that llguidance can read; leave out one that is none, or that no answer reaches."""
        count = keywords.pop(key)
        is_whole = not isinstance(count, bool) and isinstance(count, int | float) and 0 <= count == count // 1
        if not is_whole or (count > _MAX_COUNT and key in _MINIMA):
            self.refuse(where, key, f"as it is not a whole number from 0 to {_MAX_COUNT}")
        elif count <= _MAX_COUNT:
            keywords[key] = int(count)

    def refuse(self, where: str, keyword: str, reason: str = "") -> None:
        """Raise GrammarError for a keyword that cannot be enforced if the schema is strict."""
        if self.strict:
            raise GrammarError(f"{where}: this model's call format cannot enforce {f'{keyword} {reason}'.strip()}")

    def _intersection(
        self, first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]], where: str
    ) -> list[dict[str, Any]]:
        """The alternatives of what fits one of each."""
        if len(first) * len(second) > MAX_ALTERNATIVES:
            self.refuse(where, "so many alternatives of anyOf, oneOf and others", f"(more than {MAX_ALTERNATIVES})")
            return list(first)
        merged = [self._merged(a, b, where) for a in first for b in second]
        return [option for option in merged if option["type"]]

    def _merged(self, first: Mapping[str, Any], second: Mapping[str, Any], where: str) -> dict[str, Any]:
        merged: dict[str, Any] = dict(first)
        for key, value in second.items():
            if key in _OBJECT:
                continue
            previous = merged.get(key, value)
            if key == "type":
                merged[key] = [kind for kind in previous if kind in value]
            elif key not in merged or previous == value:
                merged[key] = value
            elif key in _MINIMA | _MAXIMA:
                merged[key] = (max if key in _MINIMA else min)(previous, value)
            elif key in _SUBSCHEMAS:
                merged[key] = {"allOf": [previous, value]}
            elif key in _LISTS:
                merged[key] = [*previous, *(item for item in value if item not in previous)]
            elif key == "enum":
                constants = set(map(_comparable, value))
                merged[key] = [item for item in previous if _comparable(item) in constants]
            elif key == "uniqueItems":
                merged[key] = True
            elif key in _CONFLICTING:
                self.refuse(where, key, "in two schemas")
        return merged | _merged_properties(first, second)

    def exclude_each_other(self, schemas: Sequence[object]) -> bool:
        """Return whether no value can fit two of the schemas; False where that is not cheap to decide."""
        try:
            return self._disjoint_branches([self._of(schema, "") for schema in schemas], "")
        except (TypeError, ValueError, AttributeError):  # keywords that do not concern the type may be anything
            return False

    def _disjoint_branches(self, branches: Sequence[Sequence[Mapping[str, Any]]], where: str) -> bool:
        return all(
            self._disjoint(a, b, where, 3)
            for first, second in combinations(branches, 2)
            for a, b in product(first, second)
        )

    def _disjoint(self, first: Mapping[str, Any], second: Mapping[str, Any], where: str, depth: int) -> bool:
        """Return whether no value fits both alternatives; False where that is not cheap to decide."""
        self._n_compared += 1
        if self._n_compared > 10_000:
            return False
        first, second = _fitting(dict(first)), _fitting(dict(second))
        kinds = set(first["type"]) & set(second["type"])
        if not kinds or self._merged(first, second, where).get("enum") == []:
            return True
        if kinds != {"object"} or depth == 0:
            return False
        for a, b in ((first, second), (second, first)):
            for key in a.get("required", ()):
                if _property(b, key) is False:
                    return True
                options = [self._of(_property(schema, key), where) for schema in (a, b)]
                if all(self._disjoint(left, right, where, depth - 1) for left, right in product(*options)):
                    return True
        return False


def list_in(schema: Schema, key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _fitting(alternative: dict[str, Any]) -> dict[str, Any]:
    """An alternative with constants of its types only, and with the types of its constants."""
    if not isinstance(alternative.get("enum"), list):
        return alternative
    constants = [value for value in alternative["enum"] if type_of(value) in alternative["type"]]
    return {**alternative, "enum": constants, "type": sorted({type_of(value) for value in constants})}


def _comparable(value: Any) -> str:
    """A constant as text, in which 1.0 is 1, as JSON schema compares them."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, Mapping) else value


def _property(schema: Mapping[str, Any], name: str) -> Any:
    properties, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    schemas = [properties[name]] if name in properties else []
    schemas += [value for pattern, value in patterns.items() if matches(pattern, name)]
    if not schemas:
        return schema.get("additionalProperties", True)
    return False if any(value is False for value in schemas) else {"allOf": schemas} if len(schemas) > 1 else schemas[0]


def _merged_properties(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords for properties of what fits two schemas."""
    merged: dict[str, Any] = {}
    if names := [*(first.get("properties") or {}), *(second.get("properties") or {})]:
        merged["properties"] = {name: all_of(_property(first, name), _property(second, name)) for name in names}
    patterns: dict[str, Any] = {}
    for a, b in ((first, second), (second, first)):
        theirs = b.get("patternProperties") or {}
        for pattern, value in (a.get("patternProperties") or {}).items():
            # A name that no pattern of the other schema matches is one of its further names.
            patterns[pattern] = all_of(value, theirs.get(pattern, b.get("additionalProperties", True)))
    if patterns:
        merged["patternProperties"] = patterns
    if "additionalProperties" in first or "additionalProperties" in second:
        merged["additionalProperties"] = all_of(*(s.get("additionalProperties", True) for s in (first, second)))
    return merged


def all_of(first: Any, second: Any) -> Any:
    """Return the schema of what fits two schemas."""
    if first is False or second is False:
        return False
    if first is True or first == {} or first == second:
        return second
    return first if second is True or second == {} else {"allOf": [first, second]}
