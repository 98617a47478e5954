"""Validates OpenAI chat messages and tools, and passes them on to the chat template unchanged.

Knows the schemas, not the template language.  Invariant: the result holds text only, every field has the type that
templates rely on, and only null fields are dropped.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from lucevisor.api.errors import bad_parameter
from lucevisor.api.prompts.decoding import convert
from lucevisor.api.prompts.schemas import MAX_TOOL_VALUES, ToolChoice
from lucevisor.errors import show

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = ""


class _ToolCall(msgspec.Struct):
    function: _Function
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


class _Tool(msgspec.Struct):
    type: str
    function: _ToolFunction | None = None


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
    for index, call in enumerate(message.tool_calls or ()):
        if call.type not in (None, "function"):
            raise bad_parameter(
                f"{where}.tool_calls[{index}].type", f"{show(call.type)} is not supported; use function"
            )
    kept = {name: value for name, value in raw.items() if value is not None}
    if isinstance(message.content, list):
        _check_parts(message.content, f"{where}.content")
    elif message.content is None:
        if message.role != "assistant" or not (message.tool_calls or message.refusal or message.reasoning_content):
            raise bad_parameter(f"{where}.content", "is missing; it is required", "missing_required_parameter")
        kept["content"] = message.refusal or ""
    return kept


def _check_parts(parts: list[dict[str, Any]], where: str) -> None:
    if not parts:
        raise bad_parameter(where, "is an empty array; send text")
    for index, part in enumerate(parts):
        kind = part.get("type")
        if kind != "text":
            raise bad_parameter(
                f"{where}[{index}].type",
                f"{show(kind)} is not supported; this server accepts parts of type text only",
                "unsupported_content",
            )
        if not isinstance(part.get("text"), str):
            raise bad_parameter(f"{where}[{index}].text", "is missing or not a string; it is required")


def check_tools(tools: list[dict[str, Any]], choice: object) -> list[dict[str, Any]]:
    """Return the tools to offer to the model; raises ApiError 400 for what the server does not support.

    `choice` is the decoded tool_choice.  "none" offers no tools, so that the model cannot call one.
    """
    if not _has_at_most(tools, MAX_TOOL_VALUES):
        raise bad_parameter("tools", f"have more than {MAX_TOOL_VALUES} JSON values; offer fewer or simpler tools")
    names = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    _check_choice(choice, names)
    if choice == "none":
        return []
    return [{**tool, "function": {k: v for k, v in tool["function"].items() if v is not None}} for tool in tools]


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


def _check_tool(raw: dict[str, Any], where: str) -> str:
    tool = convert(_Tool, raw, where)
    if tool.type != "function":
        raise bad_parameter(f"{where}.type", f"{show(tool.type)} is not supported; use function", "unsupported_value")
    if tool.function is None:
        raise bad_parameter(f"{where}.function", "is missing; it is required", "missing_required_parameter")
    if not tool.function.name:
        raise bad_parameter(f"{where}.function.name", "is empty; give the function a name")
    return tool.function.name


def _check_choice(choice: object, names: list[str]) -> None:
    if choice in (None, "none"):
        return
    if isinstance(choice, ToolChoice):
        if choice.type != "function" or choice.function is None:
            raise bad_parameter("tool_choice.type", f"{show(choice.type)} is not supported; use function and its name")
        if choice.function.name not in names:
            raise bad_parameter("tool_choice.function.name", f"{show(choice.function.name)} is not one of the tools")
    elif choice not in ("auto", "required"):
        raise bad_parameter("tool_choice", f"{show(choice)} is not a choice; use auto, none, required or a function")
    elif not names:
        raise bad_parameter("tool_choice", "is given without tools; send tools or leave it out")
