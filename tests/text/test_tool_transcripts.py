"""Answers with tool calls as each family writes them, well formed and malformed in every way that is known.

The forms are those of the families' templates, and those that issues of vLLM, llama.cpp, Ollama, SGLang, mlx-lm and LM
Studio report of their models; the words are ours.  A malformed call that can mean one thing only is a call, others are
text.  Any chunks give the same result.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lucevisor.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.output_parser import OutputFormat, OutputParser
from lucevisor.text.reasoning import CHANNEL, THINK
from lucevisor.text.tools import FORMATS

GEMMA, MISTRAL, MISTRAL_ARRAY, GRANITE, LLAMA, PAIRS, XML, JSON = (tool_format for _, tool_format in FORMATS)
FAMILIES = {
    "json_object": OutputFormat(THINK, JSON),
    "xml_function": OutputFormat(THINK, XML),
    "argument_pairs": OutputFormat(THINK, PAIRS),
    "gemma4": OutputFormat(CHANNEL, GEMMA),
    "mistral": OutputFormat(None, MISTRAL),
    "mistral_array": OutputFormat(None, MISTRAL_ARRAY),
    "granite": OutputFormat(None, GRANITE),
    "llama3": OutputFormat(None, LLAMA),
}
TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": TEXT, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    "write_file": {"path": TEXT, "content": TEXT},
    "search": {"query": TEXT, "tags": {"type": "array"}, "filter": {"type": "object"}},
    "now": {},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in SCHEMAS.items()
]
DATA = Path(__file__).parents[1] / "data" / "tool-calls"
CASES = [
    pytest.param(name, case, id=f"{name}-{case['name']}")
    for name in FAMILIES
    for case in json.loads((DATA / f"{name}.json").read_text())
]


def read(name: str, case: dict[str, Any], places: Iterable[int] = ()) -> tuple[str, str, list[list[object]]]:
    """(reasoning, content, calls) of the text cut at the places."""
    parser, text = OutputParser(case["thinking"], TOOLS, FAMILIES[name]), case["text"]
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    events = [event for start, stop in itertools.pairwise(edges) for event in parser.push(text[start:stop])]
    events += parser.flush()
    return (
        "".join(event.text for event in events if isinstance(event, ReasoningDelta)),
        "".join(event.text for event in events if isinstance(event, ContentDelta)),
        [[event.name, json.loads(event.arguments)] for event in events if isinstance(event, ToolCallDelta)],
    )


@pytest.mark.parametrize(("name", "case"), CASES)
def test_transcripts(name: str, case: dict[str, Any]) -> None:
    expected = (case["reasoning"], case["content"], case["calls"])
    assert read(name, case) == expected
    assert read(name, case, range(len(case["text"]))) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 400), max_size=12))
def test_chunks_make_no_difference(param: Any, places: list[int]) -> None:
    name, case = param.values
    assert read(name, case, places) == (case["reasoning"], case["content"], case["calls"])


@given(st.sampled_from(CASES), st.sampled_from(CASES), st.lists(st.integers(0, 800), max_size=12))
def test_one_after_another_under_any_chunks(first: Any, second: Any, places: list[int]) -> None:
    """What one leaves open may end in the other: only that chunks make no difference is known."""
    (name, case), (_, other) = first.values, second.values
    joined = case | {"text": case["text"] + other["text"]}
    assert read(name, joined, places) == read(name, joined)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_an_answer_cut_at_its_length_calls_nothing_that_is_not_closed(name: str, case: dict[str, Any]) -> None:
    format = FAMILIES[name]
    assert format.tools is not None
    calls_of_all = case["calls"]
    for end in range(len(case["text"])):
        parser = OutputParser(case["thinking"], TOOLS, format)
        events = [*parser.push(case["text"][:end]), *parser.flush(cut=True)]
        calls = [[e.name, json.loads(e.arguments)] for e in events if isinstance(e, ToolCallDelta)]
        assert calls == calls_of_all[: len(calls)]
