"""Prepared schemas: strict ones are enforced whole or refused by name, others lose only what cannot be enforced."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import Grammar, GrammarCompiler, GrammarError
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.grammar.schemas import prepared
from lucevisor.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, byte_metadata

A = {"type": "object", "properties": {"a": {"type": "boolean"}}}
SHUT = {**A, "additionalProperties": False}
BOOLEAN = {"type": "boolean"}


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_gguf(byte_metadata("qwen2", {"<|endoftext|>": CONTROL}))


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def compiled(schema: dict[str, Any], *, lenient: bool = False) -> Grammar:
    rules = Rules(tokenizer())
    return compiler().compile(rules.grammar(rules.part(forms.json_schema(schema, lenient=lenient))))


def accepts(grammar: Grammar, text: str) -> bool:
    walk, ids = grammar.matcher(), tokenizer().encode(text)
    if walk.n_valid(0, [], ids) < len(ids):
        return False
    row = walk.masks(0, ids, [])
    return any(row[i // 8] >> (i % 8) & 1 for i in tokenizer().eos_ids)


def allows(schema: dict[str, Any], value: object, *, lenient: bool = False) -> bool:
    return accepts(compiled(schema, lenient=lenient), json.dumps(value, ensure_ascii=False))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"type": "array", "items": A}, {"type": "array", "items": SHUT}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": A}, "$ref": "#/$defs/x"}, {"$ref": "#/$defs/d0", "$defs": {"d0": SHUT}}),
        (
            {"$defs": {"x": A}, "$ref": "#/$defs/x", "x-order": 3, "title": "T"},
            {"$ref": "#/$defs/d0", "$defs": {"d0": SHUT}},
        ),
        ({"allOf": [A], "default": {}}, {"allOf": [SHUT]}),
        ({"properties": {"p": A}}, {"properties": {"p": SHUT}, "additionalProperties": False}),
        ({"properties": {"$ref": A}}, {"properties": {"$ref": SHUT}, "additionalProperties": False}),
        ({"enum": [A]}, {"enum": [A]}),
        ({**A, "x-vendor": {"$ref": "http://other/x"}, "nullable": True}, SHUT),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": {"type": "null"}}, {**A, "additionalProperties": {"type": "null"}}),
        ({**A, "patternProperties": {"^x": True}}, {**A, "patternProperties": {"^x": True}}),
    ],
)
def test_plain_objects_are_closed(schema: dict[str, Any], expected: object) -> None:
    assert prepared(schema, lenient=False) == expected


PERSON = {"properties": {"name": {"type": "null"}}, "required": ["name"]}
COMPOSED = {
    "type": "object",
    "properties": {"head": {"allOf": [PERSON, {"properties": {"age": BOOLEAN}}]}, "plain": A},
    "allOf": [{"$ref": "#/$defs/tail"}, {"properties": {"more": A}}],
    "$defs": {"tail": {"properties": {"tail": BOOLEAN}}},
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"head": {"name": None, "age": True}, "plain": {"a": True}, "tail": True, "more": {"a": True}}, True),
        ({"head": {"name": None}}, True),
        ({}, True),
        ({"other": 1}, False),
        ({"head": {"name": None, "other": 1}}, False),
        ({"plain": {"other": 1}}, False),
        ({"more": {"other": 1}}, False),
    ],
)
def test_composed_objects_have_the_properties_that_any_of_the_schemas_names(value: object, fits: bool) -> None:
    assert allows(COMPOSED, value) == fits


def test_a_property_of_several_schemas_has_what_all_of_them_name() -> None:
    x, y = ({"properties": {"p": {"properties": {name: BOOLEAN}, "required": [name]}}} for name in "xy")
    assert allows({"allOf": [x, y], "required": ["p"]}, {"p": {"x": True, "y": False}})


E_MAIL = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z]+\.com$", "maxLength": 9}
# Either compiles alone; only what follows a character shows that both together are too much.
WORDS = {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,9}\S+$)", "minLength": 1, "maxLength": 5000}
TWO = {"a": BOOLEAN, "b": BOOLEAN}


@pytest.mark.parametrize(
    ("schema", "keyword", "fits", "others"),
    [
        (E_MAIL, "pattern at #", [".@x.com", "what"], ["more than nine", 1]),
        ({"type": "string", "pattern": r"\bfoo\b", "minLength": 2}, "pattern at #", ["foo", "ba"], ["f"]),
        (WORDS, "pattern at #", ["a b", "c" * 5000], ["", "c" * 5001]),
        ({"type": "string", "pattern": r"^(a|b)\1$"}, "pattern at #", ["aa", "ab"], [1]),
        ({"type": "string", "format": "colour", "maxLength": 3}, "format at #", ["red"], ["blue"]),
        ({"type": "array", "items": BOOLEAN, "uniqueItems": True}, "uniqueItems at #", [[True, True]], [[1]]),
        (
            {"type": "array", "contains": BOOLEAN, "items": {"type": ["boolean", "null"]}},
            "contains at #",
            [[None]],
            [[1]],
        ),
        ({"not": {"type": "string"}, "type": ["string", "null"]}, "not at #", [None], [1]),
        ({"if": {"const": 1}, "then": False, "type": "integer"}, "if at #", [2], ["2"]),
        (
            {"type": "object", "patternProperties": {"^a": BOOLEAN, "^ab": {"type": "null"}}},
            "patternProperties/^ab at #",
            [{"a": True}, {"x": 1}],
            [{"a": 1}],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^a": BOOLEAN, "(?=b)": {"type": "null"}},
                "additionalProperties": False,
            },
            "patternProperties/(?=b) at #",
            [{"a": True}, {"b": None}],
            [{"a": 1}],
        ),
        (
            {"type": "object", "properties": TWO, "additionalProperties": True, "minProperties": 1},
            "minProperties at #",
            [{"a": True}, {"c": 1}],
            [{"a": 1}],
        ),
        (
            {"properties": {"x": {"type": "integer", "maximum": -9007199254740993}}},
            "maximum at #/properties/x",
            [{"x": -9007199254740994}],
            [{"x": ""}],
        ),
        ({"type": "number", "multipleOf": 1e-300, "minimum": 0}, "multipleOf at #", [0.5], [-1]),
        ({"enum": [10**30, "a"], "type": ["integer", "string"]}, "enum at #", [10**30, "a"], [None]),
        ({"$ref": "other.json#/x", "type": "null"}, "$ref at #", [None], [1]),
        (
            {"type": "object", "properties": {"a": {"$ref": "#", "minProperties": 1}}},
            "minProperties at #/properties/a",
            [{"a": {"a": {}}}],
            [{"a": 1}],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "oneOf at #", [1, 3.5], ["a"]),
        ({"oneOf": [{"enum": [1]}, {"enum": [1.0, 2]}]}, "oneOf at #", [1, 2], ["a"]),
    ],
)
def test_what_cannot_be_enforced_is_refused_or_dropped_alone(
    schema: dict[str, Any], keyword: str, fits: list[object], others: list[object]
) -> None:
    with pytest.raises(GrammarError) as refused:
        prepared(schema, lenient=False)
    assert str(refused.value).startswith(keyword)
    grammar = compiled(schema, lenient=True)
    assert [value for value in [*fits, *others] if accepts(grammar, json.dumps(value))] == fits


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
        ({"type": "string", "pattern": r"^[[{]\/\u0041{2}}$"}, ["[/AA}"], ["[/A}"]),
        (INT64, [0, 2**53 - 1], [2**53, -(2**63)]),
        ({**A, "required": ["z"]}, [{"z": 1}, {"a": True, "z": 1}], [{}, {"a": True}, {"z": 1, "x": 1}]),
        ({**SHUT, "properties": TWO, "minProperties": 1}, [{"a": True}, {"b": True}], [{}]),
        (
            {"properties": {**TWO, "c": BOOLEAN}, "minProperties": 2, "maxProperties": 2},
            [{"a": True, "c": True}],
            [{}, {"a": True}, {"a": True, "b": True, "c": True}],
        ),
        (
            {"type": "object", "additionalProperties": BOOLEAN, "maxProperties": 1},
            [{}, {"x": True}],
            [{"x": True, "y": True}],
        ),
        (
            {"properties": TWO, "dependentRequired": {"a": ["b"]}},
            [{}, {"b": True}, {"a": True, "b": True}],
            [{"a": True}],
        ),
        ({"properties": TWO, "dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": True}], [{"a": True}]),
        (
            {"properties": TWO, "type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            [{"a": True}, {"b": True}],
            [{}, {"a": True, "b": True}],
        ),
        ({"properties": TWO, "type": "object", "not": {"required": ["a"]}}, [{"b": True}], [{"a": True}]),
        (
            {"type": "object", "propertyNames": {"enum": ["x", "y"]}, "additionalProperties": BOOLEAN},
            [{"x": True}, {}],
            [{"z": True}, {"x": 1}],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^[a-c]$"}}, [{"a": 1, "b": 2}], [{"d": 1}]),
        (
            {"type": "object", "patternProperties": {"^a": BOOLEAN, "^ab": BOOLEAN}, "additionalProperties": False},
            [{"abc": True}, {"a": True}],
            [{"b": True}, {"a": 1}],
        ),
        ({**A, "unevaluatedProperties": False}, [{"a": True}], [{"b": 1}]),
        ({"prefixItems": [BOOLEAN], "unevaluatedItems": False}, [[True]], [[True, 1]]),
        ({"type": "array", "items": [BOOLEAN], "additionalItems": False}, [[True]], [[True, 1]]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, [1.5], [1]),
        (
            {
                "$id": "http://x/y",
                "$defs": {"a": {"$anchor": "q", "type": "null"}, "~b/": BOOLEAN},
                "prefixItems": [{"$ref": "#q"}, {"$ref": "y#/$defs/~0b~1"}, {"$ref": "#/prefixItems/0"}],
            },
            [[None, True, None]],
            [[None, None, None], [None, True, True]],
        ),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 2]]),
        ({"enum": ["c", None], "type": ["string", "null"]}, ["c", None], ["n"]),
        (
            {"type": "array", "minItems": 1, "prefixItems": [BOOLEAN], "items": {"$ref": "#"}},
            [[True], [True, [False]]],
            [[], [True, []]],
        ),
        (
            {
                "properties": {"a": {"$ref": "#/$defs/n"}, "b": BOOLEAN},
                "$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"]}},
            },
            [{}, {"b": True}],
            [{"a": {}}],
        ),
        (
            {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            [None, {"a": {"a": None}}],
            [{}],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/d"}],
                "$defs": {
                    "c": {"properties": {"kind": {"const": "c"}}, "required": ["kind"], "type": "object"},
                    "d": {
                        "properties": {"kind": {"const": "d"}, "size": BOOLEAN},
                        "required": ["kind"],
                        "type": "object",
                    },
                },
            },
            [{"kind": "c"}, {"kind": "d", "size": True}],
            [{"kind": "c", "size": True}],
        ),
    ],
)
def test_a_strict_schema_is_enforced(schema: dict[str, Any], fits: list[object], others: list[object]) -> None:
    for lenient in (False, True) if schema is not INT64 else (False,):
        grammar = compiled(schema, lenient=lenient)
        assert [value for value in [*fits, *others] if accepts(grammar, json.dumps(value))] == fits


@pytest.mark.parametrize("pattern", ["^a$", "^(a|b)$", "^[ab]?$"])
def test_a_pattern_that_properties_cover_offers_no_key_that_cannot_follow(pattern: str) -> None:
    schema = {
        "properties": {"": BOOLEAN, **TWO},
        "patternProperties": {pattern: BOOLEAN},
        "additionalProperties": False,
    }
    walk = compiled(schema).matcher()
    row = walk.masks(0, tokenizer().encode('{"":true,"a":true,"b":true'), [])
    assert {tokenizer().token_bytes(i) for i in range(tokenizer().n_vocab) if row[i // 8] >> (i % 8) & 1} <= {
        b"}",
        b" ",
        b"\n",
    }
    assert allows(schema, {"a": True})
    assert not allows(schema, {"a": 1})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": {"x": {"type": "thing"}}}, '"thing" is not a type'),
        ({"properties": {"x": {"minLength": "3"}}}, "minLength at #/properties/x"),
        ({"properties": [1]}, "properties at #"),
        ({"items": 3}, "#/items is not an object"),
        ({"anyOf": {}}, "anyOf at #"),
        ({"type": "string", "enum": []}, "no value fits"),
        ({"type": "object", "required": ["z"], "additionalProperties": False}, "no value fits"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no value fits"),
        (
            {
                "anyOf": [{"$ref": "#/$defs/a"}, False],
                "$defs": {
                    "a": {"type": "array", "minItems": 2, "prefixItems": [True], "items": {"$ref": "#/$defs/b"}},
                    "b": {"allOf": [{"type": "object", "required": ["c"], "properties": {"c": {"$ref": "#/$defs/a"}}}]},
                },
            },
            "no value fits",
        ),
        (functools.reduce(lambda inner, _: {"items": inner}, range(500), {}), "nested"),
        (
            {
                "$defs": {f"a{i}": {"items": {"$ref": f"#/$defs/a{(i + 1) % 300}"}} for i in range(300)},
                "$ref": "#/$defs/a0",
            },
            "nested",
        ),
    ],
)
def test_what_is_no_schema_is_refused_either_way(schema: dict[str, Any], told: str) -> None:
    for lenient in (False, True):
        with pytest.raises(GrammarError) as refused:
            prepared(schema, lenient=lenient)
        assert told in str(refused.value)


# -- against jsonschema

NAMES = ["a", "b", "c"]
names = st.sampled_from(NAMES)
leaves = st.sampled_from([
    {}, True, False, BOOLEAN, {"type": "null"}, {"enum": [0, {"a": 1}, "a"]}, {"type": "integer", "minimum": 1},
    {"type": "string", "pattern": "^a"}, {"type": "string", "maxLength": 1}, {"const": "b"},
])  # fmt: skip
schemas = st.recursive(
    leaves,
    lambda inner: (
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(names, inner, max_size=2),
                "required": st.lists(names, max_size=2, unique=True),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(st.sampled_from(["^a", "b$", "^(?!a)", "c"]), inner, max_size=2),
                "minProperties": st.integers(0, 3),
                "maxProperties": st.integers(0, 3),
                "propertyNames": st.sampled_from([{"enum": ["a", "c"]}, {"pattern": "^[ab]"}, {"maxLength": 2}]),
                "dependentRequired": st.dictionaries(names, st.lists(names, max_size=1), max_size=1),
                "anyOf": st.lists(inner, min_size=1, max_size=2),
                "not": inner,
                "unevaluatedProperties": st.booleans(),
            },
        )
        | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"oneOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)})
        | st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={
                "items": inner,
                "prefixItems": st.lists(inner, min_size=1, max_size=2),
                "uniqueItems": st.booleans(),
            },
        )
    ),
    max_leaves=6,
).filter(lambda schema: isinstance(schema, dict))
values = st.recursive(
    st.booleans() | st.none() | st.integers(0, 2) | st.sampled_from(["", "a", "ab", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)


def grammar_of(schema: dict[str, Any], *, lenient: bool) -> Grammar | None:
    try:
        return compiled(schema, lenient=lenient)
    except GrammarError as error:
        if lenient and "no value fits" not in str(error) and "allows no output" not in str(error):
            raise
        return None


def written(grammar: Grammar, rng: random.Random) -> str | None:
    walk, output = grammar.matcher(), list[int]()
    while len(output) < 120:
        row = walk.masks(max(0, len(output) - 1), output[-1:], [])
        choices = [i for i in range(tokenizer().n_vocab) if row[i // 8] >> (i % 8) & 1]
        assert choices, tokenizer().decode(output)
        ends = [i for i in choices if i in tokenizer().eos_ids]
        if ends and (len(ends) == len(choices) or rng.random() < 0.3):
            return tokenizer().decode(output)
        plain = [i for i in choices if tokenizer().token_bytes(i)[:1] in b'"}],:{[abc01tfn']
        output.append(rng.choice(plain or [i for i in choices if i not in ends]))
    return None


@settings(max_examples=150, deadline=None)
@given(schemas, st.integers(0, 2**32), st.booleans())
def test_whatever_a_grammar_writes_fits_a_strict_schema(schema: dict[str, Any], seed: int, lenient: bool) -> None:
    grammar = grammar_of(schema, lenient=lenient)
    text = grammar and written(grammar, random.Random(seed))
    if text is not None and not lenient:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def orders(value: Any) -> Iterator[Any]:
    """A value with the properties of its objects in all orders."""
    if isinstance(value, list):
        yield from (list(items) for items in itertools.product(*map(list, map(orders, value))))
    elif isinstance(value, dict):
        for keys in itertools.permutations(value):
            for items in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, items, strict=True))
    else:
        yield value


def opened(schema: Any) -> Any:
    """The schema with every object open, so that none is closed."""
    if isinstance(schema, list):
        return [opened(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: value if key in ("enum", "const") else opened(value) for key, value in schema.items()}
    if schema.get("type") == "object" and not {"additionalProperties", "unevaluatedProperties"} & schema.keys():
        result["additionalProperties"] = True
    return result


@settings(max_examples=150, deadline=None)
@given(schemas, st.lists(values, max_size=6))
def test_a_dropped_keyword_refuses_nothing(schema: dict[str, Any], candidates: list[Any]) -> None:
    schema = opened(schema)
    grammar = grammar_of(schema, lenient=True)
    for value in candidates:
        if jsonschema.Draft202012Validator(schema).is_valid(value):
            assert grammar is not None
            assert any(accepts(grammar, json.dumps(ordered)) for ordered in itertools.islice(orders(value), 200)), value
