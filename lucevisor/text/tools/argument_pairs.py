"""`<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`: Laguna, and GLM 4.5 to 4.7."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.tools.call import ToolCall, Tools, make_call
from lucevisor.text.tools.parameters import Parameters, first_readable

_NAME: Final = re.compile(r"\s*([^<\s]+)")
_KEY: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
# A value ends at the closing tag that another key or the end follows, so that a value may quote the tag itself.
_CLOSE: Final = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")
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
        parameters = Parameters(tools, name)
        arguments: dict[str, object] = {}
        while found := _KEY.match(body, end):
            key = found[1] if found[1] in parameters.names else found[1].strip()
            closed = list(_CLOSE.finditer(body, found.end()))
            if not closed:
                break
            schema, begin = parameters.schema(key), found.end()
            last = closed[first_readable((body[begin : one.start()] for one in closed), schema)]
            arguments[key], end = parameters.read(key, body[begin : last.start()]), last.end()
        return make_call(name, arguments) if not body[end:].strip() else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Add the opening tag of values without one, and of a first key behind a second opening tag of the call."""
        return self.parse(_NO_VALUE.sub("</arg_key><arg_value>", _NO_KEY.sub(r"\1<arg_key>", body)), tools)

    def is_inside_value(self, body: str) -> bool:
        """Say whether the text ends inside a value."""
        start = body.find("<arg_value>")
        ends = [one.end() for one in _CLOSE.finditer(body, start)] if start >= 0 else []
        return start >= 0 and (not ends or _KEY.match(body, ends[-1]) is not None)
