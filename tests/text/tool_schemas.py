"""Parameters of tools as clients send them, by what is particular about them, and others made at random."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

FLAG: Schema = {"type": "boolean"}
STATE: Schema = {"type": "string", "enum": ["open", "done"]}
# Names with what ends a name or a value in one of the formats.
NAMES = [
    *("room name", "a:b", "a>b", "a=b", 'q"q', "ünï 🙂", "a,b", " lead", "trail ", "a{b", "a[b", "'s'", "<x>", "a/b"),
    *("\\n", ">x", "type", "properties", "$ref", "", "a}b", "a]b", "tab\there", "<|x|>", "a=b:c,d>e"),
]


def obj(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with these properties, all of them required unless told otherwise."""
    return {"type": "object", "properties": properties, "required": required or list(properties), **more}


def some(properties: Schema, **more: Any) -> Schema:
    """An object with these properties, or some of them, and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


VERSION: Schema = {"type": "string", "enum": ["3.10", "1"]}
PARTS = {"V": VERSION, "E": STATE, "M": obj({"a b": {"type": "string", "maxLength": 2}}, additionalProperties=False)}

SCHEMAS: dict[str, Schema] = {
    "a reference to a property": obj({"status": STATE, "only": {"$ref": "#/properties/status"}}),
    "a reference to the root": obj(
        {"leaf": FLAG, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, ["leaf"]
    ),
    "shadowed definitions": obj(
        {"o": obj({"c": {"$ref": "#/$defs/C"}}, **{"$defs": {"C": {"type": "null"}}})}, **{"$defs": {"C": FLAG}}
    ),
    "a referenced enumeration": obj({"v": {"$ref": "#/$defs/V"}}, **{"$defs": PARTS}),
    "allOf": obj({"v": {"allOf": [{"$ref": "#/$defs/V"}], "default": "3.10"}}, **{"$defs": PARTS}),
    "constants": obj({"v": {"const": "3.10"}, "w": {"const": 3}, "x": {"const": None}, "y": {"const": {"a": ["1"]}}}),
    "optional model and enumeration": obj(
        {
            "m": {"anyOf": [{"$ref": "#/$defs/M"}, {"type": "null"}], "default": None},
            "e": {"anyOf": [{"$ref": "#/$defs/E"}, {"type": "null"}], "default": None},
        },
        **{"$defs": PARTS},
    ),
    "further properties": some(
        {"id": {"type": "string", "maxLength": 3}}, additionalProperties={"type": "string", "enum": ["1", "2"]}
    ),
    "patternProperties": some({}, patternProperties={"^x-": {"type": "integer"}, "^y": {"type": "string"}}),
    "patternProperties of a named one": some(
        {"x-a": {"minimum": 3}}, required=["x-a"], patternProperties={"^x-": {"type": "integer", "maximum": 9}}
    ),
    "a nullable enumeration": obj({"x": {"type": ["string", "null"], "enum": ["c", "f", None]}}),
    "a nullable text with a length": obj({"x": {"type": ["string", "null"], "maxLength": 3}}),
    "text or bounded integer": obj(
        {"x": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5, "maximum": 7}]}}
    ),
    "text or number": obj({"x": {"type": ["string", "number"], "maxLength": 2}}),
    "text or true": obj({"x": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,5}$"}, {"const": True}]}}),
    "text or object": obj({"x": {"anyOf": [{"type": "string", "maxLength": 4}, obj({"a": STATE})]}}),
    "text or array": obj(
        {"x": {"anyOf": [{"type": "string"}, {"type": "array", "items": FLAG, "minItems": 1, "maxItems": 2}]}}
    ),
    "digits as text or integer": obj({"x": {"anyOf": [{"const": "1"}, {"type": "integer", "minimum": 5}]}}),
    "texts that look like JSON": obj({"x": {"enum": ["1", "true", "null", "{}", "[1]", "1.0"]}}),
    "mixed constants": obj({"y": {"enum": [1, 2.5, "a", None, True, [1], {"b": "c"}]}}),
    "a pattern and a length": obj({"x": {"type": "string", "pattern": "^a+$|b", "minLength": 2, "maxLength": 4}}),
    "formats": obj(
        {
            name: {"type": "string", "format": name}
            for name in ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")
        }
    ),
    "an undeclared required one": obj({"a": FLAG}, ["a", "z"]),
    "tags in constants": obj({"x": {"enum": ["</parameter>", "</tool_call>", "null", "<parameter=y>"]}}),
    "arrays": obj(
        {
            "one": {"type": "array", "items": FLAG, "maxItems": 1},
            "two": {"type": "array", "items": STATE, "minItems": 2, "maxItems": 3},
            "tuple": {"type": "array", "prefixItems": [FLAG, STATE], "items": False, "minItems": 2},
            "none": {"type": "array", "maxItems": 0},
        }
    ),
    "names": obj(dict.fromkeys(NAMES, FLAG)),
    "names inside": obj({"o": obj(dict.fromkeys(NAMES, STATE))}),
    "anyOf of parameters": {"type": "object", "anyOf": [obj({"a": STATE}), obj({"b": {"type": "integer"}})]},
    "a discriminated union": {
        "oneOf": [
            obj({"kind": {"const": "a"}, "a": STATE}, additionalProperties=False),
            obj({"kind": {"const": "b"}, "b": FLAG}, additionalProperties=False),
        ]
    },
    "allOf of parameters": {"allOf": [obj({"a": STATE}), obj({"b": {"type": "integer"}})]},
    "a reference for parameters": {"$ref": "#/$defs/M", "$defs": PARTS},
    "an array or an object": {"type": ["array", "object", "null"]},
    "nothing": {},
    "anything": obj({"a": True, "b": {}}),
    "anyOf beside type": obj(
        {"x": {**some({"a": STATE, "b": FLAG}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}}
    ),
    "a property whose values have no end": obj(
        {"a": {"type": "array", "items": {"$ref": "#/$defs/N"}, "minItems": 1}, "b": FLAG},
        ["b"],
        **{"$defs": {"N": obj({"n": {"$ref": "#/$defs/N"}})}},
    ),
    "a reference to an element": obj(
        {"l": {"type": "array", "items": STATE, "maxItems": 2}, "x": {"$ref": "#/properties/l/items"}}
    ),
    "references with escapes": obj(
        {"a/b": STATE, "c~d": FLAG, "x": {"$ref": "#/properties/a~1b"}, "y": {"$ref": "#/properties/c~0d"}}
    ),
    "the root by its identifier": {
        "$id": "http://x.y/z.json",
        **obj({"v": FLAG, "kid": {"anyOf": [{"$ref": "z.json"}, {"type": "null"}]}}),
    },
    "a reference of draft 4, of any type": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "$ref": "#/definitions/c",
        "type": "null",
        "definitions": {"c": {"properties": {"a": FLAG}}},
    },
    "anchors in groups": obj({"x": {"type": "string", "pattern": "^$|(^(?:a|b){2}$)"}}),
    "definitions of both kinds": obj(
        {"a": {"$ref": "#/definitions/C"}, "b": {"$ref": "#/$defs/C"}},
        **{"$defs": {"C": FLAG}, "definitions": {"C": STATE}},
    ),
    "nullable constants": obj(
        {
            "x": {"type": ["integer", "null"], "enum": [1, 2, None]},
            "y": {"oneOf": [{"type": "null"}, {"enum": ["null", "3"]}]},
        }
    ),
    "a nullable pattern or date": obj(
        {
            "x": {"type": ["string", "null"], "pattern": "^[0-9]{2}$"},
            "y": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        }
    ),
    "an undeclared one of a type": obj({"a": FLAG}, ["a", "z"], additionalProperties={"enum": [7, "7"]}),
    "arrays of one": obj(
        {
            "o": {"type": "array", "items": obj({"a": FLAG}), "minItems": 1, "maxItems": 1},
            "n": {"type": "array", "maxItems": 1, "items": {"type": "array", "maxItems": 1, "items": {"type": "null"}}},
        }
    ),
    "texts that look like numbers": obj(
        {
            "v": {"type": "string", "pattern": r"^\d\.\d0$"},
            "w": {"const": "1e5"},
            "l": {"type": "array", "items": {"enum": ["3.10", "007"]}, "minItems": 1, "maxItems": 2},
        }
    ),
    "64 bits": obj(
        {
            "i": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            "u": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64},
            "f": {"type": "number", "minimum": -1.8e308, "maximum": 1.7e308},
        }
    ),
    "a property that is forbidden": {"type": "object", "properties": {"a": False}, "additionalProperties": FLAG},
}
# What llguidance's JSON does not enforce, and the other formats do.
OF_MEMBERS: dict[str, Schema] = {
    "patterns that overlap": some({}, patternProperties={"^x": {"type": "integer"}, "y$": FLAG}),
    "minProperties": some({"a": FLAG, "b": FLAG, "c": FLAG}, minProperties=2),
    "maxProperties": some({"a": FLAG, "b": FLAG, "c": FLAG}, maxProperties=1, additionalProperties={"type": "null"}),
    "exactly one": some({"a": FLAG, "b": STATE}, minProperties=1, maxProperties=1),
    "properties that need each other": some({"a": FLAG, "b": FLAG}, dependentRequired={"a": ["b"], "b": ["a"]}),
    "dependencies": some({"a": FLAG, "b": FLAG, "c": FLAG}, required=["a"], dependencies={"a": ["b"], "b": ["c"]}),
    "dependentRequired": some({"a": FLAG, "b": FLAG}, dependentRequired={"a": ["b"]}),
    "dependentSchemas": some(
        {"a": FLAG, "b": {}}, dependentSchemas={"a": {"properties": {"b": {"const": "x"}}, "required": ["b"]}}
    ),
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{2}$"},
        "additionalProperties": {"type": "integer"},
    },
    "names of an enumeration": {
        "type": "object",
        "propertyNames": {"enum": ["one two", "b"]},
        "additionalProperties": {"type": "integer"},
    },
    "unevaluatedProperties": {"allOf": [obj({"a": STATE})], "properties": {"b": FLAG}, "unevaluatedProperties": False},
}


def random_schema(rng: random.Random) -> Schema:
    """Parameters of a tool with definitions that refer to each other."""
    names = ["Leaf", "Node", "Tree"][: rng.randint(1, 3)]
    definitions = {name: _object(rng, 2, names) for name in names}  # objects, as a reference to itself says nothing
    return {**_object(rng, 3, names), "$defs": definitions | {"Leaf": _scalar(rng)}}


def _value(rng: random.Random, depth: int, names: list[str]) -> Schema:
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return _scalar(rng)
    if kind < 0.5:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    if kind < 0.65:
        return {"anyOf": [_value(rng, depth - 1, names), rng.choice([{"type": "null"}, _scalar(rng)])]}
    if kind < 0.7:
        return {"allOf": [_value(rng, depth - 1, names)], "description": "a part"}
    if kind < 0.8:
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": _value(rng, depth - 1, names),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    return _object(rng, depth - 1, names)


def _object(rng: random.Random, depth: int, names: list[str]) -> Schema:
    keys = rng.sample([*NAMES[:10], "a", "b", "path", "x-y"], rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {key: _value(rng, depth, names) for key in keys}}
    schema["required"] = [key for key in keys if rng.random() < 0.6]
    schema |= rng.choice([{}, {"additionalProperties": False}, {"additionalProperties": _scalar(rng)}])
    return schema


def _scalar(rng: random.Random) -> Schema:
    low = rng.randint(-20, 20)
    return dict(
        rng.choice(
            [
                {"type": "string"},
                {"type": "string", "maxLength": rng.randint(1, 6)},
                {"type": "string", "pattern": rng.choice(["^[a-z]{1,4}$", "ab|c", "^x", "y$", r"^\d{2}-\w$"])},
                {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
                {"type": ["string", "null"], "minLength": 1, "maxLength": 5},
                {"type": ["string", "integer"]},
                {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 30)},
                {"type": "number"},
                {"enum": rng.sample(["a", "b c", "1", "null", "3.10", 1, 2.5, None, True, [1, "x"]], 3)},
                {"const": rng.choice(["only", "true", 7, None, False])},
                {"type": ["string", "null"], "enum": ["c", "f", None]},
                FLAG,
                {},
            ]
        )
    )
