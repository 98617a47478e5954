"""Bodies made of everything: never a 500, never a body that is not the promised shape, nothing left behind."""

from __future__ import annotations

import http.client
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.api.dialects import openai_responses as responses_schemas
from lucevisor.api.dialects.anthropic import RULES
from lucevisor.api.dialects.openai_chat import ChatBody
from lucevisor.api.dialects.openai_completions import CompletionBody
from lucevisor.api.schemas import NEUTRAL, REFUSED
from tests.api.scripted_model import MODEL, dice

texts = st.text(max_size=12) | st.sampled_from(["", "\x00", "🎉", "<|im_end|>", "a" * 300, "\u2028", "<think>"])
some_text = texts.filter(bool)
numbers = (
    st.integers(-3, 40)
    | st.floats(allow_nan=False, width=32)
    | st.integers()
    | st.sampled_from([1e308, 2**63, -(2**63)])
)
scalars = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url"]) | scalars}, optional={"text": texts | scalars}
)
calls = st.fixed_dictionaries(
    {
        "function": st.fixed_dictionaries(
            {"name": texts}, optional={"arguments": texts | st.just('{"a": 1}') | anything}
        )
    },
    optional={"id": texts, "type": st.just("function")},
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "robot"])},
    optional={
        "content": texts | st.lists(parts, max_size=3) | anything,
        "tool_calls": st.lists(calls, max_size=2) | anything,
        "tool_call_id": texts,
        "reasoning_content": texts | anything,
        "name": anything,
        "extra": anything,
    },
)
good_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": texts},
    optional={"extra": anything, "reasoning_content": texts},
)
tools = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={"function": st.fixed_dictionaries({"name": texts}, optional={"parameters": anything}) | anything},
)
sensible = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 50),
    "n": st.integers(1, 3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": some_text | st.lists(some_text, max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 8191).map(str), st.floats(-100, 100), max_size=3),
    "stream": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_token_ids": st.booleans(),
    "parallel_tool_calls": st.booleans(),
    "enable_thinking": st.booleans(),
    "tool_choice": st.just("none"),
    "model": st.just(MODEL),
}
wild = {
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "logprobs": st.booleans() | st.integers(0, 20),
    "top_logprobs": st.integers(0, 20),
    "reasoning_effort": st.sampled_from(["none", "low", "high"]),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "tools", "x"]), anything, max_size=2),
    "tool_choice": st.sampled_from(["auto", "none", "required"]),
    "echo": st.booleans(),
    **dict.fromkeys(["metadata", "user", *REFUSED, *NEUTRAL], anything),
}
few_tokens = {"max_tokens": st.integers(1, 4)}


def body_of(kind, required):
    """Bodies of sensible values, and bodies of which any value may be anything."""
    options = {name: values for name, values in sensible.items() if name in kind.__struct_fields__}
    good = st.fixed_dictionaries({**required, **few_tokens}, optional=options)
    bad = st.fixed_dictionaries(
        {**required, **few_tokens},
        optional={n: values | anything for n, values in {**options, **wild}.items() if n not in required},
    )
    return good | bad


talk = st.lists(good_messages, min_size=1, max_size=4)
chat_bodies = (
    body_of(ChatBody, {"messages": talk})
    | body_of(ChatBody, {"messages": st.lists(messages, max_size=4)})
    | body_of(ChatBody, {"messages": talk, "tools": st.lists(tools, max_size=2)})
)
prompts = (
    texts
    | st.lists(st.integers(-1, 8192), max_size=5)
    | st.lists(texts | st.lists(st.integers(0, 8191), max_size=3), max_size=3)
)
plain_bodies = body_of(CompletionBody, {"prompt": prompts | anything})

blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "redacted_thinking"]) | scalars},
    optional={
        "text": texts | scalars,
        "thinking": texts | scalars,
        "id": texts,
        "tool_use_id": texts,
        "name": texts,
        "input": st.dictionaries(texts, anything, max_size=2) | anything,
        "content": texts | st.lists(parts, max_size=2) | anything,
        "is_error": st.booleans(),
        "cache_control": anything,
    },
)
anthropic_messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system"]) | scalars,
        "content": texts | st.lists(blocks, max_size=3),
    }
)
anthropic_tools = st.fixed_dictionaries({"name": texts, "input_schema": st.dictionaries(texts, anything, max_size=2)})
anthropic_bodies = st.fixed_dictionaries(
    {"messages": st.lists(anthropic_messages, max_size=3), **few_tokens},
    optional={
        "system": texts | st.lists(blocks, max_size=2),
        "tools": st.lists(anthropic_tools | anything, max_size=2),
        "tool_choice": st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "none"])}) | anything,
        "thinking": st.fixed_dictionaries({"type": st.sampled_from(["adaptive", "disabled"])}) | anything,
        "output_config": st.fixed_dictionaries({"effort": st.sampled_from(["low", "max"])}) | anything,
        "stop_sequences": st.lists(texts, max_size=3) | anything,
        "stream": st.booleans() | anything,
        "top_k": numbers,
        "temperature": numbers,
        "name \u2028 \x00": anything,
        **dict.fromkeys(["metadata", *RULES.refused, *RULES.neutral], anything),
    },
)
response_items = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | scalars},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | scalars,
        "content": texts | st.lists(st.fixed_dictionaries({"type": st.just("input_text"), "text": texts})) | anything,
        "summary": st.lists(st.fixed_dictionaries({"text": texts}), max_size=2) | anything,
        "encrypted_content": texts,
        "call_id": texts,
        "name": texts,
        "arguments": texts | st.just('{"a": 1}'),
        "namespace": texts,
        "output": texts | anything,
    },
)
response_tools = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "namespace", "web_search"])},
    optional={
        "name": texts,
        "parameters": anything,
        "tools": st.lists(anything, max_size=2),
        "external_web_access": anything,
    },
)
response_bodies = st.fixed_dictionaries(
    {"input": texts | st.lists(response_items, max_size=4), "max_output_tokens": st.integers(1, 4)},
    optional={
        "instructions": texts,
        "previous_response_id": st.sampled_from(["resp_1", ""]) | anything,
        "stored_responses": anything,
        "tools": st.lists(response_tools | anything, max_size=2),
        "tool_choice": st.sampled_from(["auto", "none"]) | anything,
        "reasoning": st.fixed_dictionaries({"effort": st.sampled_from(["none", "high"]), "summary": scalars})
        | anything,
        "text": st.fixed_dictionaries({"verbosity": st.just("low")}) | anything,
        "include": st.lists(st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs"]) | texts),
        "top_logprobs": st.integers(-1, 3),
        "store": st.booleans() | anything,
        "stream": st.booleans() | anything,
        "metadata": st.dictionaries(texts, texts, max_size=2) | anything,
        **dict.fromkeys(["user", *responses_schemas.RULES.refused], anything),
    },
)


@st.composite
def requests(draw):
    """A path and a body; a function of its own, so that a report does not spell out all of the above."""
    if draw(st.booleans()):
        return "/v1/chat/completions", draw(chat_bodies)
    return "/v1/completions", draw(plain_bodies)


@pytest.fixture(scope="module")
def server():
    from tests.api.conftest import Live
    from tests.api.scripted_model import Rig

    live = Live(Rig)
    live.do(lambda rig: setattr(rig.stage, "script", dice))
    yield live
    live.close()


@pytest.fixture(scope="module")
def connection(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    one = http.client.HTTPConnection(host, int(port), timeout=30)  # the first long body starts a process
    yield one
    one.close()


def post(connection, path, data):
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.getheader("Content-Type"), response.read()
    except OSError:
        connection.close()  # the next example begins anew
        raise


def check(status, kind, raw):
    """The answer is one of those that the contract names, whole and in its shape."""
    assert status in (200, 400, 404, 413, 429), raw
    if status != 200:
        error = json.loads(raw)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["code"]
        assert len(raw) < 2000
    elif kind.startswith("text/event-stream"):
        assert raw.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(raw)["choices"]


@given(requests())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_bodies(server, connection, case):
    path, body = case
    check(*post(connection, path, json.dumps(body).encode()))
    assert server.do(lambda rig: rig.n_busy) == 0


@given(anthropic_bodies, st.booleans())
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_anthropic_bodies(server, connection, body, counted):
    path = "/v1/messages/count_tokens" if counted else "/v1/messages"
    status, kind, raw = post(connection, path, json.dumps(body).encode())
    assert status in (200, 400, 413, 429), raw
    if status != 200:
        told = json.loads(raw)
        assert set(told) == {"type", "error", "request_id"}
        assert told["error"]["message"]
        assert len(raw) < 2000
    elif kind.startswith("text/event-stream"):
        assert raw.endswith(b'data: {"type":"message_stop"}\n\n')
    else:
        assert json.loads(raw)["input_tokens" if counted else "content"] is not None
    assert server.do(lambda rig: rig.n_busy) == 0


@given(response_bodies)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_response_bodies(server, connection, body):
    status, kind, raw = post(connection, "/v1/responses", json.dumps(body).encode())
    assert status in (200, 400, 404, 413, 429), raw
    if status == 200 and kind.startswith("text/event-stream"):
        assert json.loads(raw.rpartition(b"data: ")[2])["type"] in ("response.completed", "response.incomplete")
    elif status == 200:
        assert json.loads(raw)["status"] in ("completed", "incomplete")
    else:
        check(status, kind, raw)
    assert server.do(lambda rig: rig.n_busy) == 0


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes(server, connection, data):
    for path in (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
    ):
        status, _, raw = post(connection, path, data)
        assert status in (400, 404), raw
        assert json.loads(raw)["error"]["message"]


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_good_body_with_damage(server, connection, data):
    """Bytes changed, cut or put in: JSON that almost is, and values that almost fit."""
    good = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1}}
    raw = bytearray(json.dumps(good).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
        if not raw:
            break
    check(*post(connection, "/v1/chat/completions", bytes(raw)))
