"""Values of parameters written without quotes up to a tag: texts as they are, everything else as JSON.

Knows JSON schemas and how ``read_value`` reads such a value.  Invariant: what the grammar allows is read back as a
value that fits the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.rules import ANYTHING, Rules, quoted
from lucevisor.text.grammar.schemas import UnsatisfiableError
from lucevisor.text.grammar.texts import text_terminal
from lucevisor.text.patterns import matches
from lucevisor.text.references import with_definitions
from lucevisor.text.tools.parameters import ANY_TYPE

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
    """What ends a value: a tag, and what no text may have in it, as regular expressions of Rust and Python alike."""

    tag: str
    forbidden: Sequence[str]


def bare_value(rules: Rules, schema: Any, ending: Ending, alternatives: Alternatives, where: str) -> str | None:
    """An expression for a value up to and with a tag; None if the schema allows no value."""
    found = alternatives.of(schema, where)
    kinds = frozenset(kind for one in found for kind in one["type"])
    if not found:
        return None
    if "string" not in kinds:
        return _json(rules, schema, ending, alternatives)
    values = _Values(ending, alternatives, where)
    for one in found:
        values.add(one)
    return values.written(rules, kinds)


def _json(rules: Rules, schema: Mapping[str, Any], ending: Ending, alternatives: Alternatives) -> str | None:
    whole = with_definitions(schema, alternatives.definitions)
    try:
        return f"{rules.json(whole, lenient=not alternatives.strict)} {rules.text(ending.tag)}"
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

    def add(self, one: dict[str, Any]) -> None:
        """Add an alternative."""
        kinds = set(one["type"])
        if "enum" in one:
            for value in one["enum"]:
                self._add_constant(value, one)
            return
        if "string" in kinds:
            self._terminals.append(text_terminal(one, self._alternatives, self._where))
        for kind in kinds & _WORDS.keys():
            self._constants |= dict.fromkeys(_WORDS[kind])
        if kinds & {"integer", "number"} and not _NUMERIC & one.keys():
            self._numbers.append(f"/{_NUMBER if 'number' in kinds else _INTEGER}/")
            kinds -= {"integer", "number"}
        if rest := sorted(kinds - {"string"} - _WORDS.keys()):
            own = {key: value for key, value in one.items() if key != "patterns"}
            self._json.append({**own, "type": rest})

    def _add_constant(self, value: Any, one: dict[str, Any]) -> None:
        if isinstance(value, (Mapping, list)):
            self._json.append({"const": value})
            return
        text = value if isinstance(value, str) else json.dumps(value)
        lengths = one.get("minLength", 0) <= len(text) <= one.get("maxLength", len(text))
        if isinstance(value, str) and not (lengths and all(matches(each, text) for each in one.get("patterns", ()))):
            return
        if any(re.search(forbidden, text) for forbidden in self._ending.forbidden):
            self._alternatives.refuse(self._where, "a constant with a tag in it")
        elif not isinstance(value, str) and _NUMERIC & one.keys():
            self._json.append({**one, "enum": [value]})
        else:
            self._constants[text] = None

    def written(self, rules: Rules, kinds: frozenset[str]) -> str | None:
        options, tag = list[str](), self._ending.tag
        if self._terminals or self._numbers:
            texts = [*map(_quoted, self._constants), *self._numbers]
            if self._terminals:
                texts.append(self._free_text(kinds))
            options.append(rules.ended(" | ".join(texts), tag))
        elif self._constants:
            options.append(f"({rules.one_of(self._constants)}) {rules.text(tag)}")
        if self._json:
            one = self._json[0] if len(self._json) == 1 else {"anyOf": self._json}
            if (written := _json(rules, one, self._ending, self._alternatives)) is not None:
                options.append(written)
        return f"({' | '.join(options)})" if options else None

    def _free_text(self, kinds: frozenset[str]) -> str:
        term = " | ".join(f"({one})" for one in dict.fromkeys(self._terminals))
        but = [f"~/(.|\\n)*({'|'.join(self._ending.forbidden)})(.|\\n)*/"]
        # Where anything is allowed a text may be read as anything.
        if term != f"({ANYTHING})" or kinds != ANY_TYPE:
            but += [f"~{_READ_AS[kind]}" for kind in sorted(kinds & _READ_AS.keys())]
            if any({"integer", "number"} & set(one.get("type", ())) or "enum" in one for one in self._json):
                but.append(f"~{_BEGINS_AS_NUMBER}")
        return f"(({term}) & {' & '.join(but)})"


def _quoted(text: str) -> str:
    return quoted(text) or '""'
