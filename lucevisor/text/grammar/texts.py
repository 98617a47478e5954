"""Texts by a JSON schema, written without quotes or escapes, as terminals of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from llguidance import LLMatcher, regex_to_lark

from lucevisor.text import patterns
from lucevisor.text.grammar.alternatives import Alternatives
from lucevisor.text.grammar.rules import ANYTHING

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
