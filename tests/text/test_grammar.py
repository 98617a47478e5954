"""Grammars over real and small vocabularies: what masks allow is what the grammar allows, at every draft."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import Grammar, GrammarCompiler, GrammarError, Matcher
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.grammar.schemas import prepared
from lucevisor.text.reasoning import THINK, ReasoningTags, after_reasoning
from lucevisor.text.references import UnresolvedReferenceError, flattened, with_definitions
from lucevisor.text.tokenizer import Tokenizer
from tests.text.vocabularies import CONTROL, USER_DEFINED, byte_metadata, demo_metadata

MARKERS = {"<|endoftext|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED, "</think>": USER_DEFINED}


@functools.cache
def tokenizer(name: str = "small") -> Tokenizer:
    return Tokenizer.from_gguf(demo_metadata() if name == "demo" else byte_metadata("qwen2", MARKERS))


@functools.cache
def compiler(name: str = "small") -> GrammarCompiler:
    return GrammarCompiler(tokenizer(name))


def matcher(
    part: forms.Part, name: str = "small", tags: ReasoningTags | None = None, *, inside: bool = False
) -> Matcher:
    rules = Rules(tokenizer(name))
    grammar = rules.grammar(after_reasoning(rules, rules.part(part), tags, inside=inside))
    return compiler(name).compile(grammar).matcher()


def compiled_part(part: forms.Part, name: str) -> Grammar:
    rules = Rules(tokenizer(name))
    return compiler(name).compile(rules.grammar(rules.part(part)))


def allowed(row: bytes | bytearray, name: str = "small") -> list[int]:
    return [i for i in range(tokenizer(name).n_vocab) if row[i // 8] >> (i % 8) & 1]


def first(walk: Matcher, output: list[int], name: str = "small") -> list[int]:
    """The tokens that may follow an output."""
    return allowed(walk.masks(0, output, []), name)


def written(part: forms.Part, rng: random.Random, n_most: int, name: str = "small") -> str | None:
    """A random text of a grammar, with a liking for its end; None when it takes too long."""
    walk, output = matcher(part, name), list[int]()
    while len(output) < n_most:
        choices = first(walk, output, name)
        ends = [i for i in choices if i in tokenizer(name).eos_ids]
        if ends and (len(ends) == len(choices) or rng.random() < 0.3):
            return tokenizer(name).decode(output)
        closing = [i for i in choices if tokenizer(name).token_bytes(i)[:1] in (b'"', b"}", b"]")]
        output.append(rng.choice(closing if closing and rng.random() < 0.3 else [i for i in choices if i not in ends]))
    return None


SCHEMAS = [
    {"type": "boolean"},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 4},
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}, "b": {"type": "number"}},
     "required": ["a"], "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-f]{2,5}$"}]},
    {"$defs": {"n": {"type": "object", "properties": {"k": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
     "required": ["k"], "additionalProperties": False}}, "$ref": "#/$defs/n"},
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32), st.sampled_from(["small", "demo"]))
def test_whatever_masks_allow_is_json_of_the_schema(schema: dict[str, object], seed: int, name: str) -> None:
    text = written(forms.json_schema(schema), random.Random(seed), 300, name)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32), st.integers(0, 12), st.integers(0, 5), st.booleans())
def test_the_mask_behind_a_draft_is_the_one_after_taking_it(
    schema: dict[str, object], seed: int, n_before: int, n_drafts: int, straying: bool
) -> None:
    """Drafts that are allowed, then perhaps one that is not; the matcher itself stays where it was."""
    rng, part = random.Random(seed), forms.json_schema(schema)
    output = list[int]()
    for _ in range(n_before + n_drafts):
        choices = [i for i in first(matcher(part), output) if i not in tokenizer().eos_ids]
        if not choices:
            break
        output.append(rng.choice(choices))
    before, drafts = output[:n_before], output[n_before:]
    tail = [rng.randrange(tokenizer().n_vocab) for _ in range(2)] if straying else []
    walk = matcher(part)
    rows = walk.masks(0, before, [*drafts, *tail])
    assert len(rows) == walk.row_bytes * (1 + len(drafts) + len(tail))
    for i in range(1 + len(drafts)):
        row = rows[i * walk.row_bytes : (i + 1) * walk.row_bytes]
        assert allowed(row) == first(matcher(part), before + drafts[:i])
    assert allowed(walk.masks(len(before), [], [])) == first(matcher(part), before)
    assert walk.n_tokens == len(before)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEMAS), st.integers(0, 2**32), st.integers(0, 10), st.integers(0, 6))
def test_valid_drafts_are_those_that_masks_allow(
    schema: dict[str, object], seed: int, n_before: int, n_drafts: int
) -> None:
    rng, part = random.Random(seed), forms.json_schema(schema)
    output, drafts = list[int](), list[int]()
    for i in range(n_before + n_drafts):
        choices = first(matcher(part), output + drafts) if i < n_before or rng.random() < 0.8 else []
        choices = [t for t in choices if t not in tokenizer().eos_ids]
        if not choices and i < n_before:
            return  # the answer ends before
        (output if i < n_before else drafts).append(rng.choice(choices) if choices else rng.randrange(255))
        if not choices:
            break
    right = 0
    while right < len(drafts) and drafts[right] in first(matcher(part), output + drafts[:right]):
        right += 1
    walk = matcher(part)
    assert walk.n_valid(0, output, drafts) == right
    assert allowed(walk.masks(0, output, [])) == first(matcher(part), output)


def test_tokens_that_were_taken_are_not_taken_again() -> None:
    ids = tokenizer().encode("[1,2]")
    part = forms.json_schema({"type": "array", "items": {"type": "integer"}})
    walk = matcher(part)
    walk.masks(0, ids[:3], [])
    assert allowed(walk.masks(1, ids[1:4], [])) == first(matcher(part), ids[:4])
    assert walk.n_tokens == 4


def test_a_token_that_does_not_follow_is_an_error() -> None:
    walk = matcher(forms.regex("a+"))
    with pytest.raises(GrammarError):
        walk.masks(0, tokenizer().encode("b"), [])


@pytest.mark.parametrize(
    ("part", "texts", "others"),
    [
        (forms.regex(r"\d{2}/[^/]*"), ["12/", "99/é"], ["1/", "12", "12//"]),
        (forms.choice(["yes", 'say "no"', "ä\n/b"]), ["yes", 'say "no"', "ä\n/b"], ["y", "yesyes", "no"]),
        (forms.grammar('root ::= "a" b+ # tail\nb ::= [x-z] | "-" b'), ["ax", "a-xz"], ["a", "ax-"]),
        (forms.grammar('start: "a" B*\nB: /[xy]/'), ["a", "axy"], ["x"]),
        (forms.grammar('root ::= start "!"\nstart ::= [\\u00e0-\\u00ff] "\\x41"'), ["éA!"], ["eA!"]),
        (forms.grammar('root ::= "a"{0} ("bc" | [\\[\\]^-]){2,3}'), ["bcbc", "[]^", "-bc-"], ["abcbc", "[", "[[[["]),
        (forms.grammar('root ::= [a-z]* "end" | "if" [a-z]?'), ["end", "bendend", "if", "ifx"], ["en", "i"]),
        (forms.grammar('root ::= "(" ws root? ")" # nested\nws ::= | " "'), ["()", "( (()))"], ["(", "(  )"]),
        (forms.any_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}']),
    ],
    ids=["regex", "choice", "gbnf", "lark", "escapes", "repeats", "overlap", "recursion", "object"],
)
@pytest.mark.parametrize("name", ["small", "demo"])
def test_a_form_allows_its_texts_and_no_others(
    part: forms.Part, texts: list[str], others: list[str], name: str
) -> None:
    for text in [*texts, *others]:
        walk, ids = matcher(part, name), tokenizer(name).encode(text)
        choices, steps = first(walk, [], name), 0
        while steps < len(ids) and ids[steps] in choices:
            steps += 1
            choices = allowed(walk.masks(0, ids[:steps], []), name)
        complete = steps == len(ids) and set(choices) & tokenizer(name).eos_ids
        assert bool(complete) == (text in texts), text


class TestReasoning:
    PART = forms.choice(["yes", "no"])

    def open(self) -> int:
        return tokenizer().token_id("<think>") or 0

    def close(self) -> int:
        return tokenizer().token_id("</think>") or 0

    def test_it_may_come_first_and_must_be_closed(self) -> None:
        walk = matcher(self.PART, tags=THINK)
        starts = {tokenizer().token_bytes(i) for i in first(walk, [])}
        assert starts == {b"y", b"n", b"<think>"}
        thinking = first(walk, [self.open()])
        assert set(thinking) == set(range(tokenizer().n_vocab)) - tokenizer().eos_ids
        behind = first(walk, [self.open(), *tokenizer().encode("hm"), self.close()])
        assert {tokenizer().token_bytes(i) for i in behind} == {b"y", b"n", b"\n", b"\n\n"}

    def test_a_prompt_inside_reasoning_must_close_it(self) -> None:
        walk = matcher(self.PART, tags=THINK, inside=True)
        assert tokenizer().encode("x")[0] in first(walk, [])
        assert not tokenizer().eos_ids & set(first(walk, []))
        assert tokenizer().encode("x")[0] not in first(walk, [self.close()])

    def test_tags_that_are_text_work_too(self) -> None:
        tags = ReasoningTags("[THINK]", "[/THINK]")
        walk = matcher(self.PART, tags=tags)
        ids = tokenizer().encode("[THINK]is it?[/TH[/THINK]ye")
        assert {tokenizer().token_bytes(i) for i in first(walk, ids)} == {b"s"}

    def test_markers_are_no_text_of_a_string(self) -> None:
        walk = matcher(forms.json_schema({"type": "string"}))
        assert self.open() not in first(walk, tokenizer().encode('"a'))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: forms.json_schema({"type": "thing"}), '"thing" is not a type'),
        (lambda: forms.json_schema({"type": "string", "minLength": 5, "maxLength": 2}), "no value fits"),
        (lambda: forms.regex("[0-9"), "unclosed"),
        (lambda: forms.regex("a" * 200_000), "more than"),
        (lambda: forms.json_schema({"enum": [str(i) for i in range(100_000)]}), "more than"),
        (lambda: forms.choice(["a" * 200_000]), "more than"),
        (lambda: forms.grammar("root ::= other"), "not found"),
        (lambda: forms.grammar("root = 3"), "::="),
        (lambda: forms.grammar('root ::= "a" {2'), "line 1: a repetition"),
        (lambda: forms.grammar('root ::= "\\ud800"'), "no character"),
        (lambda: forms.grammar('a ::= "b"'), "no rule 'root'"),
        (lambda: forms.grammar("root ::= " + "(" * 50_000), "nested too deep"),
        (lambda: {"lark_grammar": "start: " + "(" * 50_000}, "nested"),
        (lambda: forms.grammar("start: nothing"), "nothing"),
    ],
)
def test_what_is_malformed_or_too_big_is_said(make: object, told: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(told)):
        matcher(make())  # type: ignore[operator]


@pytest.mark.parametrize(
    "part",
    [
        forms.regex("a{99999}"),
        forms.regex("[^]{4]{1,262144}(x{1000})?"),
        forms.regex("(?x)((a{0,1000}){1000}){1000}"),
        forms.grammar('start: A | [B{99999}]\nA: /a{99999}/ & /[ab]{99999}/ # B\nB: "b"*\n%ignore /\\/"{1,3}/'),
        forms.grammar('start: "{" (%json {"type": "string", "pattern": "^a{1,9}$"} "\\"x{100000}")+ "}"'),
        forms.grammar('root ::= "a"{9999} (("b"? [c-d]*){1000}){1000}'),
        forms.json_schema({"pattern": "^(.{1,262144}|x{9999})$"}),
    ],
)
def test_long_texts_are_allowed(part: forms.Part) -> None:
    matcher(part, "demo")


ESCAPED = [*map(chr, range(0x26)), "/", "[", "\\", "]", "a", "é"]


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(ESCAPED), st.sampled_from(ESCAPED)), min_size=1, max_size=3))
def test_a_class_of_ranges_has_what_it_names(negated: bool, ranges: list[tuple[str, str]]) -> None:
    members = "".join("\\u{:04x}-\\u{:04x}".format(*sorted(map(ord, pair))) for pair in ranges)
    check_class(f"[{'^' * negated}{members}]")


def check_class(class_: str) -> None:
    """What is allowed is in the class, and all of the class is but for NUL."""
    part = forms.json_schema({"type": "array", "items": {"type": "string", "pattern": f"^{class_}$"}})
    grammar = compiled_part(part, "small")
    for char in ESCAPED:
        ids = tokenizer().encode(json.dumps([char], ensure_ascii=False))
        is_allowed = grammar.matcher().n_valid(0, [], ids) == len(ids)
        in_class = bool(re.fullmatch(class_, char))
        assert is_allowed == in_class or (char == "\0" and in_class), (class_, char)


def test_without_a_token_that_ends_answers_nothing_can_be_constrained() -> None:
    bare = Tokenizer.from_gguf(byte_metadata("qwen2", {}))
    with pytest.raises(GrammarError, match="no token that ends"):
        GrammarCompiler(bare).compile('{"grammars": [{"lark_grammar": "start: \\"a\\""}]}')


def test_the_same_grammar_is_compiled_once_and_its_matchers_are_independent() -> None:
    rules = Rules(tokenizer())
    text = rules.grammar(rules.part(forms.regex("ab")))
    grammar = compiler().compile(text)
    assert compiler().compile(text) is grammar
    walk, second = grammar.matcher(), grammar.matcher()
    walk.masks(0, tokenizer().encode("a"), [])
    assert first(second, []) == tokenizer().encode("a")


def lengths(n: int, shortest: int, step: int) -> dict[str, dict[str, Any]]:
    return {f"f{i}": {"type": "string", "maxLength": shortest + step * i} for i in range(n)}


def text_of(rng: random.Random, n: int) -> str:
    return "".join(rng.choices('abcdefgh ijkl\n\\"é漢😀.,()[]{}0123456789', k=n))


def test_a_long_string_with_a_bound_is_followed_to_its_end() -> None:
    """Its masks take more states than one lexer may have."""
    walk = matcher(forms.json_schema({"type": "string", "maxLength": 10_000}), "demo")
    text = text_of(random.Random(1), 10_000)
    ids = tokenizer("demo").encode(json.dumps(text, ensure_ascii=False)[:-1])
    for i in range(len(ids)):
        walk.masks(i, ids[i : i + 1], [])
    ends = first(walk, ids, "demo")
    assert {tokenizer("demo").token_bytes(i) for i in ends} == {b'"'}


@pytest.mark.parametrize("n", [150, pytest.param(5_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_what_some_outputs_take_of_a_grammar_is_not_missing_to_others(n: int) -> None:
    """Strings of 30 bounds: together they have more states than one lexer may have, each alone has not."""
    bounds, rng = lengths(30, 1_000, 97), random.Random(2)
    grammar = compiled_part(forms.json_schema({"type": "object", "properties": bounds}), "demo")
    running = grammar.matcher()
    for _ in range(n):
        name = rng.choice(list(bounds))
        text = text_of(rng, rng.randrange(bounds[name]["maxLength"]))
        ids = tokenizer("demo").encode(json.dumps({name: text}, ensure_ascii=False))
        walk = grammar.matcher()
        assert set(first(walk, ids, "demo")) <= tokenizer("demo").eos_ids | set(tokenizer("demo").encode(" \n"))
    assert {tokenizer("demo").token_bytes(i)[:1] for i in first(running, [], "demo")} == {b"{"}


# ---- prepared schemas, strict and lenient


A = {"type": "object", "properties": {"a": {"type": "boolean"}}}
SHUT = {**A, "additionalProperties": False}
BOOLEAN = {"type": "boolean"}


def compiled_schema(schema: dict[str, Any], *, lenient: bool = False) -> Grammar:
    return compiled_part(forms.json_schema(schema, lenient=lenient), "small")


def accepts(grammar: Grammar, text: str) -> bool:
    walk, ids = grammar.matcher(), tokenizer().encode(text)
    if walk.n_valid(0, [], ids) < len(ids):
        return False
    return not tokenizer().eos_ids.isdisjoint(allowed(walk.masks(0, ids, [])))


def allows(schema: dict[str, Any], value: object, *, lenient: bool = False) -> bool:
    return accepts(compiled_schema(schema, lenient=lenient), json.dumps(value, ensure_ascii=False))


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
        ({"properties": TWO, "dependentRequired": {"a": ["b"]}}, "dependentRequired at #", [{"a": True}], [{"a": 1}]),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames at #", [{"b": 1}], [1]),
        ({**SHUT, "properties": TWO, "minProperties": 1}, "minProperties at #", [{}, {"b": True}], [{"c": 1}]),
        (
            {"type": "object", "patternProperties": {"^a": BOOLEAN, "^ab": {"type": "null"}}},
            "patternProperties/^ab at #",
            [{"a": True}, {"x": 1}],
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
        ({"enum": [10**30, "a"], "type": ["integer", "string"]}, "enum at #", [10**30, "a"], [None]),
        ({"$ref": "other.json#/x", "type": "null"}, "$ref at #", [None], [1]),
        (
            {"type": "object", "properties": {"a": {"$ref": "#", "minProperties": 1}}},
            "minProperties at #/properties/a",
            [{"a": {"a": {}}}],
            [{"a": 1}],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "oneOf at #", [1, 3.5], ["a"]),
    ],
)
def test_what_cannot_be_enforced_is_refused_or_dropped_alone(
    schema: dict[str, Any], keyword: str, fits: list[object], others: list[object]
) -> None:
    with pytest.raises(GrammarError) as refused:
        prepared(schema, lenient=False)
    assert str(refused.value).startswith(keyword)
    grammar = compiled_schema(schema, lenient=True)
    assert [value for value in [*fits, *others] if accepts(grammar, json.dumps(value))] == fits


INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}


@pytest.mark.parametrize(
    ("schema", "fits", "others"),
    [
        ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
        ({"type": "string", "pattern": r"^[[{]\/\u0041{2}}$"}, ["[/AA}"], ["[/A}"]),
        (INT64, [0, 2**53 - 1], [2**53, -(2**63)]),
        ({"prefixItems": [BOOLEAN], "unevaluatedItems": False}, [[True]], [[True, 1]]),
        ({"type": "array", "items": [BOOLEAN], "additionalItems": False}, [[True]], [[True, 1]]),
        ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, [1.5], [1]),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[1]], [[1, 2]]),
        ({"enum": ["c", None], "type": ["string", "null"]}, ["c", None], ["n"]),
        (
            {"type": "array", "minItems": 1, "prefixItems": [BOOLEAN], "items": {"$ref": "#"}},
            [[True], [True, [False]]],
            [[], [True, []]],
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
        grammar = compiled_schema(schema, lenient=lenient)
        assert [value for value in [*fits, *others] if accepts(grammar, json.dumps(value))] == fits


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
        return compiled_schema(schema, lenient=lenient)
    except GrammarError as error:
        if lenient and "no value fits" not in str(error) and "allows no output" not in str(error):
            raise
        return None


def any_value(grammar: Grammar, rng: random.Random) -> str | None:
    walk, output = grammar.matcher(), list[int]()
    while len(output) < 120:
        choices = allowed(walk.masks(max(0, len(output) - 1), output[-1:], []))
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
    text = grammar and any_value(grammar, random.Random(seed))
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
@given(schemas, st.lists(values, max_size=6), st.booleans())
def test_what_fits_a_schema_is_allowed(schema: dict[str, Any], candidates: list[Any], lenient: bool) -> None:
    """Unless a strict schema is refused; a keyword that is dropped refuses nothing."""
    schema = opened(schema)
    grammar = grammar_of(schema, lenient=lenient)
    for value in candidates:
        if (lenient or grammar is not None) and jsonschema.Draft202012Validator(schema).is_valid(value):
            assert grammar is not None
            assert any(accepts(grammar, json.dumps(ordered)) for ordered in itertools.islice(orders(value), 200)), value


# ---- references


ENUM = {"type": "string", "enum": ["open", "done"]}

REFERRING: dict[str, dict[str, Any]] = {
    "a property": {"properties": {"x": {"$ref": "#/properties/status"}, "status": ENUM}},
    "the root": {"type": "object", "properties": {"x": {"$ref": "#"}}},
    "escaped steps": {"properties": {"x": {"$ref": "#/$defs/a~1b~0c%20d"}}, "$defs": {"a/b~c d": ENUM}},
    "an element": {"properties": {"x": {"$ref": "#/properties/y/anyOf/1"}, "y": {"anyOf": [{"type": "null"}, ENUM]}}},
    "definitions": {"properties": {"x": {"$ref": "#/definitions/w"}}, "definitions": {"w": ENUM}},
    "any place": {"properties": {"x": {"$ref": "#/components/w"}}, "components": {"w": ENUM}},
    "shadowed definitions": {
        "properties": {"x": {"$ref": "#/$defs/w", "$defs": {"w": {"type": "null"}}}},
        "$defs": {"w": ENUM},
    },
    "nested definitions": {"properties": {"x": {"$ref": "#/properties/x/$defs/w", "$defs": {"w": ENUM}}}},
    "a chain": {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": ENUM}},
    "beside other keywords": {"properties": {"x": {"$ref": "#/$defs/w", "maxLength": 4}}, "$defs": {"w": {}}},
    "a schema of false": {"properties": {"x": {"$ref": "#/$defs/w"}}, "$defs": {"w": False}},
    "a property named $ref": {"properties": {"$ref": {"type": "string"}, "x": {"const": {"$ref": "#/nowhere"}}}},
}


@pytest.mark.parametrize("name", sorted(REFERRING))
@settings(max_examples=60, deadline=None)
@given(value=st.recursive(
    st.sampled_from(["open", "done", "opened", None, 1, {"$ref": "#/nowhere"}]),
    lambda inner: st.dictionaries(st.sampled_from(["x", "y", "status"]), inner, max_size=2),
    max_leaves=3,
))  # fmt: skip
def test_a_flattened_schema_says_the_same(name: str, value: object) -> None:
    flat = flattened(REFERRING[name], lenient=False)
    validators = [jsonschema.Draft202012Validator(schema) for schema in (REFERRING[name], flat)]
    for instance in (value, {"x": value}):
        right, flattened_says = (schema.is_valid(instance) for schema in validators)
        assert flattened_says == right


@pytest.mark.parametrize("name", sorted(REFERRING))
def test_a_part_of_it_stands_alone(name: str) -> None:
    flat = flattened(REFERRING[name])
    part = with_definitions(flat["properties"]["x"], flat.get("$defs", {}))
    for value in ("open", "opened", None, {"x": "open"}, {"x": 1}):
        right = jsonschema.Draft202012Validator(REFERRING[name]).is_valid({"x": value})
        assert jsonschema.Draft202012Validator(part).is_valid(value) == right


@pytest.mark.parametrize("reference", ["#/$defs/none", "#none", "other.json", "#/required/0", "http://[", 5])
def test_a_reference_that_leads_nowhere_is_refused_or_left_out(reference: object) -> None:
    schema = {"properties": {"x": {"$ref": reference, "type": "string"}}, "required": ["x"]}
    with pytest.raises(UnresolvedReferenceError, match="leads nowhere"):
        flattened(schema, lenient=False)
    assert flattened(schema)["properties"] == {"x": {"type": "string"}}
