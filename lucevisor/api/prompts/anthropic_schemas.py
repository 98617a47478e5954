"""Schemas of Anthropic's Messages API: request bodies, content blocks, parameters without effect.

Knows names, types and ranges, not what a value means.  The bodies are open: Anthropic's clients send new fields with
every version, so an unknown field is accepted and named in a response header, unless it looks like a misspelt one.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from lucevisor.api.prompts.decoding import ParameterRules
from lucevisor.api.prompts.schemas import MAX_STOPS, NOT_HERE, Count, Flag, Fraction, StopText

RULES: Final = ParameterRules(
    harmless={
        "betas": list[str],
        "cache_control": dict[str, Any],
        "context_management": dict[str, Any],
        "diagnostics": dict[str, Any],
        "inference_geo": str,
        "metadata": dict[str, Any],
        "service_tier": Literal["auto", "standard_only"],
        "speed": Literal["standard", "fast"],
        "user_profile_id": str,
        "workspace_id": str,
    },
    refused={
        "container": NOT_HERE,
        "functions": "is not a parameter of this endpoint; use tools",
        "max_completion_tokens": "is not a parameter of this endpoint; use max_tokens",
        "reasoning_effort": "is not a parameter of this endpoint; use thinking or output_config.effort",
        "response_format": "is not a parameter of this endpoint; use output_config.format",
        "stop": "is not a parameter of this endpoint; use stop_sequences",
        "thread": "is not supported: this server keeps no conversations; send all messages",
    },
    neutral={"mcp_servers": ([],), "n": (1,)},
    aliases={},
    open=True,
)


class AnthropicToolChoice(msgspec.Struct):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = None


class Thinking(msgspec.Struct):
    """Whether the model thinks, and whether its thinking is sent (`display`)."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    display: Literal["summarized", "omitted"] | None = None


class AnthropicOutputFormat(msgspec.Struct):
    """The requested format of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnthropicOutputFormat | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """What makes a prompt, common to both endpoints.  None: absent, the default applies."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: AnthropicOutputFormat | None = None


class CountTokensBody(PromptBody, kw_only=True):
    """POST /v1/messages/count_tokens."""


class MessagesBody(PromptBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: Flag = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    top_p: Fraction | None = None


class Tool(msgspec.Struct):
    """A tool that the client runs.  Tools of other types run on Anthropic's servers or are known to its models only."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: Flag = None


class TextBlock(msgspec.Struct):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct):
    """Thinking of an earlier answer; any signature is accepted."""

    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct):
    """A call of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    """The result of a call."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: Flag = None
