"""Tool parsers: one tool-call format per file, and the choice of the format from the chat template."""

from __future__ import annotations

from typing import Final

from lucevisor.text.parameters import Tools, has_tool
from lucevisor.text.tools.bare_values import ArgumentPairs, XmlFunction
from lucevisor.text.tools.call import Function, ToolCall, ToolFormat
from lucevisor.text.tools.gemma4 import Gemma4
from lucevisor.text.tools.json_object import GraniteArray, JsonObject, Llama3, MistralArguments, MistralArray

__all__ = ["FORMATS", "Function", "ToolCall", "ToolFormat", "Tools", "detect_tool_format", "has_tool", "read_call"]

# Text by which a template shows its format, the most specific first: the last three all contain <tool_call>.
FORMATS: Final[tuple[tuple[str, ToolFormat], ...]] = (
    ("<|tool_call>call:", Gemma4()),
    ("[ARGS]", MistralArguments()),
    ("[TOOL_CALLS]", MistralArray()),
    ("<|tool_call|>", GraniteArray()),
    ('"parameters": dictionary of argument name', Llama3()),
    ("<arg_key>", ArgumentPairs()),
    ("<function=", XmlFunction()),
    ("<tool_call>", JsonObject()),
)


def read_call(tool_format: ToolFormat, body: str, tools: Tools) -> ToolCall | None:
    """Parse the text between the tags as a call, repaired if need be or in another model's format; None if it
    is none."""
    if (call := tool_format.parse(body, tools)) is not None:
        return call
    neighbours = [
        neighbour for _, neighbour in FORMATS if neighbour.open == tool_format.open and neighbour is not tool_format
    ]
    for read in (tool_format.repair, *(neighbour.parse for neighbour in neighbours)):
        if (call := read(body, tools)) is not None and has_tool(tools, call.name):
            return call
    return None


def detect_tool_format(template: str) -> ToolFormat | None:
    return next((tool_format for sign, tool_format in FORMATS if sign in template), None)
