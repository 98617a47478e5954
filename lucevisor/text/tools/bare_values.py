"""Parameters between tags: texts as they are, without quotes, everything else as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.members import MemberSequence, members
from lucevisor.text.grammar.rules import ANYTHING, Rules, quoted
from lucevisor.text.grammar.schemas import UnsatisfiableError
from lucevisor.text.grammar.texts import fits_as_text, text_terminal
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.parameters import ANY_TYPE
from lucevisor.text.references import with_definitions
from lucevisor.text.tools.call import Function

_BLANKS: Final = r"[ \t\r\n]*"
_INTEGER: Final = "-?(0|[1-9][0-9]*)"
_NUMBER: Final = rf"{_INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?"
_NUMERIC: Final = frozenset(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
_WORDS: Final = {"null": ["null"], "boolean": ["true", "false"]}
# Texts that are read as JSON where the schema allows these types.
_READ_AS: Final = {
    "null": f"/{_BLANKS}(null|None){_BLANKS}/",
    "boolean": f"/{_BLANKS}(true|false|True|False){_BLANKS}/",
    "integer": f"/{_BLANKS}{_NUMBER}{_BLANKS}/",
    "number": f"/{_BLANKS}{_NUMBER}{_BLANKS}/",
    "object": rf"/{_BLANKS}\{{(.|\n)*/",
    "array": rf"/{_BLANKS}\[(.|\n)*/",
}
_BEGINS_AS_NUMBER: Final = rf"/{_BLANKS}[0-9-](.|\n)*/"


@dataclass(frozen=True, slots=True)
class Ending:
    """The tag that ends a value, and what no text may contain, as regular expressions of Rust and Python alike."""

    tag: str
    forbidden: Sequence[str]


def bare_parameters(
    rules: Rules,
    function: Function,
    ending: Ending,
    declared: Callable[[str], str | None],
    undeclared: Callable[[str], str],
) -> str:
    """Return the parameters of a function in the order of its schema, each at most once, required ones always."""
    alternatives = Alternatives(function.schema.get("$defs", {}), strict=function.strict)

    def of_name(name: str, schema: Any, where: str) -> str | None:
        opening = declared(name)
        if opening is None:
            alternatives.refuse(where, "a name with a tag or a line end in it")
            return None
        value = _value(rules, schema, ending, alternatives, where)
        return None if value is None else f"{opening} {value}"

    def of_names(terminal: str, schema: Any) -> str | None:
        value = _value(rules, schema, ending, alternatives, "additionalProperties")
        return None if value is None else f"{undeclared(terminal)} {value}"

    sequences = list[str | None]()
    for objects in alternatives.of(function.schema, "parameters"):
        if "enum" in objects:
            alternatives.refuse("parameters", "enum")
        if (allowed := members(objects, alternatives, "properties")) is not None:
            sequences.append(MemberSequence(rules, allowed, of_name, of_names).written())
    if not any(sequences):
        raise GrammarError("they allow no arguments, as required properties are forbidden")
    return f"({' | '.join(filter(None, sequences))})"


def _value(rules: Rules, schema: Any, ending: Ending, alternatives: Alternatives, where: str) -> str | None:
    options = alternatives.of(schema, where)
    kinds = frozenset(kind for option in options for kind in option["type"])
    if not options:
        return None
    if "string" not in kinds:
        return _json(rules, schema, ending, alternatives)
    values = _Values(ending, alternatives, where)
    for option in options:
        values.add(option)
    return values.written(rules, kinds)


def _json(rules: Rules, schema: Mapping[str, Any], ending: Ending, alternatives: Alternatives) -> str | None:
    complete = with_definitions(schema, alternatives.definitions)
    try:
        return f"{rules.json(complete, lenient=not alternatives.strict)} {rules.text(ending.tag)}"
    except UnsatisfiableError:
        return None


class _Values:
    """The values of a schema that allows texts, by how they are written."""

    def __init__(self, ending: Ending, alternatives: Alternatives, where: str) -> None:
        self._ending, self._alternatives, self._where = ending, alternatives, where
        self._constants: dict[str, None] = {}  # in their order
        self._terminals = list[str]()  # of texts
        self._numbers = list[str]()
        self._json = list[dict[str, Any]]()

    def add(self, alternative: dict[str, Any]) -> None:
        kinds = set(alternative["type"])
        if "enum" in alternative:
            for value in alternative["enum"]:
                self._add_constant(value, alternative)
            return
        if "string" in kinds:
            self._terminals.append(text_terminal(alternative, self._alternatives, self._where))
        for kind in kinds & _WORDS.keys():
            self._constants |= dict.fromkeys(_WORDS[kind])
        if kinds & {"integer", "number"} and not _NUMERIC & alternative.keys():
            self._numbers.append(f"/{_NUMBER if 'number' in kinds else _INTEGER}/")
            kinds -= {"integer", "number"}
        if json_kinds := sorted(kinds - {"string"} - _WORDS.keys()):
            keywords = {key: value for key, value in alternative.items() if key != "patterns"}
            self._json.append({**keywords, "type": json_kinds})

    def _add_constant(self, value: Any, alternative: dict[str, Any]) -> None:
        if isinstance(value, (Mapping, list)):
            self._json.append({"const": value})
            return
        text = value if isinstance(value, str) else json.dumps(value)
        if isinstance(value, str) and not fits_as_text(text, alternative):
            return
        if any(re.search(forbidden, text) for forbidden in self._ending.forbidden):
            self._alternatives.refuse(self._where, "a constant with a tag in it")
        elif not isinstance(value, str) and _NUMERIC & alternative.keys():
            self._json.append({**alternative, "enum": [value]})
        else:
            self._constants[text] = None

    def written(self, rules: Rules, kinds: frozenset[str]) -> str | None:
        """Return an expression for the values added, each with the tag; None if there are none."""
        options, tag = list[str](), self._ending.tag
        if self._terminals or self._numbers:
            texts = [*(quoted(text) or '""' for text in self._constants), *self._numbers]
            if self._terminals:
                texts.append(self._free_text(kinds))
            options.append(rules.ended(" | ".join(texts), tag))
        elif self._constants:
            options.append(f"({rules.one_of(self._constants)}) {rules.text(tag)}")
        if self._json:
            schema = self._json[0] if len(self._json) == 1 else {"anyOf": self._json}
            if (value := _json(rules, schema, self._ending, self._alternatives)) is not None:
                options.append(value)
        return f"({' | '.join(options)})" if options else None

    def _free_text(self, kinds: frozenset[str]) -> str:
        term = " | ".join(f"({terminal})" for terminal in dict.fromkeys(self._terminals))
        excluded = [f"~/(.|\\n)*({'|'.join(self._ending.forbidden)})(.|\\n)*/"]
        # Where anything is allowed a text may be read as anything.
        if term != f"({ANYTHING})" or kinds != ANY_TYPE:
            excluded += [f"~{_READ_AS[kind]}" for kind in sorted(kinds & _READ_AS.keys())]
            if any({"integer", "number"} & set(schema.get("type", ())) or "enum" in schema for schema in self._json):
                excluded.append(f"~{_BEGINS_AS_NUMBER}")
        return f"(({term}) & {' & '.join(excluded)})"
