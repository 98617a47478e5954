"""The bodies of Ollama's API as chat completion requests, or completions with ``raw``.

Pure: translates names and structure and leaves meaning, limits and the chat template to chat.py.  Invariant: an error
names the field as the client wrote it (`options.temperature`), also where chat.py found it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.output.ollama import created_at
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.checks import check_ids, check_model, check_tokens
from lucevisor.api.prompts.completions import infill_ids, read_completion
from lucevisor.api.prompts.decoding import convert, ignored, to_record
from lucevisor.api.prompts.draft import ChatDraft
from lucevisor.api.prompts.ollama_schemas import (
    IDLE_OPTIONS,
    OPTIONS,
    RULES,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from lucevisor.errors import show

_EFFORTS: Final = ("low", "medium", "high", "max")
_NAMES: Final = {
    **{chat: f"options.{name}" for name, chat in OPTIONS.items()},
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "chat_template_kwargs.reasoning_effort": "think",
}
"""Parameters of chat completions, and those of this API that they are made from."""


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


class OllamaToolCall(msgspec.Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def read_ollama_chat(fields: dict[str, Any], ports: Ports) -> PreparedRequest | bytes:
    """Prepare the request in a decoded body, or answer one without messages; raises ApiError."""
    body = to_record(OllamaChatBody, fields, RULES)
    check_model(body.model, ports)
    if not body.messages:
        return _loaded(fields, ports, {"message": {"role": "assistant", "content": ""}})
    chat = ChatDraft(fields=_common(body, ports))
    _add_messages(chat, body.messages)
    for index, tool in enumerate(body.tools or ()):
        function = tool.get("function") if tool.get("type", "function") == "function" else None
        if not isinstance(function, dict):
            raise bad_parameter(f"tools[{index}].function", "is missing; send functions")
        chat.add_tool(function, f"tools[{index}]")
    return _named(chat.read(ports, _NAMES), OllamaChatBody, fields, body)


def read_ollama_generate(fields: dict[str, Any], ports: Ports) -> PreparedRequest | bytes:
    """Prepare the request in a decoded body, or answer one without a prompt; raises ApiError."""
    body = to_record(OllamaGenerateBody, fields, RULES)
    check_model(body.model, ports)
    if not body.prompt:
        return _loaded(fields, ports, {"response": ""})
    if body.raw or body.suffix or ports.template is None:
        for name, given in (("system", body.system), ("context", body.context)):
            if given:
                raise bad_parameter(name, "has no place in a raw prompt or a gap; leave it out, or raw and suffix")
        return _named(_read_raw(body, ports), OllamaGenerateBody, fields, body)
    chat = ChatDraft(fields=_common(body, ports))
    if body.system:
        chat.add_message({"role": "system", "content": body.system}, "system")
    chat.add_message({"role": "user", "content": body.prompt}, "prompt")
    prepared = _continued(chat.read(ports, _NAMES | {"messages": "prompt"}), body.context or [], ports)
    return _named(prepared, OllamaGenerateBody, fields, body)


def read_show(fields: dict[str, Any], ports: Ports) -> bytes:
    """Check a decoded body of /api/show; the answer does not depend on it.  Raises ApiError."""
    body = to_record(ShowBody, fields, RULES)
    check_model(body.model or body.name, ports)
    return b""


def _loaded(fields: dict[str, Any], ports: Ports, what: dict[str, object]) -> bytes:
    """Return the answer to a request that only loads or unloads the model, which is always loaded."""
    reason = "unload" if fields.get("keep_alive") in (0, "0", "0s") else "load"
    head = {"model": ports.model.name, "created_at": created_at(ports.model.created_s)}
    return msgspec.json.encode({**head, **what, "done_reason": reason, "done": True})


def _named(
    prepared: PreparedRequest, kind: type[OllamaBody], fields: dict[str, Any], body: OllamaBody
) -> PreparedRequest:
    idle = [f"options.{name}" for name in body.options or () if name not in OPTIONS]
    names = tuple(sorted({*ignored(kind, fields, RULES), *idle}))
    return PreparedRequest(msgspec.structs.replace(prepared.options, ignored=names), prepared.prompts)


def _read_raw(body: OllamaGenerateBody, ports: Ports) -> PreparedRequest:
    fields = _common(body, ports)
    logprobs = fields.pop("top_logprobs", 0) if fields.pop("logprobs", None) else None
    for name in ("enable_thinking", "reasoning_effort", "top_logprobs"):
        fields.pop(name, None)
    prompt = infill_ids(body.prompt or "", body.suffix, (), "suffix", ports) if body.suffix else body.prompt
    try:
        prepared = read_completion({**fields, "prompt": prompt, "logprobs": logprobs}, ports)
    except ApiError as error:
        raise error.renamed(_NAMES.get(error.param or "", error.param or "")) from None
    return PreparedRequest(msgspec.structs.replace(prepared.options, plain=True), prepared.prompts)


def _continued(prepared: PreparedRequest, context: list[int], ports: Ports) -> PreparedRequest:
    """Put the ids of an earlier conversation before the prompt; raises ApiError."""
    if not context:
        return prepared
    added = prepared.prompts[0]
    starts_again = added[:1] == (ports.tokenizer.bos,)
    n_before = len(context) - starts_again
    ids = (*check_ids(context, "context", ports), *added[starts_again:])
    check_tokens(len(ids), "context", ports)
    turn_ends = [len(context), *(n_before + end for end in prepared.options.turn_ends[0])]
    options = msgspec.structs.replace(prepared.options, turn_ends=[turn_ends], roles=[[]])
    return PreparedRequest(options, [ids])


def _common(body: OllamaBody, ports: Ports) -> dict[str, Any]:
    """Return the fields of a chat request without messages and tools."""
    fields: dict[str, Any] = {"stream": body.stream is not False}
    if body.logprobs or body.top_logprobs is not None:
        fields |= {"logprobs": bool(body.logprobs), "top_logprobs": body.top_logprobs}
    if isinstance(body.format, dict):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise bad_parameter("format", f'{show(body.format)} is not a format; send "json" or a JSON schema')
    for name, value in (body.options or {}).items():
        if name in OPTIONS:
            whole = isinstance(value, float) and value.is_integer()  # clients in JavaScript and Go write 5.0
            fields[OPTIONS[name]] = int(value) if whole else value
        elif name not in IDLE_OPTIONS:
            to_record(_Options, {name: value}, RULES)
    if isinstance(wished := fields.get("max_tokens"), int) and wished <= 0:  # -1, -2: without a limit
        del fields["max_tokens"]
    if fields.get("stop") == []:
        del fields["stop"]
    return fields | _thinking(body, ports)


_Options = msgspec.defstruct("_Options", [(name, object, None) for name in (*OPTIONS, *IDLE_OPTIONS)])


def _thinking(body: OllamaBody, ports: Ports) -> dict[str, Any]:
    """Return how the model should think; a template without a switch leaves that to the model."""
    source = "" if ports.template is None else ports.template.source
    if body.think is None:
        return {}
    if isinstance(body.think, str):
        if body.think not in _EFFORTS:
            raise bad_parameter(
                "think", f"{show(body.think)} is not a level; send true, false or {', '.join(_EFFORTS)}"
            )
        return {"reasoning_effort": body.think} if "enable_thinking" in source or "reasoning_effort" in source else {}
    return {"enable_thinking": body.think} if "enable_thinking" in source else {}


def _add_messages(chat: ChatDraft, messages: Sequence[dict[str, Any]]) -> None:
    """Append the messages.  Calls have no ids in this API: results answer them in their order."""
    waiting: list[tuple[str, str]] = []  # name and id of calls without a result
    for index, raw in enumerate(messages):
        where = f"messages[{index}]"
        message = convert(OllamaMessage, raw, where)
        if message.images:
            raise bad_parameter(
                f"{where}.images", "are not supported; this server reads text only", "unsupported_content"
            )
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        if message.tool_calls:
            ids = [call.id or f"call_{index}_{i}" for i, call in enumerate(message.tool_calls)]
            waiting = [(call.function.name, id_) for call, id_ in zip(message.tool_calls, ids, strict=True)]
            made["tool_calls"] = [
                {"id": id_, "type": "function", "function": msgspec.to_builtins(call.function)}
                for call, id_ in zip(message.tool_calls, ids, strict=True)
            ]
        if message.role == "tool":
            answered = next((one for one in waiting if message.tool_name in (None, one[0])), None)
            if answered is not None:
                waiting.remove(answered)
            made["tool_call_id"] = message.tool_call_id or (answered[1] if answered else f"call_{index}")
        chat.add_message(made, where)
