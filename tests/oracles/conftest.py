"""llama.cpp for the tests of this folder, and the table of what they measured at the end of the run."""

from __future__ import annotations

import pytest

from tests.oracles.peer import VARIABLE, Peer, interpreter

MEASURED = pytest.StashKey[dict[str, str]]()


def pytest_configure(config):
    config.stash[MEASURED] = {}


@pytest.fixture(scope="session")
def here(tmp_path_factory, pytestconfig):
    """Skips where there is no llama.cpp; where one is named, it must work."""
    if interpreter() is None:
        pytest.skip(f"no llama.cpp here: `make oracle` builds it, or name an interpreter that has it in {VARIABLE}")
    about = Peer(tmp_path_factory.mktemp("about")).about()
    pytestconfig.stash[MEASURED]["llama-cpp-python"] = f"{about['version']}; {about['system'].strip()}"


@pytest.fixture
def peer(here, tmp_path) -> Peer:
    return Peer(tmp_path)


@pytest.fixture
def measured(pytestconfig) -> dict[str, str]:
    """What was measured: shown, a line for each entry, when the run ends."""
    return pytestconfig.stash[MEASURED]


def pytest_terminal_summary(terminalreporter, config):
    if rows := config.stash.get(MEASURED, {}):
        terminalreporter.section("compared with llama.cpp: the row of logits farthest apart")
        for name, text in rows.items():
            terminalreporter.write_line(f"{name}: {text}")
