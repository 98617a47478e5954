"""The table of request states, and what refusals tell."""

from __future__ import annotations

from lucevisor.engine.request import ContextOverflow


def test_a_prompt_too_long_for_the_context_is_told_what_to_do() -> None:
    error = ContextOverflow(prompt_tokens=1024, max_context=1024, page_tokens=2048)
    assert (error.prompt_tokens, error.max_context, error.limit_tokens) == (1024, 1024, 1024)
    for part in ("1024 tokens", "max_context is 1024", "at most 1023 tokens", "raise engine.max_context"):
        assert part in error.message


def test_a_prompt_too_long_for_the_pages_names_the_pages() -> None:
    error = ContextOverflow(prompt_tokens=700, max_context=1024, page_tokens=640)
    assert error.limit_tokens == 640
    for part in ("page pool holds 640 tokens", "at most 639 tokens", "engine.pages"):
        assert part in error.message
