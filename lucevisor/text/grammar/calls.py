"""Calls of tools as grammars, in each family's own format.

Knows the formats of ``lucevisor.text.tools`` and JSON schemas.  Invariant: what such a grammar allows, the format's
parser reads as a call of an offered tool, with arguments as its schema says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.bare_values import Ending, bare_value
from lucevisor.text.grammar.endless import without_endless
from lucevisor.text.grammar.gemma_values import gemma_object
from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.grammar.members import members, sequence
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.references import Schema, UnresolvedReferenceError, flattened
from lucevisor.text.tools import ToolFormat, Tools
from lucevisor.text.tools.argument_pairs import ArgumentPairs
from lucevisor.text.tools.gemma4 import Gemma4
from lucevisor.text.tools.json_object import JsonObject
from lucevisor.text.tools.parameters import Parameters, types
from lucevisor.text.tools.xml_function import XmlFunction

MAX_CALLS: Final = 32
"""Calls of one answer that must consist of calls."""

_FREE: Final[Schema] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A tool as its grammar needs it.

    ``schema``: of its arguments, as the client sent it; ``strict``: one that cannot be enforced whole is refused.
    """

    name: str
    schema: Schema
    strict: bool


def functions(tools: Tools, names: Sequence[str] = ()) -> list[Function]:
    """Return the functions of OpenAI tools; ``names``: of these only."""
    found = []
    for tool in tools:
        function = tool["function"]
        assert isinstance(function, Mapping)
        schema = function.get("parameters") or _FREE
        found.append(Function(function["name"], schema, bool(function.get("strict"))))
    return [one for one in found if one.name in names or not names]


def freed(offered: Sequence[Function]) -> list[Function]:
    """Return the functions with free arguments for each that is not strict."""
    return [one if one.strict else replace(one, schema=_FREE) for one in offered]


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
    """A call behind its opening tag.

    A tool that is not strict and has parameters that make no grammar is offered with free arguments, so that it does
    not take the others with it.
    """
    write, calls = _WRITERS[type(tool_format)], list[str]()
    for one in offered:
        try:
            written = _checked(rules, write, one)
        except GrammarError as error:
            if one.strict:
                raise GrammarError(f"parameters of {one.name}: {str(error).strip()}") from None
            written = write(rules, Function(one.name, _FREE, strict=False))
        calls.append(f"({written} {rules.text(tool_format.close)})")
    return rules.add(" | ".join(calls))


def _checked(rules: Rules, write: _Writer, function: Function) -> str:
    """A call by the schema of its arguments.  Raises GrammarError, with nothing added to the rules."""
    mark = rules.mark()
    try:
        found = without_endless(flattened(function.schema, lenient=not function.strict))
        if isinstance(found, bool):
            raise GrammarError("no value fits them")
        schema = _of_objects(found, strict=function.strict)
        return write(rules, Function(function.name, schema, function.strict))
    except GrammarError:
        rules.drop(mark)
        raise
    except UnresolvedReferenceError as error:
        rules.drop(mark)
        raise GrammarError(str(error)) from None
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        rules.drop(mark)
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


_Writer = Callable[[Rules, Function], str]


def _json_object(rules: Rules, function: Function) -> str:
    head = rules.text(f'\n{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": ')
    return f"{head} {rules.json(function.schema, lenient=not function.strict)} {rules.text('}')} {_LINE_END}"


def _xml_function(rules: Rules, function: Function) -> str:
    head, tail = rules.text(f"\n<function={function.name}>\n"), rules.text("</function>")
    declared = "|".join(re.escape(name).replace("/", "\\/") for name in _declared(function.schema))
    also = [f"<parameter=({declared})>"] if declared else []
    ending = Ending("\n</parameter>\n", [r"<\/parameter>[\s\x1c-\x1f]*<(parameter=|\/function>)", *also])
    parameters = _parameters(
        rules,
        function,
        ending,
        lambda name: None if "\n" in name else rules.text(f"<parameter={name}>\n"),
        lambda name: rules.add(f'"<parameter=" ({name}) ">\\n"', lazy=True),
    )
    return f"{head} {parameters} {tail} {_LINE_END}"


def _argument_pairs(rules: Rules, function: Function) -> str:
    value = rules.text("<arg_value>")
    parameters = _parameters(
        rules,
        function,
        Ending("</arg_value>", [r"<\/arg_value>"]),
        lambda name: (
            None
            if "</arg_key>" in name
            else f"{_LINE_END} {rules.text(f'<arg_key>{name}</arg_key>')} {_LINE_END} {value}"
        ),
        lambda name: f"{_LINE_END} {rules.text('<arg_key>')} {rules.ended(name, '</arg_key>')} {_LINE_END} {value}",
    )
    return f"{rules.text(function.name)} {parameters} {_LINE_END}"


def _gemma4(rules: Rules, function: Function) -> str:
    value = gemma_object(rules, function.schema, strict=function.strict)
    return f"{rules.text(f'call:{function.name}')} {value}"


_LINE_END: Final = '"\\n"?'
_WRITERS: Final[Mapping[type, _Writer]] = {
    JsonObject: _json_object,
    XmlFunction: _xml_function,
    ArgumentPairs: _argument_pairs,
    Gemma4: _gemma4,
}


def _parameters(
    rules: Rules,
    function: Function,
    ending: Ending,
    declared: Callable[[str], str | None],
    other: Callable[[str], str],
) -> str:
    """The parameters of a function in the order of its schema, each at most once; required ones must be there.

    ``declared`` and ``other`` write what stands before a value, by the parameter's name or a terminal for names.
    """
    alternatives = Alternatives(function.schema.get("$defs", {}), strict=function.strict)

    def named(name: str, schema: Any, where: str) -> str | None:
        before = declared(name)
        if before is None:
            alternatives.refuse(where, "a name with a tag or a line end in it")
            return None
        value = bare_value(rules, schema, ending, alternatives, where)
        return None if value is None else f"{before} {value}"

    def further(name: str, schema: Any) -> str | None:
        value = bare_value(rules, schema, ending, alternatives, "additionalProperties")
        return None if value is None else f"{other(name)} {value}"

    found = [
        sequence(rules, members(one, alternatives, "properties"), named, further)
        for one in alternatives.of(function.schema, "parameters")
        if _is_plain(one, alternatives)
    ]
    possible = [one for one in found if one is not None]
    if not possible:
        raise GrammarError("they allow no arguments, as required properties are forbidden")
    return f"({' | '.join(possible)})"


def _declared(schema: Schema) -> list[str]:
    """The names of parameters that a function declares, by its flattened schema."""
    return sorted(Parameters([{"name": "", "parameters": schema}], "").names)


def _is_plain(schema: Mapping[str, Any], alternatives: Alternatives) -> bool:
    """Whether an object is described by its members."""
    if "enum" in schema:
        alternatives.refuse("parameters", "enum")
    return True
