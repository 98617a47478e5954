"""Tool calls, and the interface of their formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lucevisor.text import json_text
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.parameters import Tools
from lucevisor.text.references import Schema


@dataclass(frozen=True)
class ToolCall:
    """One call: the function's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Function:
    """An offered function; ``strict``: refuse a schema of its arguments that cannot be enforced whole."""

    name: str
    schema: Schema
    strict: bool


class ToolFormat(Protocol):
    """The notation in which a model family writes a call between two tags."""

    @property
    def open(self) -> str:
        """The tag before a call."""

    @property
    def close(self) -> str:
        """The tag after a call."""

    @property
    def bare(self) -> tuple[str, str]:
        """The first tag inside a call and its closing one, for models that omit the opening tag; ("", ""): none."""

    @property
    def tags(self) -> Sequence[str]:
        """All tags of the format that may be control tokens of a vocabulary."""

    def split(self, body: str) -> Sequence[str]:
        """Return the bodies of the calls between the tags: several where one pair of tags is around all calls."""

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Parse the body of a call; None if it is not one."""

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Parse a body that `parse` refuses, if it has only one possible meaning; else None."""

    def is_inside_value(self, body: str) -> bool:
        """Return whether `body`, cut before a closing tag, ends inside a value, so that the tag is part of it."""

    def grammar(self, rules: Rules, function: Function) -> str:
        """Return an expression for calls of a function that `parse` reads by its schema, from behind the opening tag
        up to and with the closing one; raises GrammarError."""


class SingleCall:
    """Formats with a pair of tags for each call."""

    def split(self, body: str) -> Sequence[str]:
        return (body,)


def make_call(name: str, arguments: Mapping[str, object]) -> ToolCall:
    return ToolCall(name, json_text.write(arguments))
