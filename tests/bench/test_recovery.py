"""bench/recovery.py, whose pauses a change in the code is held against."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_pauses_of_either_daemon_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "pauses.json"
    options = ["--model", str(ROOT / "etc/demo/demo-qwen35-22m-q4_k_m.gguf"), "--backend", "cpu", "--groups", "2"]
    options += ["--tokens", "512", "--streams", "4", "--rounds", "0", "--kills", "1", "--spares", "1"]
    command = [sys.executable, str(ROOT / "bench" / "recovery.py"), *options, "--json", str(path)]
    subprocess.run(command, timeout=250, cwd=ROOT, check=True)
    kills = json.loads(path.read_text())["kills"]
    assert len(kills) == 4
    assert all(0 < kill["pause_s"] < 60 for kill in kills)
