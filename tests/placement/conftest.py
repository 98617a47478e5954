"""Models of the planner tests."""

from __future__ import annotations

import pytest

from lucevisor.model.families import open_spec
from lucevisor.model.spec import ModelSpec
from tests.model.drafter_files import TARGET
from tests.model.qwen35_file import QWEN36_27B, QWEN36_35B_A3B, write
from tests.placement.made import DEMO


@pytest.fixture(scope="module")
def demo() -> ModelSpec:
    return open_spec(DEMO)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> ModelSpec:
    """The 35B-A3B shape: 256 experts a layer, of which each token takes eight."""
    return open_spec(write(tmp_path_factory.mktemp("gguf") / "35b.gguf", QWEN36_35B_A3B))


@pytest.fixture(scope="module")
def big(tmp_path_factory) -> ModelSpec:
    """The 27B shape in Q4_K_M: 16.5 GB of weights in a file that is nearly all hole."""
    return open_spec(write(tmp_path_factory.mktemp("gguf") / "27b.gguf", QWEN36_27B))


@pytest.fixture(scope="module")
def small() -> ModelSpec:
    """Eight layers with recurrent ones, for which there is a DFlash drafter."""
    return open_spec(TARGET)
