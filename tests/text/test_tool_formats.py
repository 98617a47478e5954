"""Values of calls, and what is read of any text; calls as each family writes them: test_tool_transcripts.py."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lucevisor.text import json_text
from lucevisor.text.messages import TemplateTraits, prepare_messages
from lucevisor.text.parameters import read_value
from lucevisor.text.tools import FORMATS
from lucevisor.text.tools.bare_values import XmlFunction

GEMMA, MISTRAL, _, _, LLAMA, PAIRS, XML, JSON = (tool_format for _, tool_format in FORMATS)
SCHEMAS = {
    "s": {"type": "string"},
    "i": {"type": "integer"},
    "n": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "o": {"type": "object"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "either": {"type": ["integer", "string"]},
    "choice": {"enum": ["1", "2"]},
}
TOOLS = [
    {"type": "function", "function": {"name": "other", "parameters": {"properties": {"s": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMAS}}},
]


def call(tool_format, body, tools=TOOLS):
    parsed = tool_format.parse(body, tools)
    return parsed and (parsed.name, json.loads(parsed.arguments))


@pytest.mark.parametrize(
    ("tool_format", "body"),
    [
        (GEMMA, "call:f{l:[1 2]}"),
        (GEMMA, 'call:f{<|"|>k<|"|> 1}'),
        (GEMMA, 'call:f{<|"|>k:1}'),
        (GEMMA, "call:f{l:" + "[" * 5000),
        (JSON, "[" * 100_000),
        (JSON, '{"name": "f", "arguments": "x"}'),
        (XML, "<function=f>words<parameter=s>\nx\n</parameter></function>"),
        (PAIRS, "<arg_key>s</arg_key><arg_value>a</arg_value>"),
        (MISTRAL, '[ARGS]{"i": 1'),
        (LLAMA, ' "Ada", "age": 36'),  # an answer in JSON, no function
    ],
)
def test_what_is_malformed_is_no_call(tool_format, body):
    assert tool_format.parse(body, TOOLS) is None


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("12", "s", "12"),
        ("12", "i", 12),
        ("12.0", "i", 12),
        ("12.5", "i", "12.5"),
        ("12", "n", 12),
        ("true", "b", True),
        ("True", "b", True),
        ("1", "b", "1"),
        ("true", "i", "true"),
        ("[1]", "l", [1]),
        ("{}", "l", "{}"),
        ('{"a": 1}', "o", {"a": 1}),
        ("None", "maybe", None),
        ("null", "maybe", None),
        ("text", "maybe", "text"),
        ('"quoted"', "maybe", '"quoted"'),
        ("5", "either", 5),
        ("five", "either", "five"),
        ("1", "choice", "1"),
        ("NaN", "n", "NaN"),
        ("not json", "o", "not json"),
    ],
)
def test_values_follow_the_schema(text, name, expected):
    value = json.loads(json_text.write(read_value(text, SCHEMAS[name])))
    assert value == expected
    assert type(value) is type(expected)


# Text that none of the notations uses as a delimiter.
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=20)
names = st.text("abcxyz_", min_size=1, max_size=6)
values = st.recursive(
    st.one_of(
        words, st.integers(-(2**53), 2**53), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=6,
)


def write_gemma(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{write_gemma(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(write_gemma, value)) + "]"
    return json.dumps(value)


class TestRoundTrips:
    @given(names, st.dictionaries(names, values, max_size=4))
    @settings(max_examples=200, deadline=None)
    def test_structured_notations(self, name, arguments):
        assert call(JSON, json.dumps({"name": name, "arguments": arguments})) == (name, arguments)
        assert call(GEMMA, f"call:{name}{write_gemma(arguments)}") == (name, arguments)

    @given(names, st.dictionaries(names, words, max_size=4))
    @settings(max_examples=200, deadline=None)
    def test_bare_strings(self, name, arguments):
        properties = {key: {"type": "string"} for key in arguments}
        tools = [{"function": {"name": name, "parameters": {"properties": properties}}}]
        xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        assert call(XML, f"\n<function={name}>\n{xml}</function>\n", tools) == (name, arguments)
        pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments.items())
        assert call(PAIRS, name + pairs, tools) == (name, arguments)

    @given(names, st.dictionaries(names, values.filter(lambda value: not isinstance(value, str)), max_size=4))
    @settings(max_examples=200, deadline=None)
    def test_bare_json(self, name, arguments):
        """Undeclared parameters that are JSON come back as what they are."""
        written = {key: json.dumps(value) for key, value in arguments.items()}
        xml = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
        pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in written.items())
        if not any("<" in value for value in written.values()):
            assert call(XML, f"<function={name}>{xml}</function>", []) == (name, arguments)
            assert call(PAIRS, name + pairs, []) == (name, arguments)


@given(st.text('<>/="{}[]:,|\\ \ncall:ftoolparameterargkeyvalue', max_size=60))
@settings(max_examples=500, deadline=None)
def test_no_text_raises(body):
    for _, tool_format in FORMATS:
        for part in tool_format.split(body):
            tool_format.parse(part, TOOLS)
        tool_format.repair(body, TOOLS)
        tool_format.is_inside_value(body)


def test_a_pattern_for_names_takes_time_linear_in_the_name() -> None:
    """A backtracking engine would take hours, in the event loop."""
    name = "a" * 60 + "b"
    parameters = {"type": "object", "properties": {name: {}}, "patternProperties": {"^(a+)+$": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = f"<function=f>\n<parameter={name}>\n7\n</parameter>\n</function>"
    call = XmlFunction().parse(text, tools)
    assert call is not None
    assert json.loads(call.arguments) == {name: 7}


# ---- arguments of calls


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
