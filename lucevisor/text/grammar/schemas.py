"""JSON schemas made ready for llguidance: only keywords that it enforces, references resolved, objects closed.

A strict schema is enforced whole or refused, with the keyword and its path; from any other a keyword that cannot be
enforced is dropped. Objects have no undeclared properties unless the schema allows them explicitly, because small
models do not stop writing them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lucevisor.errors import show
from lucevisor.text import patterns
from lucevisor.text.grammar.alternatives import Alternatives, all_of, list_in
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.references import Flattener, Place, resolved_name

MAX_DEPTH: Final = 80
"""Schemas within one another, references followed: llguidance follows them on its stack."""

_MAX_DEFINITIONS: Final = 5_000
_EXACT: Final = 2**53  # llguidance reads numbers as floats
_MAX_COUNT: Final = 2**31  # more than any answer has characters
_ALL_KINDS: Final = ("null", "boolean", "object", "array", "number", "string")

_OBJECT: Final = ("properties", "patternProperties", "additionalProperties", "required", "minProperties",
                  "maxProperties", "propertyNames", "unevaluatedProperties")  # fmt: skip
_ARRAY: Final = ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains",
                 "minContains", "maxContains", "unevaluatedItems")  # fmt: skip
_STRING: Final = ("pattern", "format", "minLength", "maxLength")
_NUMBER: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_LISTS: Final = ("allOf", "anyOf", "oneOf")
_APPLICATORS: Final = ("$ref", *_LISTS, "if", "not", "dependentSchemas", "dependencies")
_TYPE_OF_GROUP: Final = ((_OBJECT, "object"), (_ARRAY, "array"), (_STRING, "string"), (_NUMBER, "number"))
_GROUPS: Final = {key: group for group, _ in _TYPE_OF_GROUP for key in group}
_CONSTRAINTS: Final = frozenset([*_GROUPS, *_APPLICATORS, "type", "enum", "const", "dependentRequired"])
_FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
)

Ready = dict[str, Any] | bool
"""A schema of llguidance's subset."""


class UnsatisfiableError(GrammarError):
    """No value fits a schema."""


def prepared(schema: Mapping[str, Any], *, lenient: bool) -> Ready:
    """Return a schema that llguidance enforces whole; ``lenient``: drop what it cannot.  Raises GrammarError."""
    flattener = Flattener(schema, lenient)
    ready = _Preparation(flattener.flattened(), flattener.paths, lenient).prepared()
    error = _compile_error(ready)
    if error and lenient:
        ready, error = _relaxed(ready, error)
    if patterns.nothing_fits(error):
        raise UnsatisfiableError("no value fits it")
    if error:
        raise GrammarError(_reason(error))
    return ready


@dataclass(frozen=True, slots=True)
class _Scope:
    """``part``: other schemas describe the value, so an object is not closed; ``shared``: properties of several."""

    part: bool = False
    shared: frozenset[str] = frozenset()

    def of(self, name: str) -> _Scope:
        return _Scope(part=self.part and name in self.shared)


@dataclass(slots=True)
class _Survey:
    """Properties of an object, over all schemas that describe it."""

    names: Counter[str]
    declares: bool = False
    is_open: bool = False
    min_properties: int = 0

    def add(self, other: _Survey, *, alternative: bool = False) -> None:
        self.names = self.names | other.names if alternative else self.names + other.names
        self.declares |= other.declares
        self.is_open |= other.is_open
        self.min_properties = max(self.min_properties, other.min_properties)

    @property
    def closes(self) -> bool:
        """True if an object can do without properties that are not named."""
        return self.declares and not self.is_open and self.min_properties <= len(self.names)


class _Preparation:
    """Prepares a flattened schema; ``paths``: of its definitions in the schema that the client sent."""

    def __init__(self, flat: Mapping[str, Any], paths: Mapping[str, str], lenient: bool) -> None:
        self.root, self._given_definitions, self._paths = Place(flat, "#"), flat.get("$defs", {}), paths
        self.alternatives = Alternatives(self._given_definitions, strict=False)
        self.lenient = lenient
        self._definitions: dict[str, Ready] = {}
        self._names: dict[tuple[str, _Scope], str] = {}
        self._active = [name for name, path in paths.items() if path == self.root.path]
        self._surveys: dict[int, _Survey] = {}
        self._made: list[Mapping[str, Any]] = []  # kept, as surveys are found by identity
        self._depth = 0

    def prepared(self) -> Ready:
        ready = self.value(self.root, _Scope())
        if self._definitions and isinstance(ready, dict):
            ready["$defs"] = self._definitions
        return ready

    def target(self, place: Place) -> Place:
        """The definition that a schema refers to."""
        name = resolved_name(place.schema)
        return Place(self._given_definitions[name], self._paths[name])

    # -- one schema

    def value(self, place: Place, scope: _Scope) -> Ready:
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _malformed(place, "", "is not an object or a boolean, so it is no schema")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GrammarError(f"it is nested deeper than {MAX_DEPTH} schemas")
        try:
            return self._schema(self._without_siblings(place, scope), scope)
        finally:
            self._depth -= 1

    def _without_siblings(self, place: Place, scope: _Scope) -> Place:
        """Return the place without keywords beside a reference that lead back to it."""
        schema = place.schema
        if "$ref" not in schema or resolved_name(schema) not in self._active:
            return place
        if not scope.part and sum(key in _CONSTRAINTS for key in schema) == 1:
            return place
        beside = next((key for key in schema if key in _CONSTRAINTS and key != "$ref"), "$ref")
        self.unsupported(place, beside, "cannot be enforced beside a reference to a schema that contains it")
        schema = {key: value for key, value in schema.items() if (key == "$ref") != scope.part}
        self._made.append(schema)
        return replace(place, schema=schema)

    def _schema(self, place: Place, scope: _Scope) -> Ready:
        schema: Mapping[str, Any] = place.schema
        kinds = self.kinds(place)
        survey = self.survey(place)
        is_choice = _is_choice(schema)
        composed = any(key in schema for key in _APPLICATORS) and not is_choice
        closing = survey if not scope.part and not is_choice and "object" in kinds and survey.closes else None
        inner = scope
        if composed:
            several = frozenset(name for name, n in survey.names.items() if n > 1)
            inner = _Scope(part=True, shared=scope.shared | several)
        return _SchemaWriter(self, place, kinds, inner, closing, composed=composed or scope.part).written()

    def kinds(self, place: Place) -> frozenset[str]:
        """The types that a schema's own ``type`` allows."""
        type_ = place.schema.get("type", _ALL_KINDS)
        kinds = [type_] if isinstance(type_, str) else type_
        if not isinstance(kinds, Sequence) or not kinds:
            raise _malformed(place, "type", "is neither a type nor a list of types")
        for kind in kinds:
            if kind not in (*_ALL_KINDS, "integer"):
                raise _malformed(place, "type", f"{show(kind)} is not a type of JSON schema")
        return frozenset("number" if kind == "integer" else kind for kind in kinds)

    def unsupported(self, place: Place, keyword: str, reason: str = "cannot be enforced") -> None:
        """Refuse a keyword of a strict schema; the caller drops it otherwise."""
        if not self.lenient:
            raise GrammarError(f"{keyword} at {place.path} {reason}")

    # -- references

    def reference(self, place: Place, scope: _Scope) -> Ready:
        """The reference to a definition, which is prepared here the first time."""
        target, name = self.target(place), resolved_name(place.schema)
        if isinstance(target.schema, bool):
            return target.schema
        if (name, scope) not in self._names:
            if len(self._names) >= _MAX_DEFINITIONS:
                raise GrammarError(f"it refers to more than {_MAX_DEFINITIONS} schemas")
            self._names[name, scope] = prepared_name = f"d{len(self._names)}"
            self._active.append(name)
            self._definitions[prepared_name] = self.value(target, scope)
            self._active.pop()
        return {"$ref": f"#/$defs/{self._names[name, scope]}"}

    # -- properties of composed schemas

    def survey(self, place: Place) -> _Survey:
        schema = place.schema
        if not isinstance(schema, Mapping):
            return _Survey(Counter())
        if id(schema) in self._surveys:
            return self._surveys[id(schema)]
        self._surveys[id(schema)] = _Survey(Counter())  # while this one is made: circles end
        survey = self._own_survey(place)
        if "$ref" in schema:
            survey.add(self.survey(self.target(place)))
        for key in _LISTS:
            branches = _Survey(Counter())
            for i, _ in enumerate(list_in(schema, key)):
                branch = self.survey(place.child(key, i))
                branches.add(branch, alternative=key != "allOf")
            survey.add(branches)
        for key in ("then", "else"):
            if key in schema:
                survey.add(self.survey(place.child(key)))
        for key in ("dependentSchemas", "dependencies"):
            schemas = schema.get(key)
            for name in schemas if isinstance(schemas, Mapping) else ():
                survey.add(self.survey(place.child(key, name)))
        self._surveys[id(schema)] = survey
        return survey

    @staticmethod
    def _own_survey(place: Place) -> _Survey:
        schema = place.schema
        properties, required = schema.get("properties"), schema.get("required")
        survey = _Survey(Counter(list(properties) if isinstance(properties, Mapping) else []))
        survey.names |= Counter(
            name for name in (required if isinstance(required, list) else ()) if isinstance(name, str)
        )
        for key in ("dependentRequired", "dependencies"):
            dependencies = schema.get(key)
            for name, dependency in dependencies.items() if isinstance(dependencies, Mapping) else ():
                listed = dependency if isinstance(dependency, list) else ()
                survey.names |= Counter([name, *(item for item in listed if isinstance(item, str))])
        survey.declares = isinstance(properties, Mapping)
        survey.is_open = (
            any(schema.get(key, False) is not False for key in ("additionalProperties", "unevaluatedProperties"))
            or "patternProperties" in schema
            or "propertyNames" in schema
        )
        min_properties = schema.get("minProperties")
        if isinstance(min_properties, (int, float)) and min_properties < _MAX_COUNT:
            survey.min_properties = int(min_properties)
        return survey


def _is_choice(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema is only a reference to another, or a choice of several."""
    chosen = [key for key in _APPLICATORS if key in schema]
    alone = len(chosen) == 1 and (
        chosen[0] in ("$ref", "anyOf", "oneOf")
        or (chosen[0] == "allOf" and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1)
    )
    return alone and not any(key in schema for key in (*_OBJECT, "dependentRequired"))


def _malformed(place: Place, keyword: str, reason: str) -> GrammarError:
    return GrammarError(f"{keyword} at {place.path} {reason}".lstrip() if keyword else f"{place.path} {reason}")


class _SchemaWriter:
    """Writes one schema in llguidance's subset, keyword by keyword in its order: properties come in that order."""

    def __init__(
        self,
        preparation: _Preparation,
        place: Place,
        kinds: frozenset[str],
        scope: _Scope,
        closing: _Survey | None,
        *,
        composed: bool,
    ) -> None:
        self._preparation, self._place, self._kinds, self._scope = preparation, place, kinds, scope
        self._closing, self._composed = closing, composed
        self._schema: Mapping[str, Any] = place.schema
        self._out: dict[str, Any] = {}
        self._conjuncts: list[Ready] = []  # which the value must fit as well

    def written(self) -> Ready:
        written_groups = set[tuple[str, ...]]()
        for key in self._schema:
            group = _GROUPS.get(key)
            if group is not None and group not in written_groups:
                written_groups.add(group)
                self._write_group(group)
            elif key in self._WRITERS:
                self._WRITERS[key](self, key)
        if self._closing is not None and _OBJECT not in written_groups:
            self._object()
        if self._conjuncts:
            self._out["allOf"] = [*self._out.get("allOf", []), *self._conjuncts]
        return False if False in self._conjuncts else self._out

    def _write_group(self, group: tuple[str, ...]) -> None:
        kind = next(kind for keys, kind in _TYPE_OF_GROUP if keys is group)
        if kind in self._kinds:
            {"object": self._object, "array": self._array, "string": self._string, "number": self._number}[kind]()

    def _drop(self, keyword: str, reason: str = "cannot be enforced") -> None:
        self._preparation.unsupported(self._place, keyword, reason)

    def _wrong(self, keyword: str, reason: str) -> GrammarError:
        return _malformed(self._place, keyword, reason)

    def _inner(self, *steps: str | int, scope: _Scope | None = None) -> Ready:
        place = self._place.child(*steps)
        return self._preparation.value(place, self._scope if scope is None else scope)

    # -- any value

    def _type(self, key: str) -> None:
        type_ = self._schema[key]
        self._out[key] = type_ if isinstance(type_, str) else list(dict.fromkeys(type_))

    def _values(self, key: str) -> None:
        values = self._schema[key] if key == "enum" else [self._schema[key]]
        if not isinstance(values, list):
            raise self._wrong(key, "is not a list")
        if not values:
            self._conjuncts.append(False)
        elif all(map(_is_exact, values)):
            self._out[key] = self._schema[key]
        else:
            self._drop(key, "has a number beyond what can be enforced")

    def _reference(self, key: str) -> None:
        ready = self._preparation.reference(self._place, self._scope)
        if isinstance(ready, dict) and "$ref" not in self._out:
            self._out |= ready
        elif ready is not True:
            self._conjuncts.append(ready)

    def _branches(self, key: str) -> list[Ready]:
        branches = self._schema[key]
        if not isinstance(branches, list) or not branches:
            raise self._wrong(key, "is not a list of schemas")
        return [self._inner(key, i) for i in range(len(branches))]

    def _all_of(self, key: str) -> None:
        self._out[key] = self._branches(key)

    def _any_of(self, key: str) -> None:
        self._alternatives(self._branches(key))

    def _one_of(self, key: str) -> None:
        branches = self._branches(key)
        places = [self._place.child(key, i) for i in range(len(branches))]
        if not self._preparation.alternatives.exclude_each_other([place.schema for place in places]):
            self._drop(key, "has alternatives that may fit together; anyOf can be enforced")
        self._alternatives(branches)

    def _alternatives(self, branches: Sequence[Ready]) -> None:
        if "anyOf" in self._out:
            self._conjuncts.append({"anyOf": list(branches)})
        else:
            self._out["anyOf"] = list(branches)

    def _not(self, key: str) -> None:
        if self._schema[key] in (True, {}):
            self._conjuncts.append(False)
        elif self._schema[key] is not False:
            self._drop(key)

    def _if(self, key: str) -> None:
        if "then" in self._schema or "else" in self._schema:
            self._drop(key)

    def _dependencies(self, key: str) -> None:
        if self._mapping(key):
            self._drop(key)

    def _mapping(self, key: str) -> Mapping[str, Any]:
        mapping = self._schema.get(key, {})
        if not isinstance(mapping, Mapping):
            raise self._wrong(key, "is not an object")
        return mapping

    def _count(self, key: str) -> int | None:
        """A count, which may be written as 5.0; None without one, and where it is beyond any answer."""
        if key not in self._schema:
            return None
        count = self._schema[key]
        if isinstance(count, bool) or not isinstance(count, (int, float)) or count < 0 or count != count // 1:
            raise self._wrong(key, "is not a whole number of 0 or more")
        if count < _MAX_COUNT:
            return int(count)
        if key.startswith("min"):
            self._drop(key, "is more than any answer can have")
        return None

    # -- objects

    def _object(self) -> None:
        declared = self._mapping("properties")
        properties = {name: self._inner("properties", name, scope=self._scope.of(name)) for name in declared}
        additional = self._additional()
        by_pattern, is_incomplete = self._patterns(properties)
        if is_incomplete:
            additional = None
        if self._schema.get("propertyNames", True) not in (True, {}, {"type": "string"}):
            self._drop("propertyNames")
        required = self._required()
        if self._closing is not None and additional is None:
            properties |= {name: True for name in self._closing.names if name not in properties}
            additional = False
        if properties or "properties" in self._schema:
            self._out["properties"] = properties
        if by_pattern:
            self._out["patternProperties"] = by_pattern
        if additional is not None:
            self._out["additionalProperties"] = additional
        if required:
            self._out["required"] = required
        optional = properties.keys() - set(required)
        for key in ("minProperties", "maxProperties"):
            if (count := self._count(key)) is None or (key == "minProperties" and count <= len(required)):
                continue
            if self._composed or optional:
                self._drop(key, "cannot be enforced where properties are optional")
            else:
                self._out[key] = count

    def _required(self) -> list[str]:
        required = self._schema.get("required", [])
        if isinstance(required, bool):  # draft 3: of a property
            return []
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._wrong("required", "is not a list of names")
        return list(dict.fromkeys(required))

    def _additional(self) -> Ready | None:
        if "additionalProperties" in self._schema:
            return self._inner("additionalProperties", scope=_Scope(part=self._composed))
        key = "unevaluatedProperties"
        if self._schema.get(key, True) is True or self._schema[key] == {}:
            return None
        if not self._composed:
            return self._inner(key)
        self._drop(key, "cannot be enforced beside schemas that may or may not apply")
        return None

    def _patterns(self, properties: dict[str, Ready]) -> tuple[dict[str, Ready], bool]:
        """Schemas by translated patterns that exclude each other, and whether one was dropped. Properties that a
        pattern matches get its schema."""
        key, by_pattern, is_incomplete = "patternProperties", dict[str, Ready](), False
        for n, pattern in enumerate(self._mapping(key)):
            ready, translated, problem = self._inner(key, pattern, scope=_Scope(part=self._composed)), "", ""
            try:
                translated = patterns.checked(pattern)
                if n >= patterns.MAX_PATTERNS:
                    problem = f"is one of more than {patterns.MAX_PATTERNS}"
                elif by_pattern and _refusal({key: dict.fromkeys([*by_pattern, translated], True)}):
                    problem = "overlaps with another pattern, or may"
            except patterns.PatternError as error:
                problem = str(error)
            if problem:
                self._drop(f"{key}/{pattern}", problem)
                is_incomplete = True
                continue
            by_pattern[translated] = ready
            for name in properties:
                if patterns.matches(pattern, name):
                    properties[name] = all_of(properties[name], ready)
        return by_pattern, is_incomplete

    # -- arrays

    def _array(self) -> None:
        items, prefix = self._schema.get("items"), self._schema.get("prefixItems")
        scope = _Scope(part=self._composed)
        if isinstance(items, list):
            self._out["prefixItems"] = [self._inner("items", i, scope=scope) for i in range(len(items))]
            if "additionalItems" in self._schema:
                self._out["items"] = self._inner("additionalItems", scope=scope)
        else:
            if prefix is not None:
                if not isinstance(prefix, list):
                    raise self._wrong("prefixItems", "is not a list of schemas")
                self._out["prefixItems"] = [self._inner("prefixItems", i, scope=scope) for i in range(len(prefix))]
            if "items" in self._schema:
                self._out["items"] = self._inner("items", scope=scope)
        for key in ("minItems", "maxItems"):
            if (count := self._count(key)) is not None:
                self._out[key] = count
        key = "unevaluatedItems"
        if self._schema.get(key, True) is not True and "items" not in self._out:
            if self._composed or "contains" in self._schema or any(key in self._schema for key in _APPLICATORS):
                self._drop(key, "cannot be enforced beside schemas that may or may not apply")
            else:
                self._out["items"] = self._inner(key, scope=scope)
        if self._schema.get("uniqueItems") is True and self._out.get("maxItems", 2) > 1:
            self._drop("uniqueItems")
        if "contains" in self._schema and (self._schema.get("minContains") != 0 or "maxContains" in self._schema):
            self._drop("contains")

    # -- strings and numbers

    def _string(self) -> None:
        keywords = dict[str, Any]()
        for key in ("minLength", "maxLength"):
            if (count := self._count(key)) is not None:
                keywords[key] = count
        for key in ("pattern", "format"):
            if key in self._schema and not isinstance(self._schema[key], str):
                raise self._wrong(key, "is not text")
        if (name := self._schema.get("format")) in _FORMATS:
            keywords["format"] = name
        elif name is not None:
            self._drop("format", f"{show(name)} is not known; these are: {', '.join(sorted(_FORMATS))}")
        if "pattern" in self._schema:
            try:
                keywords["pattern"] = patterns.checked(self._schema["pattern"])
            except patterns.PatternError as error:
                self._drop("pattern", f"cannot be enforced: {error}")
        self._checked({"type": "string"}, keywords, ("format", "pattern", "minLength", "maxLength"))

    def _number(self) -> None:
        keywords = dict[str, Any]()
        for key in _NUMBER:
            if key not in self._schema:
                continue
            value = self._schema[key]
            if isinstance(value, bool) and key.startswith("exclusive"):  # draft 4
                plain = key.removeprefix("exclusive").lower()
                if value and plain in keywords:
                    keywords[key] = keywords.pop(plain)
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
                raise self._wrong(key, "is not a number")
            if key == "multipleOf" and value <= 0:
                raise self._wrong(key, "is not greater than 0")
            if abs(value) < _EXACT:
                keywords[key] = value
            elif key == "multipleOf" or (value > 0) == key.lower().endswith("minimum"):
                self._drop(key, "is beyond what can be enforced")
            elif not self._preparation.lenient:  # only numbers that JSON readers agree on
                keywords[key] = _EXACT - 1 if value > 0 else 1 - _EXACT
        is_integer = self._schema.get("type") == "integer"
        self._checked({"type": "integer" if is_integer else "number"}, keywords, _NUMBER)

    def _checked(self, base: Mapping[str, Any], keywords: dict[str, Any], order: Sequence[str]) -> None:
        """Add what compiles, alone and together; ``order``: drop these first."""
        for key in [*keywords]:
            if key not in ("minLength", "maxLength", "format") and _refusal({**base, key: keywords[key]}):
                del keywords[key]
                self._drop(key, "is beyond what can be enforced")
        for key in order:
            if len(keywords) > 1 and key in keywords and (refusal := _refusal_together({**base, **keywords})):
                del keywords[key]
                self._drop(key, f"cannot be enforced beside {', '.join(keywords)}: {_reason(refusal)}")
        self._out |= keywords

    _WRITERS: Final[Mapping[str, Callable[[_SchemaWriter, str], None]]] = {
        "type": _type, "enum": _values, "const": _values,
        "$ref": _reference, "allOf": _all_of, "anyOf": _any_of, "oneOf": _one_of, "not": _not, "if": _if,
        "dependentRequired": _dependencies, "dependentSchemas": _dependencies, "dependencies": _dependencies,
    }  # fmt: skip


def _is_exact(value: Any) -> bool:
    """Return whether llguidance writes a constant as it is."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return True
    if isinstance(value, int):
        return abs(value) < _EXACT
    if isinstance(value, float):
        return math.isfinite(value) and abs(value) < _EXACT and not _refusal({"const": value})
    if isinstance(value, list):
        return all(map(_is_exact, value))
    return all(map(_is_exact, value.values()))


# -- errors of llguidance


def _compile_error(ready: Ready) -> str:
    if ready is False:
        return "Unsatisfiable"
    return patterns.compile_error(json.dumps(ready))


def _refusal(ready: Ready) -> str:
    """Return why a schema does not compile; empty if it compiles or no value fits it."""
    error = _compile_error(ready)
    return "" if patterns.nothing_fits(error) else error


def _refusal_together(ready: dict[str, Any]) -> str:
    """Return why keywords of one type do not compile together.  For a pattern and a length, run the lexer as well."""
    if (refusal := _refusal(ready)) or not {"pattern", "format"} & ready.keys():
        return refusal
    return _TOO_MUCH_WORK if patterns.exceeds_work_limit(json.dumps({"json_schema": ready})) else ""


def _reason(error: str) -> str:
    """Return llguidance's message as a sentence about the schema."""
    if patterns.nothing_fits(error):
        return "no value fits it"
    for sign, reason in (
        ("circular references", "a reference beside other keywords leads back to itself"),
        ("recursion limit", f"it is nested deeper than {MAX_DEPTH} schemas"),
        ("stack level", "schemas that must fit together refer to one another without end"),
        ("oneOf", "oneOf has alternatives that may fit together; anyOf can be enforced"),
        ("min/maxProperties", "minProperties and maxProperties cannot be enforced where properties are optional"),
        ("disjoint", "patternProperties overlap, or may"),
        ("allOf", "allOf cannot be enforced"),
    ):
        if sign in error:
            return reason
    return _TOO_MUCH_WORK


_TOO_MUCH_WORK: Final = "it takes too much work"
_RELAXED: Final = ("dependencies", "patternProperties", "pattern", "format", "minProperties", "maxProperties",
                   *_NUMBER, "minLength", "maxLength", "minItems", "maxItems", "allOf", "anyOf", "$ref")  # fmt: skip


def _relaxed(ready: Ready, error: str) -> tuple[Ready, str]:
    """Drop keywords until a prepared schema compiles: one place if that is enough, then kind by kind."""
    if patterns.nothing_fits(error):
        return ready, error
    places = [(schema, key) for schema in _schemas(ready) for key in _RELAXED if key in schema]
    for schema, key in places if len(places) <= 100 else ():
        copy = dict(schema)
        _without(schema, key)
        if not (after := _compile_error(ready)) or patterns.nothing_fits(after):
            return ready, after
        schema.clear()
        schema.update(copy)
    for kind in _RELAXED:
        for schema in list(_schemas(ready)):
            if kind in schema:
                _without(schema, kind)
        if not (error := _compile_error(ready)) or patterns.nothing_fits(error):
            break
    return ready, error


def _without(schema: dict[str, Any], key: str) -> None:
    del schema[key]
    if key == "patternProperties":
        schema.pop("additionalProperties", None)


def _schemas(ready: Ready) -> Iterator[dict[str, Any]]:
    if not isinstance(ready, dict):
        return
    yield ready
    for key, value in ready.items():
        if key in ("properties", "patternProperties", "$defs"):
            inner = list(value.values())
        elif key not in ("enum", "const"):
            inner = value if isinstance(value, list) else [value]
        else:
            continue
        for schema in inner:
            yield from _schemas(schema)
