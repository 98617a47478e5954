"""The ollama package: chat, streaming, tools, thinking, structured output, generate, lists."""

from __future__ import annotations

from ollama import Client
from scenario import LOOK_UP, MODEL, QUESTION, URL, Answer, run

client = Client(host=URL)
ASK = [{"role": "user", "content": QUESTION}]
SHORT = {"num_predict": 40}


def get_doc(name: str) -> str:
    """Get the documentation of a Python object.

    Args:
      name: of the object
    """
    return f"{name}: joins path segments."


def chat() -> None:
    assert client.chat(MODEL, ASK, options=SHORT).message.content


def stream() -> None:
    parts = list(client.chat(MODEL, ASK, stream=True, options=SHORT))
    assert parts[-1].done
    assert "".join(part.message.content for part in parts)


def tools() -> None:
    """The client cannot require a call; the demo model makes one at temperature 0."""
    looked_up = [{"role": "user", "content": LOOK_UP}]
    answer = client.chat(MODEL, looked_up, tools=[get_doc], think=False, options={"temperature": 0, "num_predict": 200})
    assert answer.message.tool_calls or answer.message.content


def thinking() -> None:
    answer = client.chat(MODEL, ASK, think=True, options={"num_predict": 200})
    assert answer.message.thinking


def structured() -> None:
    answer = client.chat(MODEL, ASK, format=Answer.model_json_schema(), think=False, options={"num_predict": 200})
    Answer.model_validate_json(answer.message.content)


def generate() -> None:
    assert client.generate(MODEL, QUESTION, system="Be brief.", options=SHORT).response
    assert client.generate(MODEL, "import os\n", raw=True, options=SHORT).response


def lists() -> None:
    assert client.list().models[0].model == client.ps().models[0].model == f"{MODEL}:latest"
    assert "completion" in client.show(MODEL).capabilities


run(
    {
        "chat": chat,
        "chat, streamed": stream,
        "tools offered": tools,
        "think": thinking,
        "format: a JSON schema": structured,
        "generate, also raw": generate,
        "list, ps, show": lists,
    }
)
