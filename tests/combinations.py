"""Parameters in combination: few always, all with ``make slow``."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.kernels.cover import cover


def combinations(*, indirect: Sequence[str] = (), **values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test with every combination of the values, of which some always run.

    Those show every value; of three parameters and more, any two values together.  ``indirect``: names of fixtures.
    """
    size = 2 if len(values) > 2 else 1
    cases = {case: itertools.combinations(enumerate(case), size) for case in itertools.product(*values.values())}
    always = cover(cases)
    marked = [pytest.param(*case, marks=() if case in always else pytest.mark.slow) for case in cases]
    return pytest.mark.parametrize(list(values), marked, indirect=list(indirect))


def slow(*values: Any, id: str | None = None) -> Any:
    """One more case of a parametrized test, for ``make slow``."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)
