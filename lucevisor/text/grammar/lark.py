"""Minimum length of the texts of a grammar in Lark's notation.

llguidance takes seconds to refuse an expression whose texts are all very long.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.patterns import MAX_FORCED, Length, check_length

_TEXT: Final = r'"(?:\\.|[^"\\\n])*"'
_EXPRESSION: Final = r"/(?!/)(?:\\.|[^/\\\n])+/"
_PART: Final = re.compile(
    rf"""(?P<text>{_TEXT}) | (?P<expression>{_EXPRESSION})[imslux]* | <[^>\n]*> | ->\s*\w+ | (?P<name>\b[A-Za-z_]\w*)
    | (?:\{{|~)\s*(?P<times>\d+)[^}}\s]*\}}? | [()\[\]|&*+?]""",
    re.VERBOSE,
)
_RULE: Final = re.compile(r"^[ \t]*[?!]*(%ignore\b|[A-Za-z_]\w*(?:\.\d+)?\s*(?:\[[^\n]*\])?\s*:)", re.MULTILINE)
_ASIDE: Final = re.compile(rf"{_TEXT}|{_EXPRESSION}|(?P<comment>(?://|\#)[^\n]*)|(?P<json>%json\s*)")
_JSON: Final = json.JSONDecoder()


def check_grammar(text: str) -> None:
    """Raise GrammarError for a grammar of which a part matches only very long texts."""
    _, *rules = _RULE.split(_without_asides(text))
    names = [re.split(r"\W", head, maxsplit=1)[0] for head in rules[::2]]
    check_lengths(dict(zip(names, rules[1::2], strict=True)))


def check_lengths(rules: Mapping[str, str]) -> set[str]:
    """Return the rules, of names and bodies, that do not lead back to themselves.  Raises as ``check_grammar``."""
    parts = {name: list(_PART.finditer(body)) for name, body in rules.items()}
    uses = {name: {part["name"] for part in matches} & rules.keys() for name, matches in parts.items()}
    order = TopologicalSorter(uses)
    with contextlib.suppress(CycleError):  # rules in no cycle are reached anyway
        order.prepare()
    lengths = dict[str, int]()
    while ready := order.get_ready():
        lengths |= {name: _length(parts[name], lengths) for name in ready}
        order.done(*ready)
    for name in parts.keys() - lengths.keys():
        _length(parts[name], lengths)
    return set(lengths)


def _length(parts: list[re.Match[str]], lengths: Mapping[str, int]) -> int:
    """The least number of characters that a rule matches."""
    length = Length()
    for part in parts:
        token = part.group()
        if part["text"]:
            length.add(len(re.sub(r"\\.", ".", token)) - 2)
        elif part["expression"]:
            length.add(check_length(part["expression"][1:-1]))
        elif part["name"]:
            length.add(lengths.get(token, 0))
        elif part["times"]:
            length.repeat(min(int(part["times"][:9]), MAX_FORCED))
        elif token in "([":
            length.open()
        elif token in ")]":
            length.close()
            if token == "]":
                length.repeat(0)
        elif token in "|&":
            length.choose()
        elif token in "*?+":
            length.repeat(token == "+")
    if length.largest >= MAX_FORCED:
        raise GrammarError(f"a part of it matches only texts of {MAX_FORCED} characters or more")
    return length.whole


def _without_asides(text: str) -> str:
    """The grammar without comments and JSON schemas, whose expressions are checked."""
    pieces, at = list[str](), 0
    while match := _ASIDE.search(text, at):
        aside = match["comment"] or match["json"]
        pieces.append(text[at : match.start() if aside else match.end()])
        at = match.end()
        if match["json"]:
            with contextlib.suppress(ValueError, RecursionError):
                schema, at = _JSON.raw_decode(text, at)
                for pattern in _patterns(schema):
                    check_length(pattern)
    return "".join([*pieces, text[at:]])


def _patterns(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        yield from (value for key, value in schema.items() if key == "pattern" and isinstance(value, str))
        if isinstance(of_names := schema.get("patternProperties"), Mapping):
            yield from of_names
    for value in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _patterns(value)
