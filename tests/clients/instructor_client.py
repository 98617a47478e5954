"""instructor in its modes TOOLS and JSON_SCHEMA, and over Anthropic's API."""

from __future__ import annotations

import instructor
from anthropic import Anthropic
from openai import OpenAI
from scenario import MODEL, QUESTION, URL, Answer, run

ASK = [{"role": "user", "content": QUESTION}]


def openai(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="none"), mode=mode)
    create = client.chat.completions.create
    answer = create(model=MODEL, messages=ASK, response_model=Answer, max_tokens=200, temperature=0, max_retries=0)
    assert isinstance(answer, Answer)


def anthropic() -> None:
    client = instructor.from_anthropic(Anthropic(base_url=URL, api_key="none"))
    greedy = {"temperature": 0}
    answer = client.messages.create(
        model=MODEL, messages=ASK, response_model=Answer, max_tokens=200, extra_body=greedy, max_retries=0
    )
    assert isinstance(answer, Answer)


run(
    {
        "TOOLS": lambda: openai(instructor.Mode.TOOLS),
        "JSON_SCHEMA": lambda: openai(instructor.Mode.JSON_SCHEMA),
        "ANTHROPIC_TOOLS": anthropic,
    }
)
