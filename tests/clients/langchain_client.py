"""LangChain: ChatOpenAI by chat and by responses, ChatAnthropic."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run


@tool
def get_doc(name: str) -> str:
    """Get the documentation of a Python object."""
    return f"{name}: joins path segments."


def openai(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_tokens=200, temperature=0, **more)


def anthropic() -> ChatAnthropic:
    return ChatAnthropic(base_url=URL, api_key="none", model=MODEL, max_tokens=200, temperature=0)


def talks(model: Any) -> None:
    assert model.invoke(QUESTION).content
    assert "".join(str(part.content) for part in model.stream(QUESTION))


def calls(model: Any) -> None:
    messages: list[Any] = [HumanMessage(LOOK_UP)]
    messages.append(model.bind_tools([get_doc], tool_choice="any").invoke(messages))
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(get_doc.invoke(call["args"]), tool_call_id=call["id"]))
    assert model.bind_tools([get_doc]).invoke(messages).content


def structured(model: Any, method: str) -> None:
    assert isinstance(model.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)


def embeds() -> None:
    model = OpenAIEmbeddings(base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False)
    first, again, other = model.embed_documents([QUESTION, QUESTION, "no"])
    assert first == again == model.embed_query(QUESTION) != other


run(
    {
        "ChatOpenAI: invoke, stream": lambda: talks(openai()),
        "ChatOpenAI: tools": lambda: calls(openai()),
        "ChatOpenAI: with_structured_output, json_schema": lambda: structured(openai(), "json_schema"),
        "ChatOpenAI: with_structured_output, function_calling": lambda: structured(openai(), "function_calling"),
        "ChatOpenAI by responses: invoke, stream": lambda: talks(openai(use_responses_api=True)),
        "ChatOpenAI by responses: tools": lambda: calls(openai(use_responses_api=True)),
        "OpenAIEmbeddings": embeds,
        "ChatAnthropic: invoke, stream": lambda: talks(anthropic()),
        "ChatAnthropic: tools": lambda: calls(anthropic()),
        "ChatAnthropic: with_structured_output": lambda: structured(anthropic(), "function_calling"),
    }
)
