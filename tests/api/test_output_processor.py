"""Tokens are read into text, reasoning and calls; nothing is lost, reported twice or told wrongly at the end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.api.output import (
    ChoiceDelta,
    GenerationFailed,
    OutputProcessor,
    TokenRecord,
    chat_logprobs,
    completion_logprobs,
    token_text,
)
from lucevisor.api.prepared import GenerationOptions
from lucevisor.engine.request import FinishedEvent, RequestError, Timings, TokenEvent, Usage
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.output_parser import OutputFormat
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tools import FORMATS
from tests.api.scripted_model import ids_of, metadata, tokenizer

TIMINGS = Timings(0.0, 0.0, 0.0)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EOS = 8184


def end(
    reason: str = "stop", n: int = 0, stop_id: int | None = EOS, error: RequestError | None = None
) -> FinishedEvent:
    return FinishedEvent(reason, Usage(3, 0, n), TIMINGS, error, stop_id if reason == "stop" else None)  # type: ignore[arg-type]


def options(**fields: Any) -> GenerationOptions:
    return GenerationOptions(sampling=SamplingParams(), turn_ends=[[]], **fields)


def plain(*stops: str) -> OutputProcessor:
    return OutputProcessor(tokenizer(), options(plain=True, stops=stops))


def chat(
    *,
    thinking: bool = False,
    tools: bool = False,
    one: bool = False,
    stops: tuple[str, ...] = (),
    include: bool = False,
) -> OutputProcessor:
    template = ChatTemplate.from_gguf(metadata())
    assert template is not None
    wanted = options(
        stops=stops,
        include_stop=include,
        tools=TOOLS if tools else [],
        reasoning_open=thinking,
        one_tool_call=one,
    )
    return OutputProcessor(tokenizer(), wanted, template.output_format)


def read(reader: OutputProcessor, text: str, last: FinishedEvent | None = None) -> tuple[list[ChoiceDelta], object]:
    deltas: list[ChoiceDelta] = []
    for token in ids_of(text):
        deltas += reader.token(TokenEvent(token))
    more, usage = reader.finish(last or end())
    return deltas + more, usage


def content(deltas: list[ChoiceDelta]) -> str:
    return "".join(p.event.text for p in deltas if isinstance(p.event, ContentDelta))


def reasoning(deltas: list[ChoiceDelta]) -> str:
    return "".join(p.event.text for p in deltas if isinstance(p.event, ReasoningDelta))


class TestPlainText:
    @given(st.text(max_size=30), st.booleans())
    @settings(max_examples=100, deadline=None)
    def test_every_token_is_in_one_piece_and_no_character_is_split(self, text, cut):
        reader = plain()
        text = tokenizer().decode(ids_of(text))  # what the tokenizer makes of it, control tokens left out
        ids = ids_of(text)[: None if not cut else -1]
        deltas = [p for i in ids for p in reader.token(TokenEvent(i))]
        for delta in deltas:
            assert isinstance(delta.event, ContentDelta)
            assert "\ufffd" in text or "\ufffd" not in delta.event.text
        more, _ = reader.finish(end("length"))
        assert content(deltas + more) == tokenizer().decode(ids)
        assert [t.event.token for p in deltas + more for t in p.tokens] == ids
        assert [i for p in deltas + more for i in p.token_ids] == ids

    def test_an_incomplete_character_comes_at_the_end_as_replacement(self):
        reader = plain()
        first = ids_of("🎉")[0]
        assert reader.token(TokenEvent(first)) == []
        deltas, _ = reader.finish(end("length"))
        assert content(deltas) == "\ufffd"
        assert deltas[0].token_ids == (first,)

    def test_offsets_count_characters_of_the_text(self):
        deltas, _ = read(plain(), "añ b")
        told = [(t.offset, tokenizer().token_bytes(t.event.token)) for p in deltas for t in p.tokens]
        assert [offset for offset, _ in told] == sorted(offset for offset, _ in told)
        assert {raw: offset for offset, raw in told}[b" b"] == 2


class TestStops:
    def test_text_before_the_stop_is_shown_and_the_rest_is_not(self):
        reader = plain("STOP")
        deltas = [p for i in ids_of("one two STOP three") for p in reader.token(TokenEvent(i))]
        assert reader.ended
        more, usage = reader.finish(end("cancelled"))
        assert content(deltas + more) == "one two "
        assert more[-1].finish_reason == "stop"
        consumed = [i for p in deltas + more for i in p.token_ids]
        assert consumed == ids_of("one two STOP three")[: len(consumed)]
        assert usage.generated == len(consumed) < len(ids_of("one two STOP three"))

    def test_accepted_drafts_behind_a_stop_count_as_rejected(self):
        ids = ids_of("one two STOP three")
        last = FinishedEvent(
            "cancelled", Usage(3, 0, len(ids), draft_tokens=len(ids), accepted_tokens=len(ids)), TIMINGS
        )
        reader = plain("STOP")
        for i in ids:
            reader.token(TokenEvent(i, drafted=True))
        _, usage = reader.finish(last)
        assert usage.accepted == usage.generated < len(ids)
        assert usage.accepted + usage.rejected == len(ids)

    def test_a_stop_id_may_be_an_accepted_draft(self):
        reader = plain()
        reader.token(TokenEvent(5, drafted=True))
        _, usage = reader.finish(FinishedEvent("stop", Usage(3, 0, 2, 3, 2), TIMINGS, None, EOS))
        assert (usage.generated, usage.accepted, usage.rejected) == (2, 2, 1)

    def test_nothing_is_taken_after_the_end(self):
        reader = plain("x")
        for token in ids_of("x"):
            reader.token(TokenEvent(token))
        assert reader.token(TokenEvent(5)) == []
        deltas, usage = reader.finish(end("stop"))
        assert usage.generated == len(ids_of("x"))
        assert EOS not in deltas[-1].token_ids

    def test_a_beginning_of_a_stop_is_shown_when_it_was_none(self):
        deltas, _ = read(plain("STOPPER"), "now STOP", end("length"))
        assert content(deltas) == "now STOP"
        assert deltas[-1].finish_reason == "length"


class TestChat:
    def test_reasoning_that_never_ends(self):
        deltas, usage = read(chat(thinking=True), "still thinking", end("length"))
        assert (reasoning(deltas), content(deltas)) == ("still thinking", "")
        assert usage.reasoning == usage.generated  # type: ignore[attr-defined]

    def test_a_call_ends_with_tool_calls(self):
        deltas, _ = read(chat(tools=True), "Let me see.\n" + CALL)
        calls = [p.event for p in deltas if isinstance(p.event, ToolCallDelta)]
        assert [(c.index, c.name, c.arguments) for c in calls] == [(0, "add", '{"a": 1}')]
        assert content(deltas) == "Let me see."
        assert deltas[-1].finish_reason == "tool_calls"

    def test_a_call_cut_off_by_the_limit_is_length(self):
        deltas, _ = read(chat(tools=True), CALL + "and", end("length"))
        assert deltas[-1].finish_reason == "length"

    def test_one_call_ends_the_answer_where_one_is_allowed(self):
        reader = chat(tools=True, one=True)
        deltas = [p for i in ids_of(CALL + "\n" + CALL) for p in reader.token(TokenEvent(i))]
        assert reader.ended
        more, _ = reader.finish(end("cancelled"))
        assert sum(isinstance(p.event, ToolCallDelta) for p in deltas + more) == 1
        assert more[-1].finish_reason == "tool_calls"

    def test_a_call_without_its_closing_tag_counts_the_end_token(self):
        text = CALL.removesuffix("</tool_call>")
        deltas, usage = read(chat(tools=True, one=True), text)
        assert deltas[-1].finish_reason == "tool_calls"
        assert usage.generated == len(ids_of(text)) + 1  # type: ignore[attr-defined]
        assert deltas[-1].token_ids[-1] == EOS


class TestStopsInChat:
    """A stop string matches what the user sees: not reasoning, not the inside of a call."""

    def test_reasoning_goes_on_behind_it(self):
        deltas, _ = read(chat(thinking=True, stops=("STOP",)), "I must not STOP\n</think>\n\nHello STOP there")
        assert (reasoning(deltas), content(deltas)) == ("I must not STOP", "Hello ")
        assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", "STOP")

    @pytest.mark.parametrize(
        ("kind", "call", "stops"),
        [
            (
                "XmlFunction",
                "<tool_call>\n<function=add>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>",
                ["\ny", "</parameter>", "=a>"],
            ),
            (
                "ArgumentPairs",
                "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>x\ny</arg_value>\n</tool_call>",
                ["x\ny", "<arg_value>", "add"],
            ),
            ("Gemma4", '<|tool_call>call:add{a:<|"|>x\ny<|"|>}<tool_call|>', ["\n", '"', "call:"]),
            (
                "JsonObject",
                '<tool_call>\n{"name": "add", "arguments": {"a": "x\\ny"}}\n</tool_call>',
                ["\\n", "}}", "{"],
            ),
        ],
    )
    def test_it_is_not_seen_inside_a_call_of_any_format(self, kind, call, stops):
        form = OutputFormat(None, next(form for _, form in FORMATS if type(form).__name__ == kind))
        processor = OutputProcessor(tokenizer(), options(stops=tuple(stops), tools=TOOLS), form)
        deltas, _ = read(processor, "Well" + call)
        assert [p.event.arguments for p in deltas if isinstance(p.event, ToolCallDelta)] == ['{"a": "x\\ny"}']
        assert (content(deltas), deltas[-1].finish_reason, deltas[-1].stop) == ("Well", "tool_calls", None)

    def test_one_that_ends_in_the_tag_of_a_call_is_not_seen(self):
        deltas, _ = read(chat(tools=True, stops=("see.\n<tool_call>",)), "Let me see.\n" + CALL)
        assert (content(deltas), deltas[-1].finish_reason) == ("Let me see.", "tool_calls")

    def test_a_call_that_the_limit_cuts_is_text_that_it_is_seen_in(self):
        deltas, _ = read(chat(tools=True, stops=('"a"',)), CALL.removesuffix("}}\n</tool_call>"), end("length"))
        assert content(deltas) == '<tool_call>\n{"name": "add", "arguments": {'
        assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", '"a"')

    def test_a_call_behind_it_is_not_made(self):
        deltas, _ = read(chat(tools=True, stops=("see",)), "Let me see.\n" + CALL)
        assert content(deltas) == "Let me "
        assert not any(isinstance(p.event, ToolCallDelta) for p in deltas)
        assert deltas[-1].finish_reason == "stop"

    def test_a_call_separates_what_is_before_and_behind_it(self):
        deltas, _ = read(chat(tools=True, stops=("ab",)), f"a\n{CALL}\nb")
        assert [type(p.event) for p in deltas if p.event] == [ContentDelta, ToolCallDelta, ContentDelta]
        assert content(deltas) == "ab"

    @given(
        st.lists(st.sampled_from(["Hello", " ", "\n", "ö🎉", "<tool", "STOP", CALL, "</think>", "add"]), max_size=8),
        st.booleans(),
    )
    @settings(max_examples=100, deadline=None)
    def test_text_ends_at_the_first_one_seen(self, parts, thinking):
        text = "".join(parts)
        whole, _ = read(chat(thinking=thinking, tools=True), text)
        cut, _ = read(chat(thinking=thinking, tools=True, stops=("STOP",)), text)
        segments = [p.event for p in whole if p.event]
        seen = "".join("\0" if not isinstance(e, ContentDelta) else e.text for e in segments)
        assert content(cut) == seen.partition("STOP")[0].replace("\0", "")
        assert (cut[-1].stop == "STOP") == ("STOP" in seen)


class TestContentTokens:
    """Which tokens are content: those that log-probabilities are of."""

    def test_calls_are_not_and_text_that_is_none_is(self):
        text = f"One\n{CALL}\ntwo <tool_call>\nno call\n</tool_call>"
        deltas, _ = read(chat(tools=True), text)
        shown = "".join(
            tokenizer().decode([t.event.token], skip_special=False) for p in deltas for t in p.tokens if t.content
        )
        assert shown == "Onetwo <tool_call>\nno call\n</tool_call>"

    @given(
        st.lists(
            st.sampled_from(["Hello", " ", "\n\n", "ö🎉", "<tool_call>", "<think>", CALL, "</think>"]), max_size=8
        ),
        st.booleans(),
    )
    @settings(max_examples=100, deadline=None)
    def test_they_hold_the_content(self, parts, thinking):
        text = "".join(parts)
        deltas, _ = read(chat(thinking=thinking, tools=True), text)
        tokens = [t for p in deltas for t in p.tokens]
        assert [t.event.token for t in tokens] == ids_of(text)
        held = b"".join(tokenizer().token_bytes(t.event.token) for t in tokens if t.content).decode(errors="replace")
        told = content(deltas)
        assert "".join(told.split()) in "".join(held.split()) or not told
        assert bool(told) == any(t.content for t in tokens)


class TestFailures:
    def test_an_error_of_the_engine_is_raised(self):
        with pytest.raises(GenerationFailed) as failure:
            plain().finish(end("error", error=RequestError("shard_lost", "gone")))
        assert failure.value.error.code == "shard_lost"

    def test_a_cancellation_that_is_not_ours_is_an_error(self):
        with pytest.raises(GenerationFailed):
            plain().finish(end("cancelled"))


# ---- log-probabilities


def test_a_part_of_a_character_is_told_as_bytes():
    first, *rest = ids_of("ö")
    assert rest
    assert token_text(tokenizer(), first) == "bytes:\\xc3"
    assert token_text(tokenizer(), ids_of("Hello")[0]) == "Hello"


def test_chat_shape():
    a, b = ids_of("Hello")[0], ids_of("ö")[0]
    told = chat_logprobs(tokenizer(), [TokenRecord(TokenEvent(a, -0.5, ((a, -0.5), (b, -math.inf))), 0)])
    entry = {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    other = {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3]}
    assert told == {"content": [{**entry, "top_logprobs": [entry, other]}], "refusal": None}


def test_completion_shape_holds_the_chosen_token_too():
    a, b = ids_of("Hello")[0], ids_of(",")[0]
    told = completion_logprobs(
        tokenizer(), [TokenRecord(TokenEvent(a, -2.0, ((b, -0.1),)), 0), TokenRecord(TokenEvent(b, -0.3), 5)]
    )
    assert told == {
        "tokens": ["Hello", ","],
        "token_logprobs": [-2.0, -0.3],
        "top_logprobs": [{",": -0.1, "Hello": -2.0}, {",": -0.3}],
        "text_offset": [0, 5],
    }


def test_a_missing_or_impossible_number_is_finite():
    for impossible in (math.nan, -math.inf, math.inf, None):
        record = TokenRecord(TokenEvent(5, impossible), 0)
        assert chat_logprobs(tokenizer(), [record])["content"][0]["logprob"] == -9999.0  # type: ignore[index]
