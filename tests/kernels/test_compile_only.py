"""A run in which kernels compile and none is launched, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_each_device_and_none_is_launched(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compiled_only"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["first"] == {"kernels": 3, "zeros": True, "done": True}
    assert found["again"] == {"kernels": 0, "zeros": True, "done": True}
    assert found["launchers"] == 3
    assert not found["compile only"]
    assert found["launch"] == "'Driver' object has no attribute 'utils'"
    assert len([*tmp_path.glob("*/*.cubin")]) == 2
