"""Call formats with parameters between tags: texts as they are, without quotes, everything else as JSON.

Qwen3-Coder and others: `<function=NAME><parameter=K>V</parameter></function>`.  Laguna, and GLM 4.5 to 4.7:
`NAME<arg_key>K</arg_key><arg_value>V</arg_value>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.members import fits_as_text, member_sequence, members, text_terminal
from lucevisor.text.grammar.rules import ANYTHING, LINE_END, Rules, quoted
from lucevisor.text.grammar.schemas import UnsatisfiableError
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.parameters import ANY_TYPE, Parameters, Tools, first_readable
from lucevisor.text.references import with_definitions
from lucevisor.text.tools.call import Function, ToolCall, ToolFormat, make_call

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
            sequences.append(member_sequence(rules, allowed, of_name, of_names))
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


_HEAD: Final = re.compile(r"\s*<function=([^>\n]+)>")
_OPEN: Final = re.compile(r"<parameter=([^\n]*?)>")
_ANY_BLANKS: Final = re.compile(r"\s*")
# A value ends at the closing tag that another parameter or the end follows, so that a value may quote the tag itself.
_CLOSE: Final = re.compile(r"</parameter>(?=\s*(?:<parameter=[^\n]*?>|</function>\s*\Z|\Z))")
_UNCLOSED: Final = re.compile(r"(<parameter=[^>\n]+>(?:(?!</parameter>).)*?)(?=\s*</function>\s*\Z)", re.DOTALL)
_TAIL: Final = re.compile(r"\s*(?:</function>\s*)?\Z")


class XmlFunction(ToolFormat):
    """Calls written as XML-like tags; values are bare text, read by the tool's schema."""

    open = "<tool_call>"
    close = "</tool_call>"
    bare = ("<function=", "</function>")
    tags = (open, close)

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when a tag is missing or text stands between tags."""
        head = _HEAD.match(body)
        if head is None:
            return None
        name, end = head.group(1).strip(), head.end()
        parameters = Parameters(tools, name)
        arguments: dict[str, object] = {}
        while parameter := _parameter(body, end, parameters):
            key, value, end = parameter
            arguments |= _read(key, value, parameters)
        return make_call(name, arguments) if name and _TAIL.match(body, end) else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Close the last parameter where the function ends."""
        return self.parse(_UNCLOSED.sub(r"\1\n</parameter>", body), tools)

    def is_inside_value(self, body: str) -> bool:
        start = body.find("<parameter=")
        if start < 0:
            return False
        ends = [closing.end() for closing in _CLOSE.finditer(body, start)]
        return not ends or _opened(body, ends[-1]) is not None

    def grammar(self, rules: Rules, function: Function) -> str:
        head, tail = rules.text(f"\n<function={function.name}>\n"), rules.text("</function>")
        names = sorted(Parameters([{"name": "", "parameters": function.schema}], "").names)
        declared = "|".join(re.escape(name).replace("/", "\\/") for name in names)
        opening = [f"<parameter=({declared})>"] if declared else []
        ending = Ending("\n</parameter>\n", [r"<\/parameter>[\s\x1c-\x1f]*<(parameter=|\/function>)", *opening])
        values = bare_parameters(
            rules,
            function,
            ending,
            lambda name: None if "\n" in name else rules.text(f"<parameter={name}>\n"),
            lambda terminal: rules.add(f'"<parameter=" ({terminal}) ">\\n"', lazy=True),
        )
        return f"{head} {values} {tail} {LINE_END} {rules.text(self.close)}"


def _parameter(body: str, start: int, parameters: Parameters) -> tuple[str, str, int] | None:
    """The name and the value of the parameter that begins here, and its end; None if none does."""
    opened = _opened(body, start)
    if opened is None:
        return None
    begin = opened.start(1)
    # A declared name may contain characters that end other names.
    key = max((name for name in parameters.names if body.startswith(f"{name}>", begin)), key=len, default=None)
    begin = opened.end() if key is None else begin + len(key) + 1
    key = opened[1].strip() if key is None else key
    closings = list(_CLOSE.finditer(body, begin))
    if not closings:
        return None
    closing = closings[first_readable((body[begin : match.start()] for match in closings), parameters.schema(key))]
    return key, body[begin : closing.start()], closing.end()


def _opened(body: str, start: int) -> re.Match[str] | None:
    blanks = _ANY_BLANKS.match(body, start)
    return _OPEN.match(body, blanks.end() if blanks else start)


def _read(key: str, text: str, parameters: Parameters) -> dict[str, object]:
    """Return the value of a parameter, and of those whose opening tag stands in it as its closing tag is missing."""
    value = parameters.read(key, _unpadded(text))
    opening = None if "</parameter>" in text or not isinstance(value, str) else _OPEN.search(text)
    if opening is None or opening[1].strip() not in parameters.names:
        return {key: value}
    first = parameters.read(key, _unpadded(text[: opening.start()]))
    return {key: first, **_read(opening[1].strip(), text[opening.end() :], parameters)}


def _unpadded(value: str) -> str:
    """Return the value without the one line end that the format puts before and after it."""
    return value.removeprefix("\n").removesuffix("\n")


_NAME: Final = re.compile(r"\s*([^<\s]+)")
_KEY: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
# A value ends at the closing tag that another key or the end follows, so that a value may quote the tag itself.
_PAIR_CLOSE: Final = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|\Z))")
_NO_VALUE: Final = re.compile(r"</arg_key>(?!\s*<arg_value>)")
_NO_KEY: Final = re.compile(r"\A(\s*[^<\s]+\s*)<tool_call>")


class ArgumentPairs(ToolFormat):
    """Calls written as a name and pairs of key and value; strings are bare text, everything else JSON."""

    open = "<tool_call>"
    close = "</tool_call>"
    tags = (open, close, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def parse(self, body: str, tools: Tools) -> ToolCall | None:
        """Return the call, or None when it has no name or text stands between the pairs."""
        head = _NAME.match(body)
        if head is None:
            return None
        name, end = head.group(1), head.end()
        parameters = Parameters(tools, name)
        arguments: dict[str, object] = {}
        while opening := _KEY.match(body, end):
            key, begin = opening[1], opening.end()
            if key not in parameters.names:
                key = key.strip()
            closings = list(_PAIR_CLOSE.finditer(body, begin))
            if not closings:
                break
            texts = (body[begin : closing.start()] for closing in closings)
            closing = closings[first_readable(texts, parameters.schema(key))]
            arguments[key], end = parameters.read(key, body[begin : closing.start()]), closing.end()
        return make_call(name, arguments) if not body[end:].strip() else None

    def repair(self, body: str, tools: Tools) -> ToolCall | None:
        """Add the opening tag of values without one, and of a first key after a second opening tag of the call."""
        return self.parse(_NO_VALUE.sub("</arg_key><arg_value>", _NO_KEY.sub(r"\1<arg_key>", body)), tools)

    def is_inside_value(self, body: str) -> bool:
        start = body.find("<arg_value>")
        ends = [closing.end() for closing in _PAIR_CLOSE.finditer(body, start)] if start >= 0 else []
        return start >= 0 and (not ends or _KEY.match(body, ends[-1]) is not None)

    def grammar(self, rules: Rules, function: Function) -> str:
        value = rules.text("<arg_value>")

        def declared(name: str) -> str | None:
            key = rules.text(f"<arg_key>{name}</arg_key>")
            return None if "</arg_key>" in name else f"{LINE_END} {key} {LINE_END} {value}"

        def undeclared(terminal: str) -> str:
            return f"{LINE_END} {rules.text('<arg_key>')} {rules.ended(terminal, '</arg_key>')} {LINE_END} {value}"

        ending = Ending("</arg_value>", [r"<\/arg_value>"])
        values = bare_parameters(rules, function, ending, declared, undeclared)
        return f"{rules.text(function.name)} {values} {LINE_END} {rules.text(self.close)}"
