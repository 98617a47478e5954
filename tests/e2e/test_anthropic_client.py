"""The unmodified `anthropic` client against the demo model over two real daemons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
GET_DOC = {
    "name": "get_doc",
    "description": "Get the documentation of a Python object.",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


@pytest.fixture(scope="module")
def client(endpoint: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=endpoint.removesuffix("/v1"), api_key="none", max_retries=0) as one:
        yield one


def arguments(client: anthropic.Anthropic, **more: Any) -> dict[str, Any]:
    greedy = {"temperature": 0}
    model = client.models.list().data[0].id
    return {"model": model, "max_tokens": 24, "messages": QUESTION, "extra_body": greedy} | more


def test_streamed_and_whole_are_the_same_message(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**arguments(client))
    with client.messages.stream(**arguments(client)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert "os.path.join" in text
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 24
    n = client.messages.count_tokens(model=whole.model, messages=QUESTION).input_tokens
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == n


def test_thinking_within_its_budget_and_an_answer_after_it(client: anthropic.Anthropic) -> None:
    for budget in (100, 8):
        thinking = {"type": "enabled", "budget_tokens": budget}
        answer = client.messages.create(**arguments(client, max_tokens=400, thinking=thinking))
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert answer.content[0].thinking
        assert answer.content[1].text
        assert answer.stop_reason == "end_turn"
        assert answer.usage.output_tokens_details.thinking_tokens <= budget + 8  # and the end that is forced
        assert all("think>" not in str(block) for block in answer.content)


def test_a_tool_is_called_and_its_result_is_answered(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "Look up the documentation of os.path.join."}]
    with client.messages.stream(**arguments(client, max_tokens=200, messages=messages, tools=[GET_DOC])) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.name == "get_doc"
    assert call.input["name"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Join one or more path segments."}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**arguments(client, messages=messages, tools=[GET_DOC]))
    assert second.content[0].text
