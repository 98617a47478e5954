"""Forms of constrained output as llguidance grammars: JSON schema, regular expression, grammar, choice.

In a GBNF grammar each rule without recursion is matched as a whole: single characters would take too many states."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from llguidance import LLMatcher

from lucevisor.text.grammar.schemas import prepared
from lucevisor.text.llguidance_limits import GrammarError

_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_DEFINES: Final = re.compile(r"\s*::=")
_BLANK: Final = re.compile(r"(?:\s|#[^\n]*)*")
_REPEATS: Final = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPED: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_REFERENCE: Final = re.compile(r"\bg\d+\b")  # texts are single characters, so it stands in none
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_MAX_REPEATS: Final = 100_000


def lark(text: str) -> str:
    """Return the grammar in Lark's notation.  Raises GrammarError with the line."""
    return _Reader(text).grammar()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0
        self._names: dict[str, str] = {}
        self._used: dict[str, int] = {}  # rules that are referred to, and where first
        self._rules: dict[str, str] = {}

    def grammar(self) -> str:
        self._skip()
        while self._at < len(self._text):
            name = self._name()
            if not (match := _DEFINES.match(self._text, self._at)):
                raise self._wrong("::= is expected after a rule's name")
            self._at = match.end()
            self._skip()
            self._rules[name] = self._alternatives()
        for name, at in self._used.items():
            if name not in self._rules:
                raise self._wrong(f"rule '{name}' not found", at)
        if "root" not in self._rules:
            raise GrammarError("it has no rule 'root'")
        # llguidance's lexer follows each rule that does not lead back to itself as one expression.
        regular = _without_recursion({self._rule(name): body for name, body in self._rules.items()})
        lines = [f"start: {self._rule('root')}"]
        lines += [f"{self._rule(name)}: {body}" for name, body in self._rules.items()]
        return _REFERENCE.sub(lambda match: match.group().upper() if match.group() in regular else match.group(),
                              "\n".join([*lines, ""]))  # fmt: skip

    def _alternatives(self) -> str:
        self._depth += 1
        if self._depth > 200:
            raise GrammarError("it is nested too deep")
        sequences = [self._sequence()]
        while self._peek() == "|":
            self._take("|")
            sequences.append(self._sequence())
        self._depth -= 1
        return " | ".join(sequences)

    def _sequence(self) -> str:
        items = list[str]()
        while (char := self._peek()) not in ("", "|", ")"):
            name = _NAME.match(self._text, self._at)
            if name and _DEFINES.match(self._text, name.end()):
                break  # the next rule
            items.append(self._repeated(self._item(char)))
        return " ".join(item for item in items if item) or '""'

    def _item(self, char: str) -> str:
        if char == '"':
            return self._literal()
        if char == "[":
            return self._class()
        if char == ".":
            self._take(".")
            return r"/(.|\n)/"
        if char == "(":
            self._take("(")
            inner = self._alternatives()
            if self._peek() != ")":
                raise self._wrong("a parenthesis is not closed")
            self._take(")")
            return f"({inner})"
        at, name = self._at, self._name()
        self._skip()
        self._used.setdefault(name, at)
        return self._rule(name)

    def _repeated(self, item: str) -> str:
        while (char := self._peek()) in ("*", "+", "?", "{"):
            if char != "{":
                self._take(char)
                item = f"({item}){char}" if item else ""
                continue
            match = _REPEATS.match(self._text, self._at)
            if not match:
                raise self._wrong("a repetition is {n}, {n,} or {n,m}")
            min_times, max_times = int(match.group(1)), match.group(3) if match.group(2) else match.group(1)
            if (
                max_times and (int(max_times) < min_times or int(max_times) > _MAX_REPEATS)
            ) or min_times > _MAX_REPEATS:
                raise self._wrong(f"a repetition goes from a lower to a higher number, up to {_MAX_REPEATS}")
            self._at = match.end()
            self._skip()
            item = f"({item}){{{min_times},{max_times}}}" if item and max_times not in ("0",) else ""
        return item

    def _literal(self) -> str:
        """A text, each character by itself."""
        self._at += 1
        characters = list[str]()
        while not self._text.startswith('"', self._at):
            characters.append(json.dumps(self._character('"'), ensure_ascii=False))
        self._take('"')
        return f"({' '.join(characters)})" if characters else ""

    def _class(self) -> str:
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        members = list[str]()
        while not self._text.startswith("]", self._at):
            first = self._character("]")
            if self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at):
                self._at += 1
                last = self._character("]")
                if last < first:
                    raise self._wrong("a range goes from a lower to a higher character")
                members.append(f"{_coded(first)}-{_coded(last)}")
            else:
                members.append(_coded(first))
        self._take("]")
        if not members:
            return r"/(.|\n)/" if negated else r"/[^\s\S]/"
        return f"/[{'^' if negated else ''}{''.join(members)}]/"

    def _character(self, end: str) -> str:
        if self._at >= len(self._text) or (end == '"' and self._text[self._at] == "\n"):
            raise self._wrong(f"{end} is missing")
        if match := _ESCAPED.match(self._text, self._at):
            self._at = match.end()
            code = match.group(1) or match.group(2) or match.group(3)
            if code is None:
                return _LETTERS.get(match.group(4), match.group(4))
            if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
                raise self._wrong(f"U+{code} is no character")
            return chr(int(code, 16))
        self._at += 1
        return self._text[self._at - 1]

    def _name(self) -> str:
        match = _NAME.match(self._text, self._at)
        if not match:
            raise self._wrong(f"{self._text[self._at : self._at + 1]!r} begins neither a rule nor a part of one")
        self._at = match.end()
        return match.group()

    def _rule(self, name: str) -> str:
        return self._names.setdefault(name, f"g{len(self._names)}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self, text: str) -> None:
        self._at += len(text)
        self._skip()

    def _skip(self) -> None:
        match = _BLANK.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _wrong(self, why: str, at: int | None = None) -> GrammarError:
        line = self._text.count("\n", 0, self._at if at is None else at) + 1
        return GrammarError(f"line {line}: {why}")


def _without_recursion(rules: Mapping[str, str]) -> set[str]:
    """Return the rules, of names and bodies, that do not lead back to themselves."""
    order, found = TopologicalSorter({name: _REFERENCE.findall(body) for name, body in rules.items()}), set[str]()
    with contextlib.suppress(CycleError):  # rules in no cycle are reached anyway
        order.prepare()
    while ready := order.get_ready():
        found.update(ready)
        order.done(*ready)
    return found


def _coded(char: str) -> str:
    return rf"\u{{{ord(char):x}}}"


Part = dict[str, Any]
"""One grammar of llguidance's notation: {"lark_grammar": ...} or {"json_schema": ...}."""

MAX_GRAMMAR_CHARS: Final = 128 * 1024
"""Characters of one schema, grammar or regular expression: reading GBNF takes some 10 us each."""

_LARK: Final = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
_GBNF: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_WHITESPACE: Final = r"( |\n[ \t]{0,40})"
"""Between the tokens of JSON: nothing or this, so that a model cannot go on with blanks for ever."""


def json_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> Part:
    """JSON that a schema describes; ``lenient``: keywords that cannot be enforced are left out. Raises GrammarError."""
    try:
        _bounded(json.dumps(schema))
        ready = prepared(schema, lenient=lenient)
    except RecursionError:
        raise GrammarError("it is nested too deep") from None
    options = {"whitespace_pattern": _WHITESPACE}
    return {"json_schema": {**(ready if isinstance(ready, dict) else {}), "x-guidance": options}}


def any_object() -> Part:
    return json_schema({"type": "object"})


def regex(pattern: str) -> Part:
    """Text that a regular expression (syntax of Rust's crate regex) matches from beginning to end."""
    part: Part = json.loads(LLMatcher.grammar_from_regex(_bounded(pattern)))["grammars"][0]
    return part


def choice(options: Sequence[str]) -> Part:
    """One of several texts."""
    words = _bounded(" | ".join(json.dumps(option, ensure_ascii=False) for option in options))
    return {"lark_grammar": f"start: {words}\n"}


def grammar(text: str) -> Part:
    """A grammar in GBNF (llama.cpp) or in Lark's notation as llguidance extends it.  Raises GrammarError."""
    if not _LARK.search(_bounded(text)) or _GBNF.search(text):
        return {"lark_grammar": lark(text)}
    return {"lark_grammar": text}


def _bounded(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}")
    return text
