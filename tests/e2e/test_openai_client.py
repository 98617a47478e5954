"""The unmodified `openai` client against the demo model over two real daemons."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.process import wait_until

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


@pytest.fixture
def client(endpoint: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint, api_key="none", max_retries=0) as one:
        yield one


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(client: openai.OpenAI, **more: Any) -> Any:
    arguments: dict[str, Any] = {"messages": QUESTION, "temperature": 0, "max_tokens": 24} | more
    return client.chat.completions.create(model=model_of(client), **arguments)


def engine_status(endpoint: str) -> str:
    with urllib.request.urlopen(endpoint.removesuffix("/v1") + "/metrics") as reply:
        return str(reply.read().decode())


def gauge(endpoint: str, name: str) -> float:
    for line in engine_status(endpoint).splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no {name}")


def test_chat_streamed_and_whole_are_the_same_text_and_usage(client: openai.OpenAI) -> None:
    whole = ask(client)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert "os.path.join" in text
    assert whole.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    for usage in (chunks[-1].usage, whole.usage):  # how many drafts were accepted may differ
        assert usage.completion_tokens == 24
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert 0 <= usage.completion_tokens_details.accepted_prediction_tokens < 24


def test_stop_strings_cut_the_text_and_free_the_sequence(client: openai.OpenAI, endpoint: str) -> None:
    full = ask(client).choices[0].message.content
    word = full.split()[3]
    answer = ask(client, stop=[word])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == full[: full.index(word)]
    wait_until(lambda: gauge(endpoint, "lucevisor_requests_running") == 0, 20, "nothing runs")


def test_a_seed_gives_the_same_in_a_crowd(client: openai.OpenAI) -> None:
    seeds = range(8)

    def drawn(seed: int) -> str:
        return str(ask(client, temperature=1.0, seed=seed, max_tokens=24).choices[0].message.content)

    alone = [drawn(s) for s in seeds]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(drawn, seeds)) == alone


def test_thinking_comes_apart_from_the_answer(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=300, extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    message = answer.choices[0].message
    assert message.reasoning_content
    assert "<think>" not in (message.content or "") + message.reasoning_content
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_doc",
            "description": "Get the documentation of a Python object.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
    answer = ask(
        client, max_tokens=200, tools=[tool],
        messages=[{"role": "user", "content": "Look up the documentation of os.path.join."}],
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_doc"
    assert json.loads(call.function.arguments)["name"]


def test_a_client_that_goes_away_frees_everything(client: openai.OpenAI, endpoint: str) -> None:
    stream = client.completions.create(
        model=model_of(client), prompt="import os\n", max_tokens=3500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert gauge(endpoint, "lucevisor_requests_running") == 1
    stream.close()
    wait_until(lambda: gauge(endpoint, "lucevisor_requests_running") == 0, 5, "the sequence is gone")
    used = [x for x in engine_status(endpoint).splitlines() if "pages{" in x and 'where="device"' in x]
    assert used
    assert all(x.endswith(" 0.0") for x in used)
