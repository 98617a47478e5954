"""Converts OpenAI chat messages into what chat templates expect, without changing the client's text."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, NoReturn

from lucevisor.errors import LucevisorError

_REASONING_FIELDS: Final = ("reasoning_content", "thinking", "reasoning")
_SYSTEM: Final = ("system", "developer")
_SHORT_ID: Final = re.compile("[a-zA-Z0-9]{9}")


class TemplateError(LucevisorError):
    """A chat cannot be rendered; the message names the part at fault and can be shown to the client."""


@dataclass(frozen=True)
class TemplateTraits:
    """Features of a chat template."""

    content_parts: bool
    developer_role: bool
    embedded_tool_responses: bool
    more_system_messages: bool
    short_call_ids: bool = False  # of nine letters and digits, as Mistral's insist
    single_calls: bool = False  # of several calls in a message only the first is rendered, with its result behind it


def prepare_messages(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """Return messages that the API has checked in the template's form."""
    prepared = [_prepare(message, traits) for message in messages]
    if traits.single_calls:
        prepared = _with_single_calls(prepared)
    if not traits.more_system_messages:
        prepared = _with_one_system_message(prepared)
    return _embed_tool_responses(prepared) if traits.embedded_tool_responses else prepared


def _prepare(message: Mapping[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    result = dict(message)
    if result["role"] == "developer" and not traits.developer_role:
        result["role"] = "system"
    reasoning = next((result[name] for name in _REASONING_FIELDS if result.get(name) is not None), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    content = result.get("content")
    if isinstance(content, (list, tuple)):
        parts = [
            {"type": "image"} if part["type"] == "image" else {"type": "text", "text": part[part["type"]]}
            for part in content  # of text, of a refusal, or an image
        ]
        if traits.content_parts:
            result["content"] = parts
        elif any(part["type"] == "image" for part in parts):
            raise TemplateError("the model's chat template takes no images; leave them out")
        else:
            result["content"] = "\n".join(part["text"] for part in parts)
    if calls := result.get("tool_calls"):  # clients send arguments as JSON text, templates iterate over an object
        result["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _decoded(call["function"].get("arguments"))}}
            for call in calls
        ]
    if traits.short_call_ids:
        if isinstance(answered := result.get("tool_call_id"), str):
            result["tool_call_id"] = _short_id(answered)
        if calls := result.get("tool_calls"):
            result["tool_calls"] = [{**call, "id": _short_id(str(call.get("id") or i))} for i, call in enumerate(calls)]
    return result


def _with_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each call, followed by its result; what was thought and said before the first is one text."""
    result: list[dict[str, Any]] = []
    for is_tool, run in groupby(messages, lambda message: message["role"] == "tool"):
        answers = list(run)
        if not is_tool:
            for message in answers:
                plain = {name: value for name, value in message.items() if name != "tool_calls"}
                result += _single_calls(message) or [plain]
            continue
        calls = list[dict[str, Any]]()
        while result and result[-1].get("tool_calls"):
            calls.insert(0, result.pop())
        for message in calls:
            call_id = message["tool_calls"][0].get("id")
            own = [answer for answer in answers if answer.get("tool_call_id") == call_id]
            result += [message, *own]
            answers = [answer for answer in answers if answer not in own]
        result += answers
    return result


def _single_calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message for each of its calls."""
    said = [text for text in (message.get("thinking"), message.get("content")) if text and isinstance(text, str)]
    rest = {name: value for name, value in message.items() if name not in ("thinking", *_REASONING_FIELDS)}
    before = {**rest, "content": "\n\n".join(said)}
    return [
        {**(before if i == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]}
        for i, call in enumerate(message.get("tool_calls") or [])
    ]


def _short_id(call_id: str) -> str:
    """Nine hexadecimal digits, always the same ones for an id; an id of nine letters and digits stays."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _decoded(arguments: object) -> object:
    """Decode the JSON text of an object; other text stays unchanged, for the template to accept or reject."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_real)
        return _encodable(value) if isinstance(value, dict) else arguments
    except (ValueError, RecursionError):
        return arguments


def for_strict_template(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return prepared messages for a template that refused them: calls whose arguments are no object become text, there
    is a user message, each has a content, and turns of the user, or the assistant, that follow one another
    are joined."""
    whole = [message | ({"content": ""} if message.get("content") is None else {}) for message in messages]
    result = _with_turns([_with_malformed_calls_as_text(message) for message in whole])
    if not any(message["role"] == "user" for message in result):
        n_opening = next((i for i, m in enumerate(result) if m["role"] not in _SYSTEM), len(result))
        result.insert(n_opening, {"role": "user", "content": ""})
    return result


def _with_turns(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    for message in messages:
        before = result[-1] if result else {}
        turns = [m for m in (before, message) if m.get("role") in ("user", "assistant") and not m.get("tool_calls")]
        if len(turns) == 2 and before["role"] == message["role"]:
            result[-1] = {**before, **message, "content": _joined([m.get("content") or "" for m in turns])}
        else:
            result.append(message)
    return result


def _joined(contents: Sequence[object]) -> object:
    """Contents as one: a text, or parts where one of them has parts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(map(str, contents))
    return [part for content in contents for part in _parts(content)]


def _with_malformed_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    functions = [call["function"] for call in calls] if isinstance(calls, list) else []
    texts = [f"{f['name']}({f['arguments']})" for f in functions if not isinstance(f["arguments"], dict)]
    if not texts or not isinstance(calls, list):
        return message
    well_formed = [call for call in calls if isinstance(call["function"]["arguments"], dict)]
    content = message.get("content") or ""
    joined: object
    if isinstance(content, list):
        joined = [*content, *({"type": "text", "text": text} for text in texts)]
    else:
        joined = "\n".join([*([str(content)] if content else []), *texts])
    result = {name: value for name, value in message.items() if name != "tool_calls"}
    return result | {"content": joined} | ({"tool_calls": well_formed} if well_formed else {})


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _integer(digits: str) -> object:
    return int(digits) if len(digits) <= 1000 else digits


def _real(digits: str) -> object:
    """Return a float; one beyond a double stays text, as templates would write it as Infinity."""
    value = float(digits)
    return value if math.isfinite(value) else digits


def _encodable(value: object) -> object:
    """Replace lone surrogates, which JSON can escape and UTF-8 cannot encode, by U+FFFD."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return value


def _with_one_system_message(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages that open a chat, and make later ones the user's, as coding agents send both."""
    n_opening = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM), len(messages))
    talk = [{**m, "role": "user"} if m["role"] in _SYSTEM else m for m in messages[n_opening:]]
    if n_opening < 2:
        return [*messages[:n_opening], *talk]
    contents = [m.get("content") or "" for m in messages[:n_opening]]
    return [{**messages[0], "content": _joined(contents)}, *talk]


def _parts(content: object) -> list[object]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _embed_tool_responses(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Move each tool message into the assistant message that called the tool, as `tool_responses`."""
    result: list[dict[str, Any]] = []
    names: dict[object, object] = {}
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            names = {call.get("id"): call["function"]["name"] for call in calls}
        if message["role"] == "tool" and result and "tool_calls" in result[-1]:
            name = message.get("name") or names.get(message.get("tool_call_id")) or "unknown"
            earlier = result[-1].get("tool_responses", [])
            content = message.get("content")
            text = "".join(part.get("text", "") for part in content) if isinstance(content, list) else content
            response = {"name": name, "response": text}
            result[-1] = {**result[-1], "tool_responses": [*(earlier if isinstance(earlier, list) else []), response]}
        else:
            result.append(message)
    return result
