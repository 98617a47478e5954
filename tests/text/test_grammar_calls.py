"""Grammars of tool calls: whatever they allow, the family's parser reads as a call of an offered tool that fits."""

from __future__ import annotations

import contextlib
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.grammar.forms import json_schema
from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.tools.call import calls_only, functions, without_schemas
from tests.combinations import combinations
from tests.text.call_walks import NAMES, compiler, matcher, parsed, tokenizer, written

Schema = dict[str, Any]
FLAG: Schema = {"type": "boolean"}
STATE: Schema = {"type": "string", "enum": ["open", "done"]}


# Names with what ends a name or a value in one of the formats.
TOOL_NAMES = [
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
    "a reference to the root": obj(
        {"leaf": FLAG, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}, ["leaf"]
    ),
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
    "a nullable enumeration": obj({"x": {"type": ["string", "null"], "enum": ["c", "f", None]}}),
    "text or bounded integer": obj(
        {"x": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer", "minimum": 5, "maximum": 7}]}}
    ),
    "text or number": obj({"x": {"type": ["string", "number"], "maxLength": 2}}),
    "text or true": obj({"x": {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,5}$"}, {"const": True}]}}),
    "text or object": obj({"x": {"anyOf": [{"type": "string", "maxLength": 4}, obj({"a": STATE})]}}),
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
    "names": obj(dict.fromkeys(TOOL_NAMES, FLAG)),
    "names inside": obj({"o": obj(dict.fromkeys(TOOL_NAMES, STATE))}),
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
    keys = rng.sample([*TOOL_NAMES[:10], "a", "b", "path", "x-y"], rng.randint(0, 4))
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


def tool(name: str, properties: dict[str, object], required: list[str], strict: bool = True, **more: object) -> dict:
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "parameters": parameters | more, "strict": strict},
    }


NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    tool("get_weather", {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}}, ["city"]),
    tool(
        "add-numbers",
        {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "number"}, "exact": {"type": "boolean"}},
        ["x", "exact"],
    ),
    tool("nothing", {}, []),
    tool(
        "nested",
        {"rows": {"type": "array", "items": {"enum": [1, None]}, "minItems": 1, "maxItems": 3}, "node": NODE},
        ["node"],
        **{"$defs": {"node": NODE}},
    ),
]


def check(calls: list[tuple[str, object]], tools: list[dict]) -> None:
    schemas = {offered["function"]["name"]: offered["function"]["parameters"] for offered in tools}
    for name, arguments in calls:
        jsonschema.validate(arguments, schemas[name])


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(NAMES)),
    st.booleans(),
    st.integers(0, 2**32),
    st.lists(st.sampled_from(range(4)), min_size=1, unique=True),
)
def test_what_is_written_is_read_as_calls_that_fit(kind: str, markers: bool, seed: int, offered: list[int]) -> None:
    tools = [TOOLS[i] for i in offered]
    text = written(matcher(kind, tools, markers=markers), random.Random(seed), markers)
    if text is not None:
        content, calls = parsed(text, kind, tools)
        assert calls, text
        assert not content.strip(), text
        check(calls, tools)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(NAMES)), st.booleans(), st.integers(0, 2**32))
def test_text_is_free_and_calls_in_it_fit(kind: str, markers: bool, seed: int) -> None:
    walk = matcher(kind, TOOLS, markers=markers, only=False)
    begin = "Let me see.\n" + NAMES[kind].open
    text = written(walk, random.Random(seed), markers, begin)
    if text is not None:
        content, calls = parsed(text, kind, TOOLS)
        assert calls, text
        assert content.startswith("Let me see.")
        check(calls, TOOLS)


@pytest.mark.parametrize("kind", sorted(NAMES))
def test_plain_text_is_allowed_beside_strict_tools(kind: str) -> None:
    walk = matcher(kind, TOOLS, only=False)
    marker = "<think>" if NAMES[kind].tags else ""  # where calls begin with plain text, so does all of an answer
    ids = tokenizer(True).encode(f"No tool is needed: 1 < 2 {marker}.", parse_special=True)
    row = walk.masks(0, ids, [])
    (end,) = tokenizer(True).eos_ids
    assert row[end // 8] >> (end % 8) & 1


@pytest.mark.parametrize("kind", sorted(NAMES))
def test_one_call_is_one(kind: str) -> None:
    for seed in range(5):
        text = written(matcher(kind, TOOLS[:2], n_most=1), random.Random(seed), True)
        assert text is None or len(parsed(text, kind, TOOLS)[1]) == 1


@pytest.mark.parametrize("kind", sorted(NAMES))
def test_a_tool_without_a_schema_takes_any_arguments(kind: str) -> None:
    tools = [{"type": "function", "function": {"name": "free"}}]
    texts = [written(matcher(kind, tools, n_most=1), random.Random(seed), True) for seed in range(12)]
    calls = [parsed(text, kind, tools)[1] for text in texts if text is not None]
    assert calls
    assert all(len(answer) == 1 and answer[0][0] == "free" and isinstance(answer[0][1], dict) for answer in calls)


@pytest.mark.parametrize("kind", ["xml", "pairs", "gemma"])
@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("pattern", {"type": "string", "pattern": "^(?!a)b$"}),
        ("pattern", {"type": "string", "pattern": r"^(?:\S+\s+){0,9}\S+$", "maxLength": 5000}),
        ("patternProperties", {"type": "object", "patternProperties": {f"^{i}": {"type": "null"} for i in range(65)}}),
        ("format", {"type": "string", "format": "phone"}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]}),
        ("not", {"type": "string", "not": {"const": "a"}}),
        ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        ("minLength", {"type": "string", "minLength": 2**40}),
        ("minProperties", {"type": "object", "properties": {"a": {}}, "minProperties": 1}),
        ("maxLength", {"type": "string", "maxLength": -1}),
        ("nowhere", {"$ref": "#/$defs/nowhere"}),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name_or_left_out(kind: str, keyword: str, schema: dict) -> None:
    with pytest.raises(GrammarError, match=rf"parameters of f: .*{keyword}"):
        matcher(kind, [tool("f", {"a": schema}, ["a"])])
    matcher(kind, [tool("f", {"a": schema}, ["a"], strict=False)])


def check_walk(kind: str, schema: dict, seed: int, markers: bool, *, strict: bool = True) -> bool:
    """A random walk through the grammar of one tool is read back as arguments that fit; say whether it ended."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
    text = written(matcher(kind, tools, markers=markers, n_most=1), random.Random(seed), markers, n_most=1500)
    if text is None:
        return False
    content, calls = parsed(text, kind, tools)
    assert len(calls) == 1, text
    assert not content.strip(), text
    assert isinstance(calls[0][1], dict)
    if strict:
        validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        validator(schema, format_checker=FORMAT_CHECKER).validate(calls[0][1])
    return True


FORMAT_CHECKER = jsonschema.FormatChecker(["date", "uuid", "ipv4", "ipv6", "email"])
BARE = ["gemma", "pairs", "xml"]


@combinations(kind=sorted({*NAMES}.difference(BARE)), name=sorted(SCHEMAS))
def test_parameters_of_every_kind_in_json_are_enforced_and_read_back(kind: str, name: str) -> None:
    test_parameters_of_every_kind_are_enforced_and_read_back(kind, name)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("kind", BARE)
def test_parameters_of_every_kind_are_enforced_and_read_back(kind: str, name: str) -> None:
    ended = [check_walk(kind, SCHEMAS[name], seed, markers=seed % 2 == 0) for seed in range(4)]
    assert any(ended) or name in ("nothing", "anything")


@pytest.mark.parametrize("name", sorted(OF_MEMBERS))
@pytest.mark.parametrize("kind", BARE)
def test_the_number_and_the_names_of_parameters_are_enforced(kind: str, name: str) -> None:
    ended = [check_walk(kind, OF_MEMBERS[name], seed, markers=seed % 2 == 0) for seed in range(6)]
    assert any(ended)
    if kind == "gemma":  # the others write objects within arguments as JSON
        check_walk(kind, {"type": "object", "properties": {"o": OF_MEMBERS[name]}, "required": ["o"]}, 0, markers=True)


def check_random_schemas(kind: str, seeds: range) -> int:
    """Walks through schemas made at random; return how many strict ones ended."""
    n_ended = 0
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        for strict in (True, False):
            with contextlib.suppress(GrammarError):  # a schema that refers to itself may allow no value with an end
                n_ended += strict & check_walk(kind, schema, seed, markers=seed % 2 == 0, strict=strict)
    return n_ended


@pytest.mark.parametrize(
    ("n", "n_least"), [(25, 10), pytest.param(3000, 1500, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
@pytest.mark.parametrize("kind", sorted(NAMES))
def test_random_schemas_are_enforced_and_read_back(kind: str, n: int, n_least: int) -> None:
    assert check_random_schemas(kind, range(n)) >= n_least


@pytest.mark.parametrize("kind", BARE)
def test_counts_are_whole_numbers_however_they_are_written(kind: str) -> None:
    texts = {"type": "string", "minLength": 2.0, "maxLength": 2.0}
    far = {"type": "string", "enum": ["a"], "maxLength": 2**70}
    schema = {"type": "object", "properties": {"a": texts, "b": far}, "required": ["a", "b"]}
    assert all([check_walk(kind, schema, seed, markers=True) for seed in range(3)])  # noqa: C419 - each must be right


@pytest.mark.parametrize("kind", sorted(NAMES))
def test_one_bad_tool_leaves_the_others_as_they_are(kind: str) -> None:
    good = tool("good", {"x": {"type": "integer", "minimum": 1, "maximum": 2}}, ["x"])
    for bad in (
        {"properties": {"to": {"type": 5}}},
        {"type": "object", "properties": ["to"]},
        {"type": "object", "properties": {"to": {"type": "string", "maxLength": "x"}}},
        {"type": "object", "properties": {"to": False}, "required": ["to"], "additionalProperties": False},
        {"type": "string"},
    ):
        tools = [{"type": "function", "function": {"name": "bad", "parameters": bad}}, good]
        texts = [written(matcher(kind, tools, n_most=1), random.Random(seed), True) for seed in range(6)]
        names = set()
        for text in texts:
            for name, arguments in parsed(text or "", kind, tools)[1]:
                names.add(name)
                assert arguments in ({"x": 1}, {"x": 2}) if name == "good" else isinstance(arguments, dict)
        assert "good" in names


@pytest.mark.parametrize("kind", BARE)
def test_tools_that_are_too_much_can_be_freed(kind: str) -> None:
    """Work is known when the grammar of all is compiled; a strict tool stays as it is."""
    big = tool("big", {"text": {"type": "string", "minLength": 90_000}}, [], strict=False)
    small = tool("small", {"x": {"const": 1}}, ["x"])
    with pytest.raises(GrammarError, match="fuel"):
        matcher(kind, [big, small])
    offered = without_schemas(functions([big, small]))
    assert offered[1:] == functions([small])
    rules = Rules(tokenizer(True))
    compiler(True).compile(rules.grammar(calls_only(rules, NAMES[kind], offered)))


def test_names_and_values_cannot_break_out_of_the_grammar() -> None:
    evil = tool('x" | /.*/ "', {'k" }\nstart: "': {"enum": ['"', "\\", "\n", "/"]}}, ['k" }\nstart: "'])
    for kind in ("json", "gemma"):
        text = written(matcher(kind, [evil], n_most=1), random.Random(3), True)
        assert text is None or 'x" | /.*/ "' in text or json.dumps('x" | /.*/ "')[1:-1] in text


KEYWORDS = [
    *("type", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "$defs", "x", "pattern", "minimum"),
    *("minLength", "maxLength", "minItems", "maxItems", "additionalProperties"),
]
TEXTS = ["string", "object", "array", "#", "#/$defs/x", "}/"]
wild = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(NAMES)), st.booleans(), st.dictionaries(st.sampled_from(KEYWORDS), wild, max_size=5))
def test_whatever_is_sent_as_a_schema_compiles_or_is_refused(kind: str, strict: bool, schema: dict) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}]
    with contextlib.suppress(GrammarError):
        matcher(kind, tools, n_most=1)
    with contextlib.suppress(GrammarError):
        rules = Rules(tokenizer(True))
        compiler(True).compile(rules.grammar(rules.part(json_schema(schema, lenient=not strict))))


@combinations(key=["allOf", "anyOf", "oneOf"], kind=sorted(NAMES))
def test_definitions_that_are_used_twice_at_every_step_are_looked_at_once(kind: str, key: str) -> None:
    """Else each step would double the work, of the grammar and of reading a call: 2^60."""
    steps = {f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    schema = {
        "properties": {"x": {"$ref": "#/$defs/d0"}},
        "required": ["x"],
        "$defs": {**steps, "d60": {"enum": ["3"]}},
    }
    assert any([check_walk(kind, schema, seed, markers=True, strict=False) for seed in range(3)])  # noqa: C419
    if kind in ("xml", "pairs") and key != "oneOf":
        text = {
            "xml": "<tool_call><function=f>\n<parameter=x>\n3\n</parameter>\n</function></tool_call>",
            "pairs": "<tool_call>f<arg_key>x</arg_key><arg_value>3</arg_value></tool_call>",
        }[kind]
        assert parsed(text, kind, [{"function": {"name": "f", "parameters": schema}}])[1] == [("f", {"x": "3"})]
