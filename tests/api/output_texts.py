"""Texts that a model may generate: a tool call, and any order of what output parsers look for."""

from __future__ import annotations

from hypothesis import strategies as st

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
PIECES = ["Hm.", "\n", " ", "</think>", "<think>", CALL, "<tool_call>", "</tool_call>", "{", "é🎉", "<", "a"]
texts = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
