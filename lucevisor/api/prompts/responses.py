"""The body of OpenAI's Responses API as a chat completion request.

Pure: translates names and structure and leaves meaning, limits and the chat template to chat.py.  Invariant: an error
names the field as the client wrote it, also where chat.py found it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import STORED_RESPONSES, PreparedRequest, ResponseOptions
from lucevisor.api.prompts.decoding import convert, ignored, to_record
from lucevisor.api.prompts.draft import ChatDraft
from lucevisor.api.prompts.messages import CustomTool, custom_function
from lucevisor.api.prompts.responses_items import add_items, function_name
from lucevisor.api.prompts.responses_schemas import (
    RULES,
    FunctionChoice,
    FunctionTool,
    ItemReference,
    Namespace,
    ResponsesBody,
    TextConfig,
    TextFormat,
)
from lucevisor.api.prompts.schemas import AllowedTools
from lucevisor.errors import show
from lucevisor.protocol.steps import Sampling
from lucevisor.text.template import ChatTemplate

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


def read_response(fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the field at fault."""
    draft = _translated(fields, ports)
    body, chat = draft.body, draft.chat
    prepared = chat.read(ports, _CHAT_NAMES)
    include = body.include or []
    response = ResponseOptions(
        echo=msgspec.json.encode(_echo(body, fields, prepared.options.sampling)),
        items=msgspec.json.encode(draft.own),
        previous_id=body.previous_response_id,
        store=body.store is not False,
        summary=body.reasoning is not None and bool(body.reasoning.summary or body.reasoning.generate_summary),
        encrypted=_ENCRYPTED in include,
        namespaces=draft.namespaces,
        custom=draft.custom,
    )
    names = tuple(sorted({*ignored(ResponsesBody, fields, RULES), *chat.unused}))
    options = msgspec.structs.replace(prepared.options, ignored=names, response=response)
    return PreparedRequest(options, prepared.prompts)


def read_input_tokens(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the response to a decoded body: how many tokens its prompt has, also beyond the context."""
    n_tokens = _translated(fields, ports).chat.count(ports, _CHAT_NAMES)
    return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": n_tokens})


@dataclass(frozen=True, slots=True)
class _Draft:
    """A body and the chat request that it means.

    `own`: its input items; `namespaces` and `custom` as in ResponseOptions.
    """

    body: ResponsesBody
    chat: ChatDraft
    own: list[dict[str, Any]]
    namespaces: dict[str, str]
    custom: list[str]


def _translated(fields: dict[str, Any], ports: Ports) -> _Draft:
    stored = _stored_turns(fields.pop(STORED_RESPONSES, {}))
    body = to_record(ResponsesBody, fields, RULES)
    chat = ChatDraft()
    if body.instructions:
        chat.add_message({"role": "system", "content": body.instructions}, "instructions")
    own = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _resolved(body.input, stored)
    add_items(chat, _located(body, stored, own))
    namespaces, custom = _translate_tools(body, chat)
    _translate_choice(body, chat)
    _translate_reasoning(body, chat, ports.template)
    _translate_output(body, chat)
    return _Draft(body, chat, own, namespaces, custom)


def _stored_turns(value: object) -> _StoredTurns:
    try:
        return msgspec.convert(value, _StoredTurns)
    except msgspec.ValidationError:  # not the server's
        raise bad_parameter(STORED_RESPONSES, "is the server's own; leave it out", "unknown_parameter") from None


def previous_not_stored(response_id: str) -> ApiError:
    """Return the 404 for a previous_response_id."""
    return ApiError(
        404,
        f"previous_response_id: {show(response_id)} is not stored here (never, no longer, or for another key); "
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


def _translate_tools(body: ResponsesBody, chat: ChatDraft) -> tuple[dict[str, str], list[str]]:
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


def _add_custom(chat: ChatDraft, raw: dict[str, Any], where: str) -> str:
    """Add a custom tool as a function of one text."""
    tool = convert(CustomTool, raw, where)
    if tool.grammar is not None:
        chat.unused.append(f"{where}.format")
    chat.add_tool(custom_function(tool), where)
    return tool.name


def _add_function(chat: ChatDraft, raw: dict[str, Any], where: str, namespace: str | None) -> str:
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


def _translate_choice(body: ResponsesBody, chat: ChatDraft) -> None:
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


def _translate_reasoning(body: ResponsesBody, chat: ChatDraft, template: ChatTemplate | None) -> None:
    """Pass the effort on; where the template has no switch the model thinks or not as it does."""
    effort = body.reasoning.effort if body.reasoning is not None else None
    if effort is None or template is None:
        return
    if "enable_thinking" in template.source or "reasoning_effort" in template.source:
        chat.fields["reasoning_effort"] = effort
    elif (effort not in ("none", "minimal")) != (template.output_format.reasoning is not None):
        chat.unused.append("reasoning.effort")


def _translate_output(body: ResponsesBody, chat: ChatDraft) -> None:
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


def _echo(body: ResponsesBody, fields: dict[str, Any], sampling: Sampling) -> dict[str, object]:
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
    told: dict[str, object] = {"type": form.type}
    if form.type == "json_schema":
        more = {"description": form.description, "name": form.name or "", "schema": form.schema}
        told |= {**more, "strict": bool(form.strict)}
    return {"format": told, **({} if text.verbosity is None else {"verbosity": text.verbosity})}


def _echoed_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool with the fields that a function has, also those that the request left out."""
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}
