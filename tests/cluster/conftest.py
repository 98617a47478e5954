"""Fixtures of the tests with several hosts."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import quiet_log as quiet_log


@pytest.fixture(autouse=True)
def _every_test(forked_daemons: None, quiet_log: None) -> None:
    """What all tests here use."""
