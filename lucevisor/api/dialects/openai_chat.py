"""OpenAI's chat completions, and `ChatRequestBuilder`, with which other dialects translate their bodies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from lucevisor.api import images
from lucevisor.api.constraint import output_grammar, requested_calls, requested_form
from lucevisor.api.contexts import ModelContext
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.generation import OpenAiFormatter
from lucevisor.api.output import (
    ChoiceDelta,
    TokenRecord,
    UsageTotals,
    chat_logprobs,
)
from lucevisor.api.parameters import (
    budget_of,
    check_choices,
    check_common,
    check_generates,
    check_length,
    check_min_tokens,
    check_tokens,
    common_options,
    max_tokens_of,
    n_top_logprobs,
    random_seed,
    sampling_params,
)
from lucevisor.api.prepared import CUSTOM_INPUT, GenerationOptions, PreparedRequest, custom_input
from lucevisor.api.schemas import (
    MAX_TOOL_VALUES,
    MAX_TOP_LOGPROBS,
    Effort,
    Flag,
    GenerationBody,
    Limit,
    NamedFunction,
    ToolChoice,
    convert,
    ignored,
    to_record,
)
from lucevisor.errors import show
from lucevisor.model.vision import EncoderImage
from lucevisor.text.deltas import ContentDelta, ReasoningDelta, ToolCallDelta
from lucevisor.text.normalise import normalise_prompt
from lucevisor.text.template import ChatTemplate, EncodedPrompt, RenderedPrompt, TemplateError


class ReasoningObject(msgspec.Struct):
    """`reasoning` as routers and the Responses API write it."""

    effort: Effort | None = None
    enabled: Flag = None
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    exclude: Flag = None


class ThinkingObject(msgspec.Struct):
    """`thinking` as Anthropic, DeepSeek and GLM write it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class ChatBody(GenerationBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions.  Messages and tools stay plain for the chat template; messages.py validates them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: Flag = None
    max_completion_tokens: Limit | None = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    enable_thinking: Flag = None
    reasoning_effort: Effort | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None  # -1: no limit
    reasoning: ReasoningObject | None = None
    thinking: ThinkingObject | None = None
    include_reasoning: Flag = None  # vLLM's
    add_generation_prompt: Flag = None  # from here on of the template
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None


ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _CustomCall(msgspec.Struct):
    name: str
    input: str = ""


class _ToolCall(msgspec.Struct):
    function: _Function | None = None
    custom: _CustomCall | None = None
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None


class _ToolFunction(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(msgspec.Struct):
    """A tool that the client runs on a text."""

    name: str
    description: str | None = None
    format: dict[str, Any] | None = None

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The grammar of the text: of the format itself in the Responses API, one level down in chat completions."""
        found = (self.format or {}).get("grammar", self.format)
        return found if isinstance(found, dict) and isinstance(found.get("definition"), str) else None


def custom_function(tool: CustomTool) -> dict[str, Any]:
    """Return a custom tool as a function of one text.  Its grammar is part of the description and is not enforced."""
    description = [tool.description or ""]
    if (grammar := tool.grammar) is not None:
        description.append(f"The input must follow this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}")
    schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return {"name": tool.name, "description": "\n\n".join(filter(None, description)), "parameters": schema}


class _Tool(msgspec.Struct):
    type: str
    function: _ToolFunction | None = None
    custom: CustomTool | None = None


def check_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages ready for a template; raises ApiError 400 naming the message and field at fault."""
    if not messages:
        raise bad_parameter("messages", "is empty; send at least one message")
    return [_check_message(raw, f"messages[{index}]") for index, raw in enumerate(messages)]


def _check_message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    message = convert(_Message, raw, where)
    if message.role not in ROLES:
        known = ", ".join(ROLES)
        raise bad_parameter(f"{where}.role", f"{show(message.role)} is not a role; use {known}")
    for name in ("audio", "function_call"):
        if getattr(message, name) is not None:
            raise bad_parameter(f"{where}.{name}", "is not supported; leave it out", "unsupported_parameter")
    if message.tool_calls and message.role != "assistant":
        raise bad_parameter(
            f"{where}.tool_calls", f"is in a message of role {message.role}; only the assistant calls tools"
        )
    kept = {name: value for name, value in raw.items() if value is not None}
    if message.tool_calls:
        kept["tool_calls"] = [
            _check_call(call, raw["tool_calls"][index], f"{where}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if isinstance(message.content, list):
        if not message.content:
            raise bad_parameter(f"{where}.content", "is an empty array; send text")
        kept["content"] = [_check_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content)]
    elif message.content is None:
        if message.role != "assistant":
            raise bad_parameter(f"{where}.content", "is missing; it is required", "missing_required_parameter")
        kept["content"] = message.refusal or ""
    return kept


def _check_call(call: _ToolCall, raw: dict[str, Any], where: str) -> dict[str, Any]:
    if call.type == "custom" and call.custom is not None:
        function = {"name": call.custom.name, "arguments": {CUSTOM_INPUT: call.custom.input}}
        return {"id": call.id, "type": "function", "function": function}
    if call.type not in (None, "function", "custom"):
        raise bad_parameter(f"{where}.type", f"{show(call.type)} is not supported; use function or custom")
    if call.function is None:
        name = call.type or "function"
        raise bad_parameter(f"{where}.{name}", "is missing; it is required", "missing_required_parameter")
    return raw


def _check_part(part: dict[str, Any], where: str) -> dict[str, Any]:
    kind = part.get("type")
    if kind == "image_url":
        return images.check_part(part, where)
    if kind not in ("text", "refusal"):
        raise bad_parameter(
            f"{where}.type",
            f"{show(kind)} is not supported; this server accepts parts of type text and image_url only",
            "unsupported_content",
        )
    if not isinstance(part.get(kind), str):
        raise bad_parameter(f"{where}.{kind}", "is missing or not a string; it is required")
    return part


def check_tools(
    tools: list[dict[str, Any]], choice: str | ToolChoice | None
) -> tuple[list[dict[str, Any]], str | ToolChoice | None]:
    """Return the tools to offer to the model, functions all, and the choice among them: a word or one function. "none"
    offers no tools, so that the model cannot call one, and `allowed_tools` only those. Raises ApiError."""
    if not _has_at_most(tools, MAX_TOOL_VALUES):
        raise bad_parameter("tools", f"have more than {MAX_TOOL_VALUES} JSON values; offer fewer or simpler tools")
    offered = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in offered]
    if choice == "none":
        return [], choice
    if isinstance(choice, ToolChoice):
        if choice.allowed_tools is not None:
            allowed = _allowed_names(choice.allowed_tools.tools, names)
            return [tool for tool in offered if tool["function"]["name"] in allowed], choice.allowed_tools.mode
        return offered, _chosen(choice, names)
    if choice not in (None, "auto", "required"):
        raise bad_parameter("tool_choice", f"{show(choice)} is not a choice; use auto, none, required or a function")
    if choice == "required" and not names:
        raise bad_parameter("tool_choice", "is given without tools; send tools or leave it out")
    return offered, choice


def _has_at_most(value: object, limit: int) -> bool:
    """Return whether a decoded JSON value holds at most `limit` values, itself included."""
    left, open_values = limit, [value]
    while open_values and left >= 0:
        item = open_values.pop()
        left -= 1
        if isinstance(item, dict | list):
            if len(item) > left:
                return False
            open_values.extend(item.values() if isinstance(item, dict) else item)
    return left >= 0


def _check_tool(raw: dict[str, Any], where: str) -> dict[str, Any]:
    tool = convert(_Tool, raw, where)
    if tool.type not in ("function", "custom"):
        raise bad_parameter(
            f"{where}.type", f"{show(tool.type)} is not supported; use function or custom", "unsupported_value"
        )
    named = tool.function if tool.type == "function" else tool.custom
    if named is None:
        raise bad_parameter(f"{where}.{tool.type}", "is missing; it is required", "missing_required_parameter")
    if not named.name:
        raise bad_parameter(f"{where}.{tool.type}.name", f"is empty; give the {tool.type} a name")
    if isinstance(named, CustomTool):
        return {"type": "function", "function": custom_function(named)}
    return {**raw, "function": {k: v for k, v in raw["function"].items() if v is not None}}


def _chosen(choice: ToolChoice, names: list[str]) -> ToolChoice:
    named = choice.function if choice.type == "function" else choice.custom if choice.type == "custom" else None
    if named is None:
        raise bad_parameter(
            "tool_choice.type",
            f"{show(choice.type)} is not supported; use function or custom and its name, or allowed_tools",
        )
    if named.name not in names:
        raise bad_parameter(f"tool_choice.{choice.type}.name", f"{show(named.name)} is not one of the tools")
    return ToolChoice(type="function", function=NamedFunction(named.name))


def _allowed_names(allowed: list[dict[str, Any]], names: list[str]) -> set[str]:
    found = set()
    for index, raw in enumerate(allowed):
        where = f"tool_choice.allowed_tools.tools[{index}]"
        inner = raw.get(str(raw.get("type")))
        name = inner.get("name") if isinstance(inner, dict) else raw.get("name")
        if name not in names:
            raise bad_parameter(where, f"{show(name)} is not one of the tools")
        found.add(str(name))
    return found


def parse_chat(fields: dict[str, Any], ctx: ModelContext) -> PreparedRequest:
    """Parse the body of a chat completion."""
    body = _read_body(fields, ctx)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_parameter("top_logprobs", "is given without logprobs; send logprobs: true as well")
    template = _template(ctx)
    tools, choice = check_tools(body.tools or [], body.tool_choice)
    messages = normalise_prompt(check_messages(body.messages), ctx.normalise)
    urls = _take_images(messages, ctx)
    form = requested_form(body)
    calls = requested_calls(tools, choice, form, parallel=body.parallel_tool_calls is not False)
    prompt = _render(body, messages, tools, template)
    tags = None if prompt.answering else template.output_format.reasoning_after(prompt.text)
    encoded, of_prompt = _encoded(prompt, ctx, urls)
    n_top = n_top_logprobs(body, (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs")
    grammar = output_grammar(form, ctx, tags, inside=prompt.reasoning_open, calls=calls)
    structured = bool(tools) or grammar is not None
    unused = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {} if name not in template.source]
    max_tokens, budget = _max_tokens(body), body.max_thinking_tokens
    if budget is None and "reasoning_effort" not in template.source:
        budget = budget_of(body.reasoning_effort or "", ctx)
    options = GenerationOptions(
        sampling=sampling_params(body, ctx, random_seed(), n_top, direct=tags is None, structured=structured),
        turn_ends=[encoded.turn_ends],
        roles=[[str(message["role"]) for message in messages]],
        max_tokens=max_tokens,
        min_tokens=check_min_tokens(body, max_tokens),
        n=check_choices(body.n, 1),
        **common_options(body, ctx, ignored(ChatBody, fields, more=unused)),
        grammar=grammar,
        max_thinking_tokens=None if tags is None else budget,
        logprobs=n_top >= 0,
        tools=tools,
        custom=[tool["custom"]["name"] for tool in body.tools or () if tool["type"] == "custom"],
        reasoning_open=prompt.reasoning_open,
        show_reasoning=body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude),
        one_tool_call=body.parallel_tool_calls is False,
    )
    return PreparedRequest(options, [tuple(encoded.ids)], images=of_prompt)


def parse_apply_template(fields: dict[str, Any], ctx: ModelContext) -> bytes:
    """Return the prompt of a chat request as text."""
    prompt, _ = _prompt_only(fields, ctx)
    check_length(prompt.text, "messages", ctx)
    return msgspec.json.encode({"prompt": prompt.text})


def count_prompt(fields: dict[str, Any], ctx: ModelContext) -> int:
    """Return how many tokens the prompt of a chat request has, also beyond the context."""
    prompt, urls = _prompt_only(fields, ctx)
    return len(_encoded(prompt, replace(ctx, max_context=0), urls)[0].ids)


def _prompt_only(fields: dict[str, Any], ctx: ModelContext) -> tuple[RenderedPrompt, list[_ImageUrl]]:
    """Render the prompt of a chat request without compiling the grammar of its answer; also return its images."""
    body = _read_body(fields, ctx)
    tools, _ = check_tools(body.tools or [], body.tool_choice)
    messages = normalise_prompt(check_messages(body.messages), ctx.normalise)
    urls = _take_images(messages, ctx)
    return _render(body, messages, tools, _template(ctx)), urls


def _read_body(fields: dict[str, Any], ctx: ModelContext) -> ChatBody:
    """Return the checked body, with the `reasoning` and `thinking` objects merged into the plain parameters."""
    body = to_record(ChatBody, fields)
    check_common(body, ctx)
    if body.max_thinking_tokens == -1:
        body.max_thinking_tokens = None
    source = "" if ctx.template is None else ctx.template.source
    switch = "enable_thinking" in source
    wishes: list[tuple[bool | None, int | None]] = []
    if (reasoning := body.reasoning) is not None:
        budget = reasoning.max_tokens
        if switch or "reasoning_effort" in source:
            body.reasoning_effort = body.reasoning_effort or reasoning.effort
        elif budget is None and reasoning.effort is not None:
            budget = budget_of(reasoning.effort, ctx)
        wishes.append((reasoning.enabled, budget))
    if (thinking := body.thinking) is not None:
        wish = {"enabled": True, "disabled": False}.get(thinking.type)
        wishes.append((wish, thinking.budget_tokens if wish else None))
    for wish, budget in wishes:
        if body.max_thinking_tokens is None:
            body.max_thinking_tokens = budget if wish is not False or switch else 0
        if body.enable_thinking is None and switch:
            body.enable_thinking = wish
    return body


def _template(ctx: ModelContext) -> ChatTemplate:
    if ctx.template is None:
        check_generates(ctx)
        raise ApiError(
            400, "the model's file has no chat template; use /v1/completions", code="no_chat_template", param="model"
        )
    return ctx.template


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_parameter("max_completion_tokens", f"{new} contradicts max_tokens = {old}; send one of them")
    n_tokens = old if new is None else new
    if n_tokens == 0:
        name = "max_tokens" if new is None else "max_completion_tokens"
        raise bad_parameter(name, "0 leaves no room for an answer; send 1 or more, or -1 for no limit")
    return max_tokens_of(n_tokens)


def _render(
    body: ChatBody, messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: ChatTemplate
) -> RenderedPrompt:
    if tools and (template.output_format.tools is None or "tools" not in template.source):
        raise bad_parameter(
            "tools", "the model's chat template does not support tools; leave them out", "unsupported_parameter"
        )
    extra = {name: value for name, value in (body.chat_template_kwargs or {}).items() if name in template.source}
    if body.reasoning_effort is not None and "reasoning_effort" in template.source:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    continued = _continues(body, messages)
    try:
        return template.render(
            messages,
            tools=tools,
            enable_thinking=_thinking(body, template),
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=extra,
            continued=continued,
        )
    except TemplateError as error:
        param = "chat_template_kwargs" if str(error).startswith("chat_template_kwargs") else "messages"
        raise ApiError(400, str(error), code="template_error", param=param) from None


def _continues(body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    last = messages[-1]
    if body.continue_final_message:
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise bad_parameter(
                "continue_final_message", "true needs a last message of role assistant without tool calls"
            )
        return True
    asked = body.continue_final_message is None and body.add_generation_prompt is not False
    return asked and last["role"] == "assistant" and not last.get("tool_calls")


_ImageUrl = tuple[str, str]
"""Where an image stands in the body, and its URL."""


def _take_images(messages: list[dict[str, Any]], ctx: ModelContext) -> list[_ImageUrl]:
    """Take the images out of messages, of which their places stay; raises ApiError where none are read."""
    urls = images.take_images(messages)
    if urls and ctx.images is None:
        why = "is an image, and this server reads none: it has no vision encoder (vision.path); send text"
        raise bad_parameter(urls[0][0], why, "unsupported_content")
    return urls


def _encoded(
    prompt: RenderedPrompt, ctx: ModelContext, urls: list[_ImageUrl]
) -> tuple[EncodedPrompt, tuple[tuple[int, EncoderImage], ...]]:
    """Return the ids of a prompt, and its images with where they start."""
    check_length(prompt.text, "messages", ctx)
    encoded = prompt.encoded(ctx.tokenizer)
    if not urls or ctx.images is None:
        check_tokens(len(encoded.ids), "messages", ctx)
        return encoded, ()
    found = [ctx.images.read(url, where) for where, url in urls]
    encoded, starts = images.place_images(encoded, found, ctx.tokenizer, ctx.images.projector)
    check_tokens(len(encoded.ids), "messages", ctx)
    return encoded, tuple(zip(starts, found, strict=True))


def _thinking(body: ChatBody, template: ChatTemplate) -> bool | None:
    """Return whether the model should think (None: the template's default); raises ApiError if it cannot be set."""
    wish, param = body.enable_thinking, "enable_thinking"
    if body.reasoning_effort is not None:
        by_effort = body.reasoning_effort not in ("none", "minimal")
        if wish is not None and wish != by_effort:
            raise bad_parameter(
                "reasoning_effort", f"{show(body.reasoning_effort)} contradicts enable_thinking; send one of them"
            )
        wish, param = by_effort, "reasoning_effort"
    if wish is None or "enable_thinking" in template.source:
        return wish
    if wish and not (param == "reasoning_effort" and param in template.source):
        raise bad_parameter(
            param, "the model's chat template cannot switch thinking on; leave it out", "unsupported_value"
        )
    if not wish and param == "enable_thinking" and template.output_format.reasoning is not None:
        raise bad_parameter(
            param,
            "the model's chat template cannot switch thinking off; leave it out, or send max_thinking_tokens: 0",
            "unsupported_value",
        )
    return None


_Result = TypeVar("_Result")
_INDEXED: Final = re.compile(r"(messages|tools)\[(\d+)\]")
_IMAGE: Final = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]\.image_url")


@dataclass(slots=True)
class ChatRequestBuilder:
    """Chat request built from another dialect's body. `origins`: path of each message and tool in it; `unused`: fields
    without effect."""

    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    origins: dict[str, list[str]] = field(default_factory=lambda: {"messages": [], "tools": []})
    unused: list[str] = field(default_factory=list)

    def add_message(self, message: dict[str, Any], origin: str) -> None:
        self.messages.append(message)
        self.origins["messages"].append(origin)

    def add_tool(self, function: dict[str, Any], origin: str) -> None:
        """Append a tool, given its function; fields that are None are left out."""
        kept = {name: value for name, value in function.items() if value is not None}
        self.tools.append({"type": "function", "function": kept})
        self.origins["tools"].append(origin)

    def keep_tools(self, names: Collection[object]) -> None:
        kept = [i for i, tool in enumerate(self.tools) if tool["function"]["name"] in names]
        self.tools = [self.tools[i] for i in kept]
        self.origins["tools"] = [self.origins["tools"][i] for i in kept]

    def read(self, ctx: ModelContext, names: Mapping[str, str]) -> PreparedRequest:
        """Prepare the request; `names`: where chat parameters come from.  Raises ApiError with the field's own name."""
        return self._read(parse_chat, ctx, names)

    def count(self, ctx: ModelContext, names: Mapping[str, str]) -> int:
        """Return how many tokens the prompt has, also beyond the context; otherwise as `read`."""
        return self._read(count_prompt, ctx, names)

    def _read(
        self, reader: Callable[[dict[str, Any], ModelContext], _Result], ctx: ModelContext, names: Mapping[str, str]
    ) -> _Result:
        try:
            return reader({**self.fields, "messages": self.messages, "tools": self.tools or None}, ctx)
        except ApiError as error:
            raise error.renamed(self._origin(error.param or "", names)) from None

    def _origin(self, param: str, names: Mapping[str, str]) -> str:
        if found := _IMAGE.match(param):
            part = self.messages[int(found[1])]["content"][int(found[2])]
            if "origin" in part:
                return str(part["origin"])
        if found := _INDEXED.match(param):
            rest = param[found.end() :]
            return self.origins[found[1]][int(found[2])] + rest.removeprefix(".content").replace(".function", "", 1)
        for chat_name, name in names.items():
            if param == chat_name or param.startswith((f"{chat_name}.", f"{chat_name}[")):
                return name + param[len(chat_name) :]
        return param


class ChatFormatter(OpenAiFormatter):
    """Formatter of chat completions and their chunks."""

    id_prefix = "chatcmpl-"
    chunk_kind = "chat.completion.chunk"

    def start(self, index: int) -> Sequence[object]:
        return [self._chunk(index, {"role": "assistant", "content": ""}, ChoiceDelta(None)) | self.prompt_ids(index)]

    def delta(self, index: int, delta: ChoiceDelta) -> Sequence[object]:
        fields: dict[str, object] = {}
        match delta.event:
            case ContentDelta(text):
                fields["content"] = text
            case ReasoningDelta(text) if self.options.show_reasoning:
                fields["reasoning_content"] = text
            case ToolCallDelta() as call:
                fields["tool_calls"] = [{"index": call.index, **self._tool_call(index, call)}]
        return [self._chunk(index, fields, delta)]

    def full(self, choices: Sequence[Sequence[ChoiceDelta]], totals: UsageTotals) -> object:
        bodies = [self._full_choice(index, deltas) for index, deltas in enumerate(choices)]
        return self.response("chat.completion", bodies, totals) | self.prompt_ids(0)

    def _chunk(self, index: int, fields: dict[str, object], delta: ChoiceDelta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "delta": fields,
            "logprobs": self._logprobs(delta.tokens),
            "finish_reason": delta.finish_reason,
        }
        return self.chunk(index, choice, delta)

    def _full_choice(self, index: int, deltas: Sequence[ChoiceDelta]) -> dict[str, object]:
        events = [delta.event for delta in deltas]
        content = "".join(e.text for e in events if isinstance(e, ContentDelta))
        reasoning = "".join(e.text for e in events if isinstance(e, ReasoningDelta))
        calls = [self._tool_call(index, e) for e in events if isinstance(e, ToolCallDelta)]
        message: dict[str, object] = {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
        }
        if reasoning and self.options.show_reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        choice: dict[str, object] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs([token for delta in deltas for token in delta.tokens], full=True),
            "finish_reason": deltas[-1].finish_reason,
        }
        return self.with_ids(choice, deltas)

    def _logprobs(self, tokens: Sequence[TokenRecord], *, full: bool = False) -> object:
        if not self.options.logprobs or not (full or any(token.content for token in tokens)):
            return None
        return chat_logprobs(self.tokenizer, tokens)

    def _tool_call(self, index: int, call: ToolCallDelta) -> dict[str, object]:
        # Globally unique, as the response id is; clients send it back with the tool's result.
        call_id = f"call_{self.unique_id}{index:02d}{call.index:02d}"
        if call.name in self.options.custom:
            custom = {"name": call.name, "input": custom_input(call.arguments)}
            return {"id": call_id, "type": "custom", "custom": custom}
        return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
