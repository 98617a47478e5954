"""Limits of llguidance for one grammar, and the error for a grammar that it refuses."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

from lucevisor.errors import LucevisorError

_STEP_FUEL: Final = 200_000  # some 20 ms


def _limits(step_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=step_fuel,
        step_max_items=50_000,
        max_items_in_row=20_000,  # of one state of the parser: alternatives that are open at once
        max_lexer_states=50_000,  # 1 to 2 KiB each
        max_grammar_size=200_000,  # symbols
        verbose_errors=False,
    )


LIMITS: Final = _limits(_STEP_FUEL)
TRIAL_LIMITS: Final = _limits(_STEP_FUEL // 2)
"""For an expression that is tried alone; the rest of its grammar and a large vocabulary take work as well."""


class GrammarError(LucevisorError):
    """A grammar is malformed or takes too much work.  The message has the reason."""


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of llguidance, which is a BaseException only."""
    return type(error).__name__ == "PanicException"
