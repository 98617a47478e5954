"""LlamaIndex: OpenAILike."""

from __future__ import annotations

from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run


def get_doc(name: str) -> str:
    """Get the documentation of a Python object."""
    return f"{name}: joins path segments."


model = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, is_function_calling_model=True,
    max_tokens=200, temperature=0, max_retries=0,
)  # fmt: skip


def complete() -> None:
    assert model.complete(QUESTION).text


def stream() -> None:
    assert "".join(part.delta or "" for part in model.stream_complete(QUESTION))


def tools() -> None:
    answer = model.chat_with_tools([FunctionTool.from_defaults(get_doc)], user_msg=LOOK_UP)
    assert model.get_tool_calls_from_response(answer)[0].tool_kwargs["name"]


def structured() -> None:
    assert isinstance(model.as_structured_llm(Answer).complete(QUESTION).raw, Answer)


run({"complete": complete, "streamed": stream, "chat_with_tools": tools, "as_structured_llm": structured})
