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
        begins, ends = branch.startswith("^"), branch.endswith("$") and not _escaped_end(branch)
        body = branch[1 if begins else 0 : -1 if ends else None]
        branches.append(f"{'' if begins else _ANY}({body}){'' if ends else _ANY}")
    term = f"/({regex_to_lark('|'.join(branches), 'dw')})/"
    return None if LLMatcher.validate_grammar(f'{{"grammars": [{_grammar(term)}]}}') else term


def _grammar(terminal: str) -> str:
    return json.dumps({"lark_grammar": f"start: T\nT: {terminal}\n"})


_ANY: Final = r"(.|\n)*"


_GROUP_OPEN: Final = re.compile(r"\((?:\?:|(?!\?))")


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
    for part in patterns.PART.finditer(pattern):
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


def _escaped_end(branch: str) -> bool:
    before = branch[:-1]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


MAX_COUNTED: Final = 4096
"""Rules for the numbers of members that an object may have."""

_NAME: Final = r"/[\w.$@\/+*-]+/"


@dataclass(frozen=True, slots=True)
class Members:
    """Members of an object.  ``undeclared``: terminals of the names and schemas of further ones."""

    declared: list[tuple[str, Any, str]]
    required: frozenset[str]
    undeclared: list[tuple[str, Any]]
    min_number: int
    max_number: int | None


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
    if (names := schema.get("propertyNames")) is not None:
        properties, undeclared = _with_names(names, properties, undeclared, alternatives, f"{where}.propertyNames")
    properties = {name: value for name, value in properties.items() if value is not False}
    min_number, max_number = schema.get("minProperties", 0), schema.get("maxProperties")
    required = [name for name in required if name in properties]
    if min_number > len(required) and undeclared:
        # A name may be written twice.
        alternatives.refuse(where, "minProperties", "beside properties that it does not name")
        min_number = 0
    if (len(properties) + 1) * (max(min_number, max_number or 0) + 2) > MAX_COUNTED:
        alternatives.refuse(where, "minProperties or maxProperties", "of so many properties")
        min_number, max_number = 0, None
    with_places = [(name, value, f"{where}.{name}") for name, value in properties.items()]
    return Members(with_places, frozenset(required), undeclared, min_number, max_number)


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


def _with_names(
    names: Any, properties: dict[str, Any], undeclared: list[tuple[str, Any]], alternatives: Alternatives, where: str
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The members whose names fit a schema."""
    fitting, limited = dict.fromkeys(properties, False) | {}, list[tuple[str, Any]]()
    for option in alternatives.of(names, where):
        if "string" not in option["type"]:
            continue
        if "enum" in option:
            fitting |= {name: schema for name, schema in properties.items() if name in option["enum"]}
            free = [name for name in option["enum"] if isinstance(name, str) and name not in properties]
            fitting |= dict.fromkeys(free, undeclared[-1][1]) if len(undeclared) == 1 else {}
            if free and len(undeclared) > 1:
                alternatives.refuse(where, "enum", "beside patternProperties")
            continue
        limited += [(f"{term} & {text_terminal(option, alternatives, where)}", schema) for term, schema in undeclared]
        for name, schema in properties.items():
            if "format" not in option and fits_as_text(name, option):
                fitting[name] = schema
            elif "format" in option:
                alternatives.refuse(where, "format")
    return fitting, limited


class MemberSequence:
    """Rules for what may follow the members so far, by the next declared one and their number as far as it matters.

    ``declared`` and ``undeclared`` write a member, or return None if its schema allows no value; ``comma``: between
    members.
    """

    def __init__(
        self,
        rules: Rules,
        members: Members,
        declared: Callable[[str, Any, str], str | None],
        undeclared: Callable[[str, Any], str | None],
        comma: str = "",
    ) -> None:
        self._rules, self._comma = rules, comma
        self._min, self._max = members.min_number, members.max_number
        items = [(declared(*member), member[0] in members.required) for member in members.declared]
        self._items = [(rules.add(item), is_required) for item, is_required in items if item is not None]
        self._is_possible = all(item is not None or not is_required for item, is_required in items)
        further = [item for member in members.undeclared if (item := undeclared(*member)) is not None]
        self._further = rules.add(" | ".join(further)) if further else None
        # Beyond this number nothing depends on it.
        self._cap = max(self._min, 0 if self._max is None else self._max + 1, 1 if comma else 0)
        self._rest: dict[tuple[int, int], str | None] = {}  # by the next declared member, and the number so far

    def written(self) -> str | None:
        """Return an expression for the members one after another; None if there is none."""
        if not self._is_possible:
            return None
        # From the last to the first, so that no recursion is as deep as an object has members.
        for index in range(len(self._items), -1, -1):
            for count in range(self._cap, -1, -1):
                self._rest[index, count] = self._from(index, count)
        return self._rest[0, 0]

    def _from(self, index: int, count: int) -> str | None:
        if self._max is not None and count > self._max:
            return None
        comma = self._comma if count else ""
        if index == len(self._items):
            return self._end(count, comma)
        item, is_required = self._items[index]
        after = self._rest[index + 1, min(count + 1, self._cap)]
        options = [] if after is None else [f"{comma} {item} {after}"]
        if not is_required and (without := self._rest[index + 1, count]) is not None:
            options.append(without)
        return self._rules.add(" | ".join(options)) if options else None

    def _end(self, count: int, comma: str) -> str | None:
        is_enough = count >= self._min
        if self._further is None or count == self._max:
            return '""' if is_enough else None
        if self._max is not None:
            after = self._rest[len(self._items), count + 1]
            options = [f"{comma} {self._further} {after}"] if after is not None else []
            options += ['""'] if is_enough else []
            return self._rules.add(" | ".join(options)) if options else None
        if not is_enough:
            return None
        more = f"({self._comma} {self._further})*"
        return self._rules.add(f'{comma} {self._further} {more} | ""' if count == 0 and self._comma else more)
