"""`<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`: Laguna, and GLM 4.5 to 4.7."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.grammar.rules import LINE_END, Rules
from lucevisor.text.parameters import Parameters, Tools, first_readable
from lucevisor.text.tools.bare_values import Ending, bare_parameters
from lucevisor.text.tools.call import Function, SingleCall, ToolCall, make_call

_NAME: Final = re.compile(r"\s*([^<\s]+)")
_KEY: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
# A value ends at the closing tag that another key or the end follows, so that a value may quote the tag itself.
_CLOSE: Final = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")
_NO_VALUE: Final = re.compile(r"</arg_key>(?!\s*<arg_value>)")
_NO_KEY: Final = re.compile(r"\A(\s*[^<\s]+\s*)<tool_call>")


class ArgumentPairs(SingleCall):
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
        while opening := _KEY.match(body, end):
            key, begin = opening[1], opening.end()
            if key not in parameters.names:
                key = key.strip()
            closings = list(_CLOSE.finditer(body, begin))
            if not closings:
                break
            texts = (body[begin : closing.start()] for closing in closings)
            closing = closings[first_readable(texts, parameters.schema(key))]
            arguments[key], end = parameters.read(key, body[begin : closing.start()]), closing.end()
        return make_call(name, arguments) if not body[end:].strip() else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Add the opening tag of values without one, and of a first key after a second opening tag of the call."""
        return self.parse(_NO_VALUE.sub("</arg_key><arg_value>", _NO_KEY.sub(r"\1<arg_key>", body)), tools)

    def is_inside_value(self, body: str) -> bool:
        start = body.find("<arg_value>")
        ends = [closing.end() for closing in _CLOSE.finditer(body, start)] if start >= 0 else []
        return start >= 0 and (not ends or _KEY.match(body, ends[-1]) is not None)

    def grammar(self, rules: Rules, function: Function) -> str:
        value = rules.text("<arg_value>")

        def declared(name: str) -> str | None:
            key = rules.text(f"<arg_key>{name}</arg_key>")
            return None if "</arg_key>" in name else f"{LINE_END} {key} {LINE_END} {value}"

        def undeclared(terminal: str) -> str:
            return f"{LINE_END} {rules.text('<arg_key>')} {rules.ended(terminal, '</arg_key>')} {LINE_END} {value}"

        ending = Ending("</arg_value>", [r"<\/arg_value>"])
        values = bare_parameters(rules, function, ending, declared, undeclared)
        return f"{rules.text(function.name)} {values} {LINE_END} {rules.text(self.close)}"
