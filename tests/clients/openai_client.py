"""The openai package: chat, tools, structured output, responses."""

from __future__ import annotations

import json

from openai import OpenAI
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run

client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK = [{"role": "user", "content": QUESTION}]
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def chat() -> None:
    assert client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=40).choices[0].message.content


def stream() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as events:
        events.until_done()
        assert events.get_final_completion().choices[0].message.content


def tools() -> None:
    tool = {"type": "function", "function": {"name": "get_doc", "parameters": PARAMETERS}}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": LOOK_UP}],
        tools=[tool],
        tool_choice="required",
        max_tokens=200,
        temperature=0,
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["name"]


def parse() -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Answer, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)


def responses() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=40)
    assert first.output_text
    second = client.responses.create(
        model=MODEL, input="And os.path.split?", previous_response_id=first.id, max_output_tokens=40
    )
    assert second.output_text


def responses_stream() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION) as events:
        events.until_done()
        assert events.get_final_response().output_text


def responses_tools() -> None:
    tool = {"type": "function", "name": "get_doc", "parameters": PARAMETERS, "strict": False}
    answer = client.responses.create(model=MODEL, input=LOOK_UP, tools=[tool], tool_choice="required", temperature=0)
    assert json.loads(answer.output[-1].arguments)["name"]


def responses_parse() -> None:
    answer = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Answer, max_output_tokens=200, temperature=0
    )
    assert isinstance(answer.output_parsed, Answer)


run(
    {
        "chat": chat,
        "chat, streamed": stream,
        "chat, tool required": tools,
        "chat.completions.parse": parse,
        "responses, previous_response_id": responses,
        "responses, streamed": responses_stream,
        "responses, tool required": responses_tools,
        "responses.parse": responses_parse,
    }
)
