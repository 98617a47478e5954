"""Grammars of tool calls: whatever they allow, the family's parser reads as a call of an offered tool that fits."""

from __future__ import annotations

import contextlib
import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.grammar.forms import json_schema
from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.tools.constraint import calls_only, functions, without_schemas
from tests.text.call_walks import NAMES, compiler, matcher, parsed, tokenizer, written
from tests.text.tool_schemas import OF_MEMBERS, SCHEMAS, random_schema


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
    ids = tokenizer(True).encode("No tool is needed: 1 < 2 <think>.", parse_special=True)
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
        ("pattern", {"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}),
        ("pattern", {"type": "string", "pattern": r"^(?:\S+\s+){0,9}\S+$", "maxLength": 5000}),
        ("patternProperties", {"type": "object", "patternProperties": {f"^{i}": {"type": "null"} for i in range(65)}}),
        ("format", {"type": "string", "format": "phone"}),
        ("oneOf", {"oneOf": [{"type": "string"}, {"type": ["string", "null"]}]}),
        ("not", {"type": "string", "not": {"const": "a"}}),
        ("uniqueItems", {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}),
        ("minLength", {"type": "string", "minLength": 2**40}),
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


@pytest.mark.parametrize("name", sorted(SCHEMAS))
@pytest.mark.parametrize("kind", sorted(NAMES))
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
    """Walks through schemas made at random; return how many ended.  Only a strict one may be refused."""
    n_ended = 0
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        with contextlib.suppress(GrammarError):  # a schema that refers to itself may allow no value
            n_ended += check_walk(kind, schema, seed, markers=seed % 2 == 0)
        check_walk(kind, schema, seed, markers=seed % 2 == 0, strict=False)
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
    schema = {"type": "object", "properties": {"a": texts, "b": far}, "required": ["a", "b"], "maxProperties": 2.0}
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
        {"type": "object", "properties": {"to": {"$ref": "#"}}, "required": ["to"]},
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


@pytest.mark.parametrize("key", ["allOf", "anyOf", "oneOf"])
@pytest.mark.parametrize("kind", sorted(NAMES))
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
