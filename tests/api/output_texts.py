"""Texts that a model may generate: a tool call, and any order of what output parsers look for; and what formatters get
besides."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import strategies as st

from lucevisor.api.app_context import ModelCard
from lucevisor.api.prepared import GenerationOptions, PreparedRequest
from lucevisor.protocol.steps import SamplingParams
from tests.api.scripted_model import tokenizer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = ["Hm.", "\n", " ", "</think>", "<think>", CALL, "<tool_call>", "</tool_call>", "{", "é🎉", "<", "a"]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)

CONTEXT = SimpleNamespace(model=ModelCard(name="m", created_s=0), tokenizer=tokenizer())


def prepared(**options):
    """A request whose prompt has nine tokens."""
    return PreparedRequest(GenerationOptions(sampling=SamplingParams(), turn_ends=[[]], **options), [range(9)])
