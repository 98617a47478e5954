"""Models with trained weights, where ``make real`` has downloaded them, and llama.cpp beside them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.oracles.peer import Peer, interpreter
from tests.real.models import MODELS, VARIABLE, RealModel

MEASURED = pytest.StashKey[list[str]]()


def pytest_configure(config):
    config.stash[MEASURED] = []


@pytest.fixture
def measured(pytestconfig) -> list[str]:
    """Lines that are shown when the run ends."""
    return pytestconfig.stash[MEASURED]


def pytest_terminal_summary(terminalreporter, config):
    if rows := config.stash.get(MEASURED, []):
        terminalreporter.section("trained weights, ours beside llama.cpp")
        for row in rows:
            terminalreporter.write_line(row)


@pytest.fixture
def peer(tmp_path) -> Peer:
    if interpreter() is None:
        pytest.skip("no llama.cpp here: `make oracle` builds it")
    return Peer(tmp_path)


@pytest.fixture(params=MODELS, ids=lambda model: model.file)
def model(request) -> RealModel:
    return request.param


@pytest.fixture
def path(model) -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"no trained weights here: `make real` downloads 1.9 GB, or name their folder in {VARIABLE}")
    return Path(folder) / model.file
