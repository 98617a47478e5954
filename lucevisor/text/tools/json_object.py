"""Call formats whose arguments are JSON: of Hermes and Qwen, Llama 3, Mistral and Granite 3."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text import json_text
from lucevisor.text.grammar.rules import LINE_END, Rules
from lucevisor.text.json_text import parse
from lucevisor.text.parameters import Tools, has_tool
from lucevisor.text.tools.call import Function, ToolCall, ToolFormat, make_call

_QUOTED_OR_REST: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^"]+', re.DOTALL)
_CONTROL: Final = re.compile("[\0-\x1f]")
_FENCED: Final = re.compile(r"\s*```(?:json)?\s*(.*?)\s*(?:```)?\s*", re.DOTALL)
_MOST_BRACES: Final = 2  # that a body lacks or has too many

_NAME: Final = re.compile("[^\ud800-\udfff]+")  # JSON can name a lone surrogate, an answer in UTF-8 cannot


def json_depth(text: str) -> int | None:
    """Return how many more braces and brackets of JSON a text opens than it closes; None inside a string."""
    depth = end = 0
    while piece := _QUOTED_OR_REST.match(text, end):
        end = piece.end()
        if not piece[0].startswith('"'):
            depth += sum(piece[0].count(c) for c in "{[") - sum(piece[0].count(c) for c in "}]")
    return depth if end == len(text) else None


def _unfenced(body: str) -> str:
    fenced = _FENCED.fullmatch(body)
    return fenced[1] if fenced else body


class JsonObject(ToolFormat):
    """Calls written as one JSON object.  Qwen 2.5 Coder writes a block of Markdown in place of the tags."""

    open = "<tool_call>"
    close = "</tool_call>"
    bare = ("```json\n{", "```")
    tags = (open, close)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None; `parameters` is taken for `arguments`, which may be JSON text themselves."""
        try:
            call = parse(_unfenced(body))
            if not isinstance(call, dict):
                return None
            arguments = call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = parse(arguments)
        except ValueError:
            return None
        name = call.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(arguments, dict):
            return None
        return make_call(name, arguments)

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Escape control characters in strings, add or drop braces at the end."""
        pieces, code = _QUOTED_OR_REST.findall(_unfenced(body)), lambda found: f"\\u{ord(found[0]):04x}"
        text = "".join(_CONTROL.sub(code, piece) if piece.startswith('"') else piece for piece in pieces).strip()
        depth = sum(piece.count("{") - piece.count("}") for piece in pieces if not piece.startswith('"'))
        if not -_MOST_BRACES <= depth <= _MOST_BRACES:
            return None
        for _ in range(-depth):
            text = text.removesuffix("}").rstrip()
        return self.parse(text + "}" * depth, tools)

    def is_inside_value(self, body: str) -> bool:
        return json_depth(body) is None

    def grammar(self, rules: Rules, function: Function) -> str:
        head = rules.text(f'\n{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": ')
        arguments = rules.json(function.schema, lenient=not function.strict)
        return f"{head} {arguments} {rules.text('}')} {LINE_END} {rules.text(self.close)}"


_JSON: Final = JsonObject()


def call_of(name: str, arguments: str, *, repaired: bool = False) -> ToolCall | None:
    """Return the call of a function with arguments as text; None if they are no JSON object."""
    if repaired:
        return _JSON.repair(f'{{"name": {json_text.write(name)}, "arguments": {arguments}}}', ())
    try:
        value = parse(arguments)
    except ValueError:
        return None
    return make_call(name, value) if isinstance(value, dict) else None


class Llama3(ToolFormat):
    """Calls that are one JSON object; one of a function that was not offered is text."""

    open = '{"name":'
    close = "}"
    bare = ('{"type": "function", "name":', "}")

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when it is of no offered function."""
        return _offered(_JSON.parse(self._whole(body), tools), tools)

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """As for JSON between tags."""
        return _offered(_JSON.repair(self._whole(body), tools), tools)

    def is_inside_value(self, body: str) -> bool:
        return json_depth(body) != 0

    def grammar(self, rules: Rules, function: Function) -> str:
        head = rules.text(f' {json.dumps(function.name, ensure_ascii=False)}, "parameters": ')
        return f"{head} {rules.json(function.schema, lenient=not function.strict)} {rules.text(self.close)}"

    def _whole(self, body: str) -> str:
        return body if body.startswith(self.bare[0]) else f"{self.open}{body}{self.close}"


def _offered(call: ToolCall | None, tools: Tools) -> ToolCall | None:
    return call if call is not None and has_tool(tools, call.name) else None


_OPEN: Final = "[TOOL_CALLS]"
_NAMED: Final = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?\[ARGS\]\s*(\{.*)", re.DOTALL)


class MistralArray(ToolFormat):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`: Mistral 7B v0.3, Nemo, Small 3.0 and 3.1."""

    open = _OPEN
    close = "]"
    tags = (open,)

    def split(self, body: str) -> Sequence[str]:
        """Return the objects of the array; a body that is none stays whole."""
        try:
            calls = json_text.parse(body + self.close)
        except ValueError:
            return (body,)
        return [json_text.write(call) for call in calls] if isinstance(calls, list) else (body,)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call that an object of the array is."""
        return _JSON.parse(body, tools)

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """A single object, with or without the bracket before it, repaired as JSON between tags."""
        return _JSON.repair(body.strip().removeprefix("["), tools)

    def is_inside_value(self, body: str) -> bool:
        return json_depth(body) not in (0, 1)

    def grammar(self, rules: Rules, function: Function) -> str:
        head = rules.text(f'[{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": ')
        arguments = rules.json(function.schema, lenient=not function.strict)
        return f'" "? {head} {arguments} {rules.text("}]")}'


class GraniteArray(MistralArray):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`: Granite 3."""

    open = "<|tool_call|>"
    tags = (open,)


class MistralArguments(ToolFormat):
    """`[TOOL_CALLS]NAME[ARGS]{...}`, with or without `[CALL_ID]ID`: Mistral Small 3.2, Devstral, Ministral 3."""

    open = _OPEN
    close = "}"
    tags = (open, "[CALL_ID]", "[ARGS]")

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when its name or its arguments are missing."""
        named = _NAMED.fullmatch(body)
        return call_of(named[1], named[2] + self.close) if named else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """As for JSON between tags."""
        named = _NAMED.fullmatch(body)
        return call_of(named[1], named[2] + self.close, repaired=True) if named else None

    def is_inside_value(self, body: str) -> bool:
        named = _NAMED.fullmatch(body)
        return named is not None and json_depth(named[2]) != 1

    def grammar(self, rules: Rules, function: Function) -> str:
        arguments = rules.json(function.schema, lenient=not function.strict)
        return f"{rules.text(f'{function.name}[ARGS]')} {arguments}"
