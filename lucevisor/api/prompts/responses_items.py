"""Items of OpenAI's Responses API as chat messages.

Pure.  Invariant: what the assistant did between two inputs (reasoning, text, calls) becomes one message, as chat
templates expect it, with its parts in the order of their kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from lucevisor.api.carried_reasoning import decode_reasoning
from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.prepared import CUSTOM_INPUT
from lucevisor.api.prompts.decoding import convert
from lucevisor.api.prompts.draft import ChatDraft
from lucevisor.api.prompts.responses_schemas import (
    CustomToolCallItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    MessageItem,
    ReasoningItem,
)
from lucevisor.errors import show

_ASSISTANT_ITEMS: Final = ("reasoning", "function_call", "custom_tool_call")
"""Types of items that the assistant makes, besides messages."""
_TEXT_PARTS: Final = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts with text, and the field that holds it."""


@dataclass(slots=True)
class _Turn:
    """What the assistant did since the last input."""

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


def add_items(chat: ChatDraft, items: Iterable[tuple[str, dict[str, Any]]]) -> None:
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
