"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen3.5.

A value stands on lines of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.grammar.rules import LINE_END, Rules
from lucevisor.text.parameters import Parameters, Tools, first_readable
from lucevisor.text.tools.bare_values import Ending, bare_parameters
from lucevisor.text.tools.call import Function, SingleCall, ToolCall, make_call

_HEAD: Final = re.compile(r"\s*<function=([^>\n]+)>")
_OPEN: Final = re.compile(r"<parameter=([^\n]*?)>")
_BLANKS: Final = re.compile(r"\s*")
# A value ends at the closing tag that another parameter or the end follows, so that a value may quote the tag itself.
_CLOSE: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=[^\n]*?>|</function>\s*\Z|\Z))")
_UNCLOSED: Final = re.compile(r"(<parameter=[^>\n]+>(?:(?!</parameter>).)*?)(?=\s*</function>\s*\Z)", re.DOTALL)
_TAIL: Final = re.compile(r"\s*(?:</function>\s*)?\Z")


class XmlFunction(SingleCall):
    """Calls written as XML-like tags; values are bare text, read by the tool's schema."""

    open = "<tool_call>"
    close = "</tool_call>"
    bare = ("<function=", "</function>")
    tags: Sequence[str] = (open, close)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when a tag is missing or text stands between tags."""
        head = _HEAD.match(body)
        if head is None:
            return None
        name, end = head.group(1).strip(), head.end()
        parameters = Parameters(tools, name)
        arguments: dict[str, object] = {}
        while parameter := _parameter(body, end, parameters):
            key, value, end = parameter
            arguments |= _read(key, value, parameters)
        return make_call(name, arguments) if name and _TAIL.match(body, end) else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Close the last parameter where the function ends."""
        return self.parse(_UNCLOSED.sub(r"\1\n</parameter>", body), tools)

    def is_inside_value(self, body: str) -> bool:
        start = body.find("<parameter=")
        if start < 0:
            return False
        ends = [closing.end() for closing in _CLOSE.finditer(body, start)]
        return not ends or _opened(body, ends[-1]) is not None

    def grammar(self, rules: Rules, function: Function) -> str:
        head, tail = rules.text(f"\n<function={function.name}>\n"), rules.text("</function>")
        names = sorted(Parameters([{"name": "", "parameters": function.schema}], "").names)
        declared = "|".join(re.escape(name).replace("/", "\\/") for name in names)
        opening = [f"<parameter=({declared})>"] if declared else []
        ending = Ending("\n</parameter>\n", [r"<\/parameter>[\s\x1c-\x1f]*<(parameter=|\/function>)", *opening])
        values = bare_parameters(
            rules,
            function,
            ending,
            lambda name: None if "\n" in name else rules.text(f"<parameter={name}>\n"),
            lambda terminal: rules.add(f'"<parameter=" ({terminal}) ">\\n"', lazy=True),
        )
        return f"{head} {values} {tail} {LINE_END} {rules.text(self.close)}"


def _parameter(body: str, start: int, parameters: Parameters) -> tuple[str, str, int] | None:
    """The name and the value of the parameter that begins here, and its end; None if none does."""
    opened = _opened(body, start)
    if opened is None:
        return None
    begin = opened.start(1)
    # A declared name may contain characters that end other names.
    key = max((name for name in parameters.names if body.startswith(f"{name}>", begin)), key=len, default=None)
    begin = opened.end() if key is None else begin + len(key) + 1
    key = opened[1].strip() if key is None else key
    closings = list(_CLOSE.finditer(body, begin))
    if not closings:
        return None
    closing = closings[first_readable((body[begin : match.start()] for match in closings), parameters.schema(key))]
    return key, body[begin : closing.start()], closing.end()


def _opened(body: str, start: int) -> re.Match[str] | None:
    blanks = _BLANKS.match(body, start)
    return _OPEN.match(body, blanks.end() if blanks else start)


def _read(key: str, text: str, parameters: Parameters) -> dict[str, object]:
    """Return the value of a parameter, and of those whose opening tag stands in it as its closing tag is missing."""
    value = parameters.read(key, _unpadded(text))
    opening = None if "</parameter>" in text or not isinstance(value, str) else _OPEN.search(text)
    if opening is None or opening[1].strip() not in parameters.names:
        return {key: value}
    first = parameters.read(key, _unpadded(text[: opening.start()]))
    return {key: first, **_read(opening[1].strip(), text[opening.end() :], parameters)}


def _unpadded(value: str) -> str:
    """Return the value without the one line end that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")
