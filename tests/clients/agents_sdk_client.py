"""OpenAI's agents package: an agent with a tool, by responses and by chat."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)


@function_tool
def get_doc(name: str) -> str:
    """Get the documentation of a Python object."""
    return f"{name}: joins path segments."


def agent(model: Any, **more: Any) -> Agent[Any]:
    made = model(model=MODEL, openai_client=CLIENT)
    return Agent(name="a", model=made, model_settings=ModelSettings(max_tokens=400, temperature=0), **more)


def calls(model: Any) -> None:
    result = Runner.run_sync(agent(model, tools=[get_doc]), LOOK_UP, max_turns=3)
    assert any(item.type == "tool_call_output_item" for item in result.new_items)
    assert result.final_output


def structured(model: Any) -> None:
    assert isinstance(Runner.run_sync(agent(model, output_type=Answer), QUESTION).final_output, Answer)


run(
    {
        "responses: tool": lambda: calls(OpenAIResponsesModel),
        "responses: output_type": lambda: structured(OpenAIResponsesModel),
        "chat: tool": lambda: calls(OpenAIChatCompletionsModel),
        "chat: output_type": lambda: structured(OpenAIChatCompletionsModel),
    }
)
