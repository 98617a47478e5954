"""Answers, chats and grammars of gpt-oss: messages with channels."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lucevisor.api.constraint import CallConstraint, OutputForm, output_grammar
from lucevisor.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.grammar import forms
from lucevisor.text.grammar.matcher import GrammarCompiler
from lucevisor.text.harmony import HARMONY, HarmonyCalls
from lucevisor.text.output_parser import detect_format
from lucevisor.text.reasoning import ReasoningBudget
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.tools.call import functions
from tests.text.vocabularies import CONTROL, byte_metadata

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }
]
SOURCE = """\
{%- set last_tool_call = namespace(name=none) -%}
<|start|>system<|message|>{{ model_identity or "A model." }} Reasoning: {{ reasoning_effort or "medium" }}<|end|>
{%- for message in messages -%}
  {%- if message.tool_calls is defined -%}
    {%- if message.content and message.thinking %}{{ raise_exception("one of both") }}{% endif -%}
    {%- if message.content -%}
      <|start|>assistant<|channel|>analysis<|message|>{{ message.content }}<|end|>
    {%- endif -%}
    {%- set last_tool_call.name = message.tool_calls[0].function.name -%}
    <|start|>assistant to=functions.{{ last_tool_call.name }}<|channel|>commentary json<|message|>
    {{- message.tool_calls[0].function.arguments | tojson }}<|call|>
  {%- elif message.role == "tool" -%}
    <|start|>functions.{{ last_tool_call.name }} to=assistant<|channel|>commentary<|message|>
    {{- message.content | tojson }}<|end|>
  {%- elif message.role == "assistant" -%}
    <|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
  {%- else -%}
    <|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}"""
TEMPLATE = ChatTemplate(SOURCE, {})
MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TOKENIZER = Tokenizer.from_gguf(byte_metadata("gpt-4o", dict.fromkeys(MARKERS, CONTROL)))
GRAMMARS = GrammarCompiler(TOKENIZER)

THOUGHT = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": "1"}'
ONE = [("f", {"x": "1"})]


def parse(text, places=(), *, inside=False, tools=TOOLS, cut=False):
    """Return (reasoning, content, calls) of a text cut at the given places."""
    parser = TEMPLATE.output_format.parser(inside, tools)
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    events = [event for start, stop in itertools.pairwise(edges) for event in parser.push(text[start:stop])]
    events += parser.flush(cut=cut)
    assert parser.position == len(text)
    content = "".join(text[part.start : part.stop] for part in parser.content)
    found = "".join(event.text for event in events if isinstance(event, ContentDelta))
    assert content == found.replace("\n\n", "")
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        found,
        [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, ToolCallDelta)],
    )


CASES = [
    (THOUGHT + FINAL + "yes", ("why", "yes", [])),
    (FINAL + "yes<|return|>", ("", "yes", [])),
    (THOUGHT + CALL, ("why", "", ONE)),
    (THOUGHT + CALL + "<|call|>", ("why", "", ONE)),
    (' to=functions.f<|channel|>commentary json<|message|>{"x": "1"}<|call|>', ("", "", ONE)),
    (THOUGHT + ' to=functions.f<|channel|>analysis code<|message|>{"x": "1"}', ("why", "", ONE)),
    (THOUGHT + "<|channel|>commentary<|message|>First.<|end|><|start|>assistant" + CALL, ("why", "First.", ONE)),
    (THOUGHT + THOUGHT + FINAL + "a", ("why\n\nwhy", "a", [])),
    ("<|channel|>commentary<|message|>a<|end|><|start|>assistant" + FINAL + "b", ("", "a\n\nb", [])),
    ("<|channel|>analysis<|message|>why<|channel|>final<|message|>b", ("why", "b", [])),
    (CALL.replace('"1"}', '"1"'), ("", "", ONE)),
    (CALL.replace('{"x": "1"}', ""), ("", "", [("f", {})])),
    (CALL.replace('{"x": "1"}', "words"), ("", "words", [])),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("plain words", ("", "plain words", [])),
    ("assistance", ("", "assistance", [])),
    ("<|channel|>fin", ("", "", [])),
    ("", ("", "", [])),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_an_answer_comes_apart(text, expected):
    assert parse(text) == expected
    assert parse(text, range(len(text))) == expected


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([*MARKERS, THOUGHT, FINAL, CALL, " to=functions.f", "assistant", "a", " ", "{}"])),
    places=st.lists(st.integers(0, 500), max_size=5),
)
@example(["<|channel|>", "a", "<|message|>", "assistant", "<|end|>", " "], [3])
def test_cuts_change_nothing(parts, places):
    text = "".join(parts)
    assert parse(text, places) == parse(text)


def test_what_does_not_end_or_was_not_offered_is_text():
    assert parse(CALL, cut=True) == ("", '{"x": "1"}', [])
    assert parse(CALL, tools=[]) == ("", '{"x": "1"}', [])
    assert parse("more<|end|><|start|>assistant" + FINAL + "yes", inside=True) == ("more", "yes", [])
    assert parse("x" * 600) == ("", "x" * 600, [])
    assert parse("<|channel|>" + "x" * 600)[1].endswith("xxx")


def test_a_header_of_words_is_held_until_it_is_known():
    parser = TEMPLATE.output_format.parser(False, TOOLS)
    assert parser.push("<|channel|>final<|mess") == []
    assert parser.push("age|>a<|e") == [ContentDelta("a")]
    assert parser.push("b") == [ContentDelta("<|eb")]


def test_tokens_that_end_an_answer():
    assert TOKENIZER.eos_ids == {TOKENIZER.token_id("<|return|>"), TOKENIZER.token_id("<|call|>")}
    ids = TOKENIZER.encode("<|start|>user<|message|>a<|end|><|start|>assistant", parse_special=True)
    assert TOKENIZER.turn_ends(ids) == [ids.index(TOKENIZER.token_id("<|end|>")) + 1]
    visible = {TOKENIZER.decode([i], skip_special=False) for i in TEMPLATE.output_format.visible_ids(TOKENIZER)}
    assert visible == set(MARKERS) - {"<|return|>", "<|call|>"}


# ---- chats


def call(name, arguments):
    return {"id": f"c{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_each_call_is_followed_by_its_result():
    chat = [
        {"role": "user", "content": "<|end|>"},
        {
            "role": "assistant",
            "content": "Now.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("a", '{"x": 1}'), call("b", "{}")],
        },
        {"role": "tool", "tool_call_id": "cb", "content": "B"},
        {"role": "tool", "tool_call_id": "ca", "content": "A"},
        {"role": "assistant", "content": "done", "reasoning_content": "gone", "tool_calls": []},
    ]
    prompt = TEMPLATE.render(chat, extra={"reasoning_effort": "high", "model_identity": "Me."})
    head, _, rest = prompt.text.partition("<|start|>user")
    assert head == "<|start|>system<|message|>Me. Reasoning: high<|end|>"
    b = "<|start|>assistant to=functions.b<|channel|>commentary json<|message|>{}<|call|>"
    b += '<|start|>functions.b to=assistant<|channel|>commentary<|message|>"B"<|end|>'
    a = "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nNow.<|end|>"
    a += '<|start|>assistant to=functions.a<|channel|>commentary json<|message|>{"x": 1}<|call|>'
    a += '<|start|>functions.a to=assistant<|channel|>commentary<|message|>"A"<|end|>'
    end = "<|start|>assistant<|channel|>final<|message|>done<|end|><|start|>assistant"
    assert rest == "<|message|><|end|><|end|>" + a + b + end
    assert not prompt.reasoning_open
    [quoted] = [segment for segment in prompt.segments if segment.text == "<|end|>" and not segment.trusted]
    assert quoted


def test_a_begun_answer_is_continued_in_its_channel():
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}]
    assert TEMPLATE.render(chat, continued=True).text.endswith(f"<|start|>assistant{FINAL}yes")
    chat[-1] = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    assert TEMPLATE.render(chat, continued=True).text.endswith(f"<|start|>assistant{THOUGHT}{FINAL}yes")
    chat[-1] = {"role": "assistant", "content": "", "reasoning_content": "why"}
    begun = TEMPLATE.render(chat, continued=True)
    assert begun.text.endswith("<|start|>assistant<|channel|>analysis<|message|>why")
    assert begun.reasoning_open


def test_other_templates_have_their_own_format():
    assert not isinstance(detect_format("<tool_call>").tools, HarmonyCalls)


# ---- grammars


class Context:
    """What a grammar is made with."""

    template, tokenizer, grammars = TEMPLATE, TOKENIZER, GRAMMARS


def accepts(text, *, form=None, calls=None, tags=HARMONY):
    """Whether an answer may be ``text`` and end there."""
    grammar = output_grammar(form, Context, tags, calls=calls)
    matcher = GRAMMARS.compile(grammar.grammar).matcher()
    tokens = TOKENIZER.encode(text, parse_special=True)
    ends = [*tokens, min(TOKENIZER.eos_ids)]
    return matcher.n_valid(0, [], ends) == len(ends)


JSON = OutputForm("response_format", forms.json_schema({"type": "object"}, lenient=False))
REQUIRED = CallConstraint("tool_choice", functions(TOOLS), 1, required=True)
OFFERED = CallConstraint("tools", functions(TOOLS), 1)


def test_a_form_is_that_of_the_final_message():
    assert accepts(FINAL + "{}", form=JSON)
    assert accepts(THOUGHT + THOUGHT + FINAL + '{"a": 1}', form=JSON)
    assert not accepts("{}", form=JSON)
    assert not accepts(FINAL + "words", form=JSON)
    assert not accepts(THOUGHT, form=JSON)
    assert accepts("{}", form=JSON, tags=None)  # within an answer that was begun


def test_a_required_call_comes_after_any_reasoning():
    assert accepts(CALL, calls=REQUIRED)
    assert accepts(THOUGHT + CALL, calls=REQUIRED)
    assert not accepts(THOUGHT + CALL.replace('"x"', '"y"'), calls=REQUIRED)
    assert not accepts(FINAL + "no", calls=REQUIRED)


@pytest.mark.parametrize("form", [None, JSON])
def test_an_offered_strict_call_or_an_answer(form):
    assert accepts(THOUGHT + CALL, calls=OFFERED, form=form)
    assert accepts(THOUGHT + FINAL + "{}", calls=OFFERED, form=form)
    assert accepts(FINAL + "words", calls=OFFERED, form=form) == (form is None)
    assert not accepts(CALL.replace('"1"', "1"), calls=OFFERED, form=form)


def test_a_budget_ends_with_the_header_of_the_answer():
    budget = ReasoningBudget(2, HARMONY, TOKENIZER, inside=False)
    tokens, ending = TOKENIZER.encode(HARMONY.open + "ab", parse_special=True), HARMONY.closing
    forced = TOKENIZER.encode(ending, parse_special=True)
    assert ending == f"<|end|><|start|>assistant{FINAL}"
    assert budget.n_valid(0, tokens, forced) == len(forced)
    assert budget.n_valid(0, tokens, TOKENIZER.encode("c", parse_special=True)) == 0
    assert parse(HARMONY.open + "ab" + ending + "yes") == ("ab", "yes", [])
