"""Calls of tools as grammars, in each family's own format.

Knows the formats of ``lucevisor.text.tools`` and JSON schemas.  Invariant: what such a grammar allows, the format's
parser reads as a call of an offered tool, with arguments as its schema says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lucevisor.text.grammar.gemma_values import gemma_value
from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.grammar.rules import Rules, repeated
from lucevisor.text.tools import ToolFormat, Tools
from lucevisor.text.tools.argument_pairs import ArgumentPairs
from lucevisor.text.tools.call import schema_types
from lucevisor.text.tools.gemma4 import Gemma4
from lucevisor.text.tools.json_object import JsonObject
from lucevisor.text.tools.xml_function import XmlFunction

MAX_CALLS: Final = 32
"""Calls of one answer that must consist of calls."""

_Schema = Mapping[str, Any]
_COMPOSED: Final = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties", "if", "not")


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as its grammar needs it.  ``strict``: a schema that cannot be enforced whole is refused."""

    name: str
    schema: _Schema
    strict: bool


def functions(tools: Tools, names: Sequence[str] = ()) -> list[Function]:
    """Return the functions of OpenAI tools; ``names``: of these only."""
    found = []
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        schema = function.get("parameters") or {"type": "object"}
        found.append(Function(function["name"], schema, bool(function.get("strict"))))
    return [one for one in found if one.name in names or not names]


def calls_only(rules: Rules, tool_format: ToolFormat, offered: Sequence[Function], *, n_most: int = MAX_CALLS) -> str:
    """One to ``n_most`` calls.  Raises GrammarError for a strict schema that the format cannot enforce."""
    call = rules.add(f"{rules.text(tool_format.open)} {_rest_of_call(rules, tool_format, offered)}")
    return rules.add(call if n_most == 1 else f'{call} ("\\n"? {call}){{0,{n_most - 1}}}')


def calls_in_text(rules: Rules, tool_format: ToolFormat, offered: Sequence[Function]) -> str:
    """Any text with any number of calls in it: what begins as a call must be one.  Raises as ``calls_only``."""
    before = rules.until(tool_format.open, markers=True)
    call = rules.add(f"{before} {_rest_of_call(rules, tool_format, offered)}")
    return rules.add(f"{call}* {rules.without(tool_format.open)}")


def _rest_of_call(rules: Rules, tool_format: ToolFormat, offered: Sequence[Function]) -> str:
    """A call behind its opening tag."""
    write, calls = _WRITERS[type(tool_format)], list[str]()
    for one in offered:
        try:
            calls.append(f"({write(rules, one)} {rules.text(tool_format.close)})")
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            told = f"{type(error).__name__}: {error}"
            raise GrammarError(f"parameters of {one.name}: they are no JSON schema ({told})") from None
    return rules.add(" | ".join(calls))


def _json_object(rules: Rules, function: Function) -> str:
    head = rules.text(f'\n{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": ')
    return f"{head} {rules.json(function.schema, lenient=not function.strict)} {rules.text('}')} {_LINE_END}"


def _xml_function(rules: Rules, function: Function) -> str:
    head, tail = rules.text(f"\n<function={function.name}>\n"), rules.text("</function>")
    parameters = _parameters(
        function,
        lambda key, schema: (
            f"{rules.text(f'<parameter={key}>{_NL}')} "
            + _bare_value(rules, schema, "\n</parameter>\n", lenient=not function.strict)
        ),
        lambda: (
            f"{rules.text('<parameter=')} /[a-zA-Z0-9_-]+/ {rules.text('>' + _NL)} " + rules.until("\n</parameter>\n")
        ),
    )
    return f"{head} {parameters} {tail} {_LINE_END}"


def _argument_pairs(rules: Rules, function: Function) -> str:
    parameters = _parameters(
        function,
        lambda key, schema: (
            f"{_LINE_END} {rules.text(f'<arg_key>{key}</arg_key>')} {_LINE_END} "
            f"{rules.text('<arg_value>')} " + _bare_value(rules, schema, "</arg_value>", lenient=not function.strict)
        ),
        lambda: (
            f"{_LINE_END} {rules.text('<arg_key>')} /[a-zA-Z0-9_-]+/ {rules.text('</arg_key>')} {_LINE_END} "
            f"{rules.text('<arg_value>')} {rules.until('</arg_value>')}"
        ),
    )
    return f"{rules.text(function.name)} {parameters} {_LINE_END}"


def _gemma4(rules: Rules, function: Function) -> str:
    value = gemma_value(rules, function.schema, strict=function.strict)
    return f"{rules.text(f'call:{function.name}')} {value}"


_NL: Final = "\n"
_LINE_END: Final = '"\\n"?'
_WRITERS: Final[Mapping[type, Callable[[Rules, Function], str]]] = {
    JsonObject: _json_object,
    XmlFunction: _xml_function,
    ArgumentPairs: _argument_pairs,
    Gemma4: _gemma4,
}


def _parameters(function: Function, declared: Callable[[str, _Schema], str], any_other: Callable[[], str]) -> str:
    """The parameters of a function in the order of its schema, each at most once; required ones must be there."""
    schema = function.schema
    properties = schema.get("properties")
    unplain = [key for key in _COMPOSED if key in schema]
    if unplain or not isinstance(properties, Mapping):
        if function.strict and unplain:
            raise GrammarError(f"parameters of {function.name}: this model's call format cannot enforce {unplain[0]}")
        return f"({any_other()})*" if schema.get("additionalProperties") is not False else ""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required") or ()
    found = []
    for key, value in properties.items():
        one = declared(key, {**definitions, **value} if isinstance(value, Mapping) else definitions)
        found.append(one if key in required else f"({one})?")
    return " ".join(found)


def _bare_value(rules: Rules, schema: _Schema, end: str, *, lenient: bool) -> str:
    """A value up to and with ``end``: strings as they are, everything else JSON, as ``read_value`` reads them."""
    kinds = schema_types(schema)
    choices = [schema["const"]] if isinstance(schema.get("const"), str) else schema.get("enum")
    if "string" in kinds and isinstance(choices, list) and all(isinstance(choice, str) for choice in choices):
        return f"({rules.one_of(choices)}) {rules.text(end)}"
    if kinds == {"string"} and ("minLength" in schema or "maxLength" in schema):
        return f"/[^<]{repeated(schema, 'minLength', 'maxLength')}/ {rules.text(end)}"
    if "string" in kinds:
        if not lenient and "pattern" in schema:
            raise GrammarError("this model's call format cannot enforce a pattern")
        return rules.until(end)
    return f"{rules.json(schema, lenient=lenient)} {rules.text(end)}"
