"""Host memory while a model of half a gigabyte loads, measured in a process of its own (bench/load_child.py says how).

On the cpu the weights themselves rest in host memory; what is limited is what comes on top while they are read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = ROOT / "bench" / "load_child.py"
SMALL = 160 << 20
"""Read buffer, one chunk as float32 in several stages of conversion, and what the allocator keeps of it."""


def child(*words: object) -> dict[str, int]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), *map(str, words)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=110)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", "bfloat16"), ("F32", "float32"), ("BF16", "bfloat16")])
def test_the_peak_beside_what_stays_is_below_the_largest_tensor_and_a_little(tmp_path, kind, dtype):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("no /proc/self/clear_refs: the kernel cannot set a peak back")
    made = child("make", tmp_path / "m.gguf", kind, 500)
    assert made["n_bytes"] > 400e6
    found = child("load", tmp_path / "m.gguf", "cpu", dtype)
    (tmp_path / "m.gguf").unlink()
    extra = found["peak_bytes"] - found["kept_bytes"]
    assert found["kept_bytes"] > 400e6
    assert -SMALL < extra < found["largest_bytes"] + SMALL, f"{extra / 1e6:.0f} MB"
