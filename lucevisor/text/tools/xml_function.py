"""`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>`: Qwen3-Coder, Qwen3.5.

A value stands on lines of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from lucevisor.text.tools.call import ToolCall, Tools, make_call, parameter_schema, read_value

_HEAD: Final = re.compile(r"\s*<function=([^>\n]+)>")
# A value ends at the closing tag that another parameter or the end follows, so that a value may quote the tag itself.
_PARAMETER: Final = re.compile(
    r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=[^>\n]+>|</function>\s*\Z|\Z))", re.DOTALL
)
_NEXT: Final = re.compile(r"<parameter=([^>\n]+)>")
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
        name = head.group(1).strip()
        arguments: dict[str, object] = {}
        end = head.end()
        while parameter := _PARAMETER.match(body, end):
            for key, value in _split(parameter.group(1), parameter.group(2), name, tools):
                arguments[key] = read_value(_unpadded(value), parameter_schema(tools, name, key))
            end = parameter.end()
        return make_call(name, arguments) if name and _TAIL.match(body, end) else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Close the last parameter where the function ends."""
        return self.parse(_UNCLOSED.sub(r"\1\n</parameter>", body), tools)

    def is_inside_value(self, body: str) -> bool:
        """Say whether the text ends inside a parameter."""
        return body.rfind("<parameter=") > body.rfind("</parameter>")


def _split(key: str, value: str, name: str, tools: Tools) -> Iterator[tuple[str, str]]:
    """Yield parameters and values: more than one where the opening tag of a declared one stands in a value without
    its closing tag, as that of the one before is missing."""
    while "</parameter>" not in value and (found := _NEXT.search(value)):
        if parameter_schema(tools, name, found[1].strip()) is None:
            break
        yield key.strip(), value[: found.start()]
        key, value = found[1], value[found.end() :]
    yield key.strip(), value


def _unpadded(value: str) -> str:
    """Return the value without the one line end that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")
