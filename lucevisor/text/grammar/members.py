"""Texts by a JSON schema as terminals, and the members of an object: the declared ones in their order, then others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher, regex_to_lark

from lucevisor.text import patterns
from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.rules import ANYTHING, Rules, quoted
from lucevisor.text.patterns import matches

_YEAR: Final = "[0-9]{4}"
_LEAP_YEAR: Final = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE: Final = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|02-(0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME: Final = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_ATOM: Final = r"[A-Za-z0-9!#$%&'*+\/=?^_`{|}~-]"
_BYTE: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP: Final = "[0-9A-Fa-f]{1,4}"
_IPV6: Final = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        *(f"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7)),
        f":(:{_GROUP}){{1,7}}",
        f"({_GROUP}:){{1,7}}:",
        "::",
    ]
)
_URI_PART: Final = r"([A-Za-z0-9._~!$&'()*+,;=:@\/-]|%[0-9A-Fa-f]{2})*"
FORMATS: Final[Mapping[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]+W|[0-9]+D(T[0-9]+[HMS])?|[0-9]+[YM]|T([0-9]+H([0-9]+M)?|[0-9]+[MS]))",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "email": rf"{_ATOM}+(\.{_ATOM}+)*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:\/\/{_HOSTNAME}(:[0-9]{{1,5}})?(\/{_URI_PART})?(\?{_URI_PART})?(#{_URI_PART})?",
}
"""Formats of strings that are enforced, as regular expressions; those of JSON are llguidance's."""


def text_terminal(schema: Mapping[str, Any], alternatives: Alternatives, where: str) -> str:
    """A terminal for the texts that an alternative of a schema allows; not for an enumeration."""
    terms = list[str]()
    if "minLength" in schema or "maxLength" in schema:
        terms.append(f"/(.|\\n){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/")
    for pattern in schema.get("patterns", ()):
        term = searched(str(pattern))
        if term is None:
            alternatives.refuse(where, f"the pattern {json.dumps(pattern)}")
        elif terms and patterns.exceeds_work_limit(_grammar(" & ".join([*terms, term]))):
            alternatives.refuse(where, f"the pattern {json.dumps(pattern)}", "beside others or lengths: too much work")
        else:
            terms.append(term)
    if "format" in schema:
        if schema["format"] in FORMATS:
            terms.append(f"/{FORMATS[schema['format']]}/")
        else:
            alternatives.refuse(where, f"the format {json.dumps(schema['format'])}")
    return " & ".join(terms) or ANYTHING


def fits_as_text(text: str, alternative: Mapping[str, Any]) -> bool:
    """Return whether a constant fits the lengths and patterns of an alternative."""
    fits_length = alternative.get("minLength", 0) <= len(text) <= alternative.get("maxLength", len(text))
    return fits_length and all(patterns.matches(pattern, text) for pattern in alternative.get("patterns", ()))


def searched(pattern: str) -> str | None:
    """A terminal for the texts in which a pattern of a schema is found; None if llguidance cannot read it."""
    try:
        expression = patterns.checked(pattern)
    except patterns.PatternError:
        return None
    branches = []
    for branch in _branches(expression):
        n_escapes = len(branch) - 1 - len(branch[:-1].rstrip("\\"))
        begins, ends = branch.startswith("^"), branch.endswith("$") and n_escapes % 2 == 0
        body = branch[1 if begins else 0 : -1 if ends else None]
        branches.append(f"{'' if begins else _ANY}({body}){'' if ends else _ANY}")
    term = f"/({regex_to_lark('|'.join(branches), 'dw')})/"
    return None if LLMatcher.validate_grammar(f'{{"grammars": [{_grammar(term)}]}}') else term


def _grammar(terminal: str) -> str:
    return json.dumps({"lark_grammar": f"start: T\nT: {terminal}\n"})


_ANY: Final = r"(.|\n)*"


_GROUP_OPEN: Final = re.compile(r"\((?:\?:|(?!\?))")
# Each alternative ends within a bound or at the end of the text, so that reading takes linear time.
_PART: Final = re.compile(
    r"(?P<open>\()|(?P<close>\))|(?P<or>\|)|\[\^?\]?(?:\\.|\[(?:\\.|[^\]])*+\]?|[^\]])*+\]?|\\.|.", re.DOTALL
)


def _branches(pattern: str) -> Iterator[str]:
    """Yield the alternatives of a pattern, and of a group that is a whole alternative."""
    for branch, is_group in _alternatives(pattern):
        if is_group and (opening := _GROUP_OPEN.match(branch)):
            yield from _branches(branch[opening.end() : -1])
        else:
            yield branch


def _alternatives(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield the alternatives that a pattern has outside of groups, and whether each is one group."""
    depth, begin, n_groups, end_of_group = 0, 0, 0, -1
    for part in _PART.finditer(pattern):
        if part.lastgroup == "open":
            depth += 1
        elif part.lastgroup == "close":
            depth -= 1
            n_groups += depth == 0
            end_of_group = part.end()
        elif part.lastgroup == "or" and depth == 0:
            branch = pattern[begin : part.start()]
            yield branch, n_groups == 1 and end_of_group == part.start() and branch.startswith("(")
            begin, n_groups = part.end(), 0
    yield pattern[begin:], n_groups == 1 and end_of_group == len(pattern) and pattern.startswith("(", begin)


_NAME: Final = r"/[\w.$@\/+*-]+/"


@dataclass(frozen=True, slots=True)
class Members:
    """Members of an object.  ``undeclared``: terminals of the names and schemas of further ones."""

    declared: list[tuple[str, Any, str]]
    required: frozenset[str]
    undeclared: list[tuple[str, Any]]


def members(schema: Mapping[str, Any], alternatives: Alternatives, where: str) -> Members | None:
    """Return the members of the objects that an alternative describes; None if one that must be there is forbidden."""
    declared, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    additional = schema.get("additionalProperties")
    required = [name for name in schema.get("required") or () if isinstance(name, str)]
    properties = dict(declared)
    for name in required:
        if name not in properties and (additional is not False or any(matches(p, name) for p in patterns)):
            properties[name] = True
    for name, value in properties.items():
        matching = [pattern_schema for pattern, pattern_schema in patterns.items() if matches(pattern, name)]
        if name not in declared and not matching:
            matching = [True if additional is None else additional]
        if matching and value is not False:
            properties[name] = {"allOf": [value, *matching]}
    if any(properties.get(name, False) is False for name in required):
        return None
    undeclared = _undeclared(schema, properties, alternatives, where)
    with_places = [(name, value, f"{where}.{name}") for name, value in properties.items() if value is not False]
    return Members(with_places, frozenset(required), undeclared)


def member_sequence(
    rules: Rules,
    members: Members,
    declared: Callable[[str, Any, str], str | None],
    undeclared: Callable[[str, Any], str | None],
    comma: str = "",
) -> str | None:
    """Return an expression for the members one after another, with a ``comma`` between them; None if there is none.
    ``declared`` and ``undeclared`` write a member, or return None if its schema allows no value."""
    items = [(declared(*member), member[0] in members.required) for member in members.declared]
    if any(item is None and is_required for item, is_required in items):
        return None
    further = [item for member in members.undeclared if (item := undeclared(*member)) is not None]
    first = after = '""'  # what follows where no member was written yet, and where one was
    if further:
        item = rules.add(" | ".join(further))
        after = f"({comma} {item})*"
        first = f"({item} {after})?"
    for written, is_required in reversed(items):
        if written is not None:
            item = rules.add(written)
            rest, next_ = f"{item} {after}", f"{comma} {item} {after}"
            first = rules.add(rest if is_required else f"{rest} | {first}")
            after = rules.add(next_ if is_required else f"{next_} | {after}")
    return first


def _undeclared(
    schema: Mapping[str, Any], properties: Mapping[str, Any], alternatives: Alternatives, where: str
) -> list[tuple[str, Any]]:
    """Names and schemas of undeclared members: by their patterns, and all others where the schema allows them."""
    patterns, additional = schema.get("patternProperties") or {}, schema.get("additionalProperties")
    excluded = "".join(f" & ~{quoted(name)}" for name in properties if name)
    by_terminal = list[tuple[str, Any]]()
    for pattern, value in patterns.items():
        if (terminal := searched(pattern)) is None:
            alternatives.refuse(where, f"the pattern {json.dumps(pattern)}")
            additional = True
            continue
        if value is not False:
            by_terminal.append((f"{_NAME} & {terminal}{excluded}", value))
        excluded += f" & ~{terminal}"
    if additional is None:
        additional = not schema.get("properties") and not patterns
    return by_terminal if additional is False else [*by_terminal, (f"{_NAME}{excluded}", additional)]
