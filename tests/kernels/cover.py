"""Selects few of all combinations of parameters such that every value occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def cover(cases: Mapping[T, Iterable[Hashable]]) -> set[T]:
    """``cases``: name -> its values.  Greedy: most values not seen yet, then those seen least, then the first.

    Depends on order and equality of the values only, so every process chooses the same.
    """
    left = {name: frozenset(values) for name, values in cases.items()}
    missing = set().union(*left.values())
    seen: Counter[Hashable] = Counter()
    chosen: set[T] = set()
    while missing:
        name = max(left, key=lambda n: (len(left[n] & missing), -sum(seen[v] for v in left[n])))
        values = left.pop(name)
        missing -= values
        seen.update(values)
        chosen.add(name)
    return chosen
