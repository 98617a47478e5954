"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen 2.5 and 3 write calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.json_text import parse
from lucevisor.text.tools.call import ToolCall, Tools, make_call

_QUOTED_OR_REST: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[^"]+', re.DOTALL)


_NAME: Final = re.compile("[^\ud800-\udfff]+")  # JSON can name a lone surrogate, an answer in UTF-8 cannot


class JsonObject:
    """Calls written as one JSON object."""

    open = "<tool_call>"
    close = "</tool_call>"
    tags: Sequence[str] = (open, close)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None; `parameters` is taken for `arguments`, which may be JSON text themselves."""
        try:
            call = parse(body)
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

    def is_inside_value(self, body: str) -> bool:
        """Say whether the text ends inside a JSON string."""
        end = 0
        while match := _QUOTED_OR_REST.match(body, end):
            end = match.end()
        return end < len(body)
