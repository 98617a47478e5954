"""References are resolved against the whole schema: what a flattened schema says, the schema said."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.references import UnresolvedReferenceError, flattened, with_definitions

ENUM = {"type": "string", "enum": ["open", "done"]}
SCHEMAS: dict[str, dict[str, Any]] = {
    "a property": {"properties": {"x": {"$ref": "#/properties/status"}, "status": ENUM}},
    "the root": {"type": "object", "properties": {"x": {"$ref": "#"}}},
    "escaped steps": {"properties": {"x": {"$ref": "#/$defs/a~1b~0c%20d"}}, "$defs": {"a/b~c d": ENUM}},
    "an element": {"properties": {"x": {"$ref": "#/properties/y/anyOf/1"}, "y": {"anyOf": [{"type": "null"}, ENUM]}}},
    "an anchor": {"properties": {"x": {"$ref": "#word"}}, "$defs": {"w": {"$anchor": "word", **ENUM}}},
    "definitions": {"properties": {"x": {"$ref": "#/definitions/w"}}, "definitions": {"w": ENUM}},
    "any place": {"properties": {"x": {"$ref": "#/components/w"}}, "components": {"w": ENUM}},
    "shadowed definitions": {
        "properties": {"x": {"$ref": "#/$defs/w", "$defs": {"w": {"type": "null"}}}},
        "$defs": {"w": ENUM},
    },
    "nested definitions": {"properties": {"x": {"$ref": "#/properties/x/$defs/w", "$defs": {"w": ENUM}}}},
    "an identifier": {
        "$id": "https://example.org/root.json",
        "properties": {"x": {"$ref": "word.json"}},
        "$defs": {"w": {"$id": "word.json", **ENUM}},
    },
    "definitions of an identified part": {
        "$id": "https://example.org/root.json",
        "properties": {"x": {"$id": "part.json", "$ref": "#/$defs/w", "$defs": {"w": ENUM}}},
        "$defs": {"w": {"type": "null"}},
    },
    "a chain": {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": ENUM}},
    "beside other keywords": {"properties": {"x": {"$ref": "#/$defs/w", "maxLength": 4}}, "$defs": {"w": {}}},
    "a schema of false": {"properties": {"x": {"$ref": "#/$defs/w"}}, "$defs": {"w": False}},
    "a property named $ref": {"properties": {"$ref": {"type": "string"}, "x": {"const": {"$ref": "#/nowhere"}}}},
}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@settings(max_examples=60, deadline=None)
@given(value=st.recursive(
    st.sampled_from(["open", "done", "opened", None, 1, {"$ref": "#/nowhere"}]),
    lambda inner: st.dictionaries(st.sampled_from(["x", "y", "status"]), inner, max_size=2),
    max_leaves=3,
))  # fmt: skip
def test_a_flattened_schema_says_the_same(name: str, value: object) -> None:
    flat = flattened(SCHEMAS[name], lenient=False)
    validators = [jsonschema.Draft202012Validator(schema) for schema in (SCHEMAS[name], flat)]
    for instance in (value, {"x": value}):
        right, flattened_says = (schema.is_valid(instance) for schema in validators)
        assert flattened_says == right


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_part_of_it_stands_alone(name: str) -> None:
    flat = flattened(SCHEMAS[name])
    part = with_definitions(flat["properties"]["x"], flat.get("$defs", {}))
    for value in ("open", "opened", None, {"x": "open"}, {"x": 1}):
        right = jsonschema.Draft202012Validator(SCHEMAS[name]).is_valid({"x": value})
        assert jsonschema.Draft202012Validator(part).is_valid(value) == right


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "other.json", "#/required/0", "http://[", 5])
def test_a_reference_that_leads_nowhere_is_refused_or_left_out(reference: object) -> None:
    schema = {"properties": {"x": {"$ref": reference, "type": "string"}}, "required": ["x"]}
    with pytest.raises(UnresolvedReferenceError, match="leads nowhere"):
        flattened(schema, lenient=False)
    assert flattened(schema)["properties"] == {"x": {"type": "string"}}
