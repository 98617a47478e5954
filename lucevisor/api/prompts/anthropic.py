"""The bodies of Anthropic's Messages API as chat completion requests.

Pure: translates names and structure and leaves meaning, limits and the chat template to chat.py.  Invariant: an error
names the field as the client wrote it (`messages.0.content.1.type`), also where chat.py found it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from lucevisor.api.errors import ApiError, bad_parameter
from lucevisor.api.ports import Ports
from lucevisor.api.prepared import PreparedRequest
from lucevisor.api.prompts.anthropic_schemas import (
    RULES,
    CountTokensBody,
    MessagesBody,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
)
from lucevisor.api.prompts.decoding import convert, ignored, to_record
from lucevisor.api.prompts.draft import ChatDraft
from lucevisor.api.prompts.sampling import budget_of
from lucevisor.errors import show
from lucevisor.text.template import ChatTemplate

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
"""A content block and where it is."""


def read_messages(fields: dict[str, Any], ports: Ports) -> PreparedRequest:
    """Prepare the request in a decoded body; raises ApiError naming the field at fault."""
    with _named():
        body = to_record(MessagesBody, fields, RULES)
        chat = _translated(body, ports)
        prepared = chat.read(ports, _CHAT_NAMES)
    options = msgspec.structs.replace(
        prepared.options,
        ignored=tuple(sorted({*ignored(MessagesBody, fields, RULES), *chat.unused})),
        show_reasoning=body.thinking is None or body.thinking.display != "omitted",
    )
    return PreparedRequest(options, prepared.prompts)


def read_count_tokens(fields: dict[str, Any], ports: Ports) -> bytes:
    """Return the response to a decoded body: how many tokens its prompt has, also beyond the context."""
    with _named():
        chat = _translated(to_record(CountTokensBody, fields, RULES), ports)
        return msgspec.json.encode({"input_tokens": chat.count(ports, _CHAT_NAMES)})


@contextmanager
def _named() -> Iterator[None]:
    """Name the field of an error as Anthropic writes it."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(_anthropic_name(error.param or "")) from None


def _anthropic_name(param: str) -> str:
    """Return a field's name as Anthropic writes it, with dots before indices."""
    dotted = re.sub(r"\[(\d+)\]", r".\1", param)
    return re.sub(r"^(tools\.\d+)\.parameters", r"\1.input_schema", dotted)


def _translated(body: PromptBody, ports: Ports) -> ChatDraft:
    chat, template = ChatDraft(), ports.template
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
    _translate_output(body, chat, ports)
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


def _add_message(chat: ChatDraft, raw: dict[str, Any], where: str) -> None:
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


def _add_blocks(chat: ChatDraft, role: str, blocks: Sequence[_Block], where: str) -> None:
    """Append a message for each result of a tool, and one for each run of text between them."""
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


def _texts(blocks: Sequence[_Block]) -> str | list[dict[str, str]]:
    """Return the text of one block, or the parts of several; raises ApiError for a block of another type."""
    texts = []
    for where, block in blocks:
        if (kind := block.get("type")) != "text":
            raise _unsupported(kind, where)
        texts.append(convert(TextBlock, block, where).text)
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _unsupported(kind: object, where: str) -> ApiError:
    return bad_parameter(
        f"{where}.type", f"{show(kind)} is not supported here; this server reads text only", "unsupported_content"
    )


def _tool_message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    block = convert(ToolResultBlock, raw, where)
    content: str | list[dict[str, str]] = ""
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
            f"{show(kind)} is not supported: this server runs no tools, and the model knows none by heart; "
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


def _translate_choice(body: PromptBody, chat: ChatDraft) -> None:
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


def _translate_thinking(body: PromptBody, chat: ChatDraft, template: ChatTemplate | None) -> None:
    """Switch thinking as requested, absent means off; where the template has no switch the model does as it does."""
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


def _translate_output(body: PromptBody, chat: ChatDraft, ports: Ports) -> None:
    config, template = body.output_config, ports.template
    if config is not None and config.effort is not None:
        if template is not None and "reasoning_effort" in template.source:
            chat.fields["chat_template_kwargs"] = {"reasoning_effort": config.effort}
        else:
            chat.fields.setdefault("max_thinking_tokens", budget_of(config.effort, ports))
    form = (config.format if config is not None else None) or body.output_format
    if form is not None:
        chat.fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema, "strict": True},
        }
