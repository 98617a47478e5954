"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen3.5.

A value stands on lines of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from lucevisor.text.tools.call import ToolCall, Tools, make_call
from lucevisor.text.tools.parameters import Parameters, first_readable

_HEAD: Final = re.compile(r"\s*<function=([^>\n]+)>")
_OPEN: Final = re.compile(r"<parameter=([^\n]*?)>")
_BLANKS: Final = re.compile(r"\s*")
# A value ends at the closing tag that another parameter or the end follows, so that a value may quote the tag itself.
_CLOSE: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=[^\n]*?>|</function>\s*\Z|\Z))")
_UNCLOSED: Final = re.compile(r"(<parameter=[^>\n]+>(?:(?!</parameter>).)*?)(?=\s*</function>\s*\Z)", re.DOTALL)
_TAIL: Final = re.compile(r"\s*(?:</function>\s*)?\Z")


class XmlFunction:
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
        while found := _parameter(body, end, parameters):
            key, value, end = found
            arguments |= _read(key, value, parameters)
        return make_call(name, arguments) if name and _TAIL.match(body, end) else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Close the last parameter where the function ends."""
        return self.parse(_UNCLOSED.sub(r"\1\n</parameter>", body), tools)

    def is_inside_value(self, body: str) -> bool:
        """Say whether the text ends inside a parameter."""
        start = body.find("<parameter=")
        if start < 0:
            return False
        ends = [one.end() for one in _CLOSE.finditer(body, start)]
        return not ends or _opened(body, ends[-1]) is not None


def _parameter(body: str, start: int, parameters: Parameters) -> tuple[str, str, int] | None:
    """The name and the value of the parameter that begins here, and its end; None if none does."""
    opened = _opened(body, start)
    if opened is None:
        return None
    begin = opened.start(1)
    # A declared name may have in it what ends a name.
    key = max((one for one in parameters.names if body.startswith(f"{one}>", begin)), key=len, default=None)
    begin = opened.end() if key is None else begin + len(key) + 1
    key = opened[1].strip() if key is None else key
    closed = list(_CLOSE.finditer(body, begin))
    if not closed:
        return None
    index = first_readable((body[begin : one.start()] for one in closed), parameters.schema(key))
    return key, body[begin : closed[index].start()], closed[index].end()


def _opened(body: str, start: int) -> re.Match[str] | None:
    """The opening tag of a parameter that comes next."""
    blanks = _BLANKS.match(body, start)
    return _OPEN.match(body, blanks.end() if blanks else start)


def _read(key: str, text: str, parameters: Parameters) -> dict[str, object]:
    """Return the value of a parameter.

    More than one where the opening tag of a declared one stands in a text without its closing tag, as that of the one
    before is missing.
    """
    value = parameters.read(key, _unpadded(text))
    found = None if "</parameter>" in text or not isinstance(value, str) else _OPEN.search(text)
    if found is None or found[1].strip() not in parameters.names:
        return {key: value}
    first = parameters.read(key, _unpadded(text[: found.start()]))
    return {key: first, **_read(found[1].strip(), text[found.end() :], parameters)}


def _unpadded(value: str) -> str:
    """Return the value without the one line end that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")
