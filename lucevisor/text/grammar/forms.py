"""Forms of constrained output as llguidance grammars: JSON schema, regular expression, grammar, choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher

from lucevisor.text.grammar import gbnf, lark
from lucevisor.text.grammar.schemas import prepared
from lucevisor.text.llguidance_limits import GrammarError
from lucevisor.text.patterns import check_length

Part = dict[str, Any]
"""One grammar of llguidance's notation: {"lark_grammar": ...} or {"json_schema": ...}."""

MAX_GRAMMAR_CHARS: Final = 128 * 1024
"""Characters of one schema, grammar or regular expression: reading GBNF takes some 10 us each."""

_LARK: Final = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)
_GBNF: Final = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)

_WHITESPACE: Final = r"( |\n[ \t]{0,40})"
"""Between the tokens of JSON: nothing or this, so that a model cannot go on with blanks for ever."""


def json_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> Part:
    """JSON that a schema describes; ``lenient``: keywords that cannot be enforced are left out, not refused.

    Raises GrammarError for a schema that is refused or too long.
    """
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
    check_length(_bounded(pattern))
    part: Part = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]
    return part


def choice(options: Sequence[str]) -> Part:
    """One of several texts."""
    words = _bounded(" | ".join(json.dumps(option, ensure_ascii=False) for option in options))
    return {"lark_grammar": f"start: {words}\n"}


def grammar(text: str) -> Part:
    """A grammar in GBNF (llama.cpp) or in Lark's notation as llguidance extends it.  Raises GrammarError."""
    if not _LARK.search(_bounded(text)) or _GBNF.search(text):
        return {"lark_grammar": gbnf.lark(text)}
    lark.check_grammar(text)
    return {"lark_grammar": text}


def _bounded(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}")
    return text
