"""Every kernel becomes machine code for every target, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.targets import TARGETS

pytest.importorskip("triton")

Done = subprocess.CompletedProcess[str]


def compile_all(target: str, cache: Path) -> Done:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)  # nothing found there: it is compiled now
    command = [sys.executable, "-m", "tests.kernels.targets", target]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """One process a target, as many at once as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {t: pool.submit(compile_all, t, tmp_path_factory.mktemp(t)) for t in TARGETS}
        pool.shutdown(cancel_futures=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, compiling: dict[str, Future[Done]]) -> None:
    done = compiling[target].result()
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cases"]
    assert found["failures"] == {}
