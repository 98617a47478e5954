"""Forms of constrained output as llguidance grammars: JSON schema, regular expression, grammar, choice.

Pure.  Knows llguidance's notation, no requests and no tokens but those of the reasoning tags.  Invariant: what it
returns is well-formed JSON; whether the grammar in it is valid, compiling tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark, is_lark_syntax

from lucevisor.text.grammar.matcher import GrammarError
from lucevisor.text.output_format import ReasoningTags
from lucevisor.text.tokenizer import Tokenizer

Part = dict[str, Any]
"""One grammar of llguidance's notation: {"lark_grammar": ...} or {"json_schema": ...}."""

MAX_GRAMMAR_CHARS: Final = 128 * 1024
"""Characters of one schema, grammar or regular expression: reading GBNF takes some 10 us each."""

_WHITESPACE: Final = r"( |\n[ \t]{0,40})"
"""Between the tokens of JSON: nothing or this, so that a model cannot go on with blanks for ever."""


def json_schema(schema: Mapping[str, Any], *, lenient: bool = False) -> Part:
    """JSON that a schema describes; ``lenient``: keywords that cannot be enforced are left out, not refused.

    Raises GrammarError for a schema that is too long; so do the other forms.
    """
    try:
        _bounded(json.dumps(schema))
    except RecursionError:
        raise GrammarError("it is nested too deep") from None
    options = {"whitespace_pattern": _WHITESPACE, "lenient": lenient}
    return {"json_schema": {**schema, "x-guidance": options}}


def any_object() -> Part:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> Part:
    """Text that a regular expression (syntax of Rust's crate regex) matches from beginning to end."""
    found: Part = json.loads(LLMatcher.grammar_from_regex(_bounded(pattern)))["grammars"][0]
    return found


def choice(options: Sequence[str]) -> Part:
    """One of several texts."""
    words = _bounded(" | ".join(json.dumps(option, ensure_ascii=False) for option in options))
    return {"lark_grammar": f"start: {words}\n"}


def grammar(text: str) -> Part:
    """A grammar in GBNF (llama.cpp) or in Lark's notation as llguidance extends it.  Raises GrammarError."""
    if is_lark_syntax(_bounded(text)):
        return {"lark_grammar": text}
    try:
        return {"lark_grammar": gbnf_to_lark(text)}
    except GbnfToLarkError as error:
        raise GrammarError(str(error)) from None
    except RecursionError:
        raise GrammarError("it is nested too deep") from None
    except Exception as error:  # the converter raises bare Exceptions
        raise GrammarError(str(error)) from None


def after_reasoning(part: Part, tags: ReasoningTags | None, tokenizer: Tokenizer, *, inside: bool) -> str:
    """Return the whole grammar: reasoning as the model likes, then ``part``.

    ``inside``: the prompt ends inside reasoning, which must be closed; otherwise it may be opened or not.  ``tags``
    None: the answer has no reasoning.  Tokens that end the answer are forbidden within it.
    """
    if tags is None:
        return json.dumps({"grammars": [part]})
    rest = "thought NL?" if inside else f"({_tag(tags.open, tokenizer)} thought NL?)?"
    lark = f"start: {rest} @body\n{_until('thought', tags.close, tokenizer)}NL: /\\n{{1,2}}/\n"
    return json.dumps({"grammars": [{"lark_grammar": lark}, {"name": "body", **part}]})


def _until(rule: str, tag: str, tokenizer: Tokenizer) -> str:
    """A rule for anything but the end of the answer, up to and with a tag."""
    token = tokenizer.token_id(tag)
    if token is None:
        return f"{rule}[lazy]: /(.|\\n)*/ {json.dumps(tag)}\n"
    others = ",".join(str(i) for i in sorted({token, *tokenizer.eos_ids}))
    return f"{rule}: <[^{others}]>* <[{token}]>\n"


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.token_id(tag)
    return json.dumps(tag) if token is None else f"<[{token}]>"


def _bounded(text: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"it has {len(text)} characters, more than {MAX_GRAMMAR_CHARS}")
    return text
