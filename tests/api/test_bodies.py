"""Request ids and bodies: what is accepted, and what is refused before it is read."""

from __future__ import annotations

import io
import json

import pytest
import structlog

from lucevisor.api import schemas as bodies
from lucevisor.api.contexts import ApiSettings
from tests.api.raw_http import BODY, CHAT
from tests.api.scripted_model import Rig, say


@pytest.fixture
def client(shared_client):
    return shared_client


class TestRequestIds:
    async def test_ours_and_theirs(self, client):
        for sent, kept in (("trace-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)):
            async with client.session.get(client.url + "/health", headers={"x-request-id": sent}) as response:
                assert (response.headers["x-request-id"] == sent) == kept
                assert response.headers["x-request-id"]

    async def test_on_errors_streams_and_unknown_paths(self, client):
        headers = {"x-request-id": "mine"}
        for path, body in ((CHAT, {**BODY, "stream": True}), (CHAT, {}), ("/nope", {})):
            async with client.session.post(client.url + path, json=body, headers=headers) as response:
                assert response.headers["x-request-id"] == "mine"
                await response.read()

    async def test_the_log_line(self, client):
        seen = []
        structlog.configure(
            processors=[structlog.contextvars.merge_contextvars, lambda _l, _m, e: seen.append(e) or _drop()]
        )
        try:
            await client.ask(CHAT, BODY, headers={"x-request-id": "mine"})
        finally:
            structlog.reset_defaults()
        (line,) = [e for e in seen if e["event"] == "request"]
        assert line["request_id"] == "mine"
        assert (line["method"], line["path"], line["status"]) == ("POST", CHAT, 200)
        assert line["prompt_tokens"] > 0
        assert line["generated_tokens"] > 0
        assert (line["accepted_tokens"], line["rejected_tokens"]) == (0, 0)
        assert line["duration_s"] >= line["first_token_s"] > 0


def _drop():
    raise structlog.DropEvent


class TestBodies:
    async def test_content_types(self, client):
        data = json.dumps(BODY)
        for kind, good in (
            ("application/json", True),
            ("application/json; charset=utf-8", True),
            ("Application/JSON", True),
            ("application/vnd.api+json", True),
            ("text/plain", False),
            ("application/x-www-form-urlencoded", False),
        ):
            status, answer = await client.ask(CHAT, data=data, headers={"Content-Type": kind})
            assert status == (200 if good else 400), kind
            assert good or answer["error"]["code"] == "unsupported_content_type"

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"[]",
            b'{"a":1}{"b":2}',
            b'{"a":1e999}',
            b"[" * 100_000,
            b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        ],
    )
    async def test_no_json_object(self, client, data):
        status, answer = await client.ask(CHAT, data=data, headers={"Content-Type": "application/json"})
        assert status == 400
        assert answer["error"]["message"]

    @pytest.mark.parametrize("n_more", [0, 200_000])  # read in the loop, and in a worker
    @pytest.mark.parametrize(
        ("path", "param", "body"),
        [
            (CHAT, "messages[0].content", BODY),
            ("/v1/completions", "stop[0]", {"prompt": "x", "stop": ["Hi"]}),
            ("/v1/messages", "messages[0].content", {"max_tokens": 5, **BODY}),
            ("/v1/responses", "metadata.k", {"input": "x", "metadata": {"k": "Hi"}}),
            ("/api/chat", "messages[0].content", BODY),
            ("/tokenize", "content", {"content": "Hi"}),
        ],
    )
    async def test_bytes_that_are_not_utf8_are_refused_by_name(self, client, path, param, body, n_more):
        data = json.dumps(body).encode().replace(b'"Hi"', b'"caf\xe9' + b"x" * n_more + b'"')
        status, answer = await client.ask(path, data=data, headers={"Content-Type": "application/json"})
        message = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
        assert status == 400
        assert message.startswith(f"{param}: holds bytes that are not UTF-8, or half of a surrogate pair")
        assert (await client.chat())[0] == 200  # the worker lives

    async def test_too_large(self, start):
        client = await start(Rig(settings=ApiSettings(max_body_bytes=10_000)))
        big = json.dumps({**BODY, "user": "x" * 20_000}).encode()
        json_type = {"Content-Type": "application/json"}
        status, answer = await client.ask(CHAT, data=big, headers=json_type)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")

        async def pieces():
            for start in range(0, len(big), 1000):
                yield big[start : start + 1000]

        status, answer = await client.ask(CHAT, data=pieces(), headers=json_type)  # chunked: no length told before
        assert status == 413
        assert (await client.chat())[0] == 200


# ---- bounds of a request (docs/limits.md)


PLAIN = "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


def tool(parameters: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {"messages": HI, "stop": ["x"] * (bodies.MAX_STOPS + 1)}, "stop", "invalid_value"),
        (CHAT, {"messages": HI, "stop": "x" * (bodies.MAX_STOP_CHARS + 1)}, "stop", "invalid_value"),
        (CHAT, {"messages": HI, "n": bodies.MAX_CHOICES + 1}, "n", "invalid_value"),
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        (
            CHAT,
            {"messages": HI, "logit_bias": {str(i): 1 for i in range(bodies.MAX_BIASES + 1)}},
            "logit_bias",
            "invalid_value",
        ),
        (
            CHAT,
            {"messages": HI, "tools": [tool({"enum": list(range(bodies.MAX_TOOL_VALUES))})]},
            "tools",
            "invalid_value",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]},
            "messages[0].content[0].image_url",
            "unsupported_content",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "aGk="}}]}]},
            "messages[0].content[0].type",
            "unsupported_content",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 10_000}]}, "messages", "context_length_exceeded"),
        (CHAT, {"messages": HI * 600}, "messages", "context_length_exceeded"),
        (PLAIN, {"prompt": "x" * 100_000}, "prompt", "context_length_exceeded"),
        (PLAIN, {"prompt": ["x", "x " * 600]}, "prompt[1]", "context_length_exceeded"),
        (PLAIN, {"prompt": [5] * 512}, "prompt", "context_length_exceeded"),
        (PLAIN, {"prompt": [[5], [5] * 512]}, "prompt[1]", "context_length_exceeded"),
        (PLAIN, {"prompt": ["x"] * (bodies.MAX_CHOICES + 1)}, "n", "invalid_value"),
        (PLAIN, {"prompt": ["x"] * 65, "n": 2}, "n", "invalid_value"),
        (
            "/tokenize",
            {"content": " " * (bodies.MAX_TEXT_CHARS + 1)},
            "content",
            "invalid_value",
        ),
        ("/tokenize", {"prompt": "1" * 900_000, "with_pieces": True}, "prompt", "invalid_value"),
        ("/detokenize", {"tokens": [5] * (bodies.MAX_TEXT_TOKENS + 1)}, "tokens", "invalid_value"),
    ],
)
async def test_beyond_a_bound(client, path, body, param, code):
    json_type = {"Content-Type": "application/json"}
    status, answer = await client.ask(path, data=io.BytesIO(json.dumps(body).encode()), headers=json_type)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)
    assert answer["error"]["message"].startswith(f"{param}: ")


async def test_what_is_repeated_is_bounded(start):
    client = await start(Rig(max_context=1 << 16))
    status, answer = await client.ask(PLAIN, {"prompt": " " * 100_000, "echo": True, "n": 42})
    assert (status, answer["error"]["param"]) == (400, "echo")


@pytest.mark.parametrize("names", [["x" * 100_000], [f"unknown-{i}" for i in range(10_000)]], ids=["long", "many"])
async def test_names_of_unknown_parameters_fit_a_header(client, names):
    body = {"messages": HI, "max_tokens": 1, **dict.fromkeys(names, 1)}
    async with client.session.post(client.url + CHAT, json=body) as response:
        assert response.status == 200
        assert len(response.headers["X-Lucevisor-Ignored"]) < 4000


async def test_an_answer_with_many_log_probabilities_is_the_same_in_a_thread(client, monkeypatch):
    client.rig.stage.script = say("ab", end=False)
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 40, "seed": 1}
    _, here = await client.chat(**body)
    monkeypatch.setattr("lucevisor.api.generation._INLINE_RECORDS", 0)
    _, there = await client.chat(**body)
    assert here["choices"] == there["choices"]
    assert len(there["choices"][0]["logprobs"]["content"]) == 40
