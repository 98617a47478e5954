"""Arguments of calls are JSON by RFC 8259 whatever a model writes, with its numbers digit for digit."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text import json_text
from lucevisor.text.messages import TemplateTraits, prepare_messages
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tools import FORMATS
from tests.text.vocabularies import demo_metadata

GEMMA, PAIRS, XML, JSON = (tool_format for _, tool_format in FORMATS)
NUMBERS = [
    *("0", "-0", "1e999", "-1e999", "1E+2", "1.10", "0.1e-999", "123456789012345678901234567890"),
    *("9" * 5000, "1" + "0" * 400 + ".5"),
]


def strict(text):
    """Decode what RFC 8259 and a client's UTF-8 allow, and nothing else; numbers as their text."""
    text.encode("utf-8")

    def refuse(name):
        raise AssertionError(f"{name} in {text[:80]}")

    return json.loads(
        text, parse_constant=refuse, parse_int=lambda s: ("number", s), parse_float=lambda s: ("number", s)
    )


def written(value):
    """The four notations of a call f(v=value), where `value` is JSON text."""
    yield JSON, f'{{"name": "f", "arguments": {{"v": {value}}}}}'
    yield GEMMA, f"call:f{{v:{value}}}"
    yield XML, f"<function=f><parameter=v>{value}</parameter></function>"
    yield PAIRS, f"f<arg_key>v</arg_key><arg_value>{value}</arg_value>"


@pytest.mark.parametrize("number", NUMBERS, ids=lambda text: text[:20])
def test_numbers_keep_their_text(number):
    for shape in ("{}", "[{}, {}]"):
        value = shape.format(number, number)
        for tool_format, body in written(value):
            call = tool_format.parse(body, [])
            assert call.arguments == f'{{"v": {value}}}'
            assert strict(call.arguments) == {"v": strict(value)}


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_that_are_no_json_are_text_or_no_call(word):
    for tool_format, body in written(word):
        call = tool_format.parse(body, [])
        assert call is None or strict(call.arguments) == {"v": word}


def test_a_number_as_its_schema_wants_it():
    tools = [{"function": {"name": "f", "parameters": {"properties": {"v": {"type": "integer"}}}}}]
    for sent, expected in [("5.0", "5"), ("5e2", "500"), ("-0", "-0"), ("1e999", '"1e999"'), ("5.5", '"5.5"')]:
        (call,) = {tool_format.parse(body, tools) for tool_format, body in written(sent) if tool_format in (XML, PAIRS)}
        assert call.arguments == f'{{"v": {expected}}}'


def test_lone_surrogates_stay_escapes():
    for tool_format, body in written('"\\ud800 \\ud83d\\ude00 \\udfff"'):
        call = tool_format.parse(body, [])
        assert call.arguments == '{"v": "\\ud800 \U0001f600 \\udfff"}'
    assert JSON.parse('{"name": "f\\ud800", "arguments": {}}', []) is None
    call = JSON.parse('{"name": "f", "arguments": {"\\ud800": 1}}', [])
    assert call.arguments == '{"\\ud800": 1}'


@pytest.mark.parametrize("deep", [63, 64, 65, 20_000])
def test_nesting_is_bounded(deep):
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        value = opening * deep + "1" + closing * deep
        for tool_format, body in written(value):
            call = tool_format.parse(body, [])
            assert call is None or strict(call.arguments)
            if deep < 63:
                assert call is not None
        with pytest.raises(ValueError, match="nested more than 64 deep"):
            json_text.parse("[" + value + "]" if deep >= 64 else "[[" + value + "]]")
    assert json_text.parse("[" * 64 + "]" * 64)
    assert json_text.parse('"' + "[" * 100 + '\\""') == "[" * 100 + '"'


def test_the_last_of_a_key_given_twice_counts():
    call = JSON.parse('{"name": "f", "arguments": {"a": 1, "a": 2.50}}', [])
    assert call.arguments == '{"a": 2.50}'


number_texts = st.from_regex(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?", fullmatch=True)
texts = st.text(max_size=8).map(json.dumps) | st.sampled_from(['"\\ud800"', '"\\u0000"', '"\\/"'])
documents = st.recursive(
    number_texts | texts | st.sampled_from(["true", "false", "null"]),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(texts, inner, max_size=3).map(
            lambda items: f"{{{','.join(f'{key}:{item}' for key, item in items.items())}}}"
        )
    ),
    max_leaves=8,
)


@given(documents)
@settings(max_examples=300, deadline=None)
def test_what_is_parsed_is_written_with_the_same_meaning(document):
    assert strict(json_text.write(json_text.parse(document))) == strict(document)


@given(
    st.text('0123456789.eE+-"\\u{}[]:,dD8 \nNaInfity', max_size=40),
    st.sampled_from([None, "integer", "number", "object"]),
)
@settings(max_examples=300, deadline=None)
def test_arguments_are_json_whatever_a_model_writes(text, kind):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"v": {"type": kind}} if kind else {}}}}]
    for tool_format, body in written(text):
        call = tool_format.parse(body, tools)
        assert call is None or isinstance(strict(call.arguments), dict)


TRAITS = TemplateTraits(
    content_parts=False, developer_role=False, embedded_tool_responses=False, more_system_messages=True
)


def arguments_of(text):
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = prepare_messages([{"role": "assistant", "content": "", "tool_calls": [call]}], TRAITS)
    return message["tool_calls"][0]["function"]["arguments"]


def test_arguments_that_clients_send_back():
    assert arguments_of('{"a": 1, "b": 1.5, "c": [true]}') == {"a": 1, "b": 1.5, "c": [True]}
    assert arguments_of('{"a": 1e999, "b": [-1e999]}') == {"a": "1e999", "b": ["-1e999"]}
    assert arguments_of('{"a": ' + "9" * 5000 + "}") == {"a": "9" * 5000}
    assert arguments_of('{"a": "\\ud800\\ud83d\\ude00", "\\udfff": 1}') == {"a": "\ufffd\U0001f600", "\ufffd": 1}
    for text in ('{"a": NaN}', '{"a": -Infinity}', "[" * 100_000, '{"a":' * 100_000, "[1]", "1e999"):
        assert arguments_of(text) == text


@pytest.mark.parametrize("value", ["1e999", "-1e999", '"\\ud800"', "9" * 5000, "1e308"])
def test_a_prompt_of_such_arguments_is_text_without_infinity(value):
    template = ChatTemplate.from_gguf(demo_metadata())
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": {value}}}'}}
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    text = template.render(talk).text
    text.encode("utf-8")
    assert not re.search("Infinity|inf|NaN", text)
