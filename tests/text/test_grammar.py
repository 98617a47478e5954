"""Grammars over real and small vocabularies: what masks allow is what the grammar allows, at every draft."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import Grammar, GrammarCompiler, GrammarError, Matcher
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.reasoning import THINK, ReasoningTags, after_reasoning
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


def compiled(part: forms.Part, name: str) -> Grammar:
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
        (lambda: forms.regex("((a{1000}){1000}){1000}"), "100000 characters or more"),
        (lambda: forms.regex("b|(?:((?<n>a{1000}){1000}){1,}){0,2}"), "100000 characters or more"),
        (lambda: forms.grammar('root ::= (("a"{1000}){1000}){1000}'), "100000 characters or more"),
        (
            lambda: forms.grammar('root ::= "x" root | a{999}\na ::= b{99}\nb ::= [ac]{9}'),
            "100000 characters or more",
        ),
        *(
            (functools.partial(forms.grammar, text), "100000 characters or more")
            for text in (
                "start: /((a{1000}){1000}){1000}/",
                'start: "b" | A? // of A\nA[lazy]: (B{1000}){1000,}\nB.2: "xy" ~ 50..60 | /[^:]+/ "z"{99}',
                'start: %json {"items": {"pattern": "^((a{1000}){1000}){1000}$"}} ":"\n',
                'start: x "a"{9}\nx: "b" x | [y{9999}] "c" /d{90001}/\ny: /e{11}/',
            )
        ),
        (lambda: forms.json_schema({"pattern": "^x?((a{1000}){1000}){1000}$"}), "pattern at #"),
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


def test_an_unknown_keyword_is_left_out_only_where_asked() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}
    with pytest.raises(GrammarError, match="uniqueItems"):
        matcher(forms.json_schema(schema))
    matcher(forms.json_schema(schema, lenient=True))


ESCAPED = [*map(chr, range(0x26)), "/", "[", "\\", "]", "a", "é"]


@pytest.mark.parametrize(
    "class_",
    ['[^"]', "[^,\\x22a-c\\\\]", '[^"\\-x]', r"[\0-\x1f]", r"[\x00-!]", r"[\u0000-\u005b]", r"[a\n\t]", r"[^\n]"],
)
def test_a_class_has_what_json_escapes_if_it_names_it(class_: str) -> None:
    check_class(class_)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(ESCAPED), st.sampled_from(ESCAPED)), min_size=1, max_size=3))
def test_a_class_of_ranges_has_what_it_names(negated: bool, ranges: list[tuple[str, str]]) -> None:
    members = "".join("\\u{:04x}-\\u{:04x}".format(*sorted(map(ord, pair))) for pair in ranges)
    check_class(f"[{'^' * negated}{members}]")


def check_class(class_: str) -> None:
    """What is allowed is in the class, and all of the class is but for NUL."""
    part = forms.json_schema({"type": "array", "items": {"type": "string", "pattern": f"^{class_}$"}})
    grammar = compiled(part, "small")
    for char in ESCAPED:
        ids = tokenizer().encode(json.dumps([char], ensure_ascii=False))
        is_allowed = grammar.matcher().n_valid(0, [], ids) == len(ids)
        in_class = bool(re.fullmatch(class_, char))
        assert is_allowed == in_class or (char == "\0" and in_class), (class_, char)


def test_blanks_are_bounded() -> None:
    walk = matcher(forms.json_schema({"type": "array"}))
    assert tokenizer().encode(" ")[0] in first(walk, tokenizer().encode("["))
    assert tokenizer().encode(" ")[0] not in first(walk, tokenizer().encode("[ "))


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
    grammar = compiled(forms.json_schema({"type": "object", "properties": bounds}), "demo")
    running = grammar.matcher()
    for _ in range(n):
        name = rng.choice(list(bounds))
        text = text_of(rng, rng.randrange(bounds[name]["maxLength"]))
        ids = tokenizer("demo").encode(json.dumps({name: text}, ensure_ascii=False))
        walk = grammar.matcher()
        assert set(first(walk, ids, "demo")) <= tokenizer("demo").eos_ids | set(tokenizer("demo").encode(" \n"))
    assert {tokenizer("demo").token_bytes(i)[:1] for i in first(running, [], "demo")} == {b"{"}
