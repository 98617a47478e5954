"""Anthropic's Messages API, translated into chat requests; an error names the field as the client wrote it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from lucevisor.api.contexts import ModelContext
from lucevisor.api.dialects.openai_chat import ChatRequestBuilder
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.generation import ResponseFormatter
from lucevisor.api.images import image_part
from lucevisor.api.output import ChoiceDelta, FinishReason, UsageTotals
from lucevisor.api.parameters import budget_of
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.schemas import (
    MAX_STOPS,
    NOT_HERE,
    Count,
    Flag,
    Fraction,
    ParameterRules,
    StopText,
    convert,
    ignored,
    to_record,
)
from lucevisor.errors import show
from lucevisor.text.deltas import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta
from lucevisor.text.template import ChatTemplate

RULES: Final = ParameterRules(
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
)


class AnthropicToolChoice(msgspec.Struct):
    """Choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = None


class Thinking(msgspec.Struct):
    """Switch of thinking; `display`: whether its text is sent."""

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
    """Fields of a prompt, common to both endpoints.  None: absent, the default applies."""

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


class ImageSource(msgspec.Struct):
    """Where an image is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(msgspec.Struct):
    """An image."""

    source: ImageSource


class ToolResultBlock(msgspec.Struct):
    """The result of a call."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: Flag = None


_ROLES: Final = ("user", "assistant", "system")
_FAILED: Final = "The tool failed:"
_CHAT_NAMES: Final = {
    "enable_thinking": "thinking",
    "max_thinking_tokens": "thinking.budget_tokens",
    "chat_template_kwargs.reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Parameters of chat completions, and those of this API that they are made from."""

_Block = tuple[str, dict[str, Any]]
"""A content block and its path in the body."""


def parse_messages(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Parse the body of a message request of Anthropic's API."""
    with _field_names():
        body = to_record(MessagesBody, fields, RULES)
        chat = _translated(body, ctx)
        prepared = chat.read(ctx, _CHAT_NAMES)
    return prepared.with_options(
        ignored=ignored(MessagesBody, fields, RULES, chat.unused),
        show_reasoning=body.thinking is None or body.thinking.display != "omitted",
    )


def parse_count_tokens(fields: dict[str, Any], ctx: ModelContext) -> bytes:
    """Count the tokens of a prompt."""
    with _field_names():
        chat = _translated(to_record(CountTokensBody, fields, RULES), ctx)
        return msgspec.json.encode({"input_tokens": chat.count(ctx, _CHAT_NAMES)})


@contextmanager
def _field_names() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        dotted = re.sub(r"\[(\d+)\]", r".\1", error.param or "")
        raise error.renamed(re.sub(r"^(tools\.\d+)\.parameters", r"\1.input_schema", dotted)) from None


def _translated(body: PromptBody, ctx: ModelContext) -> ChatRequestBuilder:
    chat, template = ChatRequestBuilder(), ctx.template
    if isinstance(body.system, str):
        chat.add_message({"role": "system", "content": body.system}, "system")
    elif body.system:
        chat.add_message({"role": "system", "content": _texts(_located(body.system, "system"))}, "system")
    for index, message in enumerate(body.messages):
        _add_message(chat, message, f"messages[{index}]")
    chat.fields = {"model": body.model}
    for index, tool in enumerate(body.tools or ()):
        chat.add_tool(_function(tool, f"tools[{index}]"), f"tools[{index}]")
    _translate_choice(body, chat)
    _translate_thinking(body, chat, template)
    _translate_output(body, chat, ctx)
    if isinstance(body, MessagesBody):
        chat.fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
        }
    return chat


def _add_message(chat: ChatRequestBuilder, raw: dict[str, Any], where: str) -> None:
    role, content = raw.get("role"), raw.get("content")
    if role not in _ROLES:
        raise bad_parameter(f"{where}.role", f"{show(role)} is not a role; use user or assistant")
    where += ".content"
    if content is None:
        raise bad_parameter(where, "is missing; it is required", "missing_required_parameter")
    if isinstance(content, str):
        chat.add_message({"role": role, "content": content}, where)
    elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise bad_parameter(where, "is neither a string nor an array of content blocks")
    elif role == "assistant":
        chat.add_message(_assistant_message(_located(content, where)), where)
    elif not content:
        raise bad_parameter(where, "is an empty array; send text")
    else:
        _add_blocks(chat, role, _located(content, where), where)


def _located(blocks: Sequence[dict[str, Any]], where: str) -> list[_Block]:
    return [(f"{where}[{index}]", block) for index, block in enumerate(blocks)]


def _add_blocks(chat: ChatRequestBuilder, role: str, blocks: Sequence[_Block], where: str) -> None:
    texts: list[_Block] = []
    for block_where, block in blocks:
        if block.get("type") != "tool_result":
            texts.append((block_where, block))
            continue
        if texts:
            chat.add_message({"role": role, "content": _texts(texts)}, where)
            texts = []
        chat.add_message(_tool_message(block, block_where), block_where)
    if texts:
        chat.add_message({"role": role, "content": _texts(texts)}, where)


def _texts(blocks: Sequence[_Block]) -> str | list[dict[str, Any]]:
    parts = [_part(block, where) for where, block in blocks]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    match block.get("type"):
        case "text":
            return {"type": "text", "text": convert(TextBlock, block, where).text}
        case "image":
            source = convert(ImageBlock, block, where).source
            where += ".source"
            if source.type == "base64" and source.data is not None:
                return image_part(f"data:{source.media_type or 'image/any'};base64,{source.data}", f"{where}.data")
            if source.type == "url" and source.url is not None:
                return image_part(source.url, f"{where}.url")
            why = f"{show(source.type)} is not supported; send base64 with its data"
            raise bad_parameter(f"{where}.type", why, "unsupported_content")
        case kind:
            raise _unsupported(kind, where)


def _unsupported(kind: object, where: str) -> ApiError:
    why = f"{show(kind)} is not supported here; this server reads text and images only"
    return bad_parameter(f"{where}.type", why, "unsupported_content")


def _tool_message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    block = convert(ToolResultBlock, raw, where)
    content: str | list[dict[str, Any]] = ""
    if isinstance(block.content, str):
        content = block.content
    elif block.content:
        content = _texts(_located(block.content, f"{where}.content"))
    if block.is_error:  # chat templates have no place for it
        content = (
            [{"type": "text", "text": _FAILED}, *content] if isinstance(content, list) else f"{_FAILED}\n{content}"
        )
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _assistant_message(blocks: Sequence[_Block]) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for where, raw in blocks:
        match raw.get("type"):
            case "text":
                texts.append(convert(TextBlock, raw, where).text)
            case "thinking":
                thoughts.append(convert(ThinkingBlock, raw, where).thinking)
            case "redacted_thinking":  # another server's; only that one can read it
                pass
            case "tool_use":
                call = convert(ToolUseBlock, raw, where)
                function = {"name": call.name, "arguments": call.input}
                calls.append({"id": call.id, "type": "function", "function": function})
            case kind:
                raise _unsupported(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _function(raw: dict[str, Any], where: str) -> dict[str, Any]:
    if (kind := raw.get("type")) not in (None, "custom"):
        raise bad_parameter(
            f"{where}.type",
            f"{show(kind)} is not supported: this server runs no tools, and the served model has no built-in tools; "
            "send tools with an input_schema",
            "unsupported_value",
        )
    tool = convert(Tool, raw, where)
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }


def _translate_choice(body: PromptBody, chat: ChatRequestBuilder) -> None:
    if (choice := body.tool_choice) is None:
        return
    match choice.type:
        case "tool":
            if choice.name is None:
                raise bad_parameter("tool_choice.name", "is missing; it is required", "missing_required_parameter")
            chat.fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case "any":
            chat.fields["tool_choice"] = "required"
        case kind:
            chat.fields["tool_choice"] = kind
    if choice.disable_parallel_tool_use:
        chat.fields["parallel_tool_calls"] = False


def _translate_thinking(body: PromptBody, chat: ChatRequestBuilder, template: ChatTemplate | None) -> None:
    """Set the thinking switch as requested (absent: off). Without a switch in the template the request has
    no effect."""
    thinking = body.thinking
    wish = thinking is not None and thinking.type != "disabled"
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_parameter("thinking.budget_tokens", "is missing; it is required", "missing_required_parameter")
        if isinstance(body, MessagesBody) and thinking.budget_tokens >= body.max_tokens:
            raise bad_parameter(
                "thinking.budget_tokens", f"{thinking.budget_tokens} leaves nothing of max_tokens = {body.max_tokens}"
            )
        chat.fields["max_thinking_tokens"] = thinking.budget_tokens
    if template is None:
        return
    if "enable_thinking" in template.source:
        chat.fields["enable_thinking"] = wish
    elif thinking is not None and wish != (template.output_format.reasoning is not None):
        chat.unused.append("thinking")


def _translate_output(body: PromptBody, chat: ChatRequestBuilder, ctx: ModelContext) -> None:
    config, template = body.output_config, ctx.template
    if config is not None and config.effort is not None:
        if template is not None and "reasoning_effort" in template.source:
            chat.fields["chat_template_kwargs"] = {"reasoning_effort": config.effort}
        else:
            chat.fields.setdefault("max_thinking_tokens", budget_of(config.effort, ctx))
    form = (config.format if config is not None else None) or body.output_format
    if form is not None:
        chat.fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema, "strict": True},
        }


SIGNATURE: Final = "unsigned"
"""Signature of thinking blocks: clients require one and send it back; here it is not checked."""

_Event = dict[str, object]
_DELTAS: Final = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}
"""By the type of a block: the field that its deltas append to, and the type and field of the deltas."""
_STOP_REASONS: Final[dict[FinishReason, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageFormatter(ResponseFormatter):
    """Formatter of messages and their events."""

    id_prefix = "msg_"
    style = "named"

    def __init__(self, prepared: PreparedRequest, ctx: ModelContext) -> None:
        super().__init__(prepared, ctx)
        self._content: list[_Event] = []  # blocks, the last of which may be open
        self._open = ""  # its type
        self._texts: list[str] = []  # which it adds up to
        self._finish_reason: FinishReason = "stop"
        self._stop: str | None = None

    def start(self, index: int) -> Sequence[_Event]:
        usage = _usage(UsageTotals(prompt=len(self.prepared.prompts[0])))
        return [{"type": "message_start", "message": self._message(None, usage)}, {"type": "ping"}]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[_Event]:
        if delta.finish_reason is not None:
            self._finish_reason, self._stop = delta.finish_reason, delta.stop
        return [] if delta.event is None else self._block_events(delta.event)

    def end(self, totals: UsageTotals) -> Sequence[_Event]:
        reason = {"stop_reason": self._stop_reason(totals), "stop_sequence": self._stop}
        return [
            *self._close(),
            {"type": "message_delta", "delta": reason, "usage": _usage(totals)},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> Sequence[_Event]:
        return [error.anthropic_body()]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        for delta in choices[0]:
            self.delta(0, delta)
        self._close()
        return self._message(self._stop_reason(totals), _usage(totals))

    def _message(self, stop_reason: str | None, usage: object) -> _Event:
        return {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.card.name,
            "content": list(self._content),
            "stop_reason": stop_reason,
            "stop_sequence": self._stop,
            "usage": usage,
        }

    def _stop_reason(self, totals: UsageTotals) -> str:
        if self._stop is not None:
            return "stop_sequence"
        if self._finish_reason == "length" and totals.generated < (self.options.max_tokens or 0):
            return "model_context_window_exceeded"
        return _STOP_REASONS[self._finish_reason]

    def _block_events(self, event: OutputEvent) -> list[_Event]:
        match event:
            case ContentDelta(text):
                return [*self._continue("text", text=""), self._block_delta(text)]
            case ReasoningDelta(text):
                opened = self._continue("thinking", thinking="", signature="")
                return [*opened, self._block_delta(text)] if self.options.show_reasoning else opened
            case ToolCallDelta():
                # Globally unique, as the response id is; clients send it back with the tool's result.
                call_id = f"toolu_{self.unique_id}{event.index:02d}"
                opened = self._continue("tool_use", id=call_id, name=event.name, input={})
                return [*opened, self._block_delta(event.arguments), *self._close()]

    def _continue(self, kind: str, **fields: object) -> list[_Event]:
        """Return the events that open a block, unless one of its type is open."""
        if self._open == kind:
            return []
        closed = self._close()
        self._open = kind
        self._content.append({"type": kind, **fields})
        start = {"type": "content_block_start", "index": len(self._content) - 1, "content_block": {**self._content[-1]}}
        return [*closed, start]

    def _close(self) -> list[_Event]:
        """Return the events that close the open block, if one is."""
        kind, self._open = self._open, ""
        if not kind:
            return []
        events: list[_Event] = []
        if kind == "thinking":
            self._content[-1]["signature"] = SIGNATURE
            events.append(self._delta_event({"type": "signature_delta", "signature": SIGNATURE}))
        text, self._texts = "".join(self._texts), []
        self._content[-1][_DELTAS[kind][0]] = msgspec.Raw(text.encode()) if kind == "tool_use" else text
        return [*events, {"type": "content_block_stop", "index": len(self._content) - 1}]

    def _block_delta(self, text: str) -> _Event:
        """Add text to the open block."""
        self._texts.append(text)
        _, kind, name = _DELTAS[self._open]
        return self._delta_event({"type": kind, name: text})

    def _delta_event(self, delta: _Event) -> _Event:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}


def _usage(totals: UsageTotals) -> _Event:
    return {
        "input_tokens": totals.prompt - totals.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached,
        "output_tokens": totals.generated,
        "output_tokens_details": {"thinking_tokens": totals.reasoning},
        **totals.extension(),
    }
