"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3 write calls."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.grammar.rules import LINE_END, Rules
from lucevisor.text.json_text import parse
from lucevisor.text.parameters import Tools
from lucevisor.text.tools.call import Function, SingleCall, ToolCall, make_call

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


def _escaped(character: re.Match[str]) -> str:
    return f"\\u{ord(character[0]):04x}"


class JsonObject(SingleCall):
    """Calls written as one JSON object.  Qwen 2.5 Coder writes a block of Markdown in place of the tags."""

    open = "<tool_call>"
    close = "</tool_call>"
    bare = ("```json\n{", "```")
    tags: Sequence[str] = (open, close)

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
        pieces = _QUOTED_OR_REST.findall(_unfenced(body))
        text = "".join(_CONTROL.sub(_escaped, piece) if piece.startswith('"') else piece for piece in pieces).strip()
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
