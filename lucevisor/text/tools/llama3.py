"""`{"name": NAME, "parameters": {...}}` and nothing around it, as Llama 3.1 to 3.3 write calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from lucevisor.text.grammar.rules import Rules
from lucevisor.text.parameters import Tools, has_tool
from lucevisor.text.tools.call import Function, SingleCall, ToolCall
from lucevisor.text.tools.json_object import JsonObject, json_depth

_JSON: Final = JsonObject()


class Llama3(SingleCall):
    """Calls that are one JSON object; one of a function that was not offered is text."""

    open = '{"name":'
    close = "}"
    bare = ('{"type": "function", "name":', "}")
    tags: Sequence[str] = ()

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
