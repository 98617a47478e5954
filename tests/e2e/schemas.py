"""200 JSON schemas: written ones for every keyword that matters, and random combinations of them from a seed."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]


def obj(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    """An object with no further properties; all of them required unless told."""
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False} | more


def text(most: int = 6, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most} | more


FLAG: Schema = {"type": "boolean"}
SMALL: Schema = {"type": "integer", "minimum": 0, "maximum": 20}
PATTERNS = (
    "^[a-c]{2,4}$",
    r"^\d{3}-\d{2}$",
    "^(left|right)$",
    "^[A-Z][a-z]{1,3}$",
    r"^v\d{1,3}(\.\d{1,3}){1,2}$",
    "^$|^x+$",
)
CHOICES = (0, 1, -2.5, "a", "b c", 'd"e', None, True, [], [1], {"k": "v"})
NAMES = ("id", "name", "kind", "x-y", "größe", "a.b", "n 1", "very_long_property_name")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4")

_TREE = obj({"v": SMALL, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}})
_LIST = obj({"head": FLAG, "tail": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}})
_EVEN = obj({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}})
_ODD = obj({"even": {"$ref": "#/$defs/even"}})

WRITTEN: tuple[Schema, ...] = (
    {"type": "null"},
    FLAG,
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "exclusiveMinimum": 98, "exclusiveMaximum": 101},
    {"type": "integer", "minimum": 1000},
    {"type": "integer", "maximum": -1000},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    {"type": "number"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "number", "minimum": -0.5, "maximum": 0.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    text(0),
    text(1),
    text(12),
    {"type": "string", "minLength": 3, "maxLength": 5},
    *({"type": "string", "pattern": pattern} for pattern in PATTERNS),
    *({"type": "string", "format": name} for name in FORMATS),
    {"type": "string", "format": "email", "maxLength": 20},
    {"enum": ["only"]},
    {"enum": ["a", "b", 'c "quoted"', "line\nend", "ünï", "\\"]},
    {"enum": [1, "1", None, True, 1.5, [], {}, [1, {"a": 2}]]},
    {"const": {"deep": ["constant", {"x": 1}]}},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "boolean"]},
    {"type": "array", "items": FLAG, "maxItems": 4},
    {"type": "array", "items": SMALL, "minItems": 2, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [FLAG, SMALL], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [text(2)], "items": SMALL, "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "array", "items": SMALL, "maxItems": 2}, "maxItems": 3},
    obj({}),
    obj({"a": FLAG}),
    obj({"a": FLAG}, []),
    obj({"a": FLAG, "b": SMALL, "c": text()}, ["b"]),
    obj({"a b": FLAG, 'quo"te': SMALL, "ü": FLAG, "": FLAG}),
    obj({"a": obj({"b": obj({"c": obj({"d": FLAG})})})}),
    {"type": "object", "additionalProperties": SMALL, "maxProperties": 2},
    {"type": "object", "properties": {"k": FLAG}, "required": ["k"], "additionalProperties": {"enum": [0]}},
    {"anyOf": [FLAG, {"type": "null"}]},
    {"anyOf": [obj({"kind": {"const": "a"}, "x": SMALL}), obj({"kind": {"const": "b"}, "y": FLAG})]},
    {"oneOf": [obj({"a": FLAG}), obj({"b": FLAG})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"$defs": {"tree": _TREE}, "$ref": "#/$defs/tree"},
    {"$defs": {"list": _LIST}, "$ref": "#/$defs/list"},
    {"$defs": {"even": _EVEN, "odd": _ODD}, "$ref": "#/$defs/even"},
    {"definitions": {"small": SMALL}, **obj({"a": {"$ref": "#/definitions/small"}})},
    obj({"p": {"$ref": "#/$defs/point"}, "q": {"$ref": "#/$defs/point"}},
        **{"$defs": {"point": obj({"x": SMALL, "y": SMALL})}}),
    obj({"name": text(), "tags": {"type": "array", "items": text(3), "maxItems": 3}, "score": {"type": "number"}},
        title="Person", description="with annotations", **{"$schema": "https://json-schema.org/draft/2020-12/schema"}),
    obj({"when": {"type": "string", "format": "date"}, "id": {"type": "string", "pattern": "^[0-9a-f]{8}$"}}),
)  # fmt: skip


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of at most ``depth`` levels whose values are short."""
    kinds = ["flag", "integer", "number", "text", "pattern", "enum", "nullable"]
    kinds += ["object", "object", "array", "union", "recursive"] if depth else []
    match rng.choice(kinds):
        case "integer":
            low = rng.randrange(-200, 200)
            return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 3, 90, 5000])}
        case "number":
            low = rng.randrange(-20, 20) / 4
            return {"type": "number", "minimum": low, "maximum": low + rng.choice([0.25, 1, 40])}
        case "text":
            least = rng.randrange(3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randrange(6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "enum":
            return {"enum": rng.sample(CHOICES, rng.randrange(1, 5))}
        case "nullable":
            return {"anyOf": [random_schema(rng, 0), {"type": "null"}]}
        case "object":
            names = rng.sample(NAMES, rng.randrange(1, 5))
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return obj(properties, [name for name in names if rng.random() < 0.7])
        case "array":
            least = rng.randrange(3)
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randrange(3)}
        case "union":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(2, 4))]}
        case "recursive":
            name = f"n{rng.randrange(1000)}"
            again = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
            return {"$defs": {name: obj({"value": random_schema(rng, 0), "next": again})}, "$ref": f"#/$defs/{name}"}
    return FLAG


def whole(schema: Schema) -> Schema:
    """A schema with its inner definitions at the top, where references look for them."""
    definitions: Schema = {}

    def lifted(part: Any) -> Any:
        if isinstance(part, list):
            return [lifted(one) for one in part]
        if not isinstance(part, dict):
            return part
        values = ("enum", "const")
        kept = {key: one if key in values else lifted(one) for key, one in part.items() if key != "$defs"}
        definitions.update({name: lifted(one) for name, one in part.get("$defs", {}).items()})
        return kept

    body = lifted(schema)
    return {"$defs": definitions, **body} if definitions else body


def schemas(n: int = 200, seed: int = 1) -> list[Schema]:
    """The written ones, then random ones, ``n`` in all."""
    rng = random.Random(seed)
    return [*WRITTEN, *(whole(random_schema(rng)) for _ in range(n - len(WRITTEN)))][:n]
