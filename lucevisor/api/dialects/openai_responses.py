"""OpenAI's Responses API: all that is below /v1/responses.

A body becomes a chat request; an error names the field as the client wrote it.  A response that is not streamed equals
the one in the last event of a stream: both are made of the same deltas.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from lucevisor.api.app_context import AppContext
from lucevisor.api.bodies import AddToBody, json_response, prepare, respond_encoded
from lucevisor.api.dialects.openai_chat import ChatRequestBuilder, CustomTool, custom_function
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.generation import ResponseFormatter, ResponseId, respond
from lucevisor.api.output import ChoiceDelta, FinishReason, TokenRecord, UsageTotals, chat_logprobs
from lucevisor.api.prepared import CUSTOM_INPUT, STORED_RESPONSES, PreparedRequest, ResponseOptions, custom_input
from lucevisor.api.request_context import APP_CONTEXT, RESPONSE_STORE, context_of
from lucevisor.api.response_store import StoredResponse, with_stored
from lucevisor.api.schemas import (
    HARMLESS,
    MAX_TOP_LOGPROBS,
    NOT_HERE,
    AllowedTools,
    Count,
    Flag,
    Fraction,
    OpenAiPenalty,
    ParameterRules,
    StreamOptions,
    convert,
    ignored,
    to_record,
)
from lucevisor.api.sse import StreamStyle
from lucevisor.errors import show
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.output_parser import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta
from lucevisor.text.template import ChatTemplate
from lucevisor.text.tokenizer import Tokenizer


def encode_reasoning(text: str) -> str:
    """Return reasoning in a form that clients send back unread."""
    return base64.b64encode(text.encode()).decode()


def decode_reasoning(encoded: str) -> str | None:
    """Return the reasoning, or None if another server encoded it."""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


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
    """Effort of thinking, and the kind of its summary."""

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


_ASSISTANT_ITEMS: Final = ("reasoning", "function_call", "custom_tool_call")
"""Types of items that the assistant makes, besides messages."""
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts with text, and the field that holds it."""


@dataclass(slots=True)
class _Turn:
    """Items of the assistant since the last input."""

    origin: str = ""
    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.text)}
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def add_items(chat: ChatRequestBuilder, items: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Append items as messages; each comes with where it is.  Raises ApiError naming the field at fault."""
    turn: _Turn | None = None
    for where, item in items:
        kind = item.get("type", "message")  # messages may leave it out
        if kind in _ASSISTANT_ITEMS or (kind == "message" and item.get("role") == "assistant"):
            turn = turn or _Turn(where)
            _add_to_turn(turn, kind, item, where)
            continue
        if turn is not None:
            chat.add_message(turn.message(), turn.origin)
            turn = None
        if kind == "message":
            message = convert(MessageItem, item, where)
            content = _content(message.content, f"{where}.content")
            chat.add_message({"role": message.role, "content": content}, f"{where}.content")
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = convert(FunctionCallOutputItem, item, where)
            content = _content(output.output, f"{where}.output")
            message_fields = {"role": "tool", "tool_call_id": output.call_id, "content": content}
            chat.add_message(message_fields, f"{where}.output")
        else:
            raise _unsupported(kind, where)
    if turn is not None:
        chat.add_message(turn.message(), turn.origin)


def function_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    return name if namespace is None else f"{namespace}.{name}"


def _add_to_turn(turn: _Turn, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        content = _content(convert(MessageItem, item, where).content, f"{where}.content")
        turn.text += [content] if isinstance(content, str) else [part["text"] for part in content]
    elif kind == "reasoning":
        turn.reasoning.append(_reasoning(convert(ReasoningItem, item, where), where))
    elif kind == "custom_tool_call":
        custom = convert(CustomToolCallItem, item, where)
        function = {"name": custom.name, "arguments": {CUSTOM_INPUT: custom.input}}
        turn.calls.append({"id": custom.call_id, "type": "function", "function": function})
    else:
        call = convert(FunctionCallItem, item, where)
        function = {"name": function_name(call.namespace, call.name), "arguments": call.arguments}
        turn.calls.append({"id": call.call_id, "type": "function", "function": function})


def _reasoning(item: ReasoningItem, where: str) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        if (text := decode_reasoning(item.encrypted_content)) is None:
            raise bad_parameter(f"{where}.encrypted_content", "was not written by this server; leave the item out")
        return text
    return "".join(part.text for part in item.summary or ())


def _content(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, str]]:
    """Return a text, or its parts if there are several."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise _unsupported(kind, f"{where}[{index}]")
        text = part.get(name)
        if not isinstance(text, str):
            raise bad_parameter(f"{where}[{index}].{name}", "is missing or not a string; it is required")
        texts.append(text)
    if not texts:
        return ""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _unsupported(kind: object, where: str) -> ApiError:
    return bad_parameter(
        f"{where}.type",
        f"{show(kind)} is not supported; send messages of text, reasoning, function calls and their outputs",
        "unsupported_content",
    )


_CHAT_NAMES: Final = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
"""Parameters of chat completions, and those of this API that they are made from."""

_StoredTurns = dict[str, list[list[dict[str, Any]]]]
"""Turns of items, by the id of the response that they led to."""
_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"


def read_response(fields: dict[str, Any], ctx: AppContext) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the field at fault."""
    translation = _translated(fields, ctx)
    body, chat = translation.body, translation.chat
    prepared = chat.read(ctx, _CHAT_NAMES)
    include = body.include or []
    response = ResponseOptions(
        echo=msgspec.json.encode(_echo(body, fields, prepared.options.sampling)),
        items=msgspec.json.encode(translation.own),
        previous_id=body.previous_response_id,
        store=body.store is not False,
        summary=body.reasoning is not None and bool(body.reasoning.summary or body.reasoning.generate_summary),
        encrypted=_ENCRYPTED in include,
        namespaces=translation.namespaces,
        custom=translation.custom,
    )
    names = tuple(sorted({*ignored(ResponsesBody, fields, RULES), *chat.unused}))
    options = msgspec.structs.replace(prepared.options, ignored=names, response=response)
    return PreparedRequest(options, prepared.prompts)


def read_input_tokens(fields: dict[str, Any], ctx: AppContext) -> bytes:
    """Return the response to a decoded body: how many tokens its prompt has, also beyond the context."""
    n_tokens = _translated(fields, ctx).chat.count(ctx, _CHAT_NAMES)
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": n_tokens})


@dataclass(frozen=True, slots=True)
class _Translation:
    """A body and the chat request that it means.

    `own`: its input items; `namespaces` and `custom` as in ResponseOptions.
    """

    body: ResponsesBody
    chat: ChatRequestBuilder
    own: list[dict[str, Any]]
    namespaces: dict[str, str]
    custom: list[str]


def _translated(fields: dict[str, Any], ctx: AppContext) -> _Translation:
    stored = _stored_turns(fields.pop(STORED_RESPONSES, {}))
    body = to_record(ResponsesBody, fields, RULES)
    chat = ChatRequestBuilder()
    if body.instructions:
        chat.add_message({"role": "system", "content": body.instructions}, "instructions")
    own = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _resolved(body.input, stored)
    add_items(chat, _located(body, stored, own))
    namespaces, custom = _translate_tools(body, chat)
    _translate_choice(body, chat)
    _translate_reasoning(body, chat, ctx.template)
    _translate_output(body, chat)
    return _Translation(body, chat, own, namespaces, custom)


def _stored_turns(value: object) -> _StoredTurns:
    try:
        return msgspec.convert(value, _StoredTurns)
    except msgspec.ValidationError:  # not the server's
        raise bad_parameter(STORED_RESPONSES, "is the server's own; leave it out", "unknown_parameter") from None


def previous_not_stored(response_id: str) -> ApiError:
    """Return the 404 for a previous_response_id."""
    return ApiError(
        404,
        f"previous_response_id: {show(response_id)} is not stored here (expired, or made with another API key); "
        "send all items",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def _located(
    body: ResponsesBody, stored: _StoredTurns, own: list[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the items of the whole conversation, and where each is."""
    if (previous := body.previous_response_id) is not None:
        if previous not in stored:
            raise previous_not_stored(previous)
        for turn in stored[previous]:
            yield from (("previous_response_id", item) for item in turn)
    yield from ((f"input[{index}]", item) for index, item in enumerate(own))


def _resolved(items: list[dict[str, Any]], stored: _StoredTurns) -> list[dict[str, Any]]:
    """Put the items themselves in place of references; raises ApiError 404 for one that is not stored."""
    known = {item.get("id"): item for turns in stored.values() for turn in turns for item in turn}
    found = []
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            name = convert(ItemReference, item, f"input[{index}]").id
            if (item := known.get(name, {})) == {}:
                why = f"input[{index}].id: {show(name)} is not an item of a response stored here; send the item itself"
                raise ApiError(404, why, code="item_not_found", param=f"input[{index}].id")
        found.append(item)
    return found


def _translate_tools(body: ResponsesBody, chat: ChatRequestBuilder) -> tuple[dict[str, str], list[str]]:
    """Add the functions; return the namespaces of those that have one, and the names of custom tools."""
    namespaces: dict[str, str] = {}
    custom: list[str] = []
    for index, raw in enumerate(body.tools or ()):
        where, kind = f"tools[{index}]", raw.get("type")
        if kind == "function":
            _add_function(chat, raw, where, None)
        elif kind == "custom":
            custom.append(_add_custom(chat, raw, where))
        elif kind == "namespace":
            space = convert(Namespace, raw, where)
            for inner, function in enumerate(space.tools):
                if function.get("type") != "function":
                    raise _unsupported_tool(function.get("type"), f"{where}.tools[{inner}]")
                namespaces[_add_function(chat, function, f"{where}.tools[{inner}]", space.name)] = space.name
        elif kind == "web_search" and raw.get("external_web_access") is False:
            chat.unused.append(where)  # a search that must not reach the web has nothing to find here
        else:
            raise _unsupported_tool(kind, where)
    return namespaces, custom


def _add_custom(chat: ChatRequestBuilder, raw: dict[str, Any], where: str) -> str:
    """Add a custom tool as a function of one text."""
    tool = convert(CustomTool, raw, where)
    if tool.grammar is not None:
        chat.unused.append(f"{where}.format")
    chat.add_tool(custom_function(tool), where)
    return tool.name


def _add_function(chat: ChatRequestBuilder, raw: dict[str, Any], where: str, namespace: str | None) -> str:
    tool = convert(FunctionTool, raw, where)
    name = function_name(namespace, tool.name) if tool.name else ""
    fields = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    chat.add_tool(fields, where)
    return name


def _unsupported_tool(kind: object, where: str) -> ApiError:
    return bad_parameter(
        f"{where}.type",
        f"{show(kind)} is not supported: this server runs no tools itself; send functions or custom tools, which the "
        "client runs",
        "unsupported_value",
    )


def _translate_choice(body: ResponsesBody, chat: ChatRequestBuilder) -> None:
    choice: object = body.tool_choice
    if isinstance(choice, dict):
        match choice.get("type"):
            case "function" | "custom":
                named = convert(FunctionChoice, choice, "tool_choice")
                choice = {"type": "function", "function": {"name": named.name}}
            case "allowed_tools":
                allowed = convert(AllowedTools, choice, "tool_choice")
                chat.keep_tools({tool.get("name") for tool in allowed.tools})
                choice = allowed.mode
            case kind:
                raise bad_parameter(
                    "tool_choice.type", f"{show(kind)} is not supported; use function, custom or allowed_tools"
                )
    if choice != "auto" or chat.tools:  # responses say "auto" without tools too, and clients send it back
        chat.fields["tool_choice"] = choice
    chat.fields["parallel_tool_calls"] = body.parallel_tool_calls


def _translate_reasoning(body: ResponsesBody, chat: ChatRequestBuilder, template: ChatTemplate | None) -> None:
    """Pass the effort on; where the template has no switch the model thinks or not as it does."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None or template is None:
        return
    if "enable_thinking" in template.source or "reasoning_effort" in template.source:
        chat.fields["reasoning_effort"] = effort
    elif (effort not in ("none", "minimal")) != (template.output_format.reasoning is not None):
        chat.unused.append("reasoning.effort")


def _translate_output(body: ResponsesBody, chat: ChatRequestBuilder) -> None:
    include = set(body.include or ())
    if include - {_ENCRYPTED, _LOGPROBS}:
        chat.unused.append("include")
    if body.truncation == "auto":
        chat.unused.append("truncation")
    if body.text is not None and body.text.verbosity is not None:
        chat.unused.append("text.verbosity")
    if body.text is not None and (form := body.text.format) is not None:
        chat.fields["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            fields = {"name": form.name, "schema": form.schema, "strict": form.strict, "description": form.description}
            chat.fields["response_format"]["json_schema"] = {k: v for k, v in fields.items() if v is not None}
    chat.fields |= {
        "model": body.model,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
    }
    if _LOGPROBS in include or body.top_logprobs:
        chat.fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}


def _echo(body: ResponsesBody, fields: dict[str, Any], sampling: SamplingParams) -> dict[str, object]:
    """Return the fields of the request that the response repeats."""
    reasoning = body.reasoning
    return {
        "background": False,
        "frequency_penalty": sampling.frequency_penalty,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        "safety_identifier": fields.get("safety_identifier"),
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": _echoed_text(body.text or TextConfig()),
        "tool_choice": body.tool_choice or "auto",
        "tools": [_echoed_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.get("user"),
    }


def _echoed_text(text: TextConfig) -> dict[str, object]:
    """Return the text configuration with the fields that its type has, also those that the request left out."""
    form = text.format or TextFormat("text")
    result: dict[str, object] = {"type": form.type}
    if form.type == "json_schema":
        more = {"description": form.description, "name": form.name or "", "schema": form.schema}
        result |= {**more, "strict": bool(form.strict)}
    return {"format": result, **({} if text.verbosity is None else {"verbosity": text.verbosity})}


def _echoed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that a function has, also those that the request left out."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}


_Event = dict[str, object]
_ItemStatus = Literal["in_progress", "completed", "incomplete"]
_PREFIXES: Final = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_CALLS: Final = ("function_call", "custom_tool_call")


@dataclass(slots=True)
class _Item:
    """An output item; `text` adds up to its text, reasoning or arguments."""

    kind: str
    item_id: str
    text: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    call: ToolCallDelta | None = None


@dataclass(slots=True, kw_only=True)
class ResponsesFormatter(ResponseFormatter):
    """One response.  `keep` gets the finished response and its output items before they are sent."""

    response_id: str
    created_s: int
    model: str
    tokenizer: Tokenizer
    logprobs: bool
    options: ResponseOptions
    keep: Callable[[_Event, Sequence[_Event]], None]
    clock: Callable[[], float]
    _n_events: int = 0
    _open: _Item | None = None
    _output: list[_Event] = field(default_factory=list)
    _finish_reason: FinishReason | None = None

    style: ClassVar[StreamStyle] = "named"

    def start(self, index: int) -> Sequence[_Event]:
        """Return the events before the first item."""
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[_Event]:
        """Return the events of a delta."""
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        return [] if delta.event is None else self._item_events(delta.event, delta.tokens)

    def end(self, totals: UsageTotals) -> Sequence[_Event]:
        """Return the events after the last delta."""
        cut = self._finish_reason == "length"
        closing = self._close("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        response = self._response(status, usage=_usage(totals))
        self.keep(response, self._output)
        return [*closing, self._event(f"response.{status}", response=response)]

    def failure(self, error: ApiError) -> Sequence[_Event]:
        """Return the event that ends a stream that fails."""
        fields = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self._response("failed", error=fields))]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        """Return the whole response."""
        for delta in choices[0]:
            self.delta(0, delta)
        return self.end(totals)[-1]["response"]

    def _response(self, status: str, *, usage: object = None, error: object = None) -> _Event:
        echo = msgspec.json.decode(self.options.echo, type=dict[str, msgspec.Raw])
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": int(self.clock()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": list(self._output),
            "usage": usage,
            **echo,
        }

    def _event(self, kind: str, **fields: object) -> _Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _item_events(self, event: OutputEvent, tokens: Sequence[TokenRecord]) -> list[_Event]:
        match event:
            case ContentDelta(text):
                events = self._continue("message")
                logprobs = self._logprobs(tokens)
                return [*events, self._add_text(text, "response.output_text.delta", logprobs=logprobs)]
            case ReasoningDelta(text):
                events = self._continue("reasoning")
                part = "reasoning_summary_text" if self.options.summary else "reasoning_text"
                return [*events, self._add_text(text, f"response.{part}.delta")]
            case ToolCallDelta():
                custom = event.name in self.options.custom
                kind, part = ("custom_tool_call", "input") if custom else ("function_call", "arguments")
                events = [*self._close("completed"), *self._continue(kind, event)]
                text = custom_input(event.arguments) if custom else event.arguments
                events.append(self._add_text(text, f"response.{kind}_{part}.delta"))
                return [*events, *self._close("completed")]

    def _logprobs(self, tokens: Sequence[TokenRecord]) -> list[object]:
        content = chat_logprobs(self.tokenizer, tokens)["content"] if self.logprobs else []
        assert isinstance(content, list)
        return content

    def _continue(self, kind: str, call: ToolCallDelta | None = None) -> list[_Event]:
        """Return the events that open an item, unless one of its kind is open."""
        if self._open is not None and self._open.kind == kind:
            return []
        closed = self._close("completed")
        unique = f"{self.response_id.rpartition('_')[2]}{len(self._output):02d}"
        item = self._open = _Item(kind, _PREFIXES[kind] + unique, call=call)
        index = len(self._output)
        events = [
            *closed,
            self._event("response.output_item.added", output_index=index, item=self._item_json(item, "in_progress")),
        ]
        if kind not in _CALLS:
            events.append(self._event(f"response.{self._part_name()}.added", **self._place(), part=self._part("")))
        return events

    def _add_text(self, text: str, event: str, logprobs: list[object] | None = None) -> _Event:
        assert self._open is not None
        self._open.text.append(text)
        more: _Event = {}
        if logprobs is not None:
            self._open.logprobs += logprobs
            more["logprobs"] = logprobs
        return self._event(event, **self._place(), delta=text, **more)

    def _close(self, status: _ItemStatus) -> list[_Event]:
        """Return the events that close the open item, if one is."""
        if (item := self._open) is None:
            return []
        text, place = "".join(item.text), self._place()
        if item.kind == "function_call":
            events = [self._event("response.function_call_arguments.done", **place, arguments=text)]
        elif item.kind == "custom_tool_call":
            events = [self._event("response.custom_tool_call_input.done", **place, input=text)]
        else:
            more = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = [
                self._event(f"response.{self._text_name()}.done", **place, text=text, **more),
                self._event(f"response.{self._part_name()}.done", **place, part=self._part(text)),
            ]
        done = self._item_json(item, status, text)
        events.append(self._event("response.output_item.done", output_index=len(self._output), item=done))
        self._output.append(done)
        self._open = None
        return events

    def _place(self) -> _Event:
        assert self._open is not None
        place: _Event = {"item_id": self._open.item_id, "output_index": len(self._output)}
        if self._open.kind not in _CALLS:
            place["summary_index" if self._is_summary() else "content_index"] = 0
        return place

    def _is_summary(self) -> bool:
        return self._open is not None and self._open.kind == "reasoning" and self.options.summary

    def _part_name(self) -> str:
        return "reasoning_summary_part" if self._is_summary() else "content_part"

    def _text_name(self) -> str:
        if self._is_summary():
            return "reasoning_summary_text"
        return "reasoning_text" if self._open is not None and self._open.kind == "reasoning" else "output_text"

    def _part(self, text: str) -> _Event:
        """Return the only part of the open item."""
        assert self._open is not None
        if self._is_summary():
            return {"type": "summary_text", "text": text}
        if self._open.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = list(self._open.logprobs) if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _item_json(self, item: _Item, status: _ItemStatus, text: str | None = None) -> _Event:
        """Return the open item's JSON; `text`: None before its end."""
        head: _Event = {"id": item.item_id, "type": item.kind, "status": status}
        parts = [] if text is None else [self._part(text)]
        if item.kind == "message":
            return {**head, "role": "assistant", "content": parts}
        if item.kind == "reasoning":
            encrypted = encode_reasoning(text) if text is not None and self.options.encrypted else None
            summary, content = (parts, []) if self.options.summary else ([], parts)
            return {**head, "summary": summary, "content": content, "encrypted_content": encrypted}
        assert item.call is not None
        # Globally unique, as the response id is; clients send it back with the call's output.
        call_id = f"call_{item.item_id.removeprefix(_PREFIXES[item.kind])}"
        if item.kind == "custom_tool_call":
            return {**head, "call_id": call_id, "name": item.call.name, "input": text or ""}
        namespace = self.options.namespaces.get(item.call.name)
        named: _Event = {"name": item.call.name}
        if namespace is not None:
            named = {"name": item.call.name.removeprefix(f"{namespace}."), "namespace": namespace}
        return {**head, "call_id": call_id, **named, "arguments": text or ""}


def _usage(totals: UsageTotals) -> _Event:
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"cached_tokens": totals.cached, "cache_write_tokens": 0},
        "output_tokens": totals.generated,
        "output_tokens_details": {"reasoning_tokens": totals.reasoning},
        "total_tokens": totals.prompt + totals.generated,
        **totals.extension(),
    }


_Json = dict[str, Any]
_CALL_TEXTS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items without parts, and the field that holds their text."""


@dataclass(frozen=True, slots=True)
class Page:
    """Items of a list to return: at most `limit`, those after `after` in its order."""

    limit: int
    after: str | None
    ascending: bool


def replay(response: _Json) -> list[_Json]:
    """Return the events of a finished response, numbered."""
    begun = {**response, "status": "in_progress", "completed_at": None, "incomplete_details": None, "usage": None}
    begun["output"] = []
    events: list[_Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        text, kind = _CALL_TEXTS.get(item["type"]), item["type"]
        blank: dict[str, object] = {"summary": [], "content": [], "encrypted_content": None, text or "": ""}
        empty = {name: value for name, value in blank.items() if name in item}
        opened = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": opened})
        if text:
            events.append({"type": f"response.{kind}_{text}.delta", **place, "delta": item[text]})
            events.append({"type": f"response.{kind}_{text}.done", **place, text: item[text]})
        for name in ("summary", "content"):
            for number, part in enumerate(item.get(name) or ()):
                events += _part_events({**place, f"{name}_index": number}, name, part)
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _part_events(place: _Json, name: str, part: _Json) -> Iterator[_Json]:
    prefix = "reasoning_summary_part" if name == "summary" else "content_part"
    kind = "reasoning_summary_text" if name == "summary" else part["type"]
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    empty = {**part, "text": "", **({"logprobs": []} if more else {})}
    yield {"type": f"response.{prefix}.added", **place, "part": empty}
    yield {"type": f"response.{kind}.delta", **place, "delta": part["text"], **more}
    yield {"type": f"response.{kind}.done", **place, "text": part["text"], **more}
    yield {"type": f"response.{prefix}.done", **place, "part": part}


def input_items(response_id: str, turns: Sequence[Sequence[_Json]], page: Page) -> _Json:
    """Return a page of the items that a response answers, `turns` without its own output."""
    unique = response_id.rpartition("_")[2]
    items = [_complete(item, f"msg_{unique}i{n}") for n, item in enumerate(item for turn in turns for item in turn)]
    if not page.ascending:
        items.reverse()
    start = next((n + 1 for n, item in enumerate(items) if item["id"] == page.after), 0)
    found = items[start : start + page.limit]
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": start + page.limit < len(items),
    }


def _complete(item: _Json, item_id: str) -> _Json:
    """Return an item as clients read it, though they may send it shorter: with id, type, status and parts."""
    result = {"id": item_id, "type": "message", "status": "completed", **item}
    if result["type"] == "message" and isinstance(text := result["content"], str):
        kind = "output_text" if result["role"] == "assistant" else "input_text"
        annotated: _Json = {"annotations": []} if kind == "output_text" else {}
        result["content"] = [{"type": kind, "text": text, **annotated}]
    return result


async def create_response(request: web.Request) -> web.StreamResponse:
    """Create a response, as OpenAI's Responses API does."""
    ctx, store, key = request.app[APP_CONTEXT], request.app[RESPONSE_STORE], context_of(request).caller.id
    named: dict[str, StoredResponse] = {}
    prepared = await prepare(request, read_response, _stored_adder(request, named))
    assert isinstance(prepared, PreparedRequest)
    options = prepared.options
    assert options.response is not None
    response, wanted = ResponseId.now("resp_"), options.response
    earlier: tuple[bytes, ...] = ()
    if (previous := wanted.previous_id) is not None:
        if previous not in named:  # the client made up what the server adds
            raise previous_not_stored(previous)
        earlier = named[previous].turns

    def keep(body: dict[str, object], output: Sequence[object]) -> None:
        if wanted.store:
            turns = (*earlier, wanted.items, msgspec.json.encode(output))
            store.put(response.response_id, StoredResponse(msgspec.json.encode(body), turns, key))

    formatter = ResponsesFormatter(
        response_id=response.response_id,
        created_s=response.created_s,
        model=ctx.model.name,
        tokenizer=ctx.tokenizer,
        logprobs=options.logprobs,
        options=wanted,
        keep=keep,
        clock=time.time,
    )
    return await respond(request, prepared, formatter, response, "input")


def _stored_adder(request: web.Request, named: dict[str, StoredResponse]) -> AddToBody:
    """Return what adds the stored conversations that a body names, and notes them in `named`."""
    store, key = request.app[RESPONSE_STORE], context_of(request).caller.id

    async def add_to_body(body: list[bytes]) -> int:
        named.update(await store.named_in(body, key))
        return with_stored(body, named)

    return add_to_body


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a response's prompt."""
    return await respond_encoded(request, read_input_tokens, _stored_adder(request, {}))


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response, or its events after `starting_after` with `stream=true`."""
    stored, query = _stored(request), request.query
    if not _choice(query, "stream", {"false": False, "true": True}):
        return web.Response(body=stored.body, content_type="application/json")
    first = _integer(query, "starting_after", -1, 0, 2**31 - 1) + 1
    events = await asyncio.to_thread(lambda: replay(msgspec.json.decode(stored.body))[first:])
    body = b"".join(b"event: %b\ndata: %b\n\n" % (e["type"].encode(), msgspec.json.encode(e)) for e in events)
    return web.Response(body=body, content_type="text/event-stream", charset="utf-8")


async def list_input_items(request: web.Request) -> web.Response:
    """List the items that a stored response answers."""
    stored, query = _stored(request), request.query
    page = Page(
        limit=_integer(query, "limit", 20, 1, 100),
        after=query.get("after"),
        ascending=_choice(query, "order", {"desc": False, "asc": True}),
    )
    turns = [msgspec.json.decode(turn) for turn in stored.turns[:-1]]
    body = input_items(request.match_info["id"], turns, page)
    return json_response(body)


def _integer(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    sent = query.get(name)
    if sent is None:
        return default
    if not (sent.isascii() and sent.isdigit() and len(sent) <= 10 and least <= int(sent) <= most):
        raise bad_parameter(name, f"{show(sent)} is not an integer from {least} to {most}")
    return int(sent)


def _choice(query: Mapping[str, str], name: str, values: Mapping[str, bool]) -> bool:
    """Return what a parameter of two values means; the first is its default."""
    sent = query.get(name, next(iter(values)))
    if sent not in values:
        raise bad_parameter(name, f"{show(sent)} is not one of its values; use {' or '.join(values)}")
    return values[sent]


def _stored(request: web.Request) -> StoredResponse:
    name = request.match_info["id"]
    stored = request.app[RESPONSE_STORE].get(name, context_of(request).caller.id)
    if stored is None:
        raise _not_stored(name)
    return stored


async def delete_response(request: web.Request) -> web.Response:
    """Forget a stored response."""
    name = request.match_info["id"]
    if not request.app[RESPONSE_STORE].delete(name, context_of(request).caller.id):
        raise _not_stored(name)
    body = {"id": name, "object": "response", "deleted": True}
    return json_response(body)


def _not_stored(name: str) -> ApiError:
    return ApiError(
        404,
        f"the response {show(name)} is not stored here (expired, or made with another API key)",
        code="response_not_found",
    )
