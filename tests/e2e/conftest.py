"""Fixtures of the end-to-end tests: one supervisor of the bundled demo for all tests that only ask it things."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tests.daemon_forks import Forker
from tests.e2e.process import DEMO, Cli


@pytest.fixture(scope="module", autouse=True)
def _forked_daemons(forker: Forker) -> Iterator[None]:
    """Also for what fixtures of a module start."""
    with forker.installed():
        yield


@pytest.fixture(autouse=True)
def _every_test(quiet_log: None) -> None:
    """What all tests here use."""


@pytest.fixture
def quiet_log() -> Iterator[None]:
    """Warnings and errors only, so that a failure's output shows what matters."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def demo_status(forker: Forker) -> Iterator[dict[str, Any]]:
    """Status of a running demo supervisor, shared by tests that leave it as it was."""
    cli = Cli(forker)
    try:
        yield cli.start(DEMO, "engine.dtype=float32", "engine.max_sequences=8")
        cli.stop()
    finally:
        cli.close()


@pytest.fixture(scope="session")
def endpoint(demo_status: dict[str, Any]) -> str:
    """Base URL of the OpenAI API of a running demo supervisor."""
    return f"{demo_status['url']}/v1"


@pytest.fixture
def cli(forker: Forker) -> Iterator[Cli]:
    """The command line with a run directory of its own; its daemons are forked."""
    one = Cli(forker)
    yield one
    one.close()


@pytest.fixture
def user_cli() -> Iterator[Cli]:
    """The same with daemons that are started as a user's are."""
    one = Cli()
    yield one
    one.close()
