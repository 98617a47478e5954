"""What every tool-call format gives and takes: a call, and the tools that were offered.

Knows no format. Invariant: the arguments of a call are JSON by RFC 8259 with each number as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lucevisor.text import json_text

Tools = Sequence[Mapping[str, object]]
"""Tools as OpenAI clients send them: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


class ToolFormat(Protocol):
    """How one model family writes a call between its two tags."""

    @property
    def open(self) -> str:
        """The tag before a call."""

    @property
    def close(self) -> str:
        """The tag after a call."""

    @property
    def bare(self) -> tuple[str, str]:
        """The first tag inside a call and its closing one, for models that forget the opening tag; ("", ""): none."""

    @property
    def tags(self) -> Sequence[str]:
        """All tags of the format that may be control tokens of a vocabulary."""

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call that the text between the tags is, or None when it is not one."""

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call that a body means which `parse` refuses, where it can mean nothing else, or None."""

    def is_inside_value(self, body: str) -> bool:
        """Say whether `body`, cut before a closing tag, ends inside a value, so that the tag is part of that value."""


def make_call(name: str, arguments: Mapping[str, object]) -> ToolCall:
    """Return a call with its arguments written as JSON."""
    return ToolCall(name, json_text.write(arguments))


def has_tool(tools: Tools, name: str) -> bool:
    """Say whether a function of this name was offered."""
    return any(function_of(tool).get("name") == name for tool in tools)


def function_of(tool: Mapping[str, object]) -> Mapping[str, object]:
    """Return the function of a tool; without one the tool itself."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else {}
