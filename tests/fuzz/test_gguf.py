"""Heads of GGUF files as strangers write them, through every reader that the supervisor has: header, family, tokenizer,
chat template, and one prompt.  What is wrong is refused with the file, key or line; nothing else ever comes out.
"""

from __future__ import annotations

import random
import struct
from functools import cache

import pytest

from lucevisor.model.gguf_header import GgufError, parse
from lucevisor.text import template_language
from lucevisor.text.template import ChatTemplate, TemplateError
from lucevisor.text.tokenizer import Tokenizer
from lucevisor.text.vocabulary import TokenizerError
from tests.fuzz.steady import amounts, mutated, run
from tests.model import gguf_bytes as raw
from tests.text.vocabularies import CONTROL, byte_metadata, demo_metadata

TEMPLATE = "tokenizer.chat_template"
PIECES = (
    *("{{ messages[0].content }}", "{% for m in messages %}", "{% endfor %}", "{% if true %}", "{% endif %}", "{{"),
    *("}}", "{%", "%}", "{{ 'a' * 10**9 }}", "{% for i in range(99999) %}", "{% set ns.x = ns.x ~ ns.x %}"),
    *("{% set ns = namespace(x='a') %}", "{{ messages }}", "{{ messages|tojson }}", "{{ ''.__class__ }}"),
    *("{{ raise_exception('no') }}", "{{ 1/0 }}", "{{ x.y.z }}", "{% macro f(n) %}{{ f(n) }}{% endmacro %}"),
    *("{{ f(1) }}", "{{ [1]|batch(10**9) }}", "{{ '%999999999d' % 1 }}", "<think>", "<tool_call>", "<|im_end|>"),
    *("\0", "\U0001f389", "{# #}", "{% raw %}", "{% endraw %}", "{% break %}", "{% generation %}"),
    *("{% include 'x' %}", "{% import 'x' as y %}", "{% extends x %}", "{% block a %}", "{{ self }}"),
    *("{{ lipsum(9) }}", "("),
)
KINDS = (raw.U8, raw.I8, raw.U16, raw.I32, raw.U32, raw.U64, raw.I64, raw.F32, raw.F64, raw.BOOL)


@cache
def base() -> dict[str, object]:
    """A small sound tokenizer with the demo model's template."""
    made = byte_metadata("qwen2", {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL}, bos_token_id=264, eos_token_id=265)
    return {
        **made,
        TEMPLATE: demo_metadata()[TEMPLATE],
        "general.architecture": "qwen3",
        "tokenizer.ggml.add_bos_token": True,
    }


def wrong_scalar(rng):
    return rng.choice(
        (None, True, -1, 0, 2**31, 1e999, float("nan"), "", "x", "gpt2", "gemma4", "qwen35", "a" * 9000, "\udcff")
    )


def metadata_of(rng):
    """The sound metadata with a few keys lost, of other types, or with items changed."""
    found = dict(base())
    for _ in range(rng.randint(0, 3)):
        key = rng.choice(list(found))
        value = found[key]
        match rng.randrange(5):
            case 0:
                del found[key]
                if not found:
                    return found
            case 1:
                found[key] = wrong_scalar(rng)
            case _ if isinstance(value, list) and value:
                items = list(value)
                for _ in range(rng.randint(1, 4)):
                    at = rng.randrange(len(items))
                    items[at] = rng.choice(
                        (items[rng.randrange(len(items))], wrong_scalar(rng), " ", "a b c", "\u2581", 7)
                    )
                if rng.random() < 0.2:
                    items = items[: rng.randrange(len(items))] * rng.choice((1, 2))
                found[key] = items
            case _ if isinstance(value, int):
                found[key] = rng.choice((-1, 0, 265, 266, 267, 2**31, 2**32 - 1))
            case _:
                found[key] = wrong_scalar(rng)
    if rng.random() < 0.5:
        found[TEMPLATE] = "".join(rng.choices(PIECES, k=rng.randint(1, 8)))
    elif rng.random() < 0.4 and isinstance(found.get(TEMPLATE), str):
        found[TEMPLATE] = mutated(rng, str(found[TEMPLATE]).encode("utf-8", "replace"), 4).decode("utf-8", "replace")
    return found


def entry(rng, key, value):
    """One metadata entry; what a list mixes is written as the type of its first item, as far as that goes."""
    if isinstance(value, list):
        kind = raw.STRING if value and isinstance(value[0], str) else rng.choice((raw.I32, raw.U8))
        made = [
            (item if isinstance(item, str) else "")
            if kind == raw.STRING
            else (item if type(item) is int and 0 <= item < 256 else 1)
            for item in value
        ]
        return raw.array(key, kind, made)
    if isinstance(value, str):
        return raw.entry(key, raw.STRING, value)
    kind = raw.BOOL if isinstance(value, bool) else raw.U32
    if rng.random() < 0.1 or not isinstance(value, int):
        kind = rng.choice(KINDS)
    try:
        return raw.entry(key, kind, bool(value) if kind == raw.BOOL else value)
    except (struct.error, TypeError, OverflowError):
        return raw.entry(
            key, raw.F64 if isinstance(value, float) else raw.BOOL, value if isinstance(value, float) else True
        )


def text_case(rng: random.Random) -> str:
    found = metadata_of(rng)
    data = raw.padded(raw.header([entry(rng, key, value) for key, value in found.items()], []), 0)
    if rng.random() < 0.3:
        data = mutated(rng, data)
    try:
        metadata = parse(memoryview(data), "model.gguf").metadata
        tokenizer = Tokenizer.from_gguf(metadata)
        template = ChatTemplate.from_gguf(metadata)
        if template is None:
            return "no template"
        talk = [{"role": "user", "content": "Hi <|im_end|> \U0001f389"}, {"role": "assistant", "content": "a b"}]
        template.lost_markers(tokenizer)
        prompt = template.render(talk, tools=[{"type": "function", "function": {"name": "f"}}])
        assert tokenizer.decode(prompt.ids(tokenizer), skip_special=False) is not None
        return "a prompt"
    except (GgufError, TokenizerError, TemplateError) as error:
        told, kind = str(error), type(error).__name__
    assert 0 < len(told) < 20_000
    return kind


@pytest.mark.parametrize("n", amounts(150, 20_000))
def test_tokenizers_and_templates(n, monkeypatch):
    monkeypatch.setattr(template_language, "MAX_CPU_S", 0.05)
    outcomes = run("texts", n, text_case, growth_kib=48 << 10)
    assert {"GgufError", "TokenizerError", "TemplateError", "a prompt"} <= outcomes.keys()
