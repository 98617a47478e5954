"""Every kernel becomes machine code for every target, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.targets import TARGETS

pytest.importorskip("triton")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str, tmp_path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # nothing found there: it is compiled now
    command = [sys.executable, "-m", "tests.kernels.targets", target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["cases"]
    assert found["failures"] == {}
