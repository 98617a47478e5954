"""Bodies of every API with anything anywhere in them: never a 500 nor an answer that is not of the promised shape."""

from __future__ import annotations

import http.client
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lucevisor.api.dialects import anthropic, openai_responses
from lucevisor.api.schemas import ALIASES, NEUTRAL, REFUSED
from tests.api.conftest import Live
from tests.api.scripted_model import MODEL, Rig, dice

texts = st.text(max_size=12) | st.sampled_from(["", "\x00", "🎉", "<|im_end|>", "a" * 300, "\u2028", "<think>", "none"])
numbers = st.integers(-3, 40) | st.floats(allow_nan=False) | st.integers() | st.sampled_from([2**63, -(2**63)])
anything = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = texts | st.sampled_from(
    sorted({*ALIASES, *NEUTRAL, *REFUSED, *anthropic.RULES.refused, *openai_responses.RULES.refused})
)

FUNCTION = {"name": "f", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}}
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call_output", "call_id": "c", "output": "2"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "2", "is_error": False}]},
]
MESSAGES = {
    "messages": BLOCKS, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 2, "stop_sequences": ["x"],
    "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}], "tool_choice": {"type": "auto"},
    "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "metadata": {}, "stream": False,
}  # fmt: skip
BODIES = {
    "/v1/chat/completions": {
        "messages": CHAT, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 2, "n": 2, "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": True}, "response_format": {"type": "text"},
        "return_token_ids": True, "model": MODEL, **SAMPLING,
    },
    "/v1/completions": {"prompt": [[1, 2], "Hi"], "max_tokens": 2, "logprobs": 2, "echo": True, "n": 2, **SAMPLING},
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {key: MESSAGES[key] for key in ("messages", "system", "tools", "thinking")},
    "/v1/responses": {
        "input": ITEMS, "instructions": "Be brief.", "max_output_tokens": 2, "previous_response_id": None,
        "tools": [{"type": "function", **FUNCTION}, {"type": "namespace", "name": "n", "tools": []}],
        "tool_choice": "auto", "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"},
        "include": ["reasoning.encrypted_content"], "top_logprobs": 1, "store": True, "metadata": {"a": "b"},
        "stream": True,
    },
    "/api/chat": {
        "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "format": None, "think": True,
        "options": {"num_predict": 2, "temperature": 0.5, "stop": ["x"]}, "keep_alive": "5m",
    },
    "/completion": {"prompt": ["Hi", 5, "x"], "n_predict": 2, "n_probs": 2, **SAMPLING},
    "/apply-template": {"messages": CHAT, "tools": [TOOL], "enable_thinking": True},
    "/tokenize": {"content": "Hi <|im_end|>", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 8000]},
}  # fmt: skip
LIMITS = ("max_tokens", "max_output_tokens", "n_predict")


@pytest.fixture(scope="module")
def server():
    live = Live(Rig)
    live.do(lambda rig: setattr(rig.stage, "script", dice))
    yield live
    live.close()


@pytest.fixture(scope="module")
def connection(server):
    host, _, port = server.url.removeprefix("http://").partition(":")
    one = http.client.HTTPConnection(host, int(port), timeout=120)  # the first long body starts a process
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


def places(value):
    """(container, key) of everything in a body."""
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@st.composite
def requests(draw):
    """A path and a good body of it in which up to three things are replaced, removed or added."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body = json.loads(json.dumps(BODIES[path]))
    for _ in range(draw(st.integers(0, 3))):
        container, key = draw(st.sampled_from(list(places(body))))
        what = draw(st.sampled_from(["replace", "remove", "add"]))
        if what == "replace":
            container[key] = draw(anything)
        elif what == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[draw(names)] = draw(anything)
        else:
            container.append(draw(anything))
        if not body:
            break
    body |= {limit: 2 for limit in LIMITS if limit in BODIES[path]}
    if path == "/api/chat":
        body["options"] = {**BODIES[path]["options"], "num_predict": 2}
    return path, body


def check_error(path, raw):
    """A refusal is whole, in the shape of its API, and names something."""
    assert len(raw) < 2000
    told = json.loads(raw)
    if path.startswith("/api/"):
        assert told.keys() == {"error"}
        assert told["error"]
    elif path.startswith("/v1/messages"):
        assert told.keys() == {"type", "error", "request_id"}
        assert told["error"]["message"]
    else:
        assert told.keys() == {"error"}
        assert told["error"].keys() == {"message", "type", "param", "code"}
        assert told["error"]["message"]
        assert told["error"]["code"]


def check(path, status, kind, raw):
    assert status in (200, 400, 404, 413, 429), raw
    if status != 200:
        check_error(path, raw)
    elif kind.startswith("text/event-stream"):
        last = raw.rpartition(b"data: ")[2].strip()
        ends = ("message_stop", "response.completed", "response.incomplete")
        assert last == b"[DONE]" or json.loads(last)["type"] in ends
    elif "ndjson" in kind:
        assert json.loads(raw.splitlines()[-1])["done"] is True
    else:
        json.loads(raw, parse_constant=pytest.fail)


@given(requests())
@settings(max_examples=450, deadline=None, suppress_health_check=list(HealthCheck))
def test_bodies(server, connection, case):
    path, body = case
    check(path, *post(connection, path, json.dumps(body).encode()))
    assert server.do(lambda rig: rig.n_busy) == 0


@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_bytes(server, connection, path, data):
    status, _, raw = post(connection, path, data)
    assert status in (400, 404), raw
    check_error(path, raw)
