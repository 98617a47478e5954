"""The work that llguidance may do for one grammar, and how it says that this is too little."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

_INITIAL_FUEL: Final = 1_000_000
_STEP_FUEL: Final = 200_000
_STEP_ITEMS: Final = 50_000
_ROW_ITEMS: Final = 20_000  # of one state of the parser: alternatives that are open at once
_LEXER_STATES: Final = 50_000  # 1 to 2 KiB each
_GRAMMAR_SYMBOLS: Final = 200_000
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=_INITIAL_FUEL,
    step_lexer_fuel=_STEP_FUEL,
    step_max_items=_STEP_ITEMS,
    max_items_in_row=_ROW_ITEMS,
    max_lexer_states=_LEXER_STATES,
    max_grammar_size=_GRAMMAR_SYMBOLS,
    verbose_errors=False,
)


def is_panic(error: BaseException) -> bool:
    """Return whether llguidance gave up within itself; such an error is no Exception."""
    return type(error).__name__ == "PanicException"
