"""`<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`: Laguna, and GLM 4.5 to 4.7."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.tools.call import ToolCall, Tools, make_call, parameter_schema, read_value

_NAME: Final = re.compile(r"\s*([^<\s]+)")
_PAIR: Final = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_NO_VALUE: Final = re.compile(r"</arg_key>(?!\s*<arg_value>)")
_NO_KEY: Final = re.compile(r"\A(\s*[^<\s]+\s*)<tool_call>")


class ArgumentPairs:
    """Calls written as a name and pairs of key and value; strings are bare text, everything else JSON."""

    open = "<tool_call>"
    close = "</tool_call>"
    bare = ("", "")
    tags: Sequence[str] = (open, close, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when it has no name or text stands between the pairs."""
        head = _NAME.match(body)
        if head is None:
            return None
        name, end = head.group(1), head.end()
        arguments: dict[str, object] = {}
        while pair := _PAIR.match(body, end):
            key = pair.group(1).strip()
            arguments[key] = read_value(pair.group(2), parameter_schema(tools, name, key))
            end = pair.end()
        return make_call(name, arguments) if not body[end:].strip() else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Add the opening tag of values without one, and of a first key behind a second opening tag of the call."""
        return self.parse(_NO_VALUE.sub("</arg_key><arg_value>", _NO_KEY.sub(r"\1<arg_key>", body)), tools)

    def is_inside_value(self, body: str) -> bool:
        """Say whether the text ends inside a value."""
        return body.rfind("<arg_value>") > body.rfind("</arg_value>")
