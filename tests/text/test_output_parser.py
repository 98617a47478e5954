"""A stream comes apart into content, reasoning and calls in the same way however it was cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lucevisor.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.output_parser import OutputFormat, OutputParser, StopMatcher, detect_format
from lucevisor.text.reasoning import CHANNEL, THINK
from lucevisor.text.tokenizer import Segment, Tokenizer
from lucevisor.text.tools import FORMATS
from tests.text.vocabularies import demo_metadata, gemma_metadata

GEMMA, _, _, _, _, PAIRS, XML, JSON = (tool_format for _, tool_format in FORMATS)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}}}]
QWEN3 = OutputFormat(THINK, JSON)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>'


def parse(text, format=QWEN3, reasoning_open=False, tools=TOOLS, places=()):
    """Return (reasoning, content, calls) of a text cut at the given places."""
    parser = OutputParser(reasoning_open, tools, format)
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    events = [event for start, stop in itertools.pairwise(edges) for event in parser.push(text[start:stop])]
    events += parser.flush()
    assert parser.flush() == []
    assert all(event.text for event in events if not isinstance(event, ToolCallDelta))
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert [call.index for call in calls] == list(range(len(calls)))
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


ONE = [("f", {"x": "1"})]


@pytest.mark.parametrize(
    ("text", "reasoning_open", "expected"),
    [
        ("why\n</think>\n\nanswer", True, ("why", "answer", [])),
        ("<think>\nwhy\n</think>\n\nanswer", False, ("why", "answer", [])),
        ("\n\n<think>why</think>answer", False, ("why", "answer", [])),
        ("\n</think>\n\nanswer", True, ("", "answer", [])),
        ("say <think> in words", False, ("", "say <think> in words", [])),
        ("a</think>b", False, ("", "a</think>b", [])),
        ("cut off </thi", True, ("cut off </thi", "", [])),
        (CALL, False, ("", "", ONE)),
        (f"{CALL}\n{CALL}\n", False, ("", "", ONE + ONE)),
        (f"<think>why</think>{CALL}<think>again</think>done", False, ("whyagain", "done", ONE)),
        # A call whose end was cut off, complete or not.
        (CALL.removesuffix("</tool_call>"), False, ("", "", ONE)),
        ('x <tool_call>\n{"name": "f", "argu', False, ("", 'x <tool_call>\n{"name": "f", "argu', [])),
        # No calls at all, though they begin like some.
        (f"<tool_call>nonsense</tool_call>{CALL}", False, ("", "<tool_call>nonsense</tool_call>", ONE)),
        (f"a <tool_call> b {CALL}", False, ("", f"a <tool_call> b {CALL}"[: len("a <tool_call> b")], ONE)),
        # The closing tag inside a string of the arguments.
        (
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>!',
            False,
            ("", "!", [("f", {"x": "</tool_call>"})]),
        ),
        # Calls inside reasoning: of a tool that exists, and quoted.
        (f"think {CALL}", True, ("think", "", ONE)),
        ("I write <tool_call> now\n</think>ok", True, ("I write <tool_call> now", "ok", [])),
        (
            '<tool_call>{"name": "other"}</tool_call> quoted</think>ok',
            True,
            ('<tool_call>{"name": "other"}</tool_call> quoted', "ok", []),
        ),
        ("a <tool_call> b</think>c</tool_call>", True, ("a <tool_call> b", "c</tool_call>", [])),
        # A block of Markdown in place of the tags is a call if it names an offered tool.
        ('So:\n```json\n{"name": "f", "arguments": {"x": "1"}}\n```', False, ("", "So:", ONE)),
        ('```json\n{\n  "name": "f",\n  "arguments": {"x": "1"}\n}\n```\n', False, ("", "", ONE)),
        (
            '```json\n{"name": "f", "arguments": {"x": "a\\n```\\nb"}}\n```',
            False,
            ("", "", [("f", {"x": "a\n```\nb"})]),
        ),
        ('```json\n{"name": "f", "arguments": {"x": "1"}}', False, ("", "", ONE)),
        ('```json\n{"name": "other"}\n```\nok', False, ("", '```json\n{"name": "other"}\n```\nok', [])),
        # Blanks inside the text stay.
        ("a \n\n b\n ", False, ("", "a \n\n b\n ", [])),
        ("<think>\n  a\n\n  b \n</think>\n\n    code\n", False, ("  a\n\n  b", "    code\n", [])),
    ],
)
def test_examples(text, reasoning_open, expected):
    assert parse(text, reasoning_open=reasoning_open) == expected
    assert parse(text, reasoning_open=reasoning_open, places=range(len(text))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nwhy\n<channel|>answer", ("why", "answer", [])),
        ("<|channel>thought\n<channel|>answer", ("", "answer", [])),
        ('a<|channel>thought\nb<channel|><|tool_call>call:f{x:<|"|>1<|"|>}<tool_call|>', ("b", "a", ONE)),
        ('<|tool_call>call:f{x:<|"|>a<tool_call|>b<|"|>}<tool_call|>', ("", "", [("f", {"x": "a<tool_call|>b"})])),
    ],
)
def test_gemma(text, expected):
    format = OutputFormat(CHANNEL, GEMMA)
    assert parse(text, format) == expected
    assert parse(text, format, places=range(len(text))) == expected


def test_without_tools_calls_are_content():
    assert parse(CALL, tools=[]) == ("", CALL, [])


def test_a_format_without_tags_passes_everything_on():
    assert parse(f"\n<think>{CALL}", OutputFormat()) == ("", f"\n<think>{CALL}", [])


def test_text_is_held_back_no_longer_than_needed():
    parser = OutputParser(False, TOOLS, QWEN3)
    shown = [parser.push(piece) for piece in ("Hel", "lo <", "b>", " x\n", "\ny")]
    assert shown == [[ContentDelta(text)] if text else [] for text in ("Hel", "lo", " <b>", " x", "\n\ny")]


fragments = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|channel>", "<channel|>", "thought\n"),
            *("<|tool_call>", "<tool_call|>", '<|"|>', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            *(
                "<function=f>",
                "</function>",
                "<parameter=x>",
                "</parameter>",
                "call:f{x:",
                "}",
                '{"name": "f"}',
                '"',
                "```json\n",
            ),
            *(" ", "\n", "\n\n", "a", "b<", "</", "f", CALL),
        ]
    ),
    max_size=12,
).map("".join)
formats = st.builds(
    OutputFormat, st.sampled_from([None, THINK, CHANNEL]), st.sampled_from([None, GEMMA, PAIRS, XML, JSON])
)


@given(fragments, formats, st.booleans(), st.lists(st.integers(0, 200), max_size=10))
@settings(max_examples=1000, deadline=None)
def test_the_cut_makes_no_difference(text, format, reasoning_open, places):
    reasoning_open = reasoning_open and format.reasoning is not None
    whole = parse(text, format, reasoning_open)
    assert parse(text, format, reasoning_open, places=places) == whole
    assert parse(text, format, reasoning_open, places=range(len(text))) == whole


@given(fragments, formats, st.booleans())
@settings(max_examples=500, deadline=None)
def test_nothing_but_tags_blanks_and_calls_is_lost(text, format, reasoning_open):
    """Without calls, the letters of the parts are those of the whole, tags of recognised blocks aside."""
    reasoning_open = reasoning_open and format.reasoning is not None
    reasoning, content, calls = parse(text, format, reasoning_open)
    if not calls:
        tags = format.reasoning
        dropped = (tags.open, tags.close, tags.label.strip()) if tags else ()

        def letters(part):
            for tag in dropped:
                part = part.replace(tag, "") if tag else part
            return sorted("".join(part.split()))

        assert letters(reasoning + "|" + content) == sorted([*letters(text), "|"])


class TestChoice:
    @pytest.mark.parametrize(
        ("template", "reasoning", "tools"),
        [
            ("plain", None, None),
            ("<think></think>", THINK, None),
            ("<tool_call>{}</tool_call>", None, JSON),
            ("</think><tool_call><function=x><parameter=y>", THINK, XML),
            ("</think><tool_call>name<arg_key>k</arg_key>", THINK, PAIRS),
            ("<|channel>thought<channel|><|tool_call>call:f{}", CHANNEL, GEMMA),
        ],
    )
    def test_the_template_decides(self, template, reasoning, tools):
        assert detect_format(template) == OutputFormat(reasoning, tools)

    def test_the_last_trusted_tag_says_whether_reasoning_is_open(self):
        opened, closed = Segment("x<think>\n", True), Segment("<think>\n\n</think>", True)
        assert QWEN3.reasoning_open_after([closed, opened])
        assert not QWEN3.reasoning_open_after([opened, closed])
        assert QWEN3.reasoning_open_after([opened, Segment("</think>", False), Segment("y", True)])
        assert not QWEN3.reasoning_open_after([Segment("<think>", False)])
        assert not OutputFormat().reasoning_open_after([opened])

    def test_tags_that_are_control_tokens_are_to_be_shown(self):
        demo = Tokenizer.from_gguf(demo_metadata())
        assert QWEN3.visible_ids(demo) == {8186, 8187, 8188, 8189}
        gemma = Tokenizer.from_gguf(gemma_metadata())
        tags = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
        assert OutputFormat(CHANNEL, GEMMA).visible_ids(gemma) == {gemma.token_id(tag) for tag in tags}


# -- stop strings


def first_stop(stops, text):
    """What a reader who looks after every single character gives out."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text, places):
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]


@given(
    st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4),
    st.text(alphabet="abc\n", max_size=30),
    st.lists(st.integers(0, 100), max_size=8),
)
@example(["bcd", "abcde"], "abcde", [])
@example(["bcd", "abcde"], "abcde", [1, 2, 3, 4])
def test_the_first_complete_stop_wins_under_any_cut(stops, text, places):
    matcher = StopMatcher(stops)
    given_out = "".join(matcher.push(piece) for piece in cut(text, places)) + matcher.flush()
    assert (given_out, matcher.matched) == first_stop(stops, text)


def test_what_may_start_a_stop_is_held_back():
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("a", "bE", "N", "x", "EN")] == ["a", "b", "", "ENx", ""]
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""
