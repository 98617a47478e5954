"""Constrained output over a running supervisor: the unmodified `openai` client, the demo model, real daemons."""

from __future__ import annotations

import concurrent.futures
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

QUESTION = [{"role": "user", "content": "What does os.path.join do? Answer as JSON."}]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Part(Closed):
    kind: Literal["argument", "result"]
    optional: bool


class Answer(Closed):
    module: str = Field(max_length=12)
    parts: list[Part] = Field(min_length=1, max_length=3)
    level: int = Field(ge=1, le=5)


@pytest.fixture
def client(endpoint: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=endpoint, api_key="none", max_retries=0) as one:
        yield one


def ask(client: openai.OpenAI, **more: Any) -> Any:
    model = client.models.list().data[0].id
    return client.chat.completions.create(model=model, **({"messages": QUESTION, "max_tokens": 200} | more))


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.chat.completions.parse(
        model=model, messages=QUESTION, response_format=Answer, max_tokens=200, seed=5
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Answer)


def test_streams_and_choices_beside_plain_requests(client: openai.OpenAI) -> None:
    schema = Answer.model_json_schema()
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}

    def plain() -> str:
        return str(ask(client, temperature=0, max_tokens=60).choices[0].message.content)

    alone = plain()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(plain) for _ in range(2)]
        chunks = list(ask(client, response_format=format, n=3, seed=3, stream=True, logprobs=True, top_logprobs=2))
        assert {one.result() for one in beside} == {alone}
    for index in range(3):
        text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": r"[a-c]{3}-\d{2}"}, r"[a-c]{3}-\d{2}"),
        ({"guided_choice": ["yes", 'no, "never"', "ä/b"]}, 'yes|no, "never"|ä/b'),
        ({"guided_grammar": 'root ::= "(" [0-9]+ ("," [0-9]+)? ")"'}, r"\(\d+(,\d+)?\)"),
        ({"grammar": 'start: "a" B\nB: /[xy]{2}/'}, "a[xy]{2}"),
        ({"json_schema": {"enum": ["left", 7]}}, '"left"|7'),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_every_form_is_kept(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    answer = ask(client, extra_body=extra | {"enable_thinking": False}, temperature=1.3, seed=11, max_tokens=60)
    if answer.choices[0].finish_reason == "stop":
        assert re.fullmatch(pattern, answer.choices[0].message.content)
    else:
        assert "+" in pattern


def weather(*, strict: bool) -> dict[str, Any]:
    properties = {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}}
    schema = {"type": "object", "properties": properties, "required": ["city", "unit"], "additionalProperties": False}
    return {"type": "function", "function": {"name": "get_weather", "parameters": schema, "strict": strict}}


CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


def arguments_of(answer: Any) -> list[tuple[str, Any]]:
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    for name, arguments in calls:
        if name == "get_weather":
            jsonschema.validate(arguments, weather(strict=True)["function"]["parameters"])
    return calls


def test_a_required_or_named_tool_is_called(client: openai.OpenAI) -> None:
    tools = [weather(strict=False), CLOCK]
    more: dict[str, Any] = {"tools": tools, "seed": 0, "temperature": 1.2}
    calls = arguments_of(ask(client, tool_choice="required", parallel_tool_calls=False, **more))
    assert len(calls) == 1
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert [name for name, _ in arguments_of(ask(client, tool_choice=named, **more))] == ["get_weather"]


def test_reasoning_is_free_and_the_answer_has_its_form(client: openai.OpenAI) -> None:
    answer = ask(
        client,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}},
        extra_body={"enable_thinking": True, "max_thinking_tokens": 60},
        max_tokens=200,
        seed=1,
    )
    message = answer.choices[0].message
    assert json.loads(message.content) in ("yes", "no")
    assert message.reasoning_content
    assert answer.choices[0].finish_reason == "stop"


# ---- the unmodified `openai` client


PLAIN_QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]


def model_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask_demo(client: openai.OpenAI, **more: Any) -> Any:
    arguments: dict[str, Any] = {"messages": PLAIN_QUESTION, "temperature": 0, "max_tokens": 24} | more
    return client.chat.completions.create(model=model_of(client), **arguments)


def test_a_seed_gives_the_same_in_a_crowd(client: openai.OpenAI) -> None:
    seeds = range(8)

    def drawn(seed: int) -> str:
        return str(ask_demo(client, temperature=1.0, seed=seed, max_tokens=24).choices[0].message.content)

    alone = [drawn(s) for s in seeds]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(drawn, seeds)) == alone


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "get_doc",
            "description": "Get the documentation of a Python object.",
            "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
        },
    }
    answer = ask_demo(
        client, max_tokens=200, tools=[tool],
        messages=[{"role": "user", "content": "Look up the documentation of os.path.join."}],
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "tool_calls"
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_doc"
    assert json.loads(call.function.arguments)["name"]
