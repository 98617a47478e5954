"""Random walks through grammars of tool calls, and what a family's parser reads of them."""

from __future__ import annotations

import functools
import json
import random
from typing import Any

from lucevisor.text.deltas import ContentDelta, ToolCallDelta
from lucevisor.text.grammar.matcher import GrammarCompiler, Matcher
from lucevisor.text.grammar.rules import Rules
from lucevisor.text.output_parser import OutputFormat, OutputParser
from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.tools import FORMATS, ToolFormat
from lucevisor.text.tools.call import calls_in_text, calls_only, functions
from tests.text.vocabularies import CONTROL, USER_DEFINED, byte_metadata

Tool = dict[str, Any]

NAMES: dict[str, ToolFormat] = dict(
    zip(
        ("gemma", "mistral", "mistral array", "granite", "llama", "pairs", "xml", "json"),
        (tool_format for _, tool_format in FORMATS),
        strict=True,
    )
)
ENDS = ["\n</parameter>\n", "</arg_value>", "}"]  # random bytes hardly ever end a text


@functools.cache
def tokenizer(markers: bool) -> Tokenizer:
    """Tags as tokens of their own, or as plain text."""
    tags = {tag: USER_DEFINED for tool_format in NAMES.values() for tag in tool_format.tags} if markers else {}
    # Without the quote as a token Gemma's strings have no end that text could not have.
    tags |= {'<|"|>': USER_DEFINED, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}
    return Tokenizer.from_gguf(byte_metadata("qwen2", tags))


@functools.cache
def compiler(markers: bool) -> GrammarCompiler:
    return GrammarCompiler(tokenizer(markers))


def matcher(kind: str, tools: list[Tool], *, markers: bool = True, only: bool = True, n_most: int = 32) -> Matcher:
    rules = Rules(tokenizer(markers))
    if only:
        start = calls_only(rules, NAMES[kind], functions(tools), n_most=n_most)
    else:
        start = calls_in_text(rules, NAMES[kind], functions(tools))
    return compiler(markers).compile(rules.grammar(start)).matcher()


def allowed(row: bytearray) -> list[int]:
    """The tokens that a mask allows."""
    return [8 * at + bit for at, byte in enumerate(row) if byte for bit in range(8) if byte >> bit & 1]


def written(walk: Matcher, rng: random.Random, markers: bool, begin: str = "", n_most: int = 400) -> str | None:
    """A random text of a grammar after ``begin``, with a liking for what closes; None when it takes too long."""
    words = tokenizer(markers)
    output = words.encode(begin, parse_special=True)
    while len(output) < n_most:
        end = words.encode(rng.choice(ENDS), parse_special=True) if rng.random() < 0.15 else []
        if end and walk.n_valid(0, output, end) == len(end):
            output += end
            continue
        choices = allowed(walk.masks(0, output, []))
        assert choices, words.decode(output, skip_special=False)
        ends = [i for i in choices if i in words.eos_ids]
        if ends and (len(ends) == len(choices) or rng.random() < 0.5):
            return words.decode(output, skip_special=False)
        more = [i for i in choices if i not in ends]
        closing = [i for i in more if words.token_bytes(i)[:1] in (b'"', b"}", b"]", b"<", b"\n")]
        output.append(rng.choice(closing if closing and rng.random() < 0.5 else more))
    return None


def parsed(text: str, kind: str, tools: list[Tool]) -> tuple[str, list[tuple[str, object]]]:
    """The content of an answer, and the name and arguments of each call in it."""
    parser = OutputParser(False, tools, OutputFormat(None, NAMES[kind]))
    events = [*parser.push(text), *parser.flush()]
    calls = [(event.name, json.loads(event.arguments)) for event in events if isinstance(event, ToolCallDelta)]
    return "".join(event.text for event in events if isinstance(event, ContentDelta)), calls
