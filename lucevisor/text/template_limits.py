"""What one rendering of a chat template may cost, because a template is a program that came with the weights.

Knows Jinja's operators, filters and calls, and nothing of messages. Invariant: a rendering ends after MAX_STEPS steps
or MAX_CPU_S seconds of its thread, whichever comes first, and no single step makes a text longer than MAX_CHARS;
beyond that it raises `TooMuch`, which is an error of the template.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from jinja2.exceptions import SecurityError

from lucevisor.text.provenance import MAX_CHARS

MAX_SOURCE_CHARS: Final = 256 << 10
"""Ten times the longest published template; Jinja takes 1.6 KB to compile a character."""
MAX_STEPS: Final = 10_000_000
"""Loop rounds, calls and filters; a message costs some dozens of them."""
MAX_CPU_S: Final = 5.0
MAX_MADE: Final = 1 << 30
"""Characters, and eighths of list items, that all steps of a rendering may make together."""
MAX_ITEMS: Final = 1 << 20
MAX_BITS: Final = 4096
MAX_WIDTH: Final = 10_000
"""Of paddings, indents, batches and digits after the point."""

_STEPS_BETWEEN_LOOKS: Final = 64
_ITEM_CHARS: Final = 8
_WIDE_METHODS: Final = frozenset(["center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"])
_WIDE_FILTERS: Final = frozenset(["batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"])
_NO_METHODS: Final = frozenset(["maketrans", "translate"])
_WIDE_FORMAT: Final = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|:[^{}]*\{", re.ASCII)


class TooMuch(SecurityError):
    """A template that takes more steps, time or memory than any prompt needs."""


class _Budget:
    """What is left of one rendering."""

    __slots__ = ("deadline_s", "n_made", "n_steps")

    def __init__(self) -> None:
        self.n_steps = self.n_made = 0
        self.deadline_s = time.thread_time() + MAX_CPU_S


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget of a rendering", default=None)


@contextmanager
def budget() -> Iterator[None]:
    """Count what happens inside as one rendering; one inside of another counts to the outer."""
    token = _BUDGET.set(_BUDGET.get() or _Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


def step(made: object = None) -> None:
    """Count one step that made a value; raises TooMuch."""
    left = _BUDGET.get()
    if left is None:
        return
    left.n_steps += 1
    if isinstance(made, str | bytes):
        left.n_made += len(made)
    elif isinstance(made, Sequence | dict | set):
        left.n_made += _ITEM_CHARS * len(made)
    if left.n_steps > MAX_STEPS:
        raise TooMuch(f"takes more than {MAX_STEPS} steps")
    if left.n_made > MAX_MADE:
        raise TooMuch(f"makes more than {MAX_MADE} characters on the way")
    if left.n_steps % _STEPS_BETWEEN_LOOKS == 0 and time.thread_time() > left.deadline_s:
        raise TooMuch(f"takes longer than {MAX_CPU_S:g} s")


def nested(made: Any) -> Any:
    """Return a list, tuple or dict that a template wrote down; all that is inside counts as steps.

    One that holds the list before it twice doubles at each turn: printing or comparing the fortieth would never end.
    """
    inside = [made]
    while inside:
        value = inside.pop()
        if isinstance(value, dict):
            inside.extend(value.values())
        elif isinstance(value, list | tuple):
            inside.extend(value)
        step()
    return made


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise TooMuch for an operator whose result would be too large."""
    if operator == "%":
        if isinstance(left, str | bytes):
            _check_format(str(left))
        return
    if isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and n_bits > MAX_BITS:
            raise TooMuch(f"makes an integer of {n_bits} bits")
        return
    n = 0
    if operator == "*":
        many, times = (left, right) if isinstance(right, int) else (right, left)
        n = len(many) * times if isinstance(many, Sequence) and isinstance(times, int) else 0
    elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
        n = len(left) + len(right)
    limit = MAX_CHARS if isinstance(left, str) or isinstance(right, str) else MAX_ITEMS
    if n > limit:
        raise TooMuch(f"makes a value of {n} items")


def check_call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise TooMuch for a method of a plain value whose result could be any size."""
    function = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return
    if name in _NO_METHODS or isinstance(owner, bytes):
        raise TooMuch(f"may not call {type(owner).__name__}.{name}")
    if name in _WIDE_METHODS:
        _check_widths(name, args, kwargs)
    if name in ("format", "format_map") and isinstance(owner, str):
        _check_format(owner)


def counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with its arguments and its result looked at."""

    @wraps(function)  # keeps what Jinja notes on a function about its first argument
    def counted(*args: Any, **kwargs: Any) -> Any:
        if name in _WIDE_FILTERS:
            _check_widths(name, [arg for arg in args[1:] if isinstance(arg, int | str)], kwargs)
        if name == "format":
            _check_format(str(args[0]))
        made = function(*args, **kwargs)
        step(made)
        return made

    return counted


def _check_widths(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for arg in (*args, *kwargs.values()):
        if (isinstance(arg, int) and abs(arg) > MAX_WIDTH) or (isinstance(arg, str) and len(arg) > MAX_WIDTH):
            raise TooMuch(f"gives {name} a width of more than {MAX_WIDTH}")


def _check_format(layout: str) -> None:
    if _WIDE_FORMAT.search(layout):
        raise TooMuch("formats to a width that is computed or has five digits")
