"""OpenAI's Responses API, translated into chat requests; an error names the field as the client wrote it."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from lucevisor.api.app_state import RESPONSE_STORE, context_of
from lucevisor.api.bodies import json_response
from lucevisor.api.contexts import ModelContext
from lucevisor.api.dialects.openai_chat import ChatRequestBuilder, CustomTool, custom_function
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.generation import ResponseFormatter, handle_generation
from lucevisor.api.images import image_part
from lucevisor.api.output import ChoiceDelta, TokenRecord, UsageTotals, chat_logprobs
from lucevisor.api.prepared import CUSTOM_INPUT, STORED_RESPONSES, PreparedRequest, ResponseOptions, custom_input
from lucevisor.api.response_store import StoredResponse, with_stored
from lucevisor.api.schemas import (
    MAX_TOP_LOGPROBS,
    NOT_HERE,
    AllowedTools,
    Count,
    Flag,
    Fraction,
    NamedFunction,
    OpenAiPenalty,
    ParameterRules,
    StreamOptions,
    convert,
    ignored,
    to_record,
)
from lucevisor.errors import show
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.deltas import ContentDelta, OutputEvent, ReasoningDelta, ToolCallDelta
from lucevisor.text.template import ChatTemplate

RULES: Final = ParameterRules(
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
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
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
    """Append items as messages; each comes with its path in the body.  Raises ApiError naming the field at fault."""
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
    return name if namespace is None else f"{namespace}.{name}"


def _add_to_turn(turn: _Turn, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "message":
        content = _content(convert(MessageItem, item, where).content, f"{where}.content")
        if isinstance(content, list) and any("text" not in part for part in content):
            raise bad_parameter(f"{where}.content", "has an image in an answer; images are the user's, or a tool's")
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
        try:
            return base64.b64decode(item.encrypted_content, validate=True).decode()
        except ValueError:
            why = "was not written by this server; leave the item out"
            raise bad_parameter(f"{where}.encrypted_content", why) from None
    return "".join(part.text for part in item.summary or ())


def _content(content: str | list[dict[str, Any]], where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        if kind == "input_image":
            parts.append(_image(part, f"{where}[{index}]"))
            continue
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise _unsupported(kind, f"{where}[{index}]")
        text = part.get(name)
        if not isinstance(text, str):
            raise bad_parameter(f"{where}[{index}].{name}", "is missing or not a string; it is required")
        parts.append({"type": "text", "text": text})
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        why = "is not supported: this server stores no files; send image_url with a data: URL"
        raise bad_parameter(f"{where}.file_id", why, "unsupported_content")
    if not isinstance(url := part.get("image_url"), str):
        raise bad_parameter(f"{where}.image_url", "is missing or not a string; it is required")
    return image_part(url, f"{where}.image_url")


def _unsupported(kind: object, where: str) -> ApiError:
    return bad_parameter(
        f"{where}.type",
        f"{show(kind)} is not supported; send messages of text and images, reasoning, function calls and their outputs",
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
"""Items of each turn, by the id of the response that answered them."""
_ENCRYPTED: Final = "reasoning.encrypted_content"
_LOGPROBS: Final = "message.output_text.logprobs"


def parse_response(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Parse the body of a request of OpenAI's Responses API."""
    body, chat, own = _translated(fields, ctx)
    prepared = chat.read(ctx, _CHAT_NAMES)
    tools, reasoning = body.tools or [], body.reasoning or Reasoning()
    response = ResponseOptions(
        echo=msgspec.json.encode(_echo(body, fields, prepared.options.sampling)),
        items=msgspec.json.encode(own),
        previous_id=body.previous_response_id,
        store=body.store is not False,
        summary=bool(reasoning.summary or reasoning.generate_summary),
        encrypted=_ENCRYPTED in (body.include or ()),
        namespaces={
            function_name(space["name"], function["name"]): space["name"]
            for space in tools
            if space["type"] == "namespace"
            for function in space["tools"]
        },
        custom=[tool["name"] for tool in tools if tool["type"] == "custom"],
    )
    return prepared.with_options(ignored=ignored(ResponsesBody, fields, RULES, chat.unused), response=response)


def parse_input_tokens(fields: dict[str, Any], ctx: ModelContext) -> bytes:
    """Return how many tokens the prompt of a response has, also beyond the context."""
    _, chat, _ = _translated(fields, ctx)
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": chat.count(ctx, _CHAT_NAMES)})


def _translated(
    fields: dict[str, Any], ctx: ModelContext
) -> tuple[ResponsesBody, ChatRequestBuilder, list[dict[str, Any]]]:
    """Return a body, its translation into a chat request, and its input items."""
    try:
        stored = msgspec.convert(fields.pop(STORED_RESPONSES, {}), _StoredTurns)
    except msgspec.ValidationError:  # not the server's
        raise bad_parameter(STORED_RESPONSES, "is the server's own; leave it out", "unknown_parameter") from None
    body = to_record(ResponsesBody, fields, RULES)
    chat = ChatRequestBuilder()
    if body.instructions:
        chat.add_message({"role": "system", "content": body.instructions}, "instructions")
    own = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _resolved(body.input, stored)
    add_items(chat, _located(body, stored, own))
    for index, tool in enumerate(body.tools or ()):
        _add_tool(chat, tool, f"tools[{index}]")
    _translate_choice(body, chat)
    _translate_reasoning(body, chat, ctx.template)
    _translate_output(body, chat)
    return body, chat, own


def previous_not_stored(response_id: str) -> ApiError:
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
    if (previous := body.previous_response_id) is not None:
        if previous not in stored:
            raise previous_not_stored(previous)
        for turn in stored[previous]:
            yield from (("previous_response_id", item) for item in turn)
    yield from ((f"input[{index}]", item) for index, item in enumerate(own))


def _resolved(items: list[dict[str, Any]], stored: _StoredTurns) -> list[dict[str, Any]]:
    """Replace references by the items; raises ApiError 404 for one that is not stored."""
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


def _add_tool(chat: ChatRequestBuilder, raw: dict[str, Any], where: str) -> None:
    kind = raw.get("type")
    if kind == "function":
        _add_function(chat, raw, where, None)
    elif kind == "custom":
        tool = convert(CustomTool, raw, where)
        if tool.grammar is not None:
            chat.unused.append(f"{where}.format")
        chat.add_tool(custom_function(tool), where)
    elif kind == "namespace":
        space = convert(Namespace, raw, where)
        for index, function in enumerate(space.tools):
            if function.get("type") != "function":
                raise _unsupported_tool(function.get("type"), f"{where}.tools[{index}]")
            _add_function(chat, function, f"{where}.tools[{index}]", space.name)
    elif kind == "web_search" and raw.get("external_web_access") is False:
        chat.unused.append(where)  # a search that must not reach the web has nothing to find here
    else:
        raise _unsupported_tool(kind, where)


def _add_function(chat: ChatRequestBuilder, raw: dict[str, Any], where: str, namespace: str | None) -> None:
    tool = convert(FunctionTool, raw, where)
    name = function_name(namespace, tool.name) if tool.name else ""
    fields = {"name": name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    chat.add_tool(fields, where)


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
                named = convert(NamedFunction, choice, "tool_choice")
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
    """Pass the effort on.  Without a switch in the template the request has no effect."""
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
    same = ("model", "stream", "temperature", "top_p", "presence_penalty", "frequency_penalty")
    chat.fields |= {name: getattr(body, name) for name in same} | {"max_tokens": body.max_output_tokens}
    if _LOGPROBS in include or body.top_logprobs:
        chat.fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}


def _echo(body: ResponsesBody, fields: dict[str, Any], sampling: SamplingParams) -> dict[str, object]:
    reasoning = body.reasoning or Reasoning()
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
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": fields.get("safety_identifier"),
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": _echoed_text(body.text or TextConfig()),
        "tool_choice": body.tool_choice or "auto",
        "tools": [
            {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
            if tool.get("type") == "function"
            else tool
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": fields.get("user"),
    }


def _echoed_text(text: TextConfig) -> dict[str, object]:
    form = text.format or TextFormat("text")
    result: dict[str, object] = {"type": form.type}
    if form.type == "json_schema":
        more = {"description": form.description, "name": form.name or "", "schema": form.schema}
        result |= {**more, "strict": bool(form.strict)}
    return {"format": result, **({} if text.verbosity is None else {"verbosity": text.verbosity})}


_Json = dict[str, Any]
_PREFIXES: Final = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "custom_tool_call": "ctc_"}
_CALL_TEXTS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
"""Types of items without parts, and the field that holds their text."""
_BLANK: Final[_Json] = {"summary": [], "content": [], "encrypted_content": None, "arguments": "", "input": ""}
"""Fields of an item that has only begun."""


class _ItemEvents:
    """Events of an output item, which has a text or one part with it, at its place in the output."""

    def __init__(self, item: _Json, index: int) -> None:
        self._item, self._index = item, index
        self._place = {"item_id": item["id"], "output_index": index}
        self._part: _Json = {}
        self._field = _CALL_TEXTS.get(item["type"], "text")
        if item["type"] in _CALL_TEXTS:
            self._text_name = f"{item['type']}_{self._field}"
        else:
            name = "summary" if item.get("summary") else "content"
            (self._part,) = item[name]
            self._place[f"{name}_index"] = 0
            self._part_name = "reasoning_summary_part" if name == "summary" else "content_part"
            self._text_name = "reasoning_summary_text" if name == "summary" else self._part["type"]

    def opening(self) -> list[_Json]:
        item = {**self._item, **{k: v for k, v in _BLANK.items() if k in self._item}, "status": "in_progress"}
        added = {"type": "response.output_item.added", "output_index": self._index, "item": item}
        if not self._part:
            return [added]
        part = {**self._part, "text": "", **({"logprobs": []} if "logprobs" in self._part else {})}
        return [added, {"type": f"response.{self._part_name}.added", **self._place, "part": part}]

    def delta(self, text: str, logprobs: Sequence[object]) -> _Json:
        return {"type": f"response.{self._text_name}.delta", **self._place, "delta": text, **self._scores(logprobs)}

    def closing(self) -> list[_Json]:
        done = {"type": "response.output_item.done", "output_index": self._index, "item": self._item}
        text, scores = self.text, self._scores(self._part.get("logprobs", ()))
        events = [{"type": f"response.{self._text_name}.done", **self._place, self._field: text, **scores}]
        if self._part:
            events.append({"type": f"response.{self._part_name}.done", **self._place, "part": self._part})
        return [*events, done]

    @property
    def text(self) -> str:
        text: str = (self._part or self._item)[self._field]
        return text

    def _scores(self, logprobs: Sequence[object]) -> _Json:
        return {"logprobs": logprobs} if "logprobs" in self._part else {}


@dataclass(slots=True)
class _Item:
    """The open output item and the text collected for it."""

    kind: str
    call: ToolCallDelta | None
    text: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)


class ResponsesFormatter(ResponseFormatter):
    """Formatter of responses. `keep` gets the finished response and its output items before they are sent."""

    id_prefix = "resp_"
    prompt_param = "input"
    style = "named"

    def __init__(
        self, prepared: PreparedRequest, ctx: ModelContext, keep: Callable[[ResponsesFormatter, _Json], None]
    ) -> None:
        super().__init__(prepared, ctx)
        assert prepared.options.response is not None
        self.wanted, self._keep = prepared.options.response, keep
        self.output: list[_Json] = []
        self._n_events = 0
        self._open: _Item | None = None
        self._status = "completed"

    def start(self, index: int) -> Sequence[_Json]:
        response = self._response("in_progress")
        return self._numbered(
            [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]
        )

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[_Json]:
        if delta.finish_reason == "length":
            self._status = "incomplete"
        return [] if delta.event is None else self._numbered(self._item_events(delta.event, delta.tokens))

    def end(self, totals: UsageTotals) -> Sequence[_Json]:
        closing = self._close(self._status)
        response = self._response(self._status, usage=_usage(totals))
        self._keep(self, response)
        return self._numbered([*closing, {"type": f"response.{self._status}", "response": response}])

    def failure(self, error: ApiError) -> Sequence[_Json]:
        fields = {"code": "server_error", "message": error.message}
        return self._numbered([{"type": "response.failed", "response": self._response("failed", error=fields)}])

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        for delta in choices[0]:
            self.delta(0, delta)
        return self.end(totals)[-1]["response"]

    def _response(self, status: str, *, usage: object = None, error: object = None) -> _Json:
        echo = msgspec.json.decode(self.wanted.echo, type=dict[str, msgspec.Raw])
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.card.name,
            "output": list(self.output),
            "usage": usage,
            **echo,
        }

    def _numbered(self, events: Sequence[_Json]) -> list[_Json]:
        first = self._n_events
        self._n_events += len(events)
        return [{**event, "sequence_number": first + n} for n, event in enumerate(events)]

    def _item_events(self, event: OutputEvent, tokens: Sequence[TokenRecord]) -> list[_Json]:
        match event:
            case ContentDelta(text):
                content = chat_logprobs(self.tokenizer, tokens)["content"] if self.options.logprobs else []
                assert isinstance(content, list)
                return self._add("message", text, content)
            case ReasoningDelta(text):
                return self._add("reasoning", text)
            case ToolCallDelta():
                closed = self._close("completed")
                if event.name in self.wanted.custom:
                    events = self._add("custom_tool_call", custom_input(event.arguments), call=event)
                else:
                    events = self._add("function_call", event.arguments, call=event)
                return [*closed, *events, *self._close("completed")]

    def _add(
        self, kind: str, text: str, logprobs: Sequence[object] = (), call: ToolCallDelta | None = None
    ) -> list[_Json]:
        """Return the events that append text to an item; they open one unless one of its kind is open."""
        events: list[_Json] = []
        if self._open is None or self._open.kind != kind:
            events = self._close("completed")
            self._open = _Item(kind, call)
            events += self._events(self._open).opening()
        delta = self._events(self._open).delta(text, logprobs)
        self._open.text.append(text)
        self._open.logprobs += logprobs
        return [*events, delta]

    def _close(self, status: str) -> list[_Json]:
        if (item := self._open) is None:
            return []
        self._open = None
        done = self._item_json(item, status, "".join(item.text), item.logprobs)
        self.output.append(done)
        return _ItemEvents(done, len(self.output) - 1).closing()

    def _events(self, item: _Item) -> _ItemEvents:
        return _ItemEvents(self._item_json(item), len(self.output))

    def _item_json(
        self, item: _Item, status: str = "in_progress", text: str = "", logprobs: Sequence[object] = ()
    ) -> _Json:
        unique = f"{self.unique_id}{len(self.output):02d}"
        head: _Json = {"id": f"{_PREFIXES[item.kind]}{unique}", "type": item.kind, "status": status}
        if item.kind == "message":
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
            return {**head, "role": "assistant", "content": [part]}
        if item.kind == "reasoning":
            encrypted = base64.b64encode(text.encode()).decode() if self.wanted.encrypted else None
            field_, kind = ("summary", "summary_text") if self.wanted.summary else ("content", "reasoning_text")
            parts: _Json = {"summary": [], "content": []} | {field_: [{"type": kind, "text": text}]}
            return {**head, **parts, "encrypted_content": encrypted}
        assert item.call is not None
        # The call's id is globally unique, as the response's is; clients send it back with the call's output.
        named: _Json = {"call_id": f"call_{unique}", "name": item.call.name}
        if (namespace := self.wanted.namespaces.get(item.call.name)) is not None:
            named |= {"name": item.call.name.removeprefix(f"{namespace}."), "namespace": namespace}
        return {**head, **named, _CALL_TEXTS[item.kind]: text}


def _usage(totals: UsageTotals) -> _Json:
    return {
        "input_tokens": totals.prompt,
        "input_tokens_details": {"cached_tokens": totals.cached, "cache_write_tokens": 0},
        "output_tokens": totals.generated,
        "output_tokens_details": {"reasoning_tokens": totals.reasoning},
        "total_tokens": totals.prompt + totals.generated,
        **totals.extension(),
    }


async def create_response(request: web.Request) -> web.StreamResponse:
    """Create a response, as OpenAI's Responses API does."""
    named: dict[str, StoredResponse] = {}

    def keep(formatter: ResponsesFormatter, response: _Json) -> None:
        options, earlier = formatter.wanted, named.get(formatter.wanted.previous_id or "")
        if options.store:
            turns = (*(earlier.turns if earlier else ()), options.items, msgspec.json.encode(formatter.output))
            body = StoredResponse(msgspec.json.encode(response), turns, context_of(request).caller.id)
            request.app[RESPONSE_STORE].put(formatter.response_id, body)

    def formatter(prepared: PreparedRequest, ctx: ModelContext) -> ResponsesFormatter:
        assert prepared.options.response is not None
        previous = prepared.options.response.previous_id
        if previous is not None and previous not in named:  # the client sent the member that the server adds
            raise previous_not_stored(previous)
        return ResponsesFormatter(prepared, ctx, keep)

    return await handle_generation(request, parse_response, formatter, partial(_add_stored, request, named))


async def _add_stored(request: web.Request, named: dict[str, StoredResponse], body: list[bytes]) -> int:
    """Add the stored conversations that a body names, also to `named`; return how many bytes."""
    named.update(await request.app[RESPONSE_STORE].named_in(body, context_of(request).caller.id))
    return with_stored(body, named)


async def count_input_tokens(request: web.Request) -> web.StreamResponse:
    """Count the tokens of a response's prompt."""
    return await handle_generation(request, parse_input_tokens, add_to_body=partial(_add_stored, request, {}))


async def get_response(request: web.Request) -> web.Response:
    """Return a stored response."""
    return web.Response(body=_stored(request).body, content_type="application/json")


def _stored(request: web.Request) -> StoredResponse:
    name = request.match_info["id"]
    stored = request.app[RESPONSE_STORE].get(name, context_of(request).caller.id)
    if stored is None:
        raise _not_stored(name)
    return stored


async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response."""
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
