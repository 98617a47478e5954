"""Closing objects: no further properties where a schema is plain, and never another meaning than a narrower one."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.text.grammar.schemas import closed

A = {"type": "object", "properties": {"a": {"type": "boolean"}}}
SHUT = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"type": "array", "items": A}, {"type": "array", "items": SHUT}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        ({"properties": {"p": A}}, {"properties": {"p": SHUT}, "additionalProperties": False}),
        ({"properties": {"$ref": A}}, {"properties": {"$ref": SHUT}, "additionalProperties": False}),
        ({"enum": [A]}, {"enum": [A]}),
    ],
)
def test_plain_objects_are_closed(schema, expected):
    assert closed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "integer"}},
        {**A, "patternProperties": {"^x": True}},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, {"properties": {"b": True}, "required": ["b"]}]},
        {"properties": {"a": True}, "anyOf": [{"properties": {"b": True}, "required": ["b"]}]},
        {"$defs": {"x": A}, "$ref": "#/$defs/x", "properties": {"b": True}},
        {"if": A, "then": A},
    ],
)
def test_objects_that_others_add_to_stay_open(schema):
    assert closed(schema) == schema


names = st.sampled_from(["a", "b", "c"])
values = st.recursive(
    st.booleans() | st.none() | st.integers(0, 2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
schemas = st.recursive(
    st.sampled_from([{}, {"type": "boolean"}, {"type": "null"}, {"enum": [0, {"a": 1}]}]),
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(names, inner, max_size=2),
                "required": st.lists(names, max_size=1),
                "additionalProperties": st.booleans(),
                "anyOf": st.lists(inner, min_size=1, max_size=2),
            },
        )
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"type": st.just("array"), "items": inner})
    ),
    max_leaves=6,
)


@given(schemas, st.lists(values, max_size=8))
def test_what_fits_the_closed_schema_fits_the_schema(schema, candidates):
    whole, narrow = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(closed(schema))
    for value in candidates:
        if narrow.is_valid(value):
            assert whole.is_valid(value)


def without_others(value, schema):
    """A value that fits, less the properties that its plain object schema does not name."""
    if isinstance(value, dict) and "properties" in schema and schema.get("additionalProperties") is None:
        return {k: without_others(v, schema["properties"][k]) for k, v in value.items() if k in schema["properties"]}
    return value


@given(st.dictionaries(names, st.sampled_from([{}, A, {"type": "boolean"}]), max_size=3), st.lists(values, max_size=8))
def test_a_value_less_its_further_properties_still_fits(properties, candidates):
    schema = {"type": "object", "properties": properties}
    whole, narrow = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(closed(schema))
    for value in candidates:
        if whole.is_valid(value):
            assert narrow.is_valid(without_others(value, schema))
