"""Calls behind `[TOOL_CALLS]`, as Mistral's models write them: all in a JSON array, or each as `NAME[ARGS]{...}`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text import json_text
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.parameters import Tools
from lucevisor.text.tools.call import Function, SingleCall, ToolCall, make_call
from lucevisor.text.tools.json_object import JsonObject, json_depth

_OPEN: Final = "[TOOL_CALLS]"
_JSON: Final = JsonObject()
_NAMED: Final = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?\[ARGS\]\s*(\{.*)", re.DOTALL)


class MistralArray:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}, "id": ...}, ...]`: Mistral 7B v0.3, Nemo, Small 3.0 and 3.1."""

    open = _OPEN
    close = "]"
    bare = ("", "")
    tags: Sequence[str] = (open,)

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


class MistralArguments(SingleCall):
    """`[TOOL_CALLS]NAME[ARGS]{...}`, with or without `[CALL_ID]ID`: Mistral Small 3.2, Devstral, Ministral 3."""

    open = _OPEN
    close = "}"
    bare = ("", "")
    tags: Sequence[str] = (open, "[CALL_ID]", "[ARGS]")

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when its name or its arguments are missing."""
        named = _NAMED.fullmatch(body)
        if named is None:
            return None
        try:
            arguments = json_text.parse(named[2] + self.close)
        except ValueError:
            return None
        return make_call(named[1], arguments) if isinstance(arguments, dict) else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Control characters in strings, and missing or superfluous braces, as for JSON between tags."""
        named = _NAMED.fullmatch(body)
        if named is None:
            return None
        return _JSON.repair(f'{{"name": {json.dumps(named[1])}, "arguments": {named[2]}}}}}', tools)

    def is_inside_value(self, body: str) -> bool:
        named = _NAMED.fullmatch(body)
        return named is not None and json_depth(named[2]) != 1

    def grammar(self, rules: Rules, function: Function) -> str:
        arguments = rules.json(function.schema, lenient=not function.strict)
        return f"{rules.text(f'{function.name}[ARGS]')} {arguments}"
