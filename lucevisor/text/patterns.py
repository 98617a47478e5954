"""Regular expressions of JSON schemas (ECMA 262) in the notation that llguidance compiles, and questions about them."""

from __future__ import annotations

import functools
import json
import re
import threading
from typing import Final

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from lucevisor.text.llguidance_limits import LIMITS, TRIAL_LIMITS, GrammarError, is_panic

_END: Final = 256  # the token after the 256 bytes
_SEARCHES: Final = threading.Lock()  # of searches, which are made by workers and by the event loop
_CONTROLS: Final = {"0": r"\x00", "b": r"\x08"}
_QUANTIFIER: Final = re.compile(r"\{\d+(,\d*)?\}")
_TOKEN: Final = re.compile(
    r"\\[pP]\{[^}]{0,64}\} | \\c[A-Za-z] | \\x[0-9a-fA-F]{2} | \\u\{[0-9a-fA-F]{1,9}\} | \\u[0-9a-fA-F]{4} | \\. | .",
    re.VERBOSE | re.DOTALL,
)
_KNOWN_ESCAPES: Final = frozenset("dDwWsSbBnrtfvpPkxu123456789")
_CONTROL_CHARACTERS: Final = [chr(code) for code in range(32)]
_CLASSES: Final = {r"\w": "0-9A-Za-z_", r"\d": "0-9"}  # ASCII only, as in ECMA 262


MAX_PATTERNS: Final = 64
"""Patterns of one object: each is compared with all others, and with all names."""


class PatternError(GrammarError):
    """An expression cannot be compiled.  The message has the reason."""


def translated(pattern: str) -> str:
    """Return an ECMA expression in the notation of Rust's crate regex."""
    pieces, class_at, at = list[str](), -1, 0
    while match := _TOKEN.match(pattern, at):
        token = match.group()
        at = match.end()
        in_class = class_at >= 0
        if token[0] == "\\" and len(token) > 1:
            pieces.append(_escape(token, in_class=in_class))
        elif in_class and token == "]":
            pieces[class_at:] = [_class("".join([*pieces[class_at:], token]))]
            class_at = -1
        elif in_class:
            pieces.append(rf"\{token}" if token in "[&~|" or (token == "-" and pattern[at : at + 1] == "-") else token)
        elif token == "[":
            if pattern.startswith("^]", at):  # any character
                pieces.append(r"[\s\S]")
                at += 2
            elif pattern.startswith("]", at):  # none
                pieces.append(r"[^\s\S]")
                at += 1
            else:
                class_at = len(pieces)
                pieces.append(token)
                if pattern.startswith("^", at):
                    pieces.append("^")
                    at += 1
        elif token == "{" and not _QUANTIFIER.match(pattern, match.start()):
            pieces.append(r"\{")
        elif token == "}" and "{" not in pattern[max(0, at - 24) : at]:
            pieces.append(r"\}")
        else:
            pieces.append(token)
    return "".join(pieces)


def _class(members: str) -> str:
    """A class, in brackets, without NUL where llguidance would take too much for it.

    In JSON llguidance allows both quotes and backslashes where a class has all control characters.
    """
    try:
        matches_one = re.compile(members, re.ASCII).match
        is_exact = not all(map(matches_one, _CONTROL_CHARACTERS)) or all(map(matches_one, '"\\'))
    except re.error:  # of the notation's own, such as \p{L}
        is_exact = False
    return members if is_exact else rf"[{members}--\x00]"


def _escape(token: str, *, in_class: bool) -> str:
    kind = token[1]
    if kind in "pP" and len(token) > 2:
        return token if in_class else _class(f"[{token}]")
    if kind == "c" and len(token) == 3:
        return rf"\x{ord(token[2]) % 32:02x}"
    if kind in _CONTROLS and (kind == "0" or in_class):
        return _CONTROLS[kind]
    if in_class and token in _CLASSES:
        return _CLASSES[token]
    if kind in _KNOWN_ESCAPES:
        return token
    return re.escape(kind) if kind.isascii() else kind


@functools.lru_cache(maxsize=1024)
def compile_error(schema: str) -> str:
    """Return llguidance's error for a schema (as JSON), empty if it compiles."""
    try:
        grammar = f'{{"grammars":[{{"json_schema":{schema}}}]}}'
        message: str = LLMatcher.validate_grammar(grammar, limits=LIMITS)
    except BaseException as error:
        if not is_panic(error):
            raise
        return "it takes too much work"
    return message


@functools.lru_cache(maxsize=1024)
def exceeds_work_limit(grammar: str) -> bool:
    """Return whether the first characters of a text take llguidance too much work, by a grammar of texts (as JSON)."""
    try:
        matcher = LLMatcher(_byte_tokens(), f'{{"grammars":[{grammar}]}}', log_level=0, limits=TRIAL_LIMITS)
        for n_taken in range(8):
            row = matcher.compute_bitmask()
            if matcher.is_error():
                return True
            inside = [i for i in range(0x20, _END) if row[i // 8] >> (i % 8) & 1 and (n_taken == 0 or i not in b'"\\')]
            if not inside or not matcher.consume_token(inside[7 * n_taken % len(inside)]):
                break
    except BaseException as error:
        if not is_panic(error):
            raise
        return True
    return matcher.is_error()


def nothing_fits(message: str) -> bool:
    """Return whether an error of llguidance means that no value fits the schema."""
    return "nsatisfiable" in message or "Regex is empty" in message


@functools.lru_cache(maxsize=1024)
def checked(pattern: str) -> str:
    """Return an ECMA expression translated.  Raises PatternError if it cannot be compiled."""
    expression = translated(pattern)
    message = compile_error(json.dumps({"type": "string", "pattern": expression}))
    if message and not nothing_fits(message):
        raise PatternError(_reason(message))
    return expression


def _reason(message: str) -> str:
    for sign, reason in (
        ("look-around", "look-ahead and look-behind cannot be enforced"),
        ("lookarounds", "word boundaries cannot be enforced"),
        ("backreferences", "back-references cannot be enforced"),
    ):
        if sign in message:
            return reason
    error = re.search(r"error: (.*)", message)
    return f"the expression cannot be compiled: {error.group(1)}" if error else "the expression takes too much work"


def matches(pattern: str, text: str) -> bool:
    """Return whether an ECMA expression that compiles matches somewhere in a text, in time linear in both."""
    try:
        searching = _searching(checked(pattern))
    except PatternError:
        return False
    tokens = [*json.dumps(text, ensure_ascii=False).encode(), _END]
    with _SEARCHES:
        return searching.validate_tokens(tokens) == len(tokens)


@functools.lru_cache(maxsize=256)
def _searching(expression: str) -> LLMatcher:
    schema = {"type": "string", "pattern": expression, "x-guidance": {"whitespace_flexible": False}}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return LLMatcher(_byte_tokens(), grammar, log_level=0, limits=LIMITS)


class _ByteVocabulary:
    """A vocabulary of all bytes, for llguidance."""

    eos_token_id, bos_token_id = _END, None
    tokens: Final = [*(bytes([i]) for i in range(_END)), b"<end>"]
    special_token_ids: Final = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def _byte_tokens() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()), n_vocab=_END + 1, eos_token=_END, slices=[])
