"""bench/slow_link.py holds what is sent over loopback for its latency, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import slow_link

if os.geteuid() or not shutil.which("ip") or not Path("/dev/net/tun").exists():
    pytest.skip("network namespaces need root, iproute2 and /dev/net/tun", allow_module_level=True)

PING = f"""
import json, sys
sys.path.insert(0, {str(Path(slow_link.__file__).parent)!r})
from scale_paced import one_way_s, round_trip_s
json.dump([round_trip_s(20), *one_way_s(1 << 20, 3)], sys.stdout)
"""


def test_messages_take_the_latency_each_way_and_bytes_their_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("w") as stdout:
        assert slow_link.run([sys.executable, "-c", PING], 20e-3, 5e6, stdout=stdout) == 0
    round_trip_s, copy_s, first_s = json.loads(out.read_text())
    assert 40e-3 <= round_trip_s < 1.0
    assert min(copy_s, first_s) >= (1 << 20) / 5e6
    names = subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout
    assert slow_link.NAMESPACE not in names


def test_it_exits_as_the_command_does() -> None:
    assert slow_link.run([sys.executable, "-c", "raise SystemExit(7)"], 0.0) == 7
