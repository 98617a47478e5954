"""Validates OpenAI chat messages and tools, and passes them on to the chat template: custom tools as functions, the
rest unchanged.

Knows the schemas, not the template language.  Invariant: the result holds text only, every field has the type that
templates rely on, and only null fields are dropped.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lucevisor.api.errors import bad_parameter
from lucevisor.api.prepared import CUSTOM_INPUT
from lucevisor.api.prompts.decoding import convert
from lucevisor.api.prompts.schemas import MAX_TOOL_VALUES, NamedFunction, ToolChoice
from lucevisor.errors import show

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
    """Return a custom tool as a function of one text.  Its grammar is told to the model, and not enforced."""
    told = [tool.description or ""]
    if (grammar := tool.grammar) is not None:
        told.append(f"The input must follow this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}")
    schema = {"type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT]}
    return {"name": tool.name, "description": "\n\n".join(filter(None, told)), "parameters": schema}


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
        _check_parts(message.content, f"{where}.content")
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


def _check_parts(parts: list[dict[str, Any]], where: str) -> None:
    if not parts:
        raise bad_parameter(where, "is an empty array; send text")
    for index, part in enumerate(parts):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise bad_parameter(
                f"{where}[{index}].type",
                f"{show(kind)} is not supported; this server accepts parts of type text only",
                "unsupported_content",
            )
        if not isinstance(part.get(kind), str):
            raise bad_parameter(f"{where}[{index}].{kind}", "is missing or not a string; it is required")


def check_tools(
    tools: list[dict[str, Any]], choice: str | ToolChoice | None
) -> tuple[list[dict[str, Any]], str | ToolChoice | None]:
    """Return the tools to offer to the model, functions all, and the choice among them: a word or one function.

    `choice` is the decoded tool_choice.  "none" offers no tools, so that the model cannot call one, and `allowed_tools`
    only those.  Raises ApiError 400 for what the server does not support.
    """
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


def custom_names(tools: list[dict[str, Any]]) -> list[str]:
    """Return the names of the custom tools among checked ones."""
    return [tool["custom"]["name"] for tool in tools if tool["type"] == "custom"]


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
