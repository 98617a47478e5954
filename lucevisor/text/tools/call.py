"""Tool calls, the interface of their formats, and answers that consist of calls, or may have them, as grammars."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

from lucevisor.text import json_text
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.parameters import Tools, types
from lucevisor.text.references import Schema, flattened


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


class ToolFormat(ABC):
    """The notation in which a model family writes a call between two tags. `bare`: the first tag inside a call and its
    closing one, for models that omit the opening tag; ("", ""): none. `tags`: those that may be control tokens."""

    open: ClassVar[str]
    close: ClassVar[str]
    bare: ClassVar[tuple[str, str]] = ("", "")
    tags: ClassVar[Sequence[str]] = ()

    def split(self, body: str) -> Sequence[str]:
        """Return the bodies of the calls between the tags: several where one pair of tags is around all calls."""
        return (body,)

    @abstractmethod
    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Parse the body of a call; None if it is not one."""

    @abstractmethod
    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Parse a body that `parse` refuses, if it has only one possible meaning; else None."""

    @abstractmethod
    def is_inside_value(self, body: str) -> bool:
        """Return whether `body`, cut before a closing tag, ends inside a value, so that the tag is part of it."""

    @abstractmethod
    def grammar(self, rules: Rules, function: Function) -> str:
        """Return an expression for calls of a function that `parse` reads, from behind the opening tag up to and with
        the closing one; raises GrammarError."""


def make_call(name: str, arguments: Mapping[str, object]) -> ToolCall:
    return ToolCall(name, json_text.write(arguments))


MAX_CALLS: Final = 32
"""Calls of one answer that must consist of calls."""

_FREE: Final[Schema] = {"type": "object"}


def functions(tools: Tools, names: Sequence[str] = ()) -> list[Function]:
    """Return the functions of OpenAI tools; ``names``: of these only."""
    offered = []
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        schema = function.get("parameters") or _FREE
        offered.append(Function(function["name"], schema, bool(function.get("strict"))))
    return [function for function in offered if function.name in names or not names]


def without_schemas(offered: Sequence[Function]) -> list[Function]:
    return [function if function.strict else replace(function, schema=_FREE) for function in offered]


def calls_only(rules: Rules, tool_format: ToolFormat, offered: Sequence[Function], *, n_most: int = MAX_CALLS) -> str:
    """One to ``n_most`` calls.  Raises GrammarError for a strict schema that the format cannot enforce."""
    call = rules.add(f"{rules.text(tool_format.open)} {_rest_of_call(rules, tool_format, offered)}")
    return rules.add(call if n_most == 1 else f'{call} ("\\n"? {call}){{0,{n_most - 1}}}')


def calls_in_text(rules: Rules, tool_format: ToolFormat, offered: Sequence[Function]) -> str:
    """Any text with any number of calls in it; text that begins like a call must be one.  Raises as ``calls_only``."""
    before = rules.until(tool_format.open, markers=True)
    call = rules.add(f"{before} {_rest_of_call(rules, tool_format, offered)}")
    return rules.add(f"{call}* {rules.without(tool_format.open)}")


def _rest_of_call(rules: Rules, tool_format: ToolFormat, offered: Sequence[Function]) -> str:
    """The rest of a call after its opening tag; one that is not strict gets free arguments if need be."""
    calls = list[str]()
    for function in offered:
        try:
            call = _call(rules, tool_format, function)
        except GrammarError as error:
            if function.strict:
                raise GrammarError(f"parameters of {function.name}: {str(error).strip()}") from None
            call = tool_format.grammar(rules, replace(function, schema=_FREE))
        calls.append(f"({call})")
    return rules.add(" | ".join(calls))


def _call(rules: Rules, tool_format: ToolFormat, function: Function) -> str:
    """A call by the schema of its arguments.  Raises GrammarError, with nothing added to the rules."""
    try:
        with rules.undone_by_errors():
            schema = flattened(function.schema, lenient=not function.strict)
            return tool_format.grammar(rules, replace(function, schema=_of_objects(schema, strict=function.strict)))
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise GrammarError(f"they are no JSON schema ({type(error).__name__}: {error})") from None


def _of_objects(schema: Schema, *, strict: bool) -> Schema:
    """Return the schema for objects only, as arguments are one whatever it allows besides."""
    if schema.get("type") == "object":
        return schema
    if "object" in types(schema, schema.get("$defs", {})):
        return {**schema, "type": "object"}
    if strict:
        raise GrammarError("they allow no object, but arguments are one; set type to object")
    return _FREE
