"""The anthropic package: messages, streaming, tools, thinking, structured output."""

from __future__ import annotations

from anthropic import Anthropic
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run

client = Anthropic(base_url=URL, api_key="none", max_retries=0)
ASK = [{"role": "user", "content": QUESTION}]
TOOL = {
    "name": "get_doc",
    "input_schema": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}


def messages() -> None:
    assert client.messages.create(model=MODEL, max_tokens=40, messages=ASK).content[0].text


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=40, messages=ASK) as events:
        assert events.get_final_message().content[0].text


def tools() -> None:
    looked_up = [{"role": "user", "content": LOOK_UP}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_doc"}):
        answer = client.messages.create(
            model=MODEL, max_tokens=200, messages=looked_up, tools=[TOOL], tool_choice=choice
        )
        assert answer.content[-1].input["name"]


def tool_runner() -> None:
    from anthropic import beta_tool

    @beta_tool
    def get_doc(name: str) -> str:
        """Get the documentation of a Python object."""
        return f"{name}: joins path segments."

    looked_up = [{"role": "user", "content": LOOK_UP}]
    more = {"tool_choice": {"type": "any"}, "extra_body": {"temperature": 0}}
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=200, messages=looked_up, tools=[get_doc], **more)
    assert len([message for message, _ in zip(runner, range(2), strict=False)]) == 2


def thinking() -> None:
    budget = {"type": "enabled", "budget_tokens": 64}
    answer = client.messages.create(model=MODEL, max_tokens=400, messages=ASK, thinking=budget)
    assert [block.type for block in answer.content] == ["thinking", "text"]


def parse() -> None:
    answer = client.messages.parse(model=MODEL, max_tokens=200, messages=ASK, output_format=Answer)
    assert isinstance(answer.parsed_output, Answer)


run(
    {
        "messages": messages,
        "messages, streamed": stream,
        "tool_choice any and tool": tools,
        "beta tool runner": tool_runner,
        "thinking with a budget": thinking,
        "messages.parse": parse,
    }
)
