"""Resource limits for rendering a chat template, which is an untrusted program that came with the weights.

Knows Jinja's operators, filters and calls, not messages. Invariant: a rendering ends after MAX_CPU_S
seconds of its thread, and no step makes a text longer than MAX_CHARS; beyond that it raises
`TemplateLimitExceeded`.
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
"""Ten times the longest published template; Jinja takes 1.6 KB per character to compile."""
MAX_CPU_S: Final = 5.0
MAX_MADE: Final = 1 << 30
"""Characters, with list items counted as eight, that all steps of a rendering may create together."""
MAX_ITEMS: Final = 1 << 20
MAX_BITS: Final = 4096
MAX_WIDTH: Final = 10_000
"""Largest width of paddings, indents, batches and decimals."""

_STEPS_PER_TIME_CHECK: Final = 64
_ITEM_CHARS: Final = 8
_WIDE_METHODS: Final = frozenset(["center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"])
_WIDE_FILTERS: Final = frozenset(["batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap"])
_NO_METHODS: Final = frozenset(["maketrans", "translate"])
_WIDE_FORMAT: Final = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|:[^{}]*\{", re.ASCII)


class TemplateLimitExceeded(SecurityError):
    """A template takes more steps, time or memory than any prompt needs."""


class _Budget:
    """What one rendering has used."""

    __slots__ = ("deadline_s", "n_made", "n_steps")

    def __init__(self) -> None:
        self.n_steps = self.n_made = 0
        self.deadline_s = time.thread_time() + MAX_CPU_S


_BUDGET: ContextVar[_Budget | None] = ContextVar("budget of a rendering", default=None)


@contextmanager
def budget() -> Iterator[None]:
    """Count everything inside as one rendering; nested renderings count towards the outer one."""
    token = _BUDGET.set(_BUDGET.get() or _Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


def step(value: object = None) -> None:
    """Count one step and the value it created; raises TemplateLimitExceeded."""
    used = _BUDGET.get()
    if used is None:
        return
    used.n_steps += 1
    if isinstance(value, str | bytes):
        used.n_made += len(value)
    elif isinstance(value, Sequence | dict | set):
        used.n_made += _ITEM_CHARS * len(value)
    if used.n_made > MAX_MADE:
        raise TemplateLimitExceeded(f"makes more than {MAX_MADE} characters on the way")
    if used.n_steps % _STEPS_PER_TIME_CHECK == 0 and time.thread_time() > used.deadline_s:
        raise TemplateLimitExceeded(f"takes longer than {MAX_CPU_S:g} s")


def nested(literal: Any) -> Any:
    """Return a list, tuple or dict literal of a template, counting everything inside as steps.

    A list that holds the previous list twice doubles each time: printing or comparing the fortieth would never end.
    """
    inside = [literal]
    while inside:
        value = inside.pop()
        if isinstance(value, dict):
            inside.extend(value.values())
        elif isinstance(value, list | tuple):
            inside.extend(value)
        step()
    return literal


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimitExceeded for an operator whose result would be too large."""
    if operator == "%":
        if isinstance(left, str | bytes):
            _check_format(str(left))
        return
    if isinstance(left, int) and isinstance(right, int):
        n_bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and n_bits > MAX_BITS:
            raise TemplateLimitExceeded(f"makes an integer of {n_bits} bits")
        return
    n = 0
    if operator == "*":
        many, times = (left, right) if isinstance(right, int) else (right, left)
        n = len(many) * times if isinstance(many, Sequence) and isinstance(times, int) else 0
    elif operator == "+" and isinstance(left, Sequence) and isinstance(right, Sequence):
        n = len(left) + len(right)
    limit = MAX_CHARS if isinstance(left, str) or isinstance(right, str) else MAX_ITEMS
    if n > limit:
        raise TemplateLimitExceeded(f"makes a value of {n} items")


def check_call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise TemplateLimitExceeded for a method of a plain value whose result could have any size."""
    function = getattr(function, "__wrapped__", function)  # Jinja wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return
    if name in _NO_METHODS or isinstance(owner, bytes):
        raise TemplateLimitExceeded(f"may not call {type(owner).__name__}.{name}")
    if name in _WIDE_METHODS:
        _check_widths(name, args, kwargs)
    if name in ("format", "format_map") and isinstance(owner, str):
        _check_format(owner)


def counted_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter so that its arguments and its result are checked."""

    @wraps(function)  # keeps Jinja's marks for the first argument
    def counted(*args: Any, **kwargs: Any) -> Any:
        if name in _WIDE_FILTERS:
            _check_widths(name, [arg for arg in args[1:] if isinstance(arg, int | str)], kwargs)
        if name == "format":
            _check_format(str(args[0]))
        result = function(*args, **kwargs)
        step(result)
        return result

    return counted


def _check_widths(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for arg in (*args, *kwargs.values()):
        if (isinstance(arg, int) and abs(arg) > MAX_WIDTH) or (isinstance(arg, str) and len(arg) > MAX_WIDTH):
            raise TemplateLimitExceeded(f"gives {name} a width of more than {MAX_WIDTH}")


def _check_format(layout: str) -> None:
    if _WIDE_FORMAT.search(layout):
        raise TemplateLimitExceeded("formats to a width that is computed or has five digits")
