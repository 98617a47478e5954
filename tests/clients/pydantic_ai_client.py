"""pydantic-ai at its defaults: OpenAI by chat and by responses, Anthropic."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from scenario import MODEL, QUESTION, URL, Answer, run

LIMIT: Any = {"max_tokens": 200, "temperature": 0}
openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")
MODELS: dict[str, Any] = {
    "chat": OpenAIChatModel(MODEL, provider=openai),
    "responses": OpenAIResponsesModel(MODEL, provider=openai),
    "anthropic": AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none")),
}


def text(model: Any) -> None:
    assert Agent(model, instructions="Be brief.").run_sync(QUESTION, model_settings=LIMIT).output


def structured(model: Any) -> None:
    assert isinstance(Agent(model, output_type=Answer).run_sync(QUESTION, model_settings=LIMIT).output, Answer)


checks: dict[str, Any] = {}
for name, one in MODELS.items():
    checks[f"{name}: text"] = lambda one=one: text(one)
    checks[f"{name}: output_type"] = lambda one=one: structured(one)
run(checks)
