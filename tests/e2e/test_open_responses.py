"""What Open Responses' compliance suite asks of a server, images and files aside, as requests to the demo.

Its own requests name no temperature and no tool_choice; here both are set, as the demo may answer anything.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

N_MOST = 200
NULLABLE_TEXT = {"type": ["string", "null"]}
NULLABLE_INTEGER = {"type": ["integer", "null"]}
NULLABLE_OBJECT = {"type": ["object", "null"]}
TEXT, INTEGER, NUMBER, FLAG = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))


def record(**fields: object) -> dict[str, Any]:
    """An object that must have all these fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


TOOL = record(
    type={"const": "function"},
    name=TEXT,
    description=NULLABLE_TEXT,
    parameters=NULLABLE_OBJECT,
    strict={"type": ["boolean", "null"]},
)
STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
PART = record(type={"const": "output_text"}, text=TEXT, annotations={"type": "array"}, logprobs={"type": "array"})
ITEM = {
    "anyOf": [
        record(
            type={"const": "message"},
            id=TEXT,
            status=STATUS,
            role={"const": "assistant"},
            content={"type": "array", "items": PART},
        ),
        record(type={"const": "function_call"}, id=TEXT, call_id=TEXT, name=TEXT, arguments=TEXT, status=STATUS),
        record(type={"const": "reasoning"}, id=TEXT, summary={"type": "array"}),
    ]
}
USAGE = record(
    input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER,
    input_tokens_details=record(cached_tokens=INTEGER), output_tokens_details=record(reasoning_tokens=INTEGER),
)  # fmt: skip
RESPONSE = record(
    id=TEXT, object={"const": "response"}, created_at=INTEGER, completed_at=NULLABLE_INTEGER, status=TEXT,
    incomplete_details=NULLABLE_OBJECT, model=TEXT, previous_response_id=NULLABLE_TEXT, instructions=NULLABLE_TEXT,
    output={"type": "array", "items": ITEM}, error=NULLABLE_OBJECT, tools={"type": "array", "items": TOOL},
    tool_choice={"type": ["string", "object"]}, truncation={"enum": ["auto", "disabled"]}, parallel_tool_calls=FLAG,
    text=record(format=record(type=TEXT)), top_p=NUMBER, presence_penalty=NUMBER, frequency_penalty=NUMBER,
    top_logprobs=INTEGER, temperature=NUMBER, reasoning=NULLABLE_OBJECT, usage={"anyOf": [USAGE, {"type": "null"}]},
    max_output_tokens=NULLABLE_INTEGER, max_tool_calls=NULLABLE_INTEGER, store=FLAG, background=FLAG, service_tier=TEXT,
    metadata={"type": "object"}, safety_identifier=NULLABLE_TEXT, prompt_cache_key=NULLABLE_TEXT,
)  # fmt: skip
ITEM_PLACE = {"output_index": INTEGER, "item": ITEM}
PLACE = {"item_id": TEXT, "output_index": INTEGER}
PART_PLACE = {**PLACE, "content_index": INTEGER}
EVENTS = {
    **{f"response.{name}": {"response": RESPONSE} for name in ("created", "in_progress", "completed", "incomplete")},
    **{f"response.output_item.{name}": ITEM_PLACE for name in ("added", "done")},
    **{f"response.content_part.{name}": {**PART_PLACE, "part": PART} for name in ("added", "done")},
    "response.output_text.delta": {**PART_PLACE, "delta": TEXT},
    "response.output_text.done": {**PART_PLACE, "text": TEXT},
    "response.function_call_arguments.delta": {**PLACE, "delta": TEXT},
    "response.function_call_arguments.done": {**PLACE, "arguments": TEXT},
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": True,
}


def user(text: str) -> dict[str, str]:
    return {"type": "message", "role": "user", "content": text}


def ask(endpoint: str, **body: object) -> dict[str, Any]:
    """The response to a request, whole or as events, in the form that the specification has."""
    body = {"temperature": 0, "max_output_tokens": N_MOST, **body}
    answer = httpx.post(f"{endpoint}/responses", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        response = answer.json()
    else:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            jsonschema.validate(event, record(type=TEXT, **EVENTS[event["type"]]))
        response = {**events[-1]["response"], "events": [event["type"] for event in events]}
    jsonschema.validate(response, RESPONSE)
    cut = response["usage"]["output_tokens"] == N_MOST
    assert response["status"] == ("incomplete" if cut else "completed")
    assert response["output"]
    return response


def test_texts(endpoint: str) -> None:
    first = ask(endpoint, input=[user("Say hello in three words.")])
    streamed = ask(endpoint, input=[user("Say hello in three words.")], stream=True)
    assert [item["content"] for item in streamed["output"]] == [item["content"] for item in first["output"]]
    assert "response.output_text.delta" in streamed["events"]
    ask(endpoint, input=[{"type": "message", "role": "system", "content": "You are a pirate."}, user("Say hello.")])
    said = {"type": "message", "role": "assistant", "content": "Hello Alice!"}
    ask(endpoint, input=[user("My name is Alice."), said, user("What is my name?")])
    again = ask(endpoint, input="And again?", previous_response_id=first["id"])
    assert again["previous_response_id"] == first["id"]
    assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_output_answered(endpoint: str, stream: bool) -> None:
    choice = {"type": "function", "name": "get_weather"}
    called = ask(endpoint, input="How is the weather in Paris?", tools=[WEATHER], tool_choice=choice, stream=stream)
    [call] = [item for item in called["output"] if item["type"] == "function_call"]
    jsonschema.validate(json.loads(call["arguments"]), WEATHER["parameters"])
    assert called["tools"] == [WEATHER]
    if stream:
        assert {f"response.function_call_arguments.{name}" for name in ("delta", "done")} <= {*called["events"]}
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 degrees and clear"}
    answered = ask(endpoint, input=[output], previous_response_id=called["id"])
    assert answered["output"][-1]["type"] == "message"
