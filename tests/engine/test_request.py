"""The table of request states, and what refusals tell."""

from __future__ import annotations

import pytest

from lucevisor.engine.request import TRANSITIONS, ContextOverflow, NotReady, QueueFull, RequestState, SubmitError
from lucevisor.errors import LucevisorError


def test_every_state_has_a_row_and_only_the_ends_are_final() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    finals = {state for state, following in TRANSITIONS.items() if not following}
    assert finals == {RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED}
    reached = {RequestState.QUEUED}
    while (more := reached | {t for s in reached for t in TRANSITIONS[s]}) != reached:
        reached = more
    assert reached == set(RequestState)


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


@pytest.mark.parametrize("error", [QueueFull(7, 2, 14, 3), NotReady("group left is away")])
def test_refusals_are_our_own_errors_with_a_code(error: SubmitError) -> None:
    assert isinstance(error, LucevisorError)
    assert error.code in ("queue_full", "not_ready")
    assert str(error) == error.message
