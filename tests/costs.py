"""What work costs, told so that a slow or busy machine does not change the verdict.

Lines of Python are the same everywhere.  Thread time leaves out waiting for a core, but not shared caches, a sibling on
the same core or a lower clock: limit it by what a loop takes at the same moment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def lines_of(work: Callable[[], object]) -> int:
    """Return how many lines, calls and returns of Python code the work takes; each turn of a loop is one at least."""
    n = 0

    def count(_frame: FrameType, _event: str, _arg: object) -> TraceFunction:
        nonlocal n
        n += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
    return n


def loop_s(numbers: Iterable[int]) -> float:
    """Return this thread's time for a plain Python loop over the numbers, right now."""
    total, began_s = 0, time.thread_time()
    for number in numbers:
        total += number
    return time.thread_time() - began_s
