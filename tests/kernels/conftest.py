"""Under the interpreter one case of each kind always runs, and the full matrix of combinations with ``make kernels``.

A kind is a value of a parameter: each quant type, dtype, shape and branch occurs in some case of every test.  The other
combinations are marked slow here, so that the tests themselves only say what they promise.  A GPU runs all of them.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from tests.kernels.cover import cover


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    by_test: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and "tests/kernels/" in item.nodeid and hasattr(item, "callspec"):
            by_test[item.path, item.originalname].append(item)
    for cases in by_test.values():
        always = cover({case.nodeid: enumerate(case.callspec._idlist) for case in cases})  # an id a parametrize
        for case in cases:
            if case.nodeid not in always:
                case.add_marker(pytest.mark.slow)
