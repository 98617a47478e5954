"""A daemon runs in an environment that holds torch, numpy, gguf, msgspec and what those need: nothing of the
supervisor's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.e2e.environments import make_environment
from tests.e2e.service import GOLDEN, running, write_config
from tests.families.golden import opened

DAEMON_PACKAGES = ("torch", "numpy", "gguf", "msgspec")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with exactly those distributions."""
    return make_environment(tmp_path_factory.mktemp("bare"), DAEMON_PACKAGES)


def test_the_environment_is_bare(bare_python: Path) -> None:
    names = "('lucevisor', 'aiohttp', 'click', 'tokenizers', 'structlog')"
    code = f"import importlib.util as u; print([n for n in {names} if u.find_spec(n)])"
    done = subprocess.run([bare_python, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_daemon_of_another_environment_computes_the_golden_numbers(bare_python: Path, tmp_path: Path) -> None:
    golden = opened("qwen35")
    config = write_config(
        tmp_path,
        GOLDEN / "qwen35" / "model.gguf",
        {"own": 1, "bare": 1},
        ["0-4", "4-8"],
        '[engine]\ndtype = "float32"\n',
    )
    text = config.read_text().replace("[groups.bare]", f'[groups.bare]\npython = "{bare_python}"')
    config.write_text(text)
    async with running(config, tmp_path) as service:
        hello = service.groups["bare"].hello
        assert hello is not None
        assert hello.executable == str(bare_python)
        assert hello.executable != sys.executable
        assert service.only.engine is not None
        rows = await service.only.engine.run_ids(golden.ids, want_hidden=False, rows_per_step=64)
        golden.assert_logits(torch.from_numpy(rows.logits))
