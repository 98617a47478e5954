"""What a request may hold at most: beyond each bound a 400 that names the parameter.  docs/limits.md lists them."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from lucevisor.api import schemas as bodies
from lucevisor.api.request_context import take_turn
from tests.api.scripted_model import Rig, say

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def client(shared_client):
    return shared_client


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


async def test_so_many_turns_in_an_iteration_and_none_for_the_cancelled():
    turns, passed, rounds = asyncio.Semaphore(3), [], []

    async def task(number: int) -> None:
        await take_turn(turns)
        passed.append(number)

    tasks = [asyncio.create_task(task(number)) for number in range(20)]
    await asyncio.sleep(0)
    tasks[7].cancel()
    while len(passed) < 19:
        before = len(passed)
        await asyncio.sleep(0)
        rounds.append(len(passed) - before)
    assert passed == [number for number in range(20) if number != 7]
    assert max(rounds) <= 3
    await asyncio.gather(*tasks, return_exceptions=True)
