"""Request ids and bodies: what is accepted, and what is refused before it is read."""

from __future__ import annotations

import asyncio
import json

import pytest
import structlog

from lucevisor.api.app_context import ApiSettings
from tests.api.raw_http import BODY, CHAT
from tests.api.scripted_model import Rig


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
            b"{",
            b"[]",
            b'"x"',
            b"null",
            b"NaN",
            b"\xff\xfe",
            b'{"a":1}{"b":2}',
            b'{"a":"\\ud800"}',
            b'{"a":1e999}',
            b"[" * 100_000,
            b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}",
        ],
    )
    async def test_no_json_object(self, client, data):
        status, answer = await client.ask(CHAT, data=data, headers={"Content-Type": "application/json"})
        assert status == 400
        assert answer["error"]["message"]

    @pytest.mark.parametrize(
        ("path", "param", "body"),
        [
            (CHAT, "messages[0].content", BODY),
            (
                CHAT,
                "messages[1].content",
                {"messages": [{"role": "user", "content": "x" * 200_000}, *BODY["messages"]]},
            ),
            ("/v1/completions", "prompt", {"prompt": "Hi"}),
            ("/v1/messages", "messages[0].content", {"max_tokens": 5, **BODY}),
            ("/v1/responses", "input[0].content", {"input": BODY["messages"]}),
            ("/api/chat", "messages[0].content", BODY),
            ("/tokenize", "content", {"content": "Hi"}),
            ("/apply-template", "messages[0].content", BODY),
        ],
    )
    async def test_half_a_surrogate_pair_is_refused_by_name(self, client, path, param, body):
        text = json.dumps(body)
        assert text.count('"Hi"') == 1
        half = '"Hi \\ud800"'
        status, answer = await client.ask(
            path, data=text.replace('"Hi"', half), headers={"Content-Type": "application/json"}
        )
        message = answer["error"] if isinstance(answer["error"], str) else answer["error"]["message"]
        assert status == 400
        assert message.startswith(f"{param}: holds bytes that are not UTF-8, or half of a surrogate pair")
        assert not client.rig.stage.opened

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

    async def test_a_body_that_does_not_come(self, start):
        client = await start(Rig(settings=ApiSettings(body_timeout_s=0.1)))

        async def slow():
            yield b"{"
            await asyncio.sleep(5)
            yield b"}"

        status, answer = await client.ask(CHAT, data=slow(), headers={"Content-Type": "application/json"})
        assert (status, answer["error"]["code"]) == (408, "request_timeout")

    async def test_paths_and_methods(self, client):
        status, answer = await client.ask("/v1/nope", {})
        assert (status, answer["error"]["code"]) == (404, "not_found")
        async with client.session.get(client.url + CHAT) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert (await response.json())["error"]["code"] == "method_not_allowed"
