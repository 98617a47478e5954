"""The fixture of all golden files."""

from __future__ import annotations

import pytest

from tests.families.golden import FIXTURES, Golden, opened


@pytest.fixture(params=FIXTURES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return opened(request.param)
