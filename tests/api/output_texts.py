"""Texts that a model may generate: a tool call, and any order of what output parsers look for; and what formatters get
besides."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import strategies as st

from lucevisor.api.contexts import ModelCard
from lucevisor.api.output import ChoiceDelta
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.protocol.steps import SamplingParams
from lucevisor.text.output_parser import OutputParser
from lucevisor.text.template import ChatTemplate
from tests.api.scripted_model import metadata, tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = ["Hm.", "\n", " ", "</think>", "<think>", CALL, "<tool_call>", "</tool_call>", "{", "é🎉", "<", "a"]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)

OUTPUT_FORMAT = ChatTemplate.from_gguf(metadata()).output_format
CONTEXT = SimpleNamespace(model=ModelCard(name="m", created_s=0), tokenizer=tokenizer())


def chunked(text, sizes):
    """Cut a text, or bytes, into pieces of these sizes, over and over."""
    parts, at = [], 0
    while at < len(text):
        size = sizes[len(parts) % len(sizes)]
        parts.append(text[at : at + size])
        at += size
    return parts


def deltas_of(parts, *, thinks):
    """Parse an answer that came in these parts, from a model that may call ``add``."""
    parser = OutputParser(thinks, [{"type": "function", "function": {"name": "add"}}], OUTPUT_FORMAT)
    events = [event for part in parts for event in parser.push(part)] + parser.flush()
    return [*(ChoiceDelta(event) for event in events), ChoiceDelta(None, finish_reason="stop")]


def prepared(**options):
    """A request whose prompt has nine tokens."""
    return PreparedRequest(GenerationOptions(sampling=SamplingParams(), turn_ends=[[]], **options), [range(9)])
