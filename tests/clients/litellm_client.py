"""litellm: the same server by OpenAI's and by Anthropic's API."""

from __future__ import annotations

from typing import Any

import litellm
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "temperature": 0}
ASK = [{"role": "user", "content": QUESTION}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_doc",
        "description": "Get the documentation of a Python object.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


def chat(**where: Any) -> None:
    assert litellm.completion(messages=ASK, max_tokens=40, **where).choices[0].message.content


def stream(**where: Any) -> None:
    parts = litellm.completion(messages=ASK, max_tokens=40, stream=True, **where)
    assert "".join(part.choices[0].delta.content or "" for part in parts)


def tools(**where: Any) -> None:
    looked_up = [{"role": "user", "content": LOOK_UP}]
    answer = litellm.completion(messages=looked_up, max_tokens=200, tools=[TOOL], tool_choice="required", **where)
    assert answer.choices[0].message.tool_calls


def schema(**where: Any) -> None:
    answer = litellm.completion(messages=ASK, max_tokens=200, response_format=Answer, **where)
    Answer.model_validate_json(answer.choices[0].message.content)


def responses() -> None:
    assert litellm.responses(input=QUESTION, max_output_tokens=40, **OPENAI).output


def embeddings() -> None:
    where = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"}
    first, again, other = (
        one["embedding"] for one in litellm.embedding(input=[QUESTION, QUESTION, "no"], **where).data
    )
    assert first == again != other


def rerank() -> None:
    documents = ["It joins path segments.", "A recipe for bread."]
    where = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": "none"}
    found = litellm.rerank(query=QUESTION, documents=documents, top_n=2, **where)
    assert {one["index"] for one in found.results} == {0, 1}


run(
    {
        "openai: chat": lambda: chat(**OPENAI),
        "openai: streamed": lambda: stream(**OPENAI),
        "openai: tool required": lambda: tools(**OPENAI),
        "openai: response_format": lambda: schema(**OPENAI),
        "openai: responses": responses,
        "openai: embedding": embeddings,
        "hosted_vllm: rerank": rerank,
        "anthropic: chat": lambda: chat(**ANTHROPIC),
        "anthropic: streamed": lambda: stream(**ANTHROPIC),
        "anthropic: tool required": lambda: tools(**ANTHROPIC),
        "anthropic: response_format": lambda: schema(**ANTHROPIC),
    }
)
