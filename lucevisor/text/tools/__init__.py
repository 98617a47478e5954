"""Tool-call formats, one file each, and the choice of one by what a chat template tells the model to write.

Knows templates only as text to look for tags in. Invariant: `parse` gives a call or None and never raises, whatever a
model wrote.
"""

from __future__ import annotations

from typing import Final

from lucevisor.text.tools.argument_pairs import ArgumentPairs
from lucevisor.text.tools.call import ToolCall, ToolFormat, Tools, has_tool
from lucevisor.text.tools.gemma4 import Gemma4
from lucevisor.text.tools.json_object import JsonObject
from lucevisor.text.tools.xml_function import XmlFunction

__all__ = ["FORMATS", "ToolCall", "ToolFormat", "Tools", "detect_tool_format", "has_tool"]

# What a template says that is of this format, the most particular first: all but Gemma's write <tool_call> as well.
FORMATS: Final[tuple[tuple[str, ToolFormat], ...]] = (
    ("<|tool_call>call:", Gemma4()),
    ("<arg_key>", ArgumentPairs()),
    ("<function=", XmlFunction()),
    ("<tool_call>", JsonObject()),
)


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format of the calls that a chat template writes and asks for, or None if it knows no tools."""
    return next((tool_format for sign, tool_format in FORMATS if sign in template), None)
