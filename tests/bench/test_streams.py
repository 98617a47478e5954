"""bench/streams.py runs: its paced daemons still speak the protocol, and no stream fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_short_run() -> None:
    options = ["--streams", "4", "--seconds", "1", "--rounds", "1", "--slow", "2", "--rate", "20"]
    command = [sys.executable, str(ROOT / "bench" / "streams.py"), *options]
    done = subprocess.run(command, text=True, capture_output=True, timeout=240, cwd=ROOT, check=True)
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert found["cost"][0]["tokens/s of a stream"] > 1
    assert all(arm["n"] > 0 for arm in found["time to first byte"].values())
