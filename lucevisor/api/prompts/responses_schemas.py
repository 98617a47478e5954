"""Schemas of OpenAI's Responses API: the request body, its items and tools, parameters without effect.

Knows names, types and ranges, not what a value means.  The body is open: clients send new fields with every version, so
an unknown field is accepted and named in a response header, unless it looks like a misspelt one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from lucevisor.api.prompts.decoding import ParameterRules
from lucevisor.api.prompts.schemas import (
    HARMLESS,
    MAX_TOP_LOGPROBS,
    NOT_HERE,
    Count,
    Flag,
    Fraction,
    OpenAiPenalty,
    StreamOptions,
)

MAX_METADATA: Final = 16

_HARMLESS: Final = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user")
RULES: Final = ParameterRules(
    harmless={
        **{name: HARMLESS[name] for name in _HARMLESS},
        "client_metadata": dict[str, Any],
        "context_management": list[dict[str, Any]],
        "max_tool_calls": int,
        "service_tier": HARMLESS["service_tier"],
    },
    refused={
        "conversation": "is not supported; use previous_response_id, or send all items",
        "functions": "is not a parameter of this endpoint; use tools",
        "max_completion_tokens": "is not a parameter of this endpoint; use max_output_tokens",
        "max_tokens": "is not a parameter of this endpoint; use max_output_tokens",
        "messages": "is not a parameter of this endpoint; use input",
        "moderation": NOT_HERE,
        "prompt": "is not supported: this server keeps no prompts; send instructions and input",
        "reasoning_effort": "is not a parameter of this endpoint; use reasoning.effort",
        "response_format": "is not a parameter of this endpoint; use text.format",
        "stop": "is not a parameter of this endpoint; leave it out",
    },
    neutral={"background": (False,), "n": (1,)},
    aliases={},
    open=True,
)


class TextFormat(msgspec.Struct):
    """The requested format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: Flag = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """Format and verbosity of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    """How much the model thinks, and whether its thinking comes as a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses.  None: absent, the default applies."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Fraction | None = None
    presence_penalty: OpenAiPenalty | None = None
    frequency_penalty: OpenAiPenalty | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Flag = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=MAX_METADATA)] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class FunctionTool(msgspec.Struct):
    """A function that the client runs."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag = None


class Namespace(msgspec.Struct):
    """Functions under a common name."""

    name: str
    tools: list[dict[str, Any]]


class FunctionChoice(msgspec.Struct):
    """A tool_choice that names a function."""

    name: str


class MessageItem(msgspec.Struct):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class FunctionCallItem(msgspec.Struct):
    """A call of an earlier answer; `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(msgspec.Struct):
    """The result of a call."""

    call_id: str
    output: str | list[dict[str, Any]]


class CustomToolCallItem(msgspec.Struct):
    """A call of a custom tool in an earlier answer."""

    call_id: str
    name: str
    input: str


class ItemReference(msgspec.Struct):
    """An output item of a stored response."""

    id: str


class ReasoningText(msgspec.Struct):
    """Text of reasoning or of its summary."""

    text: str


class ReasoningItem(msgspec.Struct):
    """Reasoning of an earlier answer; `encrypted_content` as this server wrote it."""

    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
